#include "signature.h"

#include <array>
#include <string_view>

namespace ascendsim::kernels {
namespace {

// Indexing takes indices that live on the host; every other operator refuses to mix devices.
constexpr std::array<std::string_view, 5> kIndexing{"aten::index", "aten::index_put",
                                                    "aten::index_put_", "aten::_index_put_impl_",
                                                    "aten::_unsafe_index"};

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
  for (size_t i = 0; i < arguments; ++i) {
    const c10::Argument& argument = schema.arguments()[i];
    written.push_back(is_written(argument));
    out.push_back(argument.is_out());
    resizes |= argument.is_out();
    if (argument.name() == "generator") generator = static_cast<int>(i);
  }
  int fresh = 0;
  for (const c10::Argument& result : schema.returns()) {
    returned.push_back(written_argument(schema, result));
    if (returned.back() < 0) ++fresh;
  }
  only_writes = fresh == 0;
  tensor_tuple = fresh > 1;
  waits = op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output);
  for (std::string_view indexing : kIndexing) takes_host_indices |= schema.name() == indexing;
}

}  // namespace ascendsim::kernels
