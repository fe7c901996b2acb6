// Random numbers, counter-based as on the device: (seed, offset) fully determine a draw.
#pragma once

#include <ATen/core/Generator.h>

#include <cstdint>

namespace ascendsim::kernels {

// One use of an NPU generator.
struct Draw {
  int64_t seed;
  int64_t offset;
};

// Reads the generator's seed and offset and moves the offset on, on the host and at the time of
// the call: what the kernel draws later does not depend on when it runs.
Draw draw_from(const at::Generator& npu);

const at::Generator& default_generator(c10::DeviceIndex device);

// A host generator that a draw determines. manual_seed, get_rng_state and set_rng_state of
// torch.npu therefore work as usual.
at::Generator host_generator(Draw draw);

}  // namespace ascendsim::kernels
