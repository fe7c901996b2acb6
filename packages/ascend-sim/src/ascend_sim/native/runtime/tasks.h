// The contract between the runtime (libascendcl.so) and the kernels (libascendsim_kernels.so).
//
// The kernels link to nothing of the runtime: they look these functions up with
// dlsym(dlopen("libascendcl.so", RTLD_NOLOAD | RTLD_NOW), name), so that RTLD_GLOBAL is not needed.
// `stream` is always what c10_npu::NPUStream::stream() returns; null is the default stream of the
// calling thread's device.
//
// A kernel's life:
//   1. The operator asks ascendsim_error_of: an earlier task's failure is raised here.
//   2. It asks ascendsim_kernel_begins(name), on the host, in the order of submission. A nonzero
//      answer means that an injected fault strikes this kernel: its task must compute nothing and
//      call ascendsim_report_error instead, when the task runs, as a real kernel fails.
//   3. It calls ascendsim_launch. The task runs later, perhaps on another thread; it must catch
//      every exception and hand the text to ascendsim_report_error. On a device that has stopped
//      it does not run at all, so what it owns is given up in `drop`.
//   4. The error surfaces at the next synchronisation or at the next operator, whichever is first,
//      and from then on at each: see faults.h.
//
// The other way round, start.py calls one function of libascendsim_kernels.so after torch_npu was
// imported:
//   extern "C" int ascendsim_kernels_install(int strict, char* error, uint64_t error_size);
// It returns how many operators it overrode, or -1 and a text in `error`.
#pragma once

#include "control.h"

// Bytes that a kernel touches. A strided tensor counts as all from its first byte to its last.
struct AscendsimAccess {
  const void* begin;
  uint64_t bytes;
  int32_t writes;
};

struct AscendsimKernel {
  const char* name;  // must live as long as the process: an operator's name, or a literal
  void (*run)(void* argument);  // null: the task takes its time and does nothing
  void* argument;
  void (*drop)(void* argument);  // called once, behind `run` or instead of it
  uint64_t flops;                   // 0 when unknown; for a schedule with a model of time
  uint64_t bytes;                   // read and written; 0 when unknown
  uint64_t flop_bytes;              // of a number that is multiplied
  const AscendsimAccess* accesses;  // copied; may be null where settings ask for no trace
  uint64_t access_count;
};

using AscendsimLaunch = int (*)(void* stream, const AscendsimKernel* kernel);
using AscendsimSettle = void (*)(void* stream);
using AscendsimKernelBegins = int (*)(const char* name);
using AscendsimReportError = void (*)(void* stream, const char* text);
using AscendsimErrorOf = int (*)(void* stream, char* text, uint64_t size);

// Enqueues a kernel on a stream. Returns 0, as aclrtLaunchHostFunc, which does the same unnamed.
ASCENDSIM_API int ascendsim_launch(void* stream, const AscendsimKernel* kernel);

// Runs what was submitted to the stream so far, with what it depends on, and waits for it. Unlike
// aclrtSynchronizeStream it is not counted and raises nothing: for work that the simulator, and not
// the simulated operator, must do at once.
ASCENDSIM_API void ascendsim_settle(void* stream);

// Counts a kernel. Returns nonzero when an injected fault strikes it.
ASCENDSIM_API int ascendsim_kernel_begins(const char* name);

// Counts an allocation that a caching allocator is asked for (`fault`: one of the two kinds of
// allocation). Returns nonzero when an injected fault strikes it.
ASCENDSIM_API int ascendsim_allocation_begins(int32_t fault);

// What a synchronisation with the stream's device would return now, without a wait; and its text.
ASCENDSIM_API int ascendsim_error_of(void* stream, char* text, uint64_t size);

// Reports that a kernel of `stream` failed. Copies the text. Any thread may call it.
ASCENDSIM_API void ascendsim_report_error(void* stream, const char* text);
