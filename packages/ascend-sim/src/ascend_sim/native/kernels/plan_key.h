// The key under which an operator's inferred outputs are kept.
#pragma once

#include <ATen/core/stack.h>

#include <string>

namespace ascendsim::kernels {

// Appends everything that the shapes of the outputs can depend on: kinds, sizes, strides and dtypes
// of tensors, numbers when `values` is set, and what kind of number otherwise. Returns false when
// an argument is of a kind that it does not know; then nothing may be kept.
bool append_key(const torch::jit::Stack& arguments, bool values, std::string& key);

}  // namespace ascendsim::kernels
