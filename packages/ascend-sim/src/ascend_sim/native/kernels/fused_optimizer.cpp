// npu_apply_adam_w: one step of AdamW in place.
#include <ATen/ATen.h>

#include "alias.h"
#include "devices.h"
#include "fused.h"
#include "launch.h"

namespace ascendsim::kernels {
namespace {

using at::Scalar;
using at::Tensor;

struct AdamW {
  double beta1_power, beta2_power;  // beta1 and beta2 to the number of steps done so far
  double lr, weight_decay, beta1, beta2, epsilon;
  bool amsgrad, maximize;
};

// var, m, v and max_v are written; all arithmetic is in fp32.
//   m   = beta1 m + (1 - beta1) g          v = beta2 v + (1 - beta2) g g
//   var = var (1 - lr weight_decay) - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
void step(const AdamW& adam, const Tensor& var, const Tensor& m, const Tensor& v,
          const Tensor& grad, const Tensor& max_v) {
  const Tensor g = adam.maximize ? grad.to(at::kFloat).neg() : grad.to(at::kFloat);
  const Tensor new_m = m.to(at::kFloat).mul(adam.beta1).add_(g, 1 - adam.beta1);
  const Tensor new_v = v.to(at::kFloat).mul(adam.beta2).add_(g.square(), 1 - adam.beta2);
  Tensor second = new_v;
  if (adam.amsgrad) {
    second = at::maximum(max_v.to(at::kFloat), new_v);
    max_v.copy_(second);
  }
  const double correction1 = 1 - adam.beta1_power * adam.beta1;
  const double correction2 = 1 - adam.beta2_power * adam.beta2;
  const Tensor denominator = second.div(correction2).sqrt_().add_(adam.epsilon);
  const Tensor decayed = var.to(at::kFloat).mul(1 - adam.lr * adam.weight_decay);
  var.copy_(decayed.addcdiv_(new_m, denominator, -adam.lr / correction1));
  m.copy_(new_m);
  v.copy_(new_v);
}

std::tuple<Tensor, Tensor, Tensor> apply_adam_w_out(
    const Scalar& beta1_power, const Scalar& beta2_power, const Scalar& lr,
    const Scalar& weight_decay, const Scalar& beta1, const Scalar& beta2, const Scalar& epsilon,
    const Tensor& grad, const std::optional<Tensor>& max_grad_norm, std::optional<bool> amsgrad,
    std::optional<bool> maximize, at::TensorList out) {
  TORCH_CHECK(out.size() == 3, "npu_apply_adam_w: out must be (var, m, v), but has ", out.size(),
              " tensors");
  const AdamW adam{beta1_power.toDouble(),  beta2_power.toDouble(),  lr.toDouble(),
                   weight_decay.toDouble(), beta1.toDouble(),        beta2.toDouble(),
                   epsilon.toDouble(),      amsgrad.value_or(false), maximize.value_or(false)};
  TORCH_CHECK(!adam.amsgrad || (max_grad_norm && max_grad_norm->defined()),
              "npu_apply_adam_w: amsgrad needs max_grad_norm, the largest v so far");
  const Tensor max_v = adam.amsgrad ? *max_grad_norm : Tensor();
  CommonDevice device("npu::npu_apply_adam_w.out");
  device.add(grad);
  device.add(max_v);
  for (const Tensor& t : out) {
    device.add(t);
    TORCH_CHECK(t.sizes() == grad.sizes(),
                "npu_apply_adam_w: var, m and v must have the gradient's shape");
  }
  TORCH_CHECK(!adam.amsgrad || max_v.sizes() == grad.sizes(),
              "npu_apply_adam_w: max_grad_norm must have the gradient's shape");
  const Tensor largest = adam.amsgrad ? host_alias(max_v) : Tensor();
  auto body = [adam, var = host_alias(out[0]), m = host_alias(out[1]), v = host_alias(out[2]),
               g = host_alias(grad), largest] { step(adam, var, m, v, g, largest); };
  Work work;
  work.read(grad);
  for (const Tensor& t : out) work.update(t);
  if (adam.amsgrad) work.update(*max_grad_norm);
  launch("npu::npu_apply_adam_w.out", grad.device().index(), work, std::move(body));
  return {out[0], out[1], out[2]};
}

// The real one refuses too.
std::tuple<Tensor, Tensor, Tensor> apply_adam_w(const Scalar&, const Scalar&, const Scalar&,
                                                const Scalar&, const Scalar&, const Scalar&,
                                                const Scalar&, const Tensor&,
                                                const std::optional<Tensor>&, std::optional<bool>,
                                                std::optional<bool>) {
  TORCH_CHECK(false, "npu_apply_adam_w is not implemented for Tensor: pass out=(var, m, v)");
}

}  // namespace

std::vector<std::string> register_optimizer(torch::Library& npu) {
  npu.impl("npu_apply_adam_w", TORCH_FN(apply_adam_w));
  npu.impl("npu_apply_adam_w.out", TORCH_FN(apply_adam_w_out));
  return {"npu::npu_apply_adam_w", "npu::npu_apply_adam_w.out"};
}

}  // namespace ascendsim::kernels
