// What every unit of the runtime shares.
#pragma once

#include <cstdint>
#include <string>

#include "control.h"

namespace ascendsim {

// The return codes of ACL that torch_npu tells apart. The names are ours, the numbers are ACL's.
enum Code : int {
  kOk = 0,
  kBadParameter = 100000,
  kInitialisedTwice = 100002,
  kNoContext = 107002,
  kUnsupported = 207000,
  kOutOfMemory = 207001,  // torch_npu's allocator frees its cache and tries again
  kInternal = 500000,
  kKernelFailed = 507015,
};

inline constexpr int kMaxDevices = 64;

const AscendsimSettings& Settings();

// From here on ascendsim_configure refuses: something was built on the settings.
void FixSettings();

// Stores a text for the thread's next aclGetRecentErrMsg, and returns `code`.
int Fail(int code, std::string text);

// The thread's last failure, which is forgotten; empty when there is none.
std::string TakeFailure();

uint64_t NowNanoseconds();

// The device that the calling thread has selected, 0 where it has selected none.
int CurrentDevice();

}  // namespace ascendsim
