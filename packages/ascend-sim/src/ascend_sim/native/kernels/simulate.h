// The kernel of every simulated operator.
#pragma once

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <optional>
#include <string>

#include "outputs.h"
#include "signature.h"
#include "work.h"

namespace ascendsim::kernels {

// Raises when a call asks for what the simulation lacks.
using Refusal = void (*)(const torch::jit::Stack& arguments);

// What runs on the host for an operator that torch has no kernel for.
struct HostKernel {
  std::string name;  // with namespace and overload
  c10::KernelFunction body;
  Refusal refuse = nullptr;  // at the call: the body runs too late to tell who called
};

// [Note: how an operator is simulated]
//
// The kernel runs on the host, on aliases of NPU memory (host_alias), as a task on the stream that
// torch_npu has made current. The operator itself returns at once, like a launch:
//
//   1. An error that an earlier kernel reported is raised.
//   2. The outputs are inferred (OutputPlanner), out= arguments resized, new outputs allocated by
//      torch_npu's allocator.
//   3. The task is enqueued. It holds aliases only, so no NPU tensor lives longer than the program
//      holds it. What the kernel returns is copied into the outputs; what it writes in place or
//      through out= is written directly.
//
// Where outputs cannot be inferred the task runs inline, after everything on the stream.
class SimulatedOperator final : public c10::OperatorKernel {
 public:
  // `own` replaces torch's kernel for the CPU.
  SimulatedOperator(const c10::OperatorHandle& op, std::optional<HostKernel> own);

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

 private:
  c10::DeviceIndex device_of(const torch::jit::Stack& arguments) const;
  void call_host(torch::jit::Stack& stack) const;
  torch::jit::Stack host_arguments(const torch::jit::Stack& arguments,
                                   c10::DeviceIndex device) const;
  std::vector<c10::IValue> submit(const torch::jit::Stack& arguments, const OutputPlan& plan,
                                  c10::DeviceIndex device);
  std::vector<c10::IValue> run_now(const torch::jit::Stack& arguments, c10::DeviceIndex device);

  const c10::OperatorHandle op_;
  const Signature signature_;
  const std::optional<HostKernel> own_;
  const FlopRule flops_;  // null: it multiplies no matrices
  OutputPlanner planner_;
};

// Calls over all operators.
struct CallCounts {
  uint64_t enqueued, inline_, plan_hits;
};
CallCounts call_counts();

}  // namespace ascendsim::kernels
