// What torch_npu calls and a simulation need not heed, and what it refuses by name.
#include <cstddef>
#include <cstring>

#include "common.h"

using namespace ascendsim;

// Modes of arithmetic and of time-out: accepted, no effect. Overflow is never flagged.
ASCENDSIM_API int aclrtSetStreamAttribute(void*, int, void*) { return kOk; }
ASCENDSIM_API int aclrtSetStreamOverflowSwitch(void*, uint32_t) { return kOk; }
ASCENDSIM_API int aclrtGetStreamOverflowSwitch(void*, uint32_t* flag) {
  *flag = 0;
  return kOk;
}
ASCENDSIM_API int aclrtSetDeviceSatMode(int) { return kOk; }
ASCENDSIM_API int aclrtSetOpWaitTimeout(uint32_t) { return kOk; }
ASCENDSIM_API int aclrtSetOpExecuteTimeOut(uint32_t) { return kOk; }
ASCENDSIM_API int aclrtSetOpExecuteTimeOutV2(uint64_t asked, uint64_t* actual) {
  if (actual) *actual = asked;
  return kOk;
}
ASCENDSIM_API int aclrtCtxSetSysParamOpt(int, int64_t) { return kOk; }
ASCENDSIM_API int aclrtSetSysParamOpt(int, int64_t) { return kOk; }
ASCENDSIM_API int aclrtGetSysParamOpt(int, int64_t* value) {
  *value = 0;
  return kOk;
}

// Cache hints.
ASCENDSIM_API int aclrtCmoAsync(void*, size_t, int, void*) { return kOk; }

// Options of the operator compiler. The answer must be "disable": with "1", jit compilation,
// complex dtypes are refused.
ASCENDSIM_API int aclSetCompileopt(int, const char*) { return kOk; }
ASCENDSIM_API size_t aclGetCompileoptSize(int) { return sizeof "disable"; }
ASCENDSIM_API int aclGetCompileopt(int, char* value, size_t size) {
  if (size > 0) {
    std::strncpy(value, "disable", size - 1);
    value[size - 1] = '\0';
  }
  return kOk;
}

// Dumps, logs and the profiler: accepted and dropped. The profiler's clock must advance.
ASCENDSIM_API int aclmdlInitDump() { return kOk; }
ASCENDSIM_API int aclmdlFinalizeDump() { return kOk; }
ASCENDSIM_API int aclmdlSetDump(const char*) { return kOk; }
ASCENDSIM_API void aclAppLog(int, const char*, const char*, uint32_t, const char*, ...) {}
ASCENDSIM_API uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
ASCENDSIM_API int MsprofRegisterCallback(uint32_t, void*) { return 0; }
ASCENDSIM_API int MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
ASCENDSIM_API int MsprofReportApi(uint32_t, const void*) { return 0; }
ASCENDSIM_API int MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
ASCENDSIM_API uint64_t MsprofSysCycleTime() { return NowNanoseconds(); }

// Device code and memory shared between processes: refused by name. torch_npu asks for none of it
// in eager training; what does, gets an error that says what is missing.
#define ASCENDSIM_REFUSE(name, ...) \
  ASCENDSIM_API int name(__VA_ARGS__) { return Fail(kUnsupported, #name " is not simulated"); }

ASCENDSIM_REFUSE(aclrtMemExportToShareableHandle, void*, int, uint64_t, uint64_t*)
ASCENDSIM_REFUSE(aclrtMemImportFromShareableHandle, uint64_t, int, void**)
ASCENDSIM_REFUSE(aclrtMemSetPidToShareableHandle, uint64_t, int*, size_t)
ASCENDSIM_REFUSE(aclrtBinaryGetFunction, void*, const char*, void**)
ASCENDSIM_REFUSE(aclrtBinaryLoadFromData, const void*, size_t, const void*, void**)
ASCENDSIM_REFUSE(aclrtGetFunctionAddr, void*, void**, void**)
ASCENDSIM_REFUSE(rtDevBinaryRegister, const void*, void**)
ASCENDSIM_REFUSE(rtFunctionRegister, void*, const void*, const char*, const void*, uint32_t)
ASCENDSIM_REFUSE(rtGetC2cCtrlAddr, uint64_t*, uint32_t*)
ASCENDSIM_REFUSE(rtKernelLaunch, const void*, uint32_t, void*, uint32_t, void*, void*)
