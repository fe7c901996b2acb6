#include "spans.h"

#include <algorithm>

namespace ascendsim {

Spans& Spans::Get() {
  static auto* spans = new Spans;
  return *spans;
}

uint64_t Spans::Host() {
  const std::lock_guard lock(mutex_);
  return host_ns_;
}

void Spans::MoveHost(uint64_t nanoseconds) {
  const std::lock_guard lock(mutex_);
  host_ns_ += nanoseconds;
}

void Spans::Keep(bool keep) {
  const std::lock_guard lock(mutex_);
  if (keep) spans_.clear();
  keep_ = keep;
}

void Spans::AddTask(const Stream& stream, const Task& task) {
  const std::lock_guard lock(mutex_);
  if (!keep_) return;
  const Stream* after = task.after.stream.get();
  spans_.push_back({.name = task.name,
                    .ticket = stream.finished + 1,
                    .after_ticket = after ? task.after.ticket : 0,
                    .bytes = task.bytes,
                    .flops = task.flops,
                    .submitted_ns = task.submitted_ns,
                    .begin_ns = task.begin_ns,
                    .end_ns = task.end_ns,
                    .kind = task.kind,
                    .device = stream.device,
                    .stream = stream.id,
                    .after_stream = after ? after->id : -1});
}

void Spans::AddWait(const Point& goal, uint64_t begin_ns, uint64_t end_ns) {
  const std::lock_guard lock(mutex_);
  if (!keep_) return;
  spans_.push_back({.name = "wait",
                    .ticket = goal.ticket,
                    .after_ticket = 0,
                    .bytes = 0,
                    .flops = 0,
                    .submitted_ns = begin_ns,
                    .begin_ns = begin_ns,
                    .end_ns = end_ns,
                    .kind = ASCENDSIM_KIND_WAITING,
                    .device = goal.stream->device,
                    .stream = goal.stream->id,
                    .after_stream = -1});
}

uint64_t Spans::Copy(AscendsimSpan* to, uint64_t room) {
  const std::lock_guard lock(mutex_);
  std::copy_n(spans_.begin(), std::min<uint64_t>(room, spans_.size()), to);
  return spans_.size();
}

}  // namespace ascendsim

using namespace ascendsim;

uint64_t ascendsim_clock() { return Spans::Get().Host(); }

void ascendsim_keep_spans(int32_t keep) { Spans::Get().Keep(keep != 0); }

uint64_t ascendsim_spans(AscendsimSpan* spans, uint64_t room) {
  return Spans::Get().Copy(spans, room);
}
