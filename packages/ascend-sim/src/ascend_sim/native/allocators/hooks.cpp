// Looks into torch_npu's caching allocators, which stay the ones that decide.
//
// A step that runs for the second time asks the runtime for nothing: the caches serve it. What is
// to be counted, to fail or to be poisoned per tensor must therefore be seen at the caches' door:
//   * `allocate` of the device's and of the pinned host memory's allocator is replaced in its table
//     of virtual functions by one that counts, asks whether an injected fault strikes, and calls
//     the original. The DataPtr is passed on untouched, since record_stream tells by its deleter
//     whose it is.
//   * With poison, a tracker of the device's allocator sees each block as its free completes, and
//     enqueues a fill on the block's own stream: from there on the block is the allocator's, and
//     whoever still reads it without having said so (record_stream) reads NaN. Of pinned memory
//     only the cache knows when a freed block is nobody's, as its events may be pending: it is
//     filled as it is handed out again.
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>

#include "../runtime/tasks.h"

namespace {

using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
using AllocationBegins = decltype(&ascendsim_allocation_begins);
using MemsetAsync = int (*)(void*, size_t, int, size_t, void*);

struct Hooks {
  AllocationBegins begins = nullptr;
  MemsetAsync fill = nullptr;
  Allocate device = nullptr, pinned = nullptr;  // the originals
  bool poison = false;
};

Hooks hooks;

c10::DataPtr AllocateDevice(c10::Allocator* self, size_t bytes) {
  if (bytes > 0 && hooks.begins(ASCENDSIM_FAULT_DEVICE_ALLOCATION)) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "[ascend-sim] injected fault: NPU out of memory, ",
                     bytes, " bytes were asked for");
  }
  return hooks.device(self, bytes);
}

c10::DataPtr AllocatePinned(c10::Allocator* self, size_t bytes) {
  if (bytes > 0 && hooks.begins(ASCENDSIM_FAULT_PINNED_ALLOCATION)) {
    TORCH_CHECK(false, "[ascend-sim] injected fault: out of pinned host memory, ", bytes,
                " bytes were asked for");
  }
  c10::DataPtr block = hooks.pinned(self, bytes);
  if (hooks.poison) std::memset(block.get(), 0xff, bytes);
  return block;
}

// Where `allocate` is in the table, by the layout of a pointer to a virtual member function.
size_t SlotOfAllocate() {
#if defined(__x86_64__)
  const auto member = &c10::Allocator::allocate;
  ptrdiff_t offset = 0;
  std::memcpy(&offset, &member, sizeof offset);
  return (offset - 1) / sizeof(void*);
#else
#error "ascend-sim knows the layout of member function pointers on x86-64 alone"
#endif
}

// Puts `replacement` into the object's table of virtual functions, and returns what was there.
Allocate Replace(c10::Allocator* object, Allocate replacement) {
  auto* table = *reinterpret_cast<Allocate**>(object);
  Allocate* slot = table + SlotOfAllocate();
  const size_t page = sysconf(_SC_PAGESIZE);
  void* begin = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) / page * page);
  TORCH_CHECK(mprotect(begin, page, PROT_READ | PROT_WRITE) == 0, "the table is not to be written");
  const Allocate original = *slot;
  *slot = replacement;
  mprotect(begin, page, PROT_READ);
  return original;
}

void PoisonFreed(const c10_npu::NPUCachingAllocator::TraceEntry& entry) {
  if (entry.action_ != c10_npu::NPUCachingAllocator::TraceEntry::FREE_COMPLETED) return;
  auto* address = reinterpret_cast<void*>(entry.addr_);
  hooks.fill(address, entry.size_, 0xff, entry.size_, entry.stream_);
}

void Install(bool poison) {
  void* runtime = dlopen("libascendcl.so", RTLD_NOLOAD | RTLD_NOW);
  TORCH_CHECK(runtime, "the simulated runtime is not loaded");
  hooks.begins = reinterpret_cast<AllocationBegins>(dlsym(runtime, "ascendsim_allocation_begins"));
  hooks.fill = reinterpret_cast<MemsetAsync>(dlsym(runtime, "aclrtMemsetAsync"));
  TORCH_CHECK(hooks.begins && hooks.fill, "the simulated runtime lacks a function");
  auto* device = c10_npu::NPUCachingAllocator::get();
  hooks.device = Replace(device, AllocateDevice);
  hooks.pinned = Replace(at::getHostAllocator(at::kPrivateUse1), AllocatePinned);
  hooks.poison = poison;
  if (poison) device->attachAllocatorTraceTracker(PoisonFreed);
}

}  // namespace

// Called once by start.py, after torch_npu was initialised. Returns 0, or -1 and a text in `error`.
extern "C" __attribute__((visibility("default"))) int ascendsim_allocators_install(int poison,
                                                                                   char* error,
                                                                                   uint64_t size) {
  try {
    Install(poison != 0);
    return 0;
  } catch (const std::exception& e) {
    std::strncpy(error, e.what(), size - 1);
    error[size - 1] = '\0';
    return -1;
  }
}
