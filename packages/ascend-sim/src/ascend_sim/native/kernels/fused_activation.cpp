// npu_swiglu, npu_gelu and their backwards.
#include <ATen/ATen.h>

#include "fused.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;

// silu(a) * b for the halves a, b of `input` along `dim`: computed in fp32 and rounded once.
Tensor swiglu(const Tensor& input, int64_t dim) {
  const std::vector<Tensor> halves = input.to(at::kFloat).chunk(2, dim);
  return at::silu(halves[0]).mul_(halves[1]).to(input.scalar_type());
}

Tensor swiglu_backward(const Tensor& grad, const Tensor& input, int64_t dim) {
  const std::vector<Tensor> halves = input.to(at::kFloat).chunk(2, dim);
  const Tensor g = grad.to(at::kFloat);
  const Tensor gate = at::silu_backward(g * halves[1], halves[0]);
  return at::cat({gate, g * at::silu(halves[0])}, dim).to(input.scalar_type());
}

Tensor gelu(const Tensor& input, c10::string_view approximate) {
  return at::gelu(input, approximate);
}

Tensor gelu_backward(const Tensor& grad, const Tensor& input, c10::string_view approximate) {
  return at::gelu_backward(grad, input, approximate);
}

}  // namespace

void append_activations(std::vector<HostKernel>& kernels) {
  kernels.push_back(host_kernel("npu::npu_swiglu", &swiglu));
  kernels.push_back(host_kernel("npu::npu_swiglu_backward", &swiglu_backward));
  kernels.push_back(host_kernel("npu::npu_gelu", &gelu));
  kernels.push_back(host_kernel("npu::npu_gelu_backward", &gelu_backward));
}

}  // namespace ascendsim::kernels
