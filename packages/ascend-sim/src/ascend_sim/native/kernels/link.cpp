#include "link.h"

#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace ascendsim::kernels {
namespace {

// c10_npu::NPUStream: one c10::Stream and a destructor that the user wrote. The destructor matters:
// it makes the ABI return the class through memory, and this mirror must be returned alike.
struct NpuStream {
  c10::Stream stream;
  ~NpuStream() {}
};

struct TorchNpu {
  NpuStream (*current_stream)(signed char device);
  void* (*handle)(const NpuStream* stream);
};

Link g_link;
TorchNpu g_torch_npu;

void* loaded(const char* library) {
  void* handle = dlopen(library, RTLD_NOLOAD | RTLD_NOW);
  TORCH_CHECK(handle, "[ascend-sim] ", library, " is not loaded");
  return handle;
}

template <class Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  TORCH_CHECK(function, "[ascend-sim] the symbol ", name, " was not found");
}

}  // namespace

void connect() {
  void* runtime = loaded("libascendcl.so");
  resolve(runtime, "ascendsim_launch", g_link.launch);
  resolve(runtime, "ascendsim_settle", g_link.settle);
  resolve(runtime, "ascendsim_kernel_begins", g_link.kernel_begins);
  resolve(runtime, "ascendsim_report_error", g_link.report_error);
  resolve(runtime, "ascendsim_error_of", g_link.error_of);
  resolve(runtime, "aclrtSynchronizeStream", g_link.synchronize);
  void (*settings)(AscendsimSettings*) = nullptr;
  resolve(runtime, "ascendsim_settings", settings);
  AscendsimSettings read;
  settings(&read);
  g_link.traces = read.trace != 0;
  g_link.weighs = g_link.traces || read.schedule == ASCENDSIM_TIMED;
  void* torch_npu = loaded("libtorch_npu.so");
  resolve(torch_npu, "_ZN7c10_npu19getCurrentNPUStreamEa", g_torch_npu.current_stream);
  resolve(torch_npu, "_ZNK7c10_npu9NPUStream6streamEv", g_torch_npu.handle);
}

const Link& link() { return g_link; }

void* current_stream(c10::DeviceIndex device) {
  NpuStream stream = g_torch_npu.current_stream(device);
  return g_torch_npu.handle(&stream);
}

}  // namespace ascendsim::kernels
