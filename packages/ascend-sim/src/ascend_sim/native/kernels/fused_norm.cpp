// npu_rms_norm, npu_add_rms_norm and their backward. gamma has the shape of the last dimensions of
// the input, which are those that are normalised. All computation is in fp32.
#include <ATen/ATen.h>

#include "fused.h"

namespace ascendsim::kernels {
namespace {

using at::Tensor;

// The dimensions from `first` to `last`, without `last`.
std::vector<int64_t> dimensions(int64_t first, int64_t last) {
  std::vector<int64_t> dims;
  for (int64_t d = first; d < last; ++d) dims.push_back(d);
  return dims;
}

std::vector<int64_t> normalised(const Tensor& input, const Tensor& gamma) {
  return dimensions(input.dim() - gamma.dim(), input.dim());
}

// Returns (y, rstd): y in the input's dtype, rstd in fp32 with the normalised sizes 1.
std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, const Tensor& gamma, double epsilon) {
  const Tensor x = input.to(at::kFloat);
  const Tensor rstd =
      x.square().mean(normalised(input, gamma), /*keepdim=*/true).add_(epsilon).rsqrt_();
  return {(x * rstd).mul_(gamma).to(input.scalar_type()), rstd};
}

// Returns (dx, dgamma): dx in the input's dtype, dgamma in fp32 as torch_npu's is.
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& dy, const Tensor& input,
                                             const Tensor& gamma, const Tensor& rstd) {
  const Tensor g = dy.to(at::kFloat);
  const Tensor x_hat = input.to(at::kFloat) * rstd;
  const Tensor scaled = g * gamma;
  const Tensor projection = (scaled * x_hat).mean(normalised(input, gamma), /*keepdim=*/true);
  const Tensor dx = (scaled - x_hat * projection) * rstd;
  const std::vector<int64_t> batch = dimensions(0, input.dim() - gamma.dim());
  const Tensor dgamma = batch.empty() ? g * x_hat : (g * x_hat).sum(batch);
  return {dx.to(input.scalar_type()), dgamma};
}

// Returns (y, rstd, x1 + x2). The sum is rounded to the inputs' dtype before it is normalised.
std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x1, const Tensor& x2,
                                                const Tensor& gamma, double epsilon) {
  const Tensor sum = x1 + x2;
  auto [y, rstd] = rms_norm(sum, gamma, epsilon);
  return {y, rstd, sum};
}

}  // namespace

void append_norms(std::vector<HostKernel>& kernels) {
  kernels.push_back(host_kernel("npu::npu_rms_norm", &rms_norm));
  kernels.push_back(host_kernel("npu::npu_rms_norm_backward", &rms_norm_backward));
  kernels.push_back(host_kernel("npu::npu_add_rms_norm", &add_rms_norm));
}

}  // namespace ascendsim::kernels
