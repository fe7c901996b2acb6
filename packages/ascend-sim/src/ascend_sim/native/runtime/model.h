// How long things take: a model, from the rates and latencies of the settings, and no NPU's timing.
#pragma once

#include <cstdint>

#include "control.h"

namespace ascendsim {

struct Task;

// A copy: its latency (where it crosses between host and device) and its bytes over the bandwidth.
uint64_t CopyNanoseconds(AscendsimKind kind, uint64_t bytes);

// A kernel: its overhead, and the longer of its multiplications and its bytes over their rates.
// Records, waits and host functions: nothing.
uint64_t TaskNanoseconds(const Task& task);

// So many steps between ranks, in which a rank sends its neighbour so many bytes, all together.
uint64_t LinkNanoseconds(uint64_t steps, double bytes);

// What a submission costs the host.
uint64_t LaunchNanoseconds();

}  // namespace ascendsim
