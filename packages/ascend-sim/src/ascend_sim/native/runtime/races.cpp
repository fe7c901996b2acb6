#include "races.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "common.h"
#include "scheduler.h"

namespace ascendsim {

Access Access::Of(const void* begin, uint64_t bytes, bool writes) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  return {at, at + bytes, writes};
}

void Races::Learn(Knowledge& learner, const Knowledge& known) {
  if (!Settings().trace) return;
  if (learner.size() < known.size()) learner.resize(known.size());
  for (size_t i = 0; i < known.size(); ++i) learner[i] = std::max(learner[i], known[i]);
}

void Races::Submitted(const Doer& doer, Knowledge& known, const std::vector<Access>& accesses) {
  if (!Settings().trace) return;
  Learn(known, host_);
  // First all reads, then all writes: a task does not race with itself.
  for (const bool writes : {false, true}) {
    for (const Access& access : accesses) {
      if (access.writes == writes && access.begin < access.end) Touch(doer, known, access);
    }
  }
  const auto id = static_cast<size_t>(doer.stream);
  if (known.size() <= id) known.resize(id + 1);
  known[id] = doer.ticket;
}

std::vector<AscendsimRace> Races::Take() {
  seen_.clear();
  return std::exchange(found_, {});
}

// Makes `at` the beginning of a cell, if it lies within one.
void Races::Split(uintptr_t at) {
  auto after = cells_.upper_bound(at);
  if (after == cells_.begin()) return;
  auto& [begin, cell] = *std::prev(after);
  if (begin == at || cell.end <= at) return;
  Cell upper = cell;
  cell.end = at;
  cells_.emplace(at, std::move(upper));
}

// Makes cells of the bytes between that nobody has touched.
void Races::Fill(uintptr_t begin, uintptr_t end) {
  auto next = cells_.lower_bound(begin);
  while (begin < end) {
    if (next != cells_.end() && next->first == begin) {
      begin = (next++)->second.end;
      continue;
    }
    const uintptr_t gap_end = next == cells_.end() ? end : std::min(end, next->first);
    cells_.emplace_hint(next, begin, Cell{gap_end, {}, {}});
    begin = gap_end;
  }
}

void Races::Touch(const Doer& doer, const Knowledge& known, const Access& access) {
  Split(access.begin);
  Split(access.end);
  Fill(access.begin, access.end);
  const auto first = cells_.find(access.begin);
  const auto last = cells_.lower_bound(access.end);
  for (auto it = first; it != last; ++it) {
    const Doer& writer = it->second.writer;
    std::vector<Doer>& readers = it->second.readers;
    Compare(writer, true, doer, access.writes, known, it);
    if (!access.writes) {
      std::erase_if(readers, [&](const Doer& reader) { return reader.stream == doer.stream; });
      readers.push_back(doer);
      continue;
    }
    for (const Doer& reader : readers) Compare(reader, false, doer, true, known, it);
  }
  if (!access.writes) return;
  cells_.erase(first, last);
  cells_.emplace(access.begin, Cell{access.end, doer, {}});
}

void Races::Compare(const Doer& first, bool first_writes, const Doer& second, bool second_writes,
                    const Knowledge& known, Cells::const_iterator where) {
  const auto id = static_cast<size_t>(first.stream);
  if (first.ticket == 0 || first.stream == second.stream) return;
  if (id < known.size() && first.ticket <= known[id]) return;
  if (!seen_.emplace(first.task, first.stream, second.task, second.stream).second) return;
  found_.push_back({.first = first.task,
                    .second = second.task,
                    .first_ticket = first.ticket,
                    .second_ticket = second.ticket,
                    .address = where->first,
                    .bytes = where->second.end - where->first,
                    .first_stream = first.stream,
                    .second_stream = second.stream,
                    .first_writes = first_writes,
                    .second_writes = second_writes});
}

}  // namespace ascendsim

using namespace ascendsim;

uint64_t ascendsim_take_races(AscendsimRace* races, uint64_t room) {
  const auto found = Scheduler::Get().TakeRaces();
  std::copy_n(found.begin(), std::min<uint64_t>(room, found.size()), races);
  return found.size();
}
