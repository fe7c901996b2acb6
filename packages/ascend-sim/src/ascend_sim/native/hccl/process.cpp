#include "process.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "types.h"

namespace ascendsim::hccl {
namespace {

// When a process that lives was started, else 0. See proc_pid_stat(5): the fields follow the
// program's name, which stands in parentheses and may hold anything.
uint64_t StartOf(pid_t number) {
  std::ifstream file("/proc/" + std::to_string(number) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return 0;
  std::istringstream fields(line.substr(line.rfind(')') + 1));
  std::string state, skipped;
  fields >> state;
  if (state == "Z" || state == "X") return 0;
  constexpr int kBetween = 18;  // the third field is the state, the 22nd the start
  for (int i = 0; i < kBetween; ++i) fields >> skipped;
  uint64_t started = 0;
  fields >> started;
  return started;
}

}  // namespace

Process Process::Self() { return {getpid(), StartOf(getpid())}; }

bool Process::Lives() const { return StartOf(number) == started; }

int MakeMemory(const char* label) {
  const int file = memfd_create(label, MFD_CLOEXEC);
  if (file < 0) throw Failure(kSystemCall, std::string("memfd_create: ") + std::strerror(errno));
  return file;
}

int OpenOf(const Process& process, int descriptor) {
  const auto path =
      "/proc/" + std::to_string(process.number) + "/fd/" + std::to_string(descriptor);
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file >= 0) return file;
  const int error = errno;
  if (!process.Lives()) {
    throw Failure(kRemote, "process " + std::to_string(process.number) +
                               " has ended before the group was complete");
  }
  throw Failure(kSystemCall,
                path + ": " + std::strerror(error) +
                    "\n  why      ranks exchange data through memory that one process opens of "
                    "another: they must run on one machine, as one user");
}

}  // namespace ascendsim::hccl
