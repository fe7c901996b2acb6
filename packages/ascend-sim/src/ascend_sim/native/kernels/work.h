// What a kernel has to do, for the model of time and for the tracing of races.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../runtime/tasks.h"
#include "signature.h"

namespace ascendsim::kernels {

// The bytes that cross between memory and the kernel, each tensor's once (what is updated in place,
// twice), and the multiplications and additions of matrices. Tensors on the host count nothing.
class Work {
 public:
  void read(const at::Tensor& t);
  void write(const at::Tensor& t);
  void update(const at::Tensor& t);  // reads and writes
  void multiply(uint64_t flops, uint64_t element_size);

  uint64_t bytes() const { return bytes_; }
  uint64_t flops() const { return flops_; }
  uint64_t flop_bytes() const { return flop_bytes_; }
  // Empty unless the settings ask for a trace.
  const std::vector<AscendsimAccess>& accesses() const { return accesses_; }

 private:
  void touch(const at::Tensor& t, bool writes, uint64_t times);

  uint64_t bytes_ = 0, flops_ = 0, flop_bytes_ = 0;
  std::vector<AscendsimAccess> accesses_;
};

// The FLOPs of a call, as torch.utils.flop_counter counts them.
using FlopRule = uint64_t (*)(const torch::jit::Stack& arguments,
                              const std::vector<c10::IValue>& results);

// Null for an operator that multiplies no matrices.
FlopRule flop_rule(const std::string& name);

// Nothing, where the settings ask neither for a clock nor for a trace.
Work work_of(const Signature& signature, FlopRule flops, const torch::jit::Stack& arguments,
             const std::vector<c10::IValue>& results);

}  // namespace ascendsim::kernels
