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
                             const c10::KernelFunction* body)
    : op_(op), signature_(signature), body_(body) {}

uint64_t OutputPlanner::hits() { return g_hits; }

std::shared_ptr<const OutputPlan> OutputPlanner::plan(const torch::jit::Stack& arguments) {
  if (signature_.waits) return nullptr;
  if (!has_meta_) return signature_.only_writes ? std::make_shared<OutputPlan>() : nullptr;
  static thread_local std::string key;
  key.clear();
  // A number cannot change the shape of what an operator only writes to, and an optimizer passes
  // another one at each step.
  const bool keyed = append_key(arguments, /*values=*/!signature_.only_writes, key);
  if (keyed) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = plans_.find(key);
    if (found != plans_.end()) {
      ++g_hits;
      return found->second;
    }
  }
  const std::string known_key = key;  // Meta kernels call operators, which use `key`
  std::shared_ptr<const OutputPlan> plan = infer(arguments);
  if (plan && keyed) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (plans_.size() >= kPlansPerOperator) plans_.clear();
    plans_.emplace(known_key, plan);
  }
  return plan;
}

std::shared_ptr<const OutputPlan> OutputPlanner::infer(const torch::jit::Stack& arguments) {
  const std::vector<at::ScalarType>* dtypes = nullptr;
  if (needs_host_dtypes(arguments)) {
    dtypes = host_dtypes(arguments);
    if (!dtypes) return nullptr;
  }
  torch::jit::Stack twins = arguments;
  for (c10::IValue& value : twins) {
    map_tensors(value, [](const at::Tensor& t) { return is_npu(t) ? meta_twin(t) : t; });
    if (value.isDevice()) value = at::Device(at::kMeta);
    if (value.isGenerator()) value = c10::IValue();
  }
  torch::jit::Stack results = twins;
  try {
    run_on_meta(results);
  } catch (const c10::NotImplementedError&) {
    has_meta_ = false;
    return signature_.only_writes ? std::make_shared<OutputPlan>() : nullptr;
  } catch (const std::exception&) {
    return nullptr;  // a wrong argument, or data that Meta lacks: the kernel itself will tell
  }
  auto plan = std::make_shared<OutputPlan>();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!signature_.out[i] || !arguments[i].isTensor()) continue;
    const at::Tensor& twin = twins[i].toTensor();
    if (twin.sizes() != arguments[i].toTensor().sizes())
      plan->resizes.push_back({i, twin.sizes().vec()});
  }
  return describe(results, dtypes ? *dtypes : std::vector<at::ScalarType>(), *plan) ? plan
                                                                                    : nullptr;
}

void OutputPlanner::run_on_meta(torch::jit::Stack& stack) const {
  HostDispatch host;
  op_.callBoxed(&stack);
}

bool OutputPlanner::describe(const torch::jit::Stack& results,
                             const std::vector<at::ScalarType>& dtypes, OutputPlan& plan) const {
  for (size_t r = 0; r < results.size(); ++r) {
    const c10::IValue& result = results[r];
    if (signature_.returned[r] >= 0) {
      plan.returns.push_back({ReturnPlan::kArgument, {}, {}});
    } else if (result.isNone()) {
      plan.returns.push_back({ReturnPlan::kTensor, {describe_tensor(at::Tensor())}, {}});
    } else if (result.isTensor() || result.isTensorList()) {
      ReturnPlan described{
          result.isTensor() ? ReturnPlan::kTensor : ReturnPlan::kTensorList, {}, {}};
      for_each_tensor(result, [&](const at::Tensor& t) {
        described.tensors.push_back(describe_tensor(t));
        if (r < dtypes.size() && t.defined()) described.tensors.back().dtype = dtypes[r];
      });
      plan.returns.push_back(std::move(described));
    } else if (is_value(result)) {
      plan.returns.push_back({ReturnPlan::kValue, {}, result});
    } else {
      return false;
    }
  }
  return true;
}

// In reduced precision a host kernel may keep saved statistics in another dtype than the Meta
// kernel says: native_layer_norm's are bfloat16 where Meta, which follows CUDA, says float.
bool OutputPlanner::needs_host_dtypes(const torch::jit::Stack& arguments) const {
  if (!signature_.tensor_tuple || body_) return false;
  bool reduced = false;
  for (const c10::IValue& value : arguments) {
    for_each_tensor(value, [&](const at::Tensor& t) {
      reduced |= t.defined() && at::isReducedFloatingType(t.scalar_type());
    });
  }
  return reduced;
}

// Learns the dtypes by running the host's kernel once on zeros of the same shapes. It touches no
// device memory and waits for nothing, so a race stays visible in the very first call.
const std::vector<at::ScalarType>* OutputPlanner::host_dtypes(const torch::jit::Stack& arguments) {
  std::string key;
  append_dtype_key(arguments, key);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = dtypes_.find(key);
    if (found != dtypes_.end()) return &found->second;
  }
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
  std::vector<at::ScalarType> learnt;
  for (const c10::IValue& result : zeros) {
    const bool defined = result.isTensor() && result.toTensor().defined();
    learnt.push_back(defined ? result.toTensor().scalar_type() : at::kFloat);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  return &dtypes_.emplace(std::move(key), std::move(learnt)).first->second;
}

}  // namespace ascendsim::kernels
