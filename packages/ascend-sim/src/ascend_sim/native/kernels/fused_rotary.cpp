// npu_rotary_mul and its backward: input * r1 + rotate(input) * r2, in fp32 and rounded once.
#include <ATen/ATen.h>

#include "fused.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;

bool is_half(c10::string_view mode) { return mode == "half"; }

void refuse_mode(const std::string& mode) {
  TORCH_CHECK_NOT_IMPLEMENTED(mode == "half" || mode == "interleave",
                              "[ascend-sim] npu_rotary_mul: rotary_mode '", mode,
                              "' is not simulated; 'half' and 'interleave' are");
}

void refuse_forward(const torch::jit::Stack& arguments) {
  refuse_mode(arguments[3].toStringRef());
  const bool rotates = arguments[4].isTensor() && arguments[4].toTensor().defined();
  TORCH_CHECK_NOT_IMPLEMENTED(!rotates, "[ascend-sim] npu_rotary_mul: `rotate` is not simulated");
}

void refuse_backward(const torch::jit::Stack& arguments) {
  refuse_mode(arguments[4].toStringRef());
}

// half: (a, b) -> (-b, a) for the halves; interleave: for each pair of neighbours.
Tensor rotate(const Tensor& x, bool half) {
  if (half) {
    const std::vector<Tensor> c = x.chunk(2, -1);
    return at::cat({-c[1], c[0]}, -1);
  }
  const Tensor pairs = x.unflatten(-1, {-1, 2});
  return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
}

// The transpose of a rotation by a quarter is its opposite.
Tensor rotate_back(const Tensor& x, bool half) { return -rotate(x, half); }

Tensor rotary_mul(const Tensor& input, const Tensor& r1, const Tensor& r2, c10::string_view mode,
                  const std::optional<Tensor>&) {
  const Tensor x = input.to(at::kFloat);
  return (x * r1 + rotate(x, is_half(mode)) * r2).to(input.scalar_type());
}

std::tuple<Tensor, Tensor, Tensor> rotary_mul_backward(const Tensor& grad, const Tensor& input,
                                                       const Tensor& r1, const Tensor& r2,
                                                       c10::string_view mode) {
  const bool half = is_half(mode);
  const Tensor g = grad.to(at::kFloat), x = input.to(at::kFloat);
  const Tensor dx = g * r1 + rotate_back(g * r2, half);
  const Tensor dr1 = (g * x).sum_to_size(r1.sizes());
  const Tensor dr2 = (g * rotate(x, half)).sum_to_size(r2.sizes());
  return {dx.to(input.scalar_type()), dr1.to(r1.scalar_type()), dr2.to(r2.scalar_type())};
}

}  // namespace

void append_rotary(std::vector<HostKernel>& kernels) {
  kernels.push_back(host_kernel("npu::npu_rotary_mul", &rotary_mul, &refuse_forward));
  kernels.push_back(
      host_kernel("npu::npu_rotary_mul_backward", &rotary_mul_backward, &refuse_backward));
}

}  // namespace ascendsim::kernels
