// What the kernels take from the runtime and from torch_npu, found by name when they are installed.
#pragma once

#include <c10/core/Device.h>

#include "../runtime/tasks.h"

namespace ascendsim::kernels {

struct Link {
  AscendsimLaunch launch;
  AscendsimSettle settle;
  AscendsimKernelBegins kernel_begins;
  AscendsimReportError report_error;
  AscendsimErrorOf error_of;
  int (*synchronize)(void* stream);  // aclrtSynchronizeStream: counted, as the real operator's is
  bool traces;                       // the settings ask for a trace of accesses
  bool weighs;                       // they ask for one, or for a clock
};

// Resolves every name. Throws c10::Error, naming what is missing.
void connect();

// Valid after connect().
const Link& link();

// The runtime's handle of the stream that torch_npu has made current on `device`.
void* current_stream(c10::DeviceIndex device);

}  // namespace ascendsim::kernels
