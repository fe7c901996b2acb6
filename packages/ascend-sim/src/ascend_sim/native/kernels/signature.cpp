#include "signature.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "alias.h"

namespace ascendsim::kernels {
namespace {

// Indexing takes indices that live on the host; every other operator refuses to mix devices.
constexpr std::array<std::string_view, 5> kIndexing{"aten::index", "aten::index_put",
                                                    "aten::index_put_", "aten::_index_put_impl_",
                                                    "aten::_unsafe_index"};

// What decides by its data how many elements are taken.
bool is_mask(const at::Tensor& t) {
  return t.defined() && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

int written_argument(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!is_written(result)) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    if (is_written(argument) &&
        argument.alias_info()->beforeSets() == result.alias_info()->beforeSets()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

}  // namespace

std::string full_name(const c10::OperatorName& name) {
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

Signature::Signature(const c10::OperatorHandle& op)
    : name(full_name(op.operator_name())),
      arguments(op.schema().arguments().size()),
      returns(op.schema().returns().size()) {
  const c10::FunctionSchema& schema = op.schema();
  const bool indexes =
      std::find(kIndexing.begin(), kIndexing.end(), schema.name()) != kIndexing.end();
  for (size_t i = 0; i < arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    written.push_back(is_written(argument));
    out.push_back(argument.is_out());
    resizes |= argument.is_out();
    indices.push_back(indexes && argument.name() == "indices");
    if (argument.name() == "generator") generator = static_cast<int>(i);
    if (argument.name() == "output_size") output_size_ = static_cast<int>(i);
  }
  int fresh = 0;
  for (const c10::Argument& result : schema.returns()) {
    returned.push_back(written_argument(schema, result));
    if (returned.back() < 0) ++fresh;
  }
  only_writes = fresh == 0;
  tensor_tuple = fresh > 1;
  if (schema.name() == "aten::index" || schema.name() == "aten::_unsafe_index") {
    waits_ = Waits::kForMasks;
  } else if (op.hasTag(at::Tag::dynamic_output_shape) ||
             op.hasTag(at::Tag::data_dependent_output)) {
    waits_ = output_size_ >= 0 ? Waits::kWithoutSize : Waits::kAlways;
  }
}

bool Signature::waits(const torch::jit::Stack& call) const {
  if (waits_ == Waits::kWithoutSize) return call[output_size_].isNone();
  if (waits_ != Waits::kForMasks) return waits_ == Waits::kAlways;
  bool masked = false;
  for (size_t i = 0; i < arguments; ++i) {
    if (!indices[i]) continue;
    for_each_tensor(call[i], [&](const at::Tensor& t) { masked |= is_mask(t); });
  }
  return masked;
}

bool Signature::may_be_on_host(size_t argument, const at::Tensor& t) const {
  return t.defined() && t.is_cpu() && !written[argument] && (t.dim() == 0 || indices[argument]);
}

}  // namespace ascendsim::kernels
