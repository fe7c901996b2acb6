// What an operator will return, known before its kernel runs.
//
// Shapes come from the Meta kernel. Most of those are Python and cost 0.2 to 6 ms, so what they
// answered is kept, keyed by everything that shapes can depend on.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "signature.h"

namespace ascendsim::kernels {

struct TensorPlan {
  bool defined;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct ReturnPlan {
  enum Kind { kArgument, kTensor, kTensorList, kValue } kind;
  std::vector<TensorPlan> tensors;
  c10::IValue value;  // kValue: an int, a float or a bool
};

struct ResizePlan {
  size_t argument;
  std::vector<int64_t> sizes;
};

struct OutputPlan {
  std::vector<ReturnPlan> returns;
  std::vector<ResizePlan> resizes;  // out= arguments that the operator gives a new shape
};

class OutputPlanner {
 public:
  // `body` is what a task runs; empty means the operator's own kernel for the CPU.
  OutputPlanner(const c10::OperatorHandle& op, const Signature& signature,
                const c10::KernelFunction* body);

  // Returns null when the outputs cannot be known without running the kernel. Then the call has to
  // wait, and an argument that is wrong is found there too.
  std::shared_ptr<const OutputPlan> plan(const torch::jit::Stack& arguments);

  // How often the answer was already known, over all operators.
  static uint64_t hits();

 private:
  std::shared_ptr<const OutputPlan> infer(const torch::jit::Stack& arguments);
  void run_on_meta(torch::jit::Stack& stack) const;
  bool describe(const torch::jit::Stack& results, const std::vector<at::ScalarType>& dtypes,
                OutputPlan& plan) const;
  bool needs_host_dtypes(const torch::jit::Stack& arguments) const;
  const std::vector<at::ScalarType>* host_dtypes(const torch::jit::Stack& arguments);

  const c10::OperatorHandle op_;
  const Signature& signature_;
  const c10::KernelFunction* body_;
  std::atomic<bool> has_meta_{true};
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const OutputPlan>> plans_;
  std::unordered_map<std::string, std::vector<at::ScalarType>> dtypes_;
};

}  // namespace ascendsim::kernels
