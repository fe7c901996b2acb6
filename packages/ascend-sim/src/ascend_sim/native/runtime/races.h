// Looks for races: two tasks that touch the same bytes, one of them writing, and nothing that
// orders them. It asks what had to happen before, not what did: a race is found whether or not a
// value went wrong.
//
// Each stream knows, for every stream, up to which ticket tasks must have finished before its next
// task begins. It learns from the events that it waits for, and from the host, which learns from
// what it synchronises with and from each query that is answered "reached". (All host threads learn
// together.) What the host itself reads and writes is not seen.
//
// The caching allocators query, too. Where tasks run early, their answers order much that nothing
// else does; with queries that answer "not yet", as in `lazy`, only what the program asks for is
// left.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "control.h"

namespace ascendsim {

struct Access {
  uintptr_t begin, end;
  bool writes;

  static Access Of(const void* begin, uint64_t bytes, bool writes);
};

using Knowledge = std::vector<uint64_t>;  // by stream: the last ticket that must have finished

class Races {
 public:
  struct Doer {
    const char* task = "";
    int stream = 0;
    uint64_t ticket = 0;
  };

  void Learn(Knowledge& learner, const Knowledge& known);
  void HostLearns(const Knowledge& known) { Learn(host_, known); }

  // A stream is given a task. Compares its accesses with those of earlier tasks.
  void Submitted(const Doer& doer, Knowledge& known, const std::vector<Access>& accesses);

  std::vector<AscendsimRace> Take();

 private:
  struct Cell {  // bytes that were touched alike
    uintptr_t end;
    Doer writer;                // ticket 0: none
    std::vector<Doer> readers;  // since then, the last of each stream
  };
  using Cells = std::map<uintptr_t, Cell>;  // by first byte

  void Split(uintptr_t at);
  void Fill(uintptr_t begin, uintptr_t end);
  void Touch(const Doer& doer, const Knowledge& known, const Access& access);
  void Compare(const Doer& first, bool first_writes, const Doer& second, bool second_writes,
               const Knowledge& known, Cells::const_iterator where);

  Knowledge host_;
  Cells cells_;
  std::vector<AscendsimRace> found_;
  std::set<std::tuple<const char*, int, const char*, int>> seen_;
};

}  // namespace ascendsim
