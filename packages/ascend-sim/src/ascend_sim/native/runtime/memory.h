// Which memory belongs to whom: the one registry of device, pinned and registered host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

namespace ascendsim {

enum class Home { kDevice, kPinned, kPageable };

// Fills memory with bytes that read as NaN in every floating-point type, when settings ask for it.
void Poison(void* address, size_t bytes);

class Memory {
 public:
  static Memory& Get();

  // Takes part of a device's capacity. False when not so much is left.
  bool Claim(int device, size_t bytes);
  void Release(int device, size_t bytes);
  size_t Used(int device);
  size_t UsedInAll();
  size_t Pinned();

  // Makes addresses known: of a device, or (kHost) of pinned host memory.
  static constexpr int kHost = -1;
  void Add(void* address, size_t bytes, int owner);
  // Forgets a range by its first address. Returns its size, 0 when there is none of that kind.
  size_t RemoveDevice(void* address);
  size_t RemoveHost(void* address);

  // Host memory that is pinned where it is. It may be memory of aclrtMallocHost as well, which
  // torch_npu's swapped memory is: that is known twice, and forgotten twice.
  void Register(void* address, size_t bytes);
  bool Unregister(void* address);

  Home Where(const void* address, int* device = nullptr);

 private:
  struct Range {
    size_t bytes;
    int owner;
  };
  using Ranges = std::map<uintptr_t, Range>;

  static const Range* Find(const Ranges& ranges, const void* address);
  size_t Remove(Ranges& ranges, void* address, bool device);

  std::mutex mutex_;
  Ranges ranges_;
  Ranges registered_;
  std::unordered_map<int, size_t> used_;
  size_t pinned_ = 0;
};

}  // namespace ascendsim
