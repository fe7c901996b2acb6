// Settings, and the text of the last failure.
#include <atomic>
#include <chrono>
#include <utility>

#include "common.h"

namespace ascendsim {
namespace {

AscendsimSettings settings = {
    .hbm_bytes = uint64_t{4} << 30,
    .query_stall = 100000,
    .seed = 0,
    .h2d_gbps = 0,
    .d2h_gbps = 0,
    .d2d_gbps = 0,
    .copy_latency_us = 0,
    .collective_timeout_s = 120,
    .launch_us = 0,
    .kernel_us = 0,
    .memory_gbps = 0,
    .matmul_tflops_16 = 0,
    .matmul_tflops_32 = 0,
    .link_latency_us = 0,
    .link_gbps = 0,
    .devices = 1,
    .schedule = ASCENDSIM_EAGER,
    .poison = 0,
    .blocking_sends = 0,
    .trace = 0,
};
std::atomic<bool> fixed{false};
thread_local std::string failure;

}  // namespace

const AscendsimSettings& Settings() { return settings; }

void FixSettings() { fixed = true; }

int Fail(int code, std::string text) {
  failure = "[ascend-sim] " + std::move(text);
  return code;
}

std::string TakeFailure() { return std::exchange(failure, {}); }

uint64_t NowNanoseconds() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

}  // namespace ascendsim

uint32_t ascendsim_abi() { return ASCENDSIM_ABI; }

int ascendsim_configure(const AscendsimSettings* wanted) {
  if (ascendsim::fixed) return -1;
  ascendsim::settings = *wanted;
  return 0;
}

void ascendsim_settings(AscendsimSettings* out) { *out = ascendsim::settings; }
