// NPU tensors as the host kernels see them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <utility>
#include <vector>

namespace ascendsim::kernels {

inline bool is_npu(const at::Tensor& t) {
  return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1;
}

// A CPU tensor over the memory of an NPU tensor, without owning it: the memory lives as long as
// stream order and the caching allocator say, exactly as for a kernel on a device. So a missing
// record_stream goes wrong here as it does there, and no figure of memory changes.
at::Tensor host_alias(const at::Tensor& npu);

// What a task reads of a tensor of the host: a copy, since the tensor may change before the task
// runs. A task owns no tensor that Python may know: whoever drops such a one needs Python's lock,
// which a thread of the runtime would wait for while Python waits for the stream.
at::Tensor host_copy(const at::Tensor& t);

// A tensor without data and with the same sizes, strides and dtype.
at::Tensor meta_twin(const at::Tensor& npu);

// Zeros on the host with the same sizes, strides and dtype.
at::Tensor host_zeros_like(const at::Tensor& t);

// Replaces each tensor of `value` (a tensor, a list of them, a list of optional ones) by `f` of it.
// Undefined tensors are passed to `f` too, except in lists of optional tensors.
template <class F>
void map_tensors(c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    value = f(std::as_const(value).toTensor());
  } else if (value.isTensorList()) {
    std::vector<at::Tensor> mapped;
    for (const at::Tensor& t : value.toTensorVector()) mapped.push_back(f(t));
    value = c10::IValue(std::move(mapped));
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
      const bool defined = t.has_value() && t->defined();
      mapped.push_back(defined ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    }
    value = c10::IValue(std::move(mapped));
  }
}

// Calls `f` for each tensor of `value`, undefined ones included.
template <class F>
void for_each_tensor(const c10::IValue& value, F&& f) {
  if (value.isTensor()) {
    f(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) f(t);
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
      f(t.value_or(at::Tensor()));
    }
  }
}

}  // namespace ascendsim::kernels
