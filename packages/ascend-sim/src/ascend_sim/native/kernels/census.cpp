#include "census.h"

#include <atomic>
#include <mutex>

#include "signature.h"

namespace ascendsim::kernels {
namespace {

std::atomic<bool> g_strict{false};
std::mutex g_mutex;

std::map<std::string, uint64_t>& calls() {
  static auto* counts = new std::map<std::string, uint64_t>;
  return *counts;
}

bool count_first(const std::string& name) {
  std::lock_guard<std::mutex> lock(g_mutex);
  return ++calls()[name] == 1;
}

}  // namespace

Census& census() {
  static auto* the_one = new Census;
  return *the_one;
}

void set_strict(bool strict) { g_strict = strict; }

std::map<std::string, uint64_t> left_calls() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return calls();
}

LeftOperator::LeftOperator(const c10::OperatorHandle& op)
    : name_(full_name(op.operator_name())),
      torch_npu_(op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {}

void LeftOperator::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet,
                              torch::jit::Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !g_strict, "[ascend-sim] ", name_, " has no kernel for the NPU in torch_npu.\n",
      "  why      a real NPU would copy the tensors to the CPU, run there and copy back\n",
      "  instead  use another operator, or start the simulator with strict=False");
  if (count_first(name_)) {  // a call that was refused is none
    TORCH_WARN("[ascend-sim] ", name_,
               " has no kernel for the NPU in torch_npu, which runs it on the CPU");
  }
  torch_npu_.callBoxed(op, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), stack);
}

AbsentOperator::AbsentOperator(std::string name) : name_(std::move(name)) {}

void AbsentOperator::operator()(const c10::OperatorHandle&, c10::DispatchKeySet,
                                torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, "[ascend-sim] ", name_, " is not simulated.\n",
      "  why      torch_npu has a kernel for it that only a real NPU runs\n",
      "  instead  use another operator, or add its kernel to ascend_sim/native/kernels");
}

}  // namespace ascendsim::kernels
