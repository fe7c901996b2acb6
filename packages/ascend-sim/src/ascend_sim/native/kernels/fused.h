// torch_npu's fused operators, under its own schemas, with its own Meta and autograd formulas.
#pragma once

#include <torch/library.h>

#include <string>
#include <vector>

#include "simulate.h"

namespace ascendsim::kernels {

// An operator as a function of host tensors. SimulatedOperator does the rest.
template <class Function>
HostKernel host_kernel(const char* name, Function* function, Refusal refuse = nullptr) {
  return {name, c10::KernelFunction::makeFromUnboxedRuntimeFunction(function), refuse};
}

void append_activations(std::vector<HostKernel>& kernels);  // npu_swiglu, npu_gelu
void append_norms(std::vector<HostKernel>& kernels);        // npu_rms_norm, npu_add_rms_norm
void append_rotary(std::vector<HostKernel>& kernels);       // npu_rotary_mul
void append_matmuls(std::vector<HostKernel>& kernels);      // npu_grouped_matmul
void append_casts(std::vector<HostKernel>& kernels);        // npu_dtype_cast, _npu_format_cast

// Those that do something on the host too. Each registers with a library for PrivateUse1 and
// returns the names.
std::vector<std::string> register_attention(torch::Library& npu);
std::vector<std::string> register_optimizer(torch::Library& npu);
std::vector<std::string> register_formats(torch::Library& npu);

}  // namespace ascendsim::kernels
