// What Python reaches through ctypes: settings, counters, faults. Plain C, so that no header of
// torch is needed. The functions are exported by libascendcl.so. ascend_sim/_runtime.py mirrors the
// structures field by field and compares ASCENDSIM_ABI before it calls anything else.
#pragma once

#include <stdint.h>

#define ASCENDSIM_API extern "C" __attribute__((visibility("default")))

#define ASCENDSIM_ABI 4u

// The order in which submitted tasks run.
enum AscendsimSchedule : int32_t {
  ASCENDSIM_EAGER = 0,   // at submission
  ASCENDSIM_THREAD = 1,  // by one worker thread per stream: copies and kernels overlap
  ASCENDSIM_LAZY = 2,    // only when a synchronisation asks, with exactly what that depends on
  ASCENDSIM_EARLY = 3,   // side streams as soon as they can, main streams as in `lazy`
  ASCENDSIM_RANDOM = 4,  // whichever can, by a seeded choice
  ASCENDSIM_TIMED = 5,   // in the order of a modelled clock
};

// What a task is, for the model of time. (WAITING: no task, but the host in a synchronisation.)
enum AscendsimKind : int32_t {
  ASCENDSIM_KIND_KERNEL = 0,
  ASCENDSIM_KIND_H2D = 1,
  ASCENDSIM_KIND_D2H = 2,
  ASCENDSIM_KIND_D2D = 3,
  ASCENDSIM_KIND_HOST = 4,
  ASCENDSIM_KIND_RECORD = 5,
  ASCENDSIM_KIND_WAIT = 6,
  ASCENDSIM_KIND_WAITING = 7,
  ASCENDSIM_KIND_COLLECTIVE = 8,  // between ranks; sends and receives too
};

struct AscendsimSettings {
  uint64_t hbm_bytes;    // capacity of each device
  uint64_t query_stall;  // this many queries of an event answer "not yet" and let nothing run
  uint64_t seed;         // random
  double h2d_gbps;       // 1e9 bytes per second from host to device; 0: as fast as memcpy
  double d2h_gbps;
  double d2d_gbps;
  double copy_latency_us;       // added to each copy that crosses between host and device
  double collective_timeout_s;  // how long a rank waits for others
  double launch_us;             // timed, here and below: what a submission costs the host
  double kernel_us;             // what each kernel takes beside its work
  double memory_gbps;           // what a kernel reads and writes
  double matmul_tflops_16;      // multiplying numbers of at most 16 bits
  double matmul_tflops_32;      // multiplying wider ones
  double link_latency_us;       // a step between two ranks
  double link_gbps;             // from a rank to its neighbour
  uint32_t devices;
  int32_t schedule;        // AscendsimSchedule
  int32_t poison;          // fill fresh and freed memory with a pattern that reads as NaN
  int32_t blocking_sends;  // a send ends when it is received
  int32_t trace;           // look for races among the accesses that tasks make
};

// Totals since the process began, all devices together.
struct AscendsimCounters {
  uint64_t h2d_bytes, d2h_bytes, d2d_bytes;
  uint64_t h2d_copies, d2h_copies, d2d_copies;
  uint64_t synchronisations;  // calls in which the host waits for a stream, an event or a device
  uint64_t event_queries;
  uint64_t kernels;
  uint64_t device_allocations, pinned_allocations;  // asked of torch_npu's caching allocators
  uint64_t device_segments, pinned_segments;        // asked of the runtime by those allocators
  uint64_t tasks_submitted, tasks_pending;
  uint64_t device_bytes, pinned_bytes;  // held of the runtime now
  uint64_t faults_injected;
};

// What can be made to fail.
enum AscendsimFault : int32_t {
  ASCENDSIM_FAULT_DEVICE_ALLOCATION = 0,
  ASCENDSIM_FAULT_PINNED_ALLOCATION = 1,
  ASCENDSIM_FAULT_COPY = 2,
  ASCENDSIM_FAULT_KERNEL = 3,
  ASCENDSIM_FAULT_LATE_COPY = 4,  // as it runs
  ASCENDSIM_FAULT_DEVICE_SEGMENT = 5,  // asked of the runtime; and all that follow
};

// A task that has ended in schedule `timed`, or (kind WAITING) a wait of the host for one. Times
// are of the modelled clock.
struct AscendsimSpan {
  const char* name;
  uint64_t ticket;  // its place on its stream, from 1; WAITING: of the task that was waited for
  uint64_t after_ticket;  // kind WAIT: the task that the stream waited for; 0: none
  uint64_t bytes, flops;
  uint64_t submitted_ns, begin_ns, end_ns;
  int32_t kind;  // AscendsimKind
  int32_t device, stream, after_stream;
};

// Two accesses to the same bytes, at least one of them a write, that nothing orders.
struct AscendsimRace {
  const char* first;  // the task that was submitted first
  const char* second;
  uint64_t first_ticket, second_ticket;
  uint64_t address, bytes;
  int32_t first_stream, second_stream;
  int32_t first_writes, second_writes;
};

ASCENDSIM_API uint32_t ascendsim_abi();

// Returns 0, or -1 when a stream or an allocation exists already: settings are fixed by then.
ASCENDSIM_API int ascendsim_configure(const AscendsimSettings* settings);
ASCENDSIM_API void ascendsim_settings(AscendsimSettings* settings);

ASCENDSIM_API void ascendsim_counters(AscendsimCounters* counters);
ASCENDSIM_API uint64_t ascendsim_device_bytes(uint32_t device);

// Arms `fault`: its `nth` occurrence from now on fails; of a segment, all that follow as well, since
// memory that has run out is not there for the second attempt either. 0 disarms.
// Returns how many occurrences were still to come (0: disarmed, or it has struck).
ASCENDSIM_API uint64_t ascendsim_inject(int32_t fault, uint64_t nth);

// Runs every task that can run, without counting a synchronisation or raising anything.
ASCENDSIM_API void ascendsim_drain();

// Takes the asynchronous errors of all devices; those that have stopped go on. If the program was
// not told of one, copies at most `size` bytes of the oldest one's text, terminated, and returns 1.
// Returns 0 otherwise.
ASCENDSIM_API int ascendsim_take_error(char* text, uint64_t size);

// Lets schedule `random` choose as at its beginning.
ASCENDSIM_API void ascendsim_reseed();

// The host's modelled clock; 0 in other schedules than `timed`.
ASCENDSIM_API uint64_t ascendsim_clock();

// Begins (1) to keep the spans, with none, or ends (0) to.
ASCENDSIM_API void ascendsim_keep_spans(int32_t keep);

// Copies the spans that were kept, at most `room`, and returns how many there are.
ASCENDSIM_API uint64_t ascendsim_spans(AscendsimSpan* spans, uint64_t room);

// Takes the races that were found since the last call, at most `room`; the others are dropped.
ASCENDSIM_API uint64_t ascendsim_take_races(AscendsimRace* races, uint64_t room);
