#include "model.h"

#include <algorithm>
#include <cmath>

#include "common.h"
#include "scheduler.h"

namespace ascendsim {
namespace {

// A rate of 0 is one without limit.
double Over(double amount, double per_nanosecond) {
  return per_nanosecond > 0 ? amount / per_nanosecond : 0;
}

uint64_t Whole(double nanoseconds) { return static_cast<uint64_t>(std::llround(nanoseconds)); }

double Bandwidth(AscendsimKind kind) {  // 1 GB/s is 1 byte per nanosecond
  switch (kind) {
    case ASCENDSIM_KIND_H2D:
      return Settings().h2d_gbps;
    case ASCENDSIM_KIND_D2H:
      return Settings().d2h_gbps;
    case ASCENDSIM_KIND_D2D:
      return Settings().d2d_gbps;
    default:
      return 0;
  }
}

uint64_t KernelNanoseconds(const Task& task) {
  constexpr double kFlopsPerNanosecond = 1e3;  // of 1 TFLOP/s
  const bool narrow = task.flop_bytes <= 2;
  const double rate = narrow ? Settings().matmul_tflops_16 : Settings().matmul_tflops_32;
  const double multiplying = Over(static_cast<double>(task.flops), rate * kFlopsPerNanosecond);
  const double moving = Over(static_cast<double>(task.bytes), Settings().memory_gbps);
  return Whole(Settings().kernel_us * 1e3 + std::max(multiplying, moving));
}

}  // namespace

uint64_t CopyNanoseconds(AscendsimKind kind, uint64_t bytes) {
  const bool crosses = kind == ASCENDSIM_KIND_H2D || kind == ASCENDSIM_KIND_D2H;
  const double latency = crosses ? Settings().copy_latency_us * 1e3 : 0;
  return Whole(latency + Over(static_cast<double>(bytes), Bandwidth(kind)));
}

uint64_t TaskNanoseconds(const Task& task) {
  switch (task.kind) {
    case ASCENDSIM_KIND_KERNEL:
      return KernelNanoseconds(task);
    case ASCENDSIM_KIND_H2D:
    case ASCENDSIM_KIND_D2H:
    case ASCENDSIM_KIND_D2D:
      return CopyNanoseconds(task.kind, task.bytes);
    default:
      return 0;
  }
}

uint64_t LinkNanoseconds(uint64_t steps, double bytes) {
  const double latency = static_cast<double>(steps) * Settings().link_latency_us * 1e3;
  return Whole(latency + Over(bytes, Settings().link_gbps));
}

uint64_t LaunchNanoseconds() { return Whole(Settings().launch_us * 1e3); }

}  // namespace ascendsim
