// npu_grouped_matmul, without quantisation: one matmul per group, in the dtype of x.
#include <ATen/ATen.h>

#include "fused.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;
using OptionalTensors = std::optional<std::vector<Tensor>>;

enum GroupType : int64_t { kNotGrouped = -1, kGroupRows = 0, kGroupInner = 2 };

struct Groups {
  std::vector<int64_t> ends;  // cumulated sizes; empty where every x has its own weight
  int64_t type;
};

bool given(const OptionalTensors& tensors) { return tensors && !tensors->empty(); }

void refuse(bool unsupported, const char* what) {
  TORCH_CHECK_NOT_IMPLEMENTED(!unsupported, "[ascend-sim] npu_grouped_matmul: ", what,
                              " is not simulated");
}

// group_list_type 0: cumulated sizes; 1: sizes.
std::vector<int64_t> group_ends(const Tensor& list, int64_t list_type) {
  refuse(list_type != 0 && list_type != 1, "this group_list_type");
  const Tensor ends = list_type == 0 ? list.to(at::kLong) : list.to(at::kLong).cumsum(0);
  const auto* data = ends.const_data_ptr<int64_t>();
  return {data, data + ends.numel()};
}

// The weight of each group: a list of [k, n], or one [groups, k, n].
Tensor pick(const std::vector<Tensor>& tensors, int64_t group, int64_t dims) {
  const bool stacked = tensors.size() == 1 && tensors[0].dim() == dims + 1;
  return stacked ? tensors[0].select(0, group) : tensors.at(group);
}

Tensor multiply(const Tensor& x, const Tensor& weight, const OptionalTensors& bias, int64_t group) {
  const Tensor y = at::matmul(x, weight);
  return given(bias) ? y + pick(*bias, group, 1) : y;
}

// y rows of a group are x rows of the group by the group's weight.
std::vector<Tensor> by_rows(const Tensor& x, const std::vector<Tensor>& weight,
                            const OptionalTensors& bias, const std::vector<int64_t>& ends) {
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
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (int64_t end : ends) {
    parts.push_back(at::matmul(x.slice(1, begin, end), weight.slice(0, begin, end)));
    begin = end;
  }
  return at::stack(parts);
}

std::vector<Tensor> compute(const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                            const OptionalTensors& bias, const Groups& groups, int64_t split_item) {
  if (groups.type == kGroupInner) {
    refuse(x.size() != 1 || weight.size() != 1 || split_item < 2, "a K-split of several tensors");
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

struct Quantisation {
  const OptionalTensors &scale, &offset, &antiquant_scale, &antiquant_offset, &per_token_scale;
  const OptionalTensors &activation_input, &activation_scale, &activation_offset;

  bool any() const {
    for (const auto* t : {&scale, &offset, &antiquant_scale, &antiquant_offset, &per_token_scale,
                          &activation_input, &activation_scale, &activation_offset}) {
      if (given(*t)) return true;
    }
    return false;
  }
};

void check(const std::vector<Tensor>& x, const Quantisation& quantisation, int64_t act_type) {
  refuse(quantisation.any() || !at::isFloatingType(x.at(0).scalar_type()), "quantisation");
  refuse(act_type != 0, "an activation");
}

std::vector<Tensor> grouped_matmul(
    const std::vector<Tensor>& x, const std::vector<Tensor>& weight, const OptionalTensors& bias,
    const OptionalTensors& scale, const OptionalTensors& offset,
    const OptionalTensors& antiquant_scale, const OptionalTensors& antiquant_offset,
    const OptionalTensors& per_token_scale, const std::optional<Tensor>& group_list,
    const OptionalTensors& activation_input, const OptionalTensors& activation_scale,
    const OptionalTensors& activation_offset, std::optional<int64_t> split_item,
    std::optional<int64_t> group_type, std::optional<int64_t> group_list_type,
    std::optional<int64_t> act_type, const std::optional<std::vector<int64_t>>&,
    std::optional<int64_t>, std::optional<int64_t>, std::optional<int64_t>, std::optional<int64_t>,
    std::optional<int64_t>) {
  check(x,
        {scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input,
         activation_scale, activation_offset},
        act_type.value_or(0));
  Groups groups{{}, group_type.value_or(kNotGrouped)};
  if (group_list && group_list->defined()) {
    groups.ends = group_ends(*group_list, group_list_type.value_or(0));
  }
  return compute(x, weight, bias, groups, split_item.value_or(0));
}

std::vector<Tensor> grouped_matmul_list(
    const std::vector<Tensor>& x, const std::vector<Tensor>& weight, const OptionalTensors& bias,
    const OptionalTensors& scale, const OptionalTensors& offset,
    const OptionalTensors& antiquant_scale, const OptionalTensors& antiquant_offset,
    const OptionalTensors& per_token_scale, const std::optional<std::vector<int64_t>>& group_list,
    const OptionalTensors& activation_input, const OptionalTensors& activation_scale,
    const OptionalTensors& activation_offset, std::optional<int64_t> split_item,
    std::optional<int64_t> group_type, std::optional<int64_t> group_list_type,
    std::optional<int64_t> act_type, std::optional<at::ScalarType>) {
  check(x,
        {scale, offset, antiquant_scale, antiquant_offset, per_token_scale, activation_input,
         activation_scale, activation_offset},
        act_type.value_or(0));
  refuse(group_list_type.value_or(0) != 0, "this group_list_type");
  const Groups groups{group_list.value_or(std::vector<int64_t>()), group_type.value_or(kGroupRows)};
  return compute(x, weight, bias, groups, split_item.value_or(0));
}

}  // namespace

void append_matmuls(std::vector<HostKernel>& kernels) {
  kernels.push_back(host_kernel("npu::npu_grouped_matmul", &grouped_matmul));
  kernels.push_back(host_kernel("npu::npu_grouped_matmul.List", &grouped_matmul_list));
}

}  // namespace ascendsim::kernels
