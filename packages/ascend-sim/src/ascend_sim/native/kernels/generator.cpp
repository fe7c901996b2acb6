#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <mutex>

namespace ascendsim::kernels {
namespace {

// Offsets of torch_npu's generator are multiples of four.
constexpr uint64_t kOffsetsPerDraw = 4;

// The finaliser of splitmix64: neighbouring offsets give unrelated seeds.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

}  // namespace

Draw draw_from(const at::Generator& npu) {
  TORCH_CHECK(npu.device().type() == c10::DeviceType::PrivateUse1,
              "Expected a 'npu' device type for generator but found '", npu.device().type(), "'");
  at::Generator generator = npu;
  std::lock_guard<std::mutex> lock(generator.mutex());
  const uint64_t offset = generator.get_offset();
  generator.set_offset(offset + kOffsetsPerDraw);
  return {static_cast<int64_t>(generator.current_seed()), static_cast<int64_t>(offset)};
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  return at::globalContext().defaultGenerator(at::Device(c10::DeviceType::PrivateUse1, device));
}

at::Generator host_generator(Draw draw) {
  const uint64_t key = mixed(static_cast<uint64_t>(draw.seed)) + static_cast<uint64_t>(draw.offset);
  return at::make_generator<at::CPUGeneratorImpl>(mixed(key));
}

}  // namespace ascendsim::kernels
