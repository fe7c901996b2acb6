// npu_grouped_matmul, without quantisation: one matmul per group, in the dtype of x.
#include <ATen/ATen.h>

#include <algorithm>

#include "fused.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;

enum GroupType : int64_t { kNotGrouped = -1, kGroupRows = 0, kGroupInner = 2 };

struct Groups {
  std::vector<int64_t> ends;  // cumulated sizes; empty where every x has its own weight
  int64_t type;
};

void refuse(bool unsupported, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(!unsupported, "[ascend-sim] npu_grouped_matmul: ", what,
                              " is not simulated");
}

// The kernel alone knows them, where they are a tensor: so the error comes late, as it does there.
void check_ends(const std::vector<int64_t>& ends, int64_t size, const char* what) {
  int64_t last = 0;
  for (int64_t end : ends) {
    TORCH_CHECK(end >= last && end <= size, "npu_grouped_matmul: group_list must be growing ends ",
                "of groups within the ", size, " ", what, " of x, but is ", ends);
    last = end;
  }
}

// group_list_type 0: cumulated sizes; 1: sizes.
std::vector<int64_t> group_ends(const Tensor& list, int64_t list_type) {
  const Tensor ends = list_type == 0 ? list.to(at::kLong) : list.to(at::kLong).cumsum(0);
  const auto* data = ends.const_data_ptr<int64_t>();
  return {data, data + ends.numel()};
}

// The weight of each group: a list of [k, n], or one [groups, k, n].
Tensor pick(const std::vector<Tensor>& tensors, int64_t group, int64_t dims) {
  const bool stacked = tensors.size() == 1 && tensors[0].dim() == dims + 1;
  return stacked ? tensors[0].select(0, group) : tensors.at(group);
}

Tensor multiply(const Tensor& x, const Tensor& weight, const std::vector<Tensor>& bias,
                int64_t group) {
  const Tensor y = at::matmul(x, weight);
  return bias.empty() ? y : y + pick(bias, group, 1);
}

// y rows of a group are x rows of the group by the group's weight.
std::vector<Tensor> by_rows(const Tensor& x, const std::vector<Tensor>& weight,
                            const std::vector<Tensor>& bias, const std::vector<int64_t>& ends) {
  check_ends(ends, x.size(0), "rows");
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (size_t g = 0; g < ends.size(); ++g) {
    parts.push_back(multiply(x.slice(0, begin, ends[g]), pick(weight, g, 2), bias, g));
    begin = ends[g];
  }
  // Rows beyond the last group are not computed.
  if (begin < x.size(0)) parts.push_back(x.new_zeros({x.size(0) - begin, parts[0].size(1)}));
  return parts;
}

// y of a group is x columns of the group by the weight rows of the group: [groups, m, n].
Tensor by_inner(const Tensor& x, const Tensor& weight, const std::vector<int64_t>& ends) {
  check_ends(ends, std::min(x.size(1), weight.size(0)), "columns");
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (int64_t end : ends) {
    parts.push_back(at::matmul(x.slice(1, begin, end), weight.slice(0, begin, end)));
    begin = end;
  }
  return at::stack(parts);
}

std::vector<Tensor> compute(const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                            const std::vector<Tensor>& bias, const Groups& groups,
                            int64_t split_item) {
  if (groups.type == kGroupInner) {
    return {by_inner(x[0], weight[0], groups.ends)};
  }
  std::vector<Tensor> parts;
  if (groups.ends.empty()) {
    for (size_t i = 0; i < x.size(); ++i)
      parts.push_back(multiply(x[i], pick(weight, i, 2), bias, i));
  } else {
    parts = by_rows(at::cat(x), weight, bias, groups.ends);
  }
  const bool one_output = split_item == 2 || split_item == 3;
  if (one_output) return {at::cat(parts)};
  if (split_item == 0 && !groups.ends.empty()) return {at::cat(parts)};
  return parts;
}

// Positions in the schemas of both overloads.
constexpr size_t kX = 0, kWeight = 1, kBias = 2, kGroupList = 8;
constexpr size_t kQuantisation[] = {3, 4, 5, 6, 7, 9, 10, 11};
constexpr size_t kSplitItem = 12, kGroupType = 13, kGroupListType = 14, kActivation = 15;

int64_t integer(const c10::IValue& value, int64_t otherwise) {
  return value.isInt() ? value.toInt() : otherwise;
}

std::vector<Tensor> tensors(const c10::IValue& value) {
  return value.isTensorList() ? value.toTensorVector() : std::vector<Tensor>();
}

Groups groups_of(const torch::jit::Stack& arguments) {
  const c10::IValue& list = arguments[kGroupList];
  if (list.isIntList()) return {list.toIntVector(), integer(arguments[kGroupType], kGroupRows)};
  const int64_t type = integer(arguments[kGroupType], kNotGrouped);
  if (!list.isTensor() || !list.toTensor().defined()) return {{}, type};
  return {group_ends(list.toTensor(), integer(arguments[kGroupListType], 0)), type};
}

void refuse_call(const torch::jit::Stack& arguments) {
  const std::vector<Tensor> x = tensors(arguments[kX]);
  for (size_t i : kQuantisation) refuse(!tensors(arguments[i]).empty(), "quantisation");
  refuse(!at::isFloatingType(x.at(0).scalar_type()), "quantisation");
  refuse(integer(arguments[kActivation], 0) != 0, "an activation");
  const int64_t list_type = integer(arguments[kGroupListType], 0);
  refuse(list_type != 0 && list_type != 1, "this group_list_type");
  const bool several = x.size() != 1 || tensors(arguments[kWeight]).size() != 1;
  const bool by_inner = integer(arguments[kGroupType], kNotGrouped) == kGroupInner;
  refuse(by_inner && (several || integer(arguments[kSplitItem], 0) < 2),
         "a K-split of several tensors");
}

void grouped_matmul(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  std::vector<Tensor> y =
      compute(tensors((*stack)[kX]), tensors((*stack)[kWeight]), tensors((*stack)[kBias]),
              groups_of(*stack), integer((*stack)[kSplitItem], 0));
  stack->clear();
  stack->emplace_back(std::move(y));
}

}  // namespace

void append_matmuls(std::vector<HostKernel>& kernels) {
  for (const char* name : {"npu::npu_grouped_matmul", "npu::npu_grouped_matmul.List"}) {
    kernels.push_back(
        {name, c10::KernelFunction::makeFromBoxedFunction<&grouped_matmul>(), &refuse_call});
  }
}

}  // namespace ascendsim::kernels
