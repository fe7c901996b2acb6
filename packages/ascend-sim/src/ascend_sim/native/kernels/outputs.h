// What an operator will return, known before its kernel runs.
//
// One new tensor: from the Meta kernel. Most of those are Python and cost 0.2 to 6 ms, so what they
// answer is kept, keyed by everything that shapes can depend on.
//
// Several new tensors: from running the host's kernel once, on zeros of the same shapes. Meta
// follows CUDA, and what the host's kernel saves for backward may differ: native_layer_norm's
// statistics are bfloat16 there, native_batch_norm's are empty in evaluation. The run touches no
// device memory and waits for nothing, so a race stays visible in the very first call.
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
  // Where outputs may be learnt: torch has no kernel for the CPU of an operator of torch_npu.
  enum Source { kMeta, kMetaOrHost };

  OutputPlanner(const c10::OperatorHandle& op, const Signature& signature, Source source);

  // Returns null when the outputs cannot be known without running the kernel. Then the call has to
  // wait, and an argument that is wrong is found there too.
  std::shared_ptr<const OutputPlan> plan(const torch::jit::Stack& arguments);

  // How often the answer was already known, over all operators.
  static uint64_t hits();

 private:
  using Plan = std::shared_ptr<OutputPlan>;

  Plan infer(const torch::jit::Stack& arguments);
  Plan from_meta(const torch::jit::Stack& arguments);
  Plan from_host(const torch::jit::Stack& arguments) const;
  Plan describe(const torch::jit::Stack& results) const;

  const c10::OperatorHandle op_;
  const Signature& signature_;
  const Source source_;
  std::atomic<bool> has_meta_{true};  // until a call shows that it has none
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const OutputPlan>> plans_;
};

}  // namespace ascendsim::kernels
