// Device and pinned memory.
#include "memory.h"

#include <sys/mman.h>

#include <cstring>

#include "common.h"
#include "faults.h"
#include "scheduler.h"

namespace ascendsim {

void Poison(void* address, size_t bytes) {
  if (Settings().poison) std::memset(address, 0xff, bytes);
}

Memory& Memory::Get() {
  static auto* memory = new Memory;
  return *memory;
}

bool Memory::Claim(int device, size_t bytes) {
  if (Strikes(ASCENDSIM_FAULT_DEVICE_SEGMENT)) return false;
  const std::lock_guard lock(mutex_);
  size_t& used = used_[device];
  if (bytes > Settings().hbm_bytes - used) return false;
  used += bytes;
  return true;
}

void Memory::Release(int device, size_t bytes) {
  const std::lock_guard lock(mutex_);
  used_[device] -= bytes;
}

size_t Memory::Used(int device) {
  const std::lock_guard lock(mutex_);
  return used_[device];
}

size_t Memory::UsedInAll() {
  const std::lock_guard lock(mutex_);
  size_t sum = 0;
  for (const auto& [device, bytes] : used_) sum += bytes;
  return sum;
}

size_t Memory::Pinned() {
  const std::lock_guard lock(mutex_);
  return pinned_;
}

void Memory::Add(void* address, size_t bytes, int owner) {
  const std::lock_guard lock(mutex_);
  ranges_[reinterpret_cast<uintptr_t>(address)] = {bytes, owner};
  if (owner < 0) pinned_ += bytes;
}

size_t Memory::Remove(Ranges& ranges, void* address, bool device) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges.find(reinterpret_cast<uintptr_t>(address));
  if (found == ranges.end() || (found->second.owner >= 0) != device) return 0;
  const size_t bytes = found->second.bytes;
  ranges.erase(found);
  if (!device && &ranges == &ranges_) pinned_ -= bytes;
  return bytes;
}

size_t Memory::RemoveDevice(void* address) { return Remove(ranges_, address, true); }

size_t Memory::RemoveHost(void* address) { return Remove(ranges_, address, false); }

void Memory::Register(void* address, size_t bytes) {
  const std::lock_guard lock(mutex_);
  registered_[reinterpret_cast<uintptr_t>(address)] = {bytes, kHost};
}

bool Memory::Unregister(void* address) { return Remove(registered_, address, false) > 0; }

const Memory::Range* Memory::Find(const Ranges& ranges, const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return nullptr;
  const auto& [begin, range] = *--after;
  return at < begin + range.bytes ? &range : nullptr;
}

Home Memory::Where(const void* address, int* device) {
  const std::lock_guard lock(mutex_);
  const Range* range = Find(ranges_, address);
  if (!range) range = Find(registered_, address);
  if (!range) return Home::kPageable;
  if (range->owner < 0) return Home::kPinned;
  if (device) *device = range->owner;
  return Home::kDevice;
}

namespace {

constexpr size_t kDeviceGrain = 512, kPage = 4096;

size_t RoundUp(size_t bytes, size_t grain) { return (bytes + grain - 1) / grain * grain; }

// Pages come zeroed and only when they are touched: a large device costs the host nothing.
void* MapPages(size_t bytes) {
  void* pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
}

int AllocateDevice(void** address, size_t asked) {
  FixSettings();
  Count(&AscendsimCounters::device_segments);
  const size_t bytes = RoundUp(asked, kDeviceGrain);
  const int device = CurrentDevice();
  *address = nullptr;
  if (!Memory::Get().Claim(device, bytes)) {
    return Fail(kOutOfMemory, "device " + std::to_string(device) + " has no " +
                                  std::to_string(bytes) +
                                  " bytes left: " + std::to_string(Memory::Get().Used(device)) +
                                  " of " + std::to_string(Settings().hbm_bytes) + " are taken");
  }
  *address = MapPages(bytes);
  if (!*address) {
    Memory::Get().Release(device, bytes);
    return Fail(kOutOfMemory, "the host has no memory left to stand in for the device's");
  }
  Poison(*address, bytes);
  Memory::Get().Add(*address, bytes, device);
  return kOk;
}

}  // namespace
}  // namespace ascendsim

using namespace ascendsim;

// Device memory. torch_npu's caching allocator asks for segments here, on the current device. On
// 207001 it frees what it has cached, asks again, and then raises OutOfMemoryError with what
// aclrtGetMemInfo says. Freeing waits for the device, as there; what is freed is unmapped, so that
// a late access ends the process rather than reading what happens to be there.
ASCENDSIM_API int aclrtMalloc(void** address, size_t bytes, int) {
  return AllocateDevice(address, bytes);
}

ASCENDSIM_API int aclrtMallocAlign32(void** address, size_t bytes, int) {
  return AllocateDevice(address, bytes);
}

ASCENDSIM_API int aclrtFree(void* address) {
  int device = 0;
  if (Memory::Get().Where(address, &device) != Home::kDevice) {
    return Fail(kBadParameter, "aclrtFree: not an address of device memory");
  }
  Scheduler::Get().AwaitDevice(device);
  const size_t bytes = Memory::Get().RemoveDevice(address);
  if (!bytes) return Fail(kBadParameter, "aclrtFree: not the first address of an allocation");
  munmap(address, bytes);
  Memory::Get().Release(device, bytes);
  return kOk;
}

ASCENDSIM_API int aclrtGetMemInfo(int, size_t* available, size_t* total) {
  *total = Settings().hbm_bytes;
  *available = *total - Memory::Get().Used(CurrentDevice());
  return kOk;
}

ASCENDSIM_API int aclrtGetMemUsageInfo(int, void*, size_t, size_t* count) {
  if (count) *count = 0;
  return kOk;
}

// Pinned host memory, below torch_npu's caching host allocator. It returns a block to its cache
// only once the events that were recorded for it are reached.
ASCENDSIM_API int aclrtMallocHost(void** address, size_t asked) {
  FixSettings();
  Count(&AscendsimCounters::pinned_segments);
  const size_t bytes = RoundUp(asked, kPage);
  *address = MapPages(bytes);
  if (!*address) return Fail(kOutOfMemory, "the host has no memory left to pin");
  Poison(*address, bytes);
  Memory::Get().Add(*address, bytes, Memory::kHost);
  return kOk;
}

ASCENDSIM_API int aclrtMallocHostWithCfg(void** address, uint64_t bytes, void*) {
  return aclrtMallocHost(address, bytes);
}

ASCENDSIM_API int aclrtFreeHost(void* address) {
  const size_t bytes = Memory::Get().RemoveHost(address);
  if (!bytes) return Fail(kBadParameter, "aclrtFreeHost: not an address of aclrtMallocHost");
  munmap(address, bytes);
  return kOk;
}

// Host memory that the program made itself and has pinned (`pin_memory_register`). It is freed by
// its owner, so it is kept apart from aclrtMallocHost's.
ASCENDSIM_API int aclrtHostRegister(void* address, uint64_t bytes, int, void** on_device) {
  Memory::Get().Register(address, bytes);
  if (on_device) *on_device = address;
  return kOk;
}

ASCENDSIM_API int aclrtHostRegisterV2(void* address, uint64_t bytes, uint32_t) {
  return aclrtHostRegister(address, bytes, 0, nullptr);
}

ASCENDSIM_API int aclrtHostUnregister(void* address) {
  if (Memory::Get().Unregister(address)) return kOk;
  return Fail(kBadParameter, "aclrtHostUnregister: the address was not registered");
}

// is_pinned() and the copy path ask what an address is: {location{id, type}, page size, reserved},
// type 0 for pinned host memory, 1 for a device's, 2 for memory that ACL does not know.
ASCENDSIM_API int aclrtPointerGetAttributes(const void* address, void* attributes) {
  constexpr size_t kSizeOfAttributes = 28;
  std::memset(attributes, 0, kSizeOfAttributes);
  auto* words = static_cast<uint32_t*>(attributes);
  int device = 0;
  const Home home = Memory::Get().Where(address, &device);
  words[0] = home == Home::kDevice ? device : 0;
  words[1] = home == Home::kDevice ? 1 : home == Home::kPinned ? 0 : 2;
  return kOk;
}
