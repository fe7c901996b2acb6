// Addresses and physical memory apart, for torch_npu's expandable segments: a range of addresses is
// reserved once, and physical memory is mapped into it as the segment grows.
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>
#include <unordered_map>

#include "common.h"
#include "memory.h"
#include "scheduler.h"

namespace ascendsim {
namespace {

struct Physical {
  int file;
  size_t bytes;
  int device;
};

// What is mapped where; an unmap names the address alone.
struct Mappings {
  std::mutex mutex;
  std::unordered_map<void*, size_t> bytes;
};

Mappings& Mapped() {
  static auto* mapped = new Mappings;
  return *mapped;
}

void* ReservePages(void* at, size_t bytes, int flags) {
  return mmap(at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

}  // namespace
}  // namespace ascendsim

using namespace ascendsim;

// Reserves addresses; none of the device's capacity is taken.
ASCENDSIM_API int aclrtReserveMemAddress(void** address, size_t bytes, size_t, void* hint,
                                         uint64_t) {
  *address = ReservePages(hint, bytes, 0);
  if (*address == MAP_FAILED) return Fail(kOutOfMemory, "no addresses left to reserve");
  Memory::Get().Add(*address, bytes, CurrentDevice());
  return kOk;
}

ASCENDSIM_API int aclrtReleaseMemAddress(void* address) {
  const size_t bytes = Memory::Get().RemoveDevice(address);
  if (!bytes) return Fail(kBadParameter, "aclrtReleaseMemAddress: these were not reserved");
  munmap(address, bytes);
  return kOk;
}

// Takes capacity. 207001 sends the allocator the same way as in aclrtMalloc.
ASCENDSIM_API int aclrtMallocPhysical(void** handle, size_t bytes, const void*, uint64_t) {
  const int device = CurrentDevice();
  if (!Memory::Get().Claim(device, bytes)) {
    return Fail(kOutOfMemory, "device " + std::to_string(device) + " has no " +
                                  std::to_string(bytes) + " bytes of physical memory left");
  }
  const int file = memfd_create("ascend-sim", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) {
    if (file >= 0) close(file);
    Memory::Get().Release(device, bytes);
    return Fail(kOutOfMemory, "the host has no memory left to stand in for the device's");
  }
  *handle = new Physical{file, bytes, device};
  return kOk;
}

ASCENDSIM_API int aclrtFreePhysical(void* handle) {
  auto* physical = static_cast<Physical*>(handle);
  close(physical->file);
  Memory::Get().Release(physical->device, physical->bytes);
  delete physical;
  return kOk;
}

ASCENDSIM_API int aclrtMapMem(void* address, size_t bytes, size_t offset, void* handle, uint64_t) {
  const int file = static_cast<Physical*>(handle)->file;
  void* mapped = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                      static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return Fail(kOutOfMemory, "physical memory could not be mapped");
  Poison(address, bytes);
  const std::lock_guard lock(Mapped().mutex);
  Mapped().bytes[address] = bytes;
  return kOk;
}

ASCENDSIM_API int aclrtUnmapMem(void* address) {
  Scheduler::Get().AwaitDevice(CurrentDevice());
  const std::lock_guard lock(Mapped().mutex);
  const auto found = Mapped().bytes.find(address);
  if (found == Mapped().bytes.end()) return Fail(kBadParameter, "aclrtUnmapMem: nothing is mapped");
  ReservePages(address, found->second, MAP_FIXED);
  Mapped().bytes.erase(found);
  return kOk;
}
