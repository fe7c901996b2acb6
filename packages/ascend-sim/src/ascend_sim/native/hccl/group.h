// The memory that the ranks of a group share.
//
//   The board   one anonymous file, made by the rank that called HcclGetRootInfo and mapped by all:
//               who is there, and the notices of messages.
//   The arenas  one anonymous file per rank, where it writes what it sends. A message has a place
//               of its own, behind all earlier ones; when its last reader is done, its pages are
//               given back. The file is sparse, so its length says nothing.
//
// Each rank opens all arenas before the group is complete, so that what a rank has posted can be
// read after its end. No file has a name: the system frees them with the last process, however that
// ends, and there is nothing to clean up.
//
// Messages are numbered, per channel, in the order of submission on the host. A rank has one
// channel that all ranks read (for collectives), and one to each rank (for sends).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "process.h"
#include "types.h"

namespace ascendsim::hccl {

// What a rank calls. In a collective all ranks call the same, or it is an error.
struct Call {
  const char* name = "";  // a literal; it is compared by its text, and not shared
  DataType type = kInt8;
  uint64_t count = 0;
  Reduction reduction = kNone;
  int32_t root = -1;

  std::string Text() const;
};

// Part of an arena, mapped for as long as this lives.
class View {
 public:
  View() = default;
  View(int file, uint64_t offset, uint64_t bytes);
  View(View&& other) noexcept;
  View& operator=(View&& other) = delete;
  ~View();

  const char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  uint64_t bytes_ = 0;
};

// Bytes to send, in pieces that lie one behind another in the message.
struct Piece {
  const void* data;
  uint64_t bytes;
};

// On the modelled clock of the rank that posts: when it was ready, and how long its part takes.
struct Timing {
  uint64_t ready_ns = 0, takes_ns = 0;
};

class Group {
 public:
  // Joins the group of `size` ranks whose board is `file` of `owner`, and waits for the others.
  // Throws Failure.
  Group(const Process& owner, int file, uint32_t size, uint32_t rank);
  // Leaves it: who still waits for this rank is told.
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  uint32_t size() const { return size_; }
  uint32_t rank() const { return rank_; }

  // `to` is a rank, or kAll.
  static constexpr uint32_t kAll = UINT32_MAX;
  struct Message {
    uint32_t from, to;
    uint64_t number;
  };

  // Writes a message and lets its readers know. Waits while the channel is full.
  void Post(const Message& message, const Call& call, const std::vector<Piece>& pieces,
            const Timing& timing);
  bool Posted(const Message& message) const;
  bool Read(const Message& message) const;  // by all of its readers
  // Of a message that was posted. Each reader calls Release once, after its view was dropped.
  View Open(const Message& message) const;
  std::string CallOf(const Message& message) const;
  Timing TimingOf(const Message& message) const;
  void Release(const Message& message);

  // A receiver asks for a message, or a sender insists that one be read: what lies pending in the
  // other rank's queue must run.
  void Ask(const Message& message);
  bool Asked(const Message& message) const;
  void Insist(const Message& message);
  bool Insisted(const Message& message) const;

  // Waits until `missing` names no rank. Throws Failure when one of those has ended or left, and
  // after the time-out of the settings: they "did not `act` within" it.
  using Missing = std::function<std::vector<uint32_t>()>;
  void Await(const Missing& missing, const char* act);
  // Throws it.
  using Moment = std::chrono::steady_clock::time_point;
  static Moment Deadline();
  void Check(const Missing& missing, const char* act, Moment deadline) const;

  // On the modelled clock: until then, this rank posts nothing.
  void Promise(uint64_t until_ns);
  uint64_t PromiseOf(uint32_t rank) const;
  // What has changed is counted. Sleeps for a moment, unless more has changed than `seen`.
  uint32_t Changes() const;
  void Sleep(uint32_t seen) const;

  std::string Describe(uint32_t rank) const;

 private:
  struct Slot;
  struct Channel;
  struct Member;
  struct Board;

  Board* Map(int file);
  void Join();
  void Leave();
  Member& MemberOf(uint32_t rank) const;
  Channel& ChannelOf(const Message& message) const;
  Slot& SlotOf(const Message& message) const;
  void AwaitRoom(const Message& message);
  bool Gone(uint32_t rank) const;
  std::string Overdue(const std::vector<uint32_t>& ranks, const char* act) const;
  void Changed();
  void Sleep(uint32_t seen, std::chrono::nanoseconds longest) const;

  uint32_t size_, rank_;
  size_t bytes_ = 0;
  Board* board_ = nullptr;
  bool claimed_ = false;  // the rank's place
  std::vector<int> arenas_;
  std::atomic<uint64_t> end_{0};  // of this rank's arena
};

}  // namespace ascendsim::hccl
