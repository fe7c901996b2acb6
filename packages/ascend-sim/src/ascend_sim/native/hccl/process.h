// What one rank asks of the system about another: whether it lives, and for a file of its.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace ascendsim::hccl {

// Names a process for good: a number alone is given again after its end.
struct Process {
  pid_t number = 0;
  uint64_t started = 0;  // in the system's ticks since it booted

  static Process Self();
  // False also for one that has ended and that its parent has not asked after.
  bool Lives() const;
};

// An anonymous file in memory: it has no name, so that nothing of it outlives its processes.
int MakeMemory(const char* label);

// Opens a file that another process has open, by its descriptor there.
int OpenOf(const Process& process, int descriptor);

}  // namespace ascendsim::hccl
