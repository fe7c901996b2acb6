#include "work.h"

#include <algorithm>
#include <unordered_map>

#include "alias.h"
#include "link.h"

namespace ascendsim::kernels {
namespace {

using Arguments = torch::jit::Stack;
using Results = std::vector<c10::IValue>;

// Elements from a tensor's first to its last.
uint64_t extent(const at::Tensor& t) {
  uint64_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
  return last + 1;
}

uint64_t columns(const at::Tensor& right) { return right.dim() < 2 ? 1 : right.size(-1); }

template <size_t kLeft>
uint64_t product(const Arguments& arguments, const Results&) {
  return 2 * arguments[kLeft].toTensor().numel() * columns(arguments[kLeft + 1].toTensor());
}

uint64_t linear(const Arguments& arguments, const Results&) {
  return 2 * arguments[0].toTensor().numel() * arguments[1].toTensor().size(0);
}

// The groups share the rows of x, or each has its own x and weight.
uint64_t grouped(const Arguments& arguments, const Results&) {
  const std::vector<at::Tensor> x = arguments[0].toTensorVector();
  const std::vector<at::Tensor> weight = arguments[1].toTensorVector();
  uint64_t flops = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    flops += 2 * x[i].numel() * weight[std::min(i, weight.size() - 1)].size(-1);
  }
  return flops;
}

// The first bool says whether a convolution is transposed: then its weight meets each element of
// the input, otherwise of the output.
uint64_t convolution(const Arguments& arguments, const at::Tensor& input, const at::Tensor& output,
                     const at::Tensor& weight) {
  const auto flag = std::find_if(arguments.begin(), arguments.end(),
                                 [](const c10::IValue& value) { return value.isBool(); });
  const bool transposed = flag != arguments.end() && flag->toBool();
  return 2 * (transposed ? input : output).numel() * (weight.numel() / weight.size(0));
}

uint64_t convolution_forward(const Arguments& arguments, const Results& results) {
  if (results.empty()) return 0;
  return convolution(arguments, arguments[0].toTensor(), results[0].toTensor(),
                     arguments[1].toTensor());
}

// The gradients of the input and of the weight cost the same; output_mask asks for them.
uint64_t convolution_backward(const Arguments& arguments, const Results&) {
  const at::Tensor &grad = arguments[0].toTensor(), &input = arguments[1].toTensor();
  const auto mask = arguments.back().toBoolList();
  const uint64_t once = convolution(arguments, input, grad, arguments[2].toTensor());
  return once * (static_cast<uint64_t>(mask.get(0)) + static_cast<uint64_t>(mask.get(1)));
}

// Without their overloads: out= multiplies the same.
const std::unordered_map<std::string, FlopRule>& rules() {
  static const auto* rules = new std::unordered_map<std::string, FlopRule>{
      {"aten::mm", product<0>},
      {"aten::bmm", product<0>},
      {"aten::mv", product<0>},
      {"aten::dot", product<0>},
      {"aten::matmul", product<0>},
      {"aten::addmm", product<1>},
      {"aten::addmm_", product<1>},
      {"aten::addmv", product<1>},
      {"aten::addbmm", product<1>},
      {"aten::baddbmm", product<1>},
      {"aten::baddbmm_", product<1>},
      {"aten::linear", linear},
      {"aten::convolution", convolution_forward},
      {"aten::convolution_overrideable", convolution_forward},
      {"aten::convolution_backward", convolution_backward},
      {"aten::convolution_backward_overrideable", convolution_backward},
      {"npu::npu_grouped_matmul", grouped},
  };
  return *rules;
}

}  // namespace

void Work::read(const at::Tensor& t) { touch(t, false, 1); }

void Work::write(const at::Tensor& t) { touch(t, true, 1); }

void Work::update(const at::Tensor& t) { touch(t, true, 2); }

void Work::multiply(uint64_t flops, uint64_t element_size) {
  flops_ += flops;
  flop_bytes_ = element_size;
}

void Work::touch(const at::Tensor& t, bool writes, uint64_t times) {
  if (!is_npu(t) || t.numel() == 0) return;
  const uint64_t size = t.element_size(), whole = extent(t);
  bytes_ += times * size * std::min<uint64_t>(t.numel(), whole);  // an expanded one has fewer
  if (link().traces) accesses_.push_back({t.const_data_ptr(), size * whole, writes});
}

FlopRule flop_rule(const std::string& name) {
  const auto found = rules().find(name.substr(0, name.find('.')));
  return found == rules().end() ? nullptr : found->second;
}

Work work_of(const Signature& signature, FlopRule flops, const torch::jit::Stack& arguments,
             const std::vector<c10::IValue>& results) {
  Work work;
  if (!link().weighs) return work;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& t) {
      if (signature.out[i]) {
        work.write(t);
      } else if (signature.written[i]) {
        work.update(t);
      } else {
        work.read(t);
      }
    });
  }
  for (size_t r = 0; r < results.size(); ++r) {
    if (signature.returned[r] >= 0) continue;
    for_each_tensor(results[r], [&](const at::Tensor& t) { work.write(t); });
  }
  if (!flops) return work;
  const auto first = std::find_if(arguments.begin(), arguments.end(),
                                  [](const auto& a) { return a.isTensor() || a.isTensorList(); });
  const at::Tensor any = first->isTensor() ? first->toTensor() : first->toTensorVector().at(0);
  work.multiply(flops(arguments, results), any.element_size());
  return work;
}

}  // namespace ascendsim::kernels
