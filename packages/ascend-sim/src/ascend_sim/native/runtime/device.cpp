// Start and end, devices and contexts, and what the device says it is.
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>
#include <string>

#include "common.h"
#include "faults.h"
#include "scheduler.h"

namespace ascendsim {
namespace {

// In torch_npu's table of devices: a 910B has the operators that the simulated kernels stand for.
constexpr const char* kSocName = "Ascend910B2";
// Below 8.3, so that torch_npu selects a device at once and not at its first use.
constexpr const char* kCannVersion = "8.2.RC1";
constexpr int64_t kCores = 24;

thread_local int selected_device = -1;
std::atomic<int> initialised{0};
std::array<int, kMaxDevices> contexts;  // a context is the address of its device's element
std::array<std::atomic<bool>, kMaxDevices> selected_ever;

}  // namespace

int CurrentDevice() { return selected_device < 0 ? 0 : selected_device; }

}  // namespace ascendsim

using namespace ascendsim;

// torch_npu initialises once, accepts "initialised twice", and finalises at exit.
ASCENDSIM_API int aclInit(const char*) { return initialised++ ? kInitialisedTwice : kOk; }

ASCENDSIM_API int aclFinalize() {
  Scheduler::Get().AwaitAll();
  initialised = 0;
  return kOk;
}

// A device is selected per thread; before that there is no context, which torch_npu tells apart
// from an error. A context stands for its device.
ASCENDSIM_API int aclrtGetDeviceCount(uint32_t* count) {
  *count = Settings().devices;
  return kOk;
}

ASCENDSIM_API int aclrtSetDevice(int device) {
  if (device < 0 || device >= static_cast<int>(Settings().devices)) {
    return Fail(kBadParameter, "there is no device " + std::to_string(device) + ", only " +
                                   std::to_string(Settings().devices));
  }
  selected_device = device;
  selected_ever[device] = true;
  return kOk;
}

ASCENDSIM_API int aclrtGetDevice(int* device) {
  if (selected_device < 0) return kNoContext;
  *device = selected_device;
  return kOk;
}

// Nothing is freed here: torch_npu calls it when the process ends.
ASCENDSIM_API int aclrtResetDevice(int device) {
  ResetFailures(device);
  return kOk;
}

ASCENDSIM_API int aclrtGetCurrentContext(void** context) {
  if (selected_device < 0) return kNoContext;
  *context = &contexts[selected_device];
  return kOk;
}

ASCENDSIM_API int aclrtSetCurrentContext(void* context) {
  selected_device = static_cast<int>(static_cast<int*>(context) - contexts.data());
  return kOk;
}

// A device has a context from the first time that a thread selects it.
ASCENDSIM_API int aclrtGetPrimaryCtxState(int device, uint32_t* flags, int* active) {
  if (device < 0 || device >= static_cast<int>(Settings().devices)) {
    return Fail(kBadParameter, "there is no device " + std::to_string(device));
  }
  if (flags) *flags = 0;
  *active = selected_ever[device] ? 1 : 0;
  return kOk;
}

ASCENDSIM_API int aclrtGetLogicDevIdByUserDevId(int user, int* logical) {
  *logical = user;
  return kOk;
}

ASCENDSIM_API int aclrtDeviceTaskAbort(int, uint32_t) { return kOk; }

// Identity. The name and the version choose torch_npu's code paths; the rest is for display.
ASCENDSIM_API const char* aclrtGetSocName() { return kSocName; }

ASCENDSIM_API int aclsysGetVersionStr(char*, char* version) {
  std::strcpy(version, kCannVersion);
  return kOk;
}

ASCENDSIM_API int aclsysGetCANNVersion(int, void* version) {
  constexpr size_t kLeastSize = 32;
  std::memset(version, 0, kLeastSize);
  std::strcpy(static_cast<char*>(version), kCannVersion);
  return kOk;
}

ASCENDSIM_API int aclGetCannAttributeList(const int** attributes, size_t* count) {
  static const int kNone = 0;
  *attributes = &kNone;
  *count = 0;
  return kOk;
}

ASCENDSIM_API int aclGetCannAttribute(int, int* value) {
  *value = 1;
  return kOk;
}

ASCENDSIM_API int aclGetDeviceCapability(uint32_t, int, int64_t* value) {
  *value = kCores;
  return kOk;
}

ASCENDSIM_API int aclrtGetDeviceInfo(uint32_t, int, int64_t* value) {
  *value = kCores;
  return kOk;
}

ASCENDSIM_API int aclrtDeviceGetBareTgid(int* process) {
  *process = getpid();
  return kOk;
}

ASCENDSIM_API int aclrtDeviceGetUuid(int device, void* uuid) {
  constexpr size_t kSizeOfUuid = 16;
  std::memset(uuid, 0, kSizeOfUuid);
  std::memcpy(uuid, &device, sizeof device);
  return kOk;
}

ASCENDSIM_API int aclrtGetDeviceUtilizationRate(int, void* rate) {
  constexpr size_t kSizeOfRate = 16;
  std::memset(rate, 0, kSizeOfRate);
  return kOk;
}

// Peers: every device reaches every other's memory.
ASCENDSIM_API int aclrtDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return kOk;
}

ASCENDSIM_API int aclrtDeviceEnablePeerAccess(int, uint32_t) { return kOk; }

// Errors. torch_npu asks for the text after a call that failed; null means that there is none. It
// must stay valid until the thread asks again.
ASCENDSIM_API const char* aclGetRecentErrMsg() {
  thread_local std::string text;
  text = TakeFailure();
  return text.empty() ? nullptr : text.c_str();
}

ASCENDSIM_API int aclrtGetLastError(int) { return kOk; }

ASCENDSIM_API int aclrtPeekAtLastError(int) { return kOk; }
