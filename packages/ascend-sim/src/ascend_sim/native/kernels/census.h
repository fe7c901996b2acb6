// What the simulator does with each operator, and what it has seen called.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace ascendsim::kernels {

enum class Fate : int32_t {
  kSimulated = 0,  // torch_npu registers it; runs on the host's kernel
  kComposed = 1,   // torch_npu registers it; runs on torch's own composite of simulated operators
  kKept = 2,       // torch_npu's own code runs: allocation, views, storages, streams
  kLeft = 3,       // torch_npu registers nothing and composes nothing: its fallback to the CPU runs
  kAbsent = 4,     // torch_npu registers it, the simulator has no kernel: a call fails
};

class Census {
 public:
  void add(Fate fate, const std::string& name) { names_[fate].push_back(name); }
  const std::vector<std::string>& names(Fate fate) { return names_[fate]; }

 private:
  std::map<Fate, std::vector<std::string>> names_;
};

// The one census, filled when the kernels are installed.
Census& census();

// An operator that torch_npu runs on the CPU, because the NPU has none. Never hidden: the first
// call warns with its name, each call is counted, and in strict mode a call is an error.
class LeftOperator final : public c10::OperatorKernel {
 public:
  explicit LeftOperator(const c10::OperatorHandle& op);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

 private:
  const std::string name_;
  const c10::SafeKernelFunction torch_npu_;
};

// An operator of the NPU that the simulator cannot run.
class AbsentOperator final : public c10::OperatorKernel {
 public:
  explicit AbsentOperator(std::string name);
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

 private:
  const std::string name_;
};

void set_strict(bool strict);

// Operators that were left to torch_npu and called, with the number of calls.
std::map<std::string, uint64_t> left_calls();

}  // namespace ascendsim::kernels
