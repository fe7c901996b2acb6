// The modelled clock of the host, and what happened when: what the reports are made of.
#pragma once

#include <mutex>
#include <vector>

#include "control.h"
#include "scheduler.h"

namespace ascendsim {

class Spans {
 public:
  static Spans& Get();

  uint64_t Host();
  void MoveHost(uint64_t nanoseconds);

  void Keep(bool keep);
  void AddTask(const Stream& stream, const Task& task);
  void AddWait(const Point& goal, uint64_t begin_ns, uint64_t end_ns);
  uint64_t Copy(AscendsimSpan* to, uint64_t room);

 private:
  std::mutex mutex_;
  uint64_t host_ns_ = 0;
  bool keep_ = false;
  std::vector<AscendsimSpan> spans_;
};

}  // namespace ascendsim
