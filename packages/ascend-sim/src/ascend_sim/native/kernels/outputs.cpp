#include "outputs.h"

#include <ATen/core/Tensor.h>

#include "alias.h"
#include "generator.h"
#include "launch.h"
#include "plan_key.h"

namespace ascendsim::kernels {
namespace {

constexpr size_t kPlansPerOperator = 4096;

std::atomic<uint64_t> g_hits{0};

TensorPlan describe_tensor(const at::Tensor& meta) {
  if (!meta.defined()) return {false, {}, {}, at::kFloat};
  return {true, meta.sizes().vec(), meta.strides().vec(), meta.scalar_type()};
}

bool is_value(const c10::IValue& v) { return v.isInt() || v.isDouble() || v.isBool(); }

}  // namespace

OutputPlanner::OutputPlanner(const c10::OperatorHandle& op, const Signature& signature,
                             Source source)
    : op_(op), signature_(signature), source_(source) {}

uint64_t OutputPlanner::hits() { return g_hits; }

std::shared_ptr<const OutputPlan> OutputPlanner::plan(const torch::jit::Stack& arguments) {
  if (signature_.waits(arguments)) return nullptr;
  static thread_local std::string key;
  key.clear();
  // A number cannot change the shape of what an operator writes in place, and an optimizer passes
  // another one at each step.
  const bool values = signature_.resizes || !signature_.only_writes;
  const bool keyed = append_key(arguments, values, key);
  if (keyed) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) {
      ++g_hits;
      return found->second;
    }
  }
  const std::string known_key = key;  // Meta kernels call operators, which use `key`
  const Plan plan = infer(arguments);
  if (plan && keyed) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (plans_.size() >= kPlansPerOperator) plans_.clear();
    plans_.emplace(known_key, plan);
  }
  return plan;
}

OutputPlanner::Plan OutputPlanner::infer(const torch::jit::Stack& arguments) {
  if (signature_.only_writes) {
    const Plan plan = from_meta(arguments);
    return plan || has_meta_ ? plan : std::make_shared<OutputPlan>();
  }
  if (source_ == kMeta) return from_meta(arguments);
  if (signature_.tensor_tuple) {
    const Plan plan = from_host(arguments);
    return plan ? plan : from_meta(arguments);
  }
  const Plan plan = from_meta(arguments);
  return plan || has_meta_ ? plan : from_host(arguments);
}

OutputPlanner::Plan OutputPlanner::from_meta(const torch::jit::Stack& arguments) {
  if (!has_meta_) return nullptr;
  torch::jit::Stack twins = arguments;
  for (c10::IValue& value : twins) {
    map_tensors(value, [](const at::Tensor& t) { return is_npu(t) ? meta_twin(t) : t; });
    if (value.isDevice()) value = at::Device(at::kMeta);
    if (value.isGenerator()) value = c10::IValue();
  }
  torch::jit::Stack results = twins;
  try {
    HostDispatch host;
    op_.callBoxed(&results);
  } catch (const c10::NotImplementedError&) {
    has_meta_ = false;
    return nullptr;
  } catch (const std::exception&) {
    return nullptr;  // a wrong argument, or data that Meta lacks: the kernel itself will tell
  }
  const Plan plan = describe(results);
  for (size_t i = 0; plan && i < arguments.size(); ++i) {
    if (!signature_.out[i] || !arguments[i].isTensor()) continue;
    const at::IntArrayRef sizes = twins[i].toTensor().sizes();
    if (sizes != arguments[i].toTensor().sizes()) plan->resizes.push_back({i, sizes.vec()});
  }
  return plan;
}

OutputPlanner::Plan OutputPlanner::from_host(const torch::jit::Stack& arguments) const {
  torch::jit::Stack zeros = arguments;
  for (size_t i = 0; i < zeros.size(); ++i) {
    map_tensors(zeros[i], [](const at::Tensor& t) { return t.defined() ? host_zeros_like(t) : t; });
    if (zeros[i].isDevice()) zeros[i] = at::Device(at::kCPU);
    if (static_cast<int>(i) == signature_.generator) zeros[i] = host_generator({0, 0});
  }
  try {
    HostDispatch host;
    op_.callBoxed(&zeros);
  } catch (const std::exception&) {
    return nullptr;
  }
  return describe(zeros);
}

OutputPlanner::Plan OutputPlanner::describe(const torch::jit::Stack& results) const {
  auto plan = std::make_shared<OutputPlan>();
  bool known = true;
  for (size_t r = 0; r < results.size(); ++r) {
    const c10::IValue& result = results[r];
    if (signature_.returned[r] >= 0) {
      plan->returns.push_back({ReturnPlan::kArgument, {}, {}});
    } else if (result.isNone()) {
      plan->returns.push_back({ReturnPlan::kTensor, {describe_tensor(at::Tensor())}, {}});
    } else if (result.isTensor() || result.isTensorList()) {
      const auto kind = result.isTensor() ? ReturnPlan::kTensor : ReturnPlan::kTensorList;
      plan->returns.push_back({kind, {}, {}});
      for_each_tensor(result, [&](const at::Tensor& t) {
        known = known && (!t.defined() || t.layout() == at::kStrided);
        if (known) plan->returns.back().tensors.push_back(describe_tensor(t));
      });
    } else {
      known = known && is_value(result);
      plan->returns.push_back({ReturnPlan::kValue, {}, result});
    }
  }
  return known ? plan : nullptr;
}

}  // namespace ascendsim::kernels
