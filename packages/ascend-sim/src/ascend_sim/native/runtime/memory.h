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

  // Makes addresses known: to which device they belong (kHost: pinned by us, kRegistered: the
  // program's own host memory, pinned by registration).
  static constexpr int kHost = -1, kRegistered = -2;
  void Add(void* address, size_t bytes, int owner);
  // Forgets a range by its first address. Returns its size, 0 when it is unknown or not of `kind`.
  size_t Remove(void* address, bool (*kind)(int owner), int* owner = nullptr);

  Home Where(const void* address, int* device = nullptr);

 private:
  struct Range {
    size_t bytes;
    int owner;
  };

  std::mutex mutex_;
  std::map<uintptr_t, Range> ranges_;
  std::unordered_map<int, size_t> used_;
  size_t pinned_ = 0;
};

}  // namespace ascendsim
