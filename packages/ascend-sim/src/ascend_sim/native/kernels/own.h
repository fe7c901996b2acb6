// Operators of torch whose simulation is more than a kernel of the host.
#pragma once

#include <torch/library.h>

#include <string>
#include <vector>

namespace ascendsim::kernels {

// Registers them with `aten`, a library for PrivateUse1, and returns their names.
std::vector<std::string> register_own(torch::Library& aten);

}  // namespace ascendsim::kernels
