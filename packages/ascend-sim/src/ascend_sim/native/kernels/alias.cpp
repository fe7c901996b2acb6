#include "alias.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>

#include <cstring>

namespace ascendsim::kernels {
namespace {

void copy_wrapped_number(const at::Tensor& from, at::Tensor& to) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) {
    to.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
}

}  // namespace

at::Tensor host_alias(const at::Tensor& npu) {
  const c10::Storage& device = npu.storage();
  c10::Storage host(c10::Storage::use_byte_size_t(), device.nbytes(),
                    at::DataPtr(const_cast<void*>(device.data()), at::Device(at::kCPU)),
                    /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor alias = at::detail::make_tensor<at::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), npu.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(npu.sizes(), npu.strides(),
                                                     npu.storage_offset());
  copy_wrapped_number(npu, alias);
  if (npu.is_conj()) alias._set_conj(true);
  if (npu.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor host_copy(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (!t.unsafeGetTensorImpl()->is_wrapped_number()) return t.detach().clone();
  // Quicker than clone, for the commonest case: a number of the program.
  at::Tensor number = at::detail::empty_cpu({}, at::TensorOptions().dtype(t.dtype()));
  std::memcpy(number.mutable_data_ptr(), t.const_data_ptr(), t.itemsize());
  copy_wrapped_number(t, number);
  return number;
}

at::Tensor meta_twin(const at::Tensor& npu) {
  at::Tensor twin = at::empty_strided(npu.sizes(), npu.strides(), npu.options().device(at::kMeta));
  copy_wrapped_number(npu, twin);
  return twin;
}

at::Tensor host_zeros_like(const at::Tensor& t) {
  at::Tensor zeros = at::empty_strided(t.sizes(), t.strides(),
                                       at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
  zeros.zero_();
  copy_wrapped_number(t, zeros);
  return zeros;
}

}  // namespace ascendsim::kernels
