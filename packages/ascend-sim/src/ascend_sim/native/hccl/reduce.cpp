#include "reduce.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace ascendsim::hccl {
namespace {

// Bits of a bfloat16. Rounds to the nearest, ties to even.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  explicit BFloat16(float value) {
    const auto wide = std::bit_cast<uint32_t>(value);
    bits = std::isnan(value) ? 0x7FC0 : (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16;
  }
  explicit operator float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

template <class Element>
struct Accumulator {
  using Type = Element;
};
template <>
struct Accumulator<_Float16> {
  using Type = float;
};
template <>
struct Accumulator<BFloat16> {
  using Type = float;
};

template <class Element, class Combine>
void Fold(void* to, const std::vector<const char*>& parts, uint64_t count, Combine combine) {
  using Wide = typename Accumulator<Element>::Type;
  auto* result = static_cast<Element*>(to);
  const auto at = [&](size_t part, uint64_t i) {
    return static_cast<Wide>(reinterpret_cast<const Element*>(parts[part])[i]);
  };
  for (uint64_t i = 0; i < count; ++i) {
    Wide value = at(0, i);
    for (size_t part = 1; part < parts.size(); ++part) {
      value = static_cast<Wide>(combine(value, at(part, i)));
    }
    result[i] = static_cast<Element>(value);
  }
}

template <class Element>
void ReduceOf(void* to, const std::vector<const char*>& parts, uint64_t count,
              Reduction reduction) {
  switch (reduction) {
    case kProduct:
      return Fold<Element>(to, parts, count, [](auto a, auto b) { return a * b; });
    case kMaximum:
      return Fold<Element>(to, parts, count, [](auto a, auto b) { return std::max(a, b); });
    case kMinimum:
      return Fold<Element>(to, parts, count, [](auto a, auto b) { return std::min(a, b); });
    default:
      return Fold<Element>(to, parts, count, [](auto a, auto b) { return a + b; });
  }
}

struct TypeInfo {
  size_t size;
  const char* name;
  void (*reduce)(void*, const std::vector<const char*>&, uint64_t, Reduction);
};

// Indexed by DataType.
constexpr TypeInfo kTypes[] = {
    {1, "int8", ReduceOf<int8_t>},          {2, "int16", ReduceOf<int16_t>},
    {4, "int32", ReduceOf<int32_t>},        {2, "float16", ReduceOf<_Float16>},
    {4, "float32", ReduceOf<float>},        {8, "int64", ReduceOf<int64_t>},
    {8, "uint64", ReduceOf<uint64_t>},      {1, "uint8", ReduceOf<uint8_t>},
    {2, "uint16", ReduceOf<uint16_t>},      {4, "uint32", ReduceOf<uint32_t>},
    {8, "float64", ReduceOf<double>},       {2, "bfloat16", ReduceOf<BFloat16>},
};

}  // namespace

std::string Failure::Text(const std::string& doing) const {
  const char* name = code == kBadArgument  ? "HCCL_E_PARA"
                     : code == kSystemCall ? "HCCL_E_SYSCALL"
                     : code == kTimeout    ? "HCCL_E_TIMEOUT"
                                           : "HCCL_E_REMOTE";
  return std::string(name) + ": " + doing + ": " + what();
}

size_t SizeOf(int32_t type) {
  return type >= kInt8 && type <= kBFloat16 ? kTypes[type].size : 0;
}

const char* NameOf(DataType type) { return kTypes[type].name; }

void Reduce(void* to, const std::vector<const char*>& parts, uint64_t count, DataType type,
            Reduction reduction) {
  kTypes[type].reduce(to, parts, count, reduction);
}

}  // namespace ascendsim::hccl
