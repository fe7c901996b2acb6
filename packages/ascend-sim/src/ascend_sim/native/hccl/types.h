// The numbers of HCCL's interface that torch_npu passes or tells apart. The names are ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace ascendsim::hccl {

enum Result : int {
  kSuccess = 0,
  kBadArgument = 1,
  kSystemCall = 8,
  kTimeout = 9,
  kRemote = 21,  // another rank is at fault
};

enum DataType : int32_t {
  kInt8 = 0,
  kInt16 = 1,
  kInt32 = 2,
  kFloat16 = 3,
  kFloat32 = 4,
  kInt64 = 5,
  kUInt64 = 6,
  kUInt8 = 7,
  kUInt16 = 8,
  kUInt32 = 9,
  kFloat64 = 10,
  kBFloat16 = 11,
};

// torch_npu itself makes AVG of a sum, and the SUM of bools of a maximum of bytes.
enum Reduction : int32_t { kSum = 0, kProduct = 1, kMaximum = 2, kMinimum = 3, kNone = 255 };

// 0 for a type that is not simulated.
size_t SizeOf(int32_t type);
const char* NameOf(DataType type);

// Why a collective failed. Ends the task, never the process.
class Failure : public std::runtime_error {
 public:
  Failure(Result code, const std::string& text) : std::runtime_error(text), code(code) {}

  // With HCCL's name of the code first, and what was being done.
  std::string Text(const std::string& doing) const;

  Result code;
};

}  // namespace ascendsim::hccl
