#include "simulate.h"

#include <ATen/Functions.h>

#include <atomic>
#include <memory>

#include "alias.h"
#include "devices.h"
#include "generator.h"
#include "launch.h"

namespace ascendsim::kernels {
namespace {

std::atomic<uint64_t> g_enqueued{0};
std::atomic<uint64_t> g_inline{0};

// Copies each new tensor of `results` into its place; a place is undefined where nothing is to be
// copied because the result is an argument.
void copy_results(const torch::jit::Stack& results, const std::vector<at::Tensor>& places) {
  size_t k = 0;
  for (const c10::IValue& result : results) {
    for_each_tensor(result, [&](const at::Tensor& t) {
      if (k == places.size()) return;
      const at::Tensor& place = places[k++];
      if (place.defined() && t.defined()) place.copy_(t);
    });
  }
}

at::TensorOptions options_on(c10::DeviceIndex device, at::ScalarType dtype) {
  return at::TensorOptions().dtype(dtype).device(at::Device(c10::DeviceType::PrivateUse1, device));
}

at::Tensor allocate(const TensorPlan& plan, c10::DeviceIndex device,
                    std::vector<at::Tensor>& places) {
  at::Tensor output;
  if (plan.defined) {
    output = at::empty_strided(plan.sizes, plan.strides, options_on(device, plan.dtype));
  }
  places.push_back(plan.defined && output.numel() > 0 ? host_alias(output) : at::Tensor());
  return output;
}

c10::IValue allocate(const ReturnPlan& plan, c10::DeviceIndex device,
                     std::vector<at::Tensor>& places) {
  if (plan.kind == ReturnPlan::kTensor) return allocate(plan.tensors[0], device, places);
  std::vector<at::Tensor> outputs;
  for (const TensorPlan& tensor : plan.tensors) {
    outputs.push_back(allocate(tensor, device, places));
  }
  return c10::IValue(std::move(outputs));
}

}  // namespace

CallCounts call_counts() { return {g_enqueued, g_inline, OutputPlanner::hits()}; }

SimulatedOperator::SimulatedOperator(const c10::OperatorHandle& op, std::optional<HostKernel> own)
    : op_(op),
      signature_(op),
      own_(std::move(own)),
      flops_(flop_rule(signature_.name)),
      planner_(op_, signature_, own_ ? OutputPlanner::kMeta : OutputPlanner::kMetaOrHost) {}

void SimulatedOperator::operator()(const c10::OperatorHandle&, c10::DispatchKeySet,
                                   torch::jit::Stack* stack) {
  const torch::jit::Stack arguments = torch::jit::last(*stack, signature_.arguments).vec();
  if (own_ && own_->refuse) own_->refuse(arguments);
  const c10::DeviceIndex device = device_of(arguments);
  const std::shared_ptr<const OutputPlan> plan = planner_.plan(arguments);
  std::vector<c10::IValue> results =
      plan ? submit(arguments, *plan, device) : run_now(arguments, device);
  torch::jit::drop(*stack, signature_.arguments);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

c10::DeviceIndex SimulatedOperator::device_of(const torch::jit::Stack& arguments) const {
  CommonDevice tensors(signature_.name);
  std::optional<c10::Device> asked;
  for (size_t i = 0; i < arguments.size(); ++i) {
    for_each_tensor(arguments[i], [&](const at::Tensor& t) {
      if (!signature_.may_be_on_host(i, t)) tensors.add(t);
    });
    if (arguments[i].isDevice()) asked = arguments[i].toDevice();
  }
  const std::optional<c10::Device>& device = tensors.get() ? tensors.get() : asked;
  if (device && device->has_index()) return device->index();
  const at::TensorOptions npu = at::TensorOptions().device(c10::DeviceType::PrivateUse1);
  return at::empty({0}, npu).device().index();
}

void SimulatedOperator::call_host(torch::jit::Stack& stack) const {
  if (own_) {
    own_->body.callBoxed(op_, c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  } else {
    op_.callBoxed(&stack);
  }
}

torch::jit::Stack SimulatedOperator::host_arguments(const torch::jit::Stack& arguments,
                                                    c10::DeviceIndex device) const {
  torch::jit::Stack host = arguments;
  for (size_t i = 0; i < host.size(); ++i) {
    c10::IValue& value = host[i];
    if (static_cast<int>(i) == signature_.generator) {
      const at::Generator& npu =
          value.isGenerator() ? value.toGenerator() : default_generator(device);
      value = host_generator(draw_from(npu));
    } else if (value.isDevice()) {
      value = at::Device(at::kCPU);
    } else {
      map_tensors(value,
                  [&](const at::Tensor& t) { return is_npu(t) ? host_alias(t) : host_copy(t); });
    }
  }
  return host;
}

std::vector<c10::IValue> SimulatedOperator::submit(const torch::jit::Stack& arguments,
                                                   const OutputPlan& plan,
                                                   c10::DeviceIndex device) {
  for (const ResizePlan& resize : plan.resizes) {
    arguments[resize.argument].toTensor().resize_(resize.sizes);
  }
  std::vector<c10::IValue> results(signature_.returns);
  std::vector<at::Tensor> places;
  for (size_t r = 0; r < results.size(); ++r) {
    if (signature_.returned[r] >= 0) {
      results[r] = arguments[signature_.returned[r]];
      for_each_tensor(results[r], [&](const at::Tensor&) { places.emplace_back(); });
    } else if (plan.returns[r].kind == ReturnPlan::kValue) {
      results[r] = plan.returns[r].value;
    } else {
      results[r] = allocate(plan.returns[r], device, places);
    }
  }
  ++g_enqueued;
  auto host = std::make_shared<torch::jit::Stack>(host_arguments(arguments, device));
  auto body = [this, host, places = std::move(places)] {
    call_host(*host);
    copy_results(*host, places);
    host->clear();
  };
  const Work work = work_of(signature_, flops_, arguments, results);
  launch(signature_.name.c_str(), device, work, std::move(body));
  return results;
}

std::vector<c10::IValue> SimulatedOperator::run_now(const torch::jit::Stack& arguments,
                                                    c10::DeviceIndex device) {
  ++g_inline;
  torch::jit::Stack host = host_arguments(arguments, device);
  // out= arguments may get a new shape, which an alias cannot take: the kernel gets its own tensor.
  std::vector<std::pair<at::Tensor, at::Tensor>> outs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!signature_.out[i] || !arguments[i].isTensor()) continue;
    const at::Tensor npu = arguments[i].toTensor();
    outs.emplace_back(npu, at::empty({0}, npu.options().device(at::kCPU)));
    host[i] = outs.back().second;
  }
  // What it returns is not known before it runs, and counts as nothing.
  const Work work = work_of(signature_, flops_, arguments, {});
  run_inline(signature_.name.c_str(), device, signature_.waits(arguments), work,
             [&] { call_host(host); });
  const auto to_npu = [&](const at::Tensor& t) {
    if (!t.defined()) return t;
    at::Tensor npu = at::empty_strided(t.sizes(), t.strides(), options_on(device, t.scalar_type()));
    if (t.numel() > 0) host_alias(npu).copy_(t);
    return npu;
  };
  for (auto& [npu, result] : outs) {
    npu.resize_(result.sizes());
    if (result.numel() > 0) host_alias(npu).copy_(result);
  }
  std::vector<c10::IValue> results(host.begin(), host.end());
  for (size_t r = 0; r < results.size(); ++r) {
    if (signature_.returned[r] >= 0) {
      results[r] = arguments[signature_.returned[r]];
    } else {
      map_tensors(results[r], to_npu);
    }
  }
  return results;
}

}  // namespace ascendsim::kernels
