#include "group.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <sstream>
#include <utility>

#include "../runtime/common.h"

namespace ascendsim::hccl {
namespace {

constexpr uint64_t kPage = 4096;
constexpr size_t kText = 128;
// Messages of a channel that may wait for their readers.
constexpr uint64_t kSlots = 64;
// How long a rank sleeps before it looks whether the others live.
constexpr std::chrono::milliseconds kPatience{20};
// Where it waits for something in another group too.
constexpr std::chrono::milliseconds kMoment{1};

uint64_t RoundUp(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

[[noreturn]] void FailOf(const char* function) {
  throw Failure(kSystemCall, std::string(function) + ": " + std::strerror(errno));
}

void Write(int file, const Piece& piece, uint64_t offset) {
  const auto* from = static_cast<const char*>(piece.data);
  for (uint64_t done = 0; done < piece.bytes;) {
    const ssize_t count = pwrite(file, from + done, piece.bytes - done, offset + done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) FailOf("writing a message to memory");
    done += count;
  }
}

void RaiseTo(std::atomic<uint64_t>& counter, uint64_t value) {
  uint64_t seen = counter;
  while (seen < value && !counter.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace

struct Group::Slot {
  std::atomic<uint64_t> posted;   // one more than the message's number; 0: there was none yet
  std::atomic<uint32_t> readers;  // who have not read it
  uint64_t offset, bytes;
  Timing timing;
  std::array<char, kText> call;
};

struct Group::Channel {
  std::atomic<uint64_t> asked, insisted;  // all messages below this number
  std::array<Slot, kSlots> slots;
};

struct Group::Member {
  std::atomic<uint32_t> claimed, joined, opened, left;
  std::atomic<uint64_t> promise;
  Process process;
  int arena;  // its descriptor in that process
};

struct Group::Board {
  std::atomic<uint32_t> size;
  std::atomic<uint32_t> changes;  // a futex
};

std::string Call::Text() const {
  std::string text = name;
  if (count > 0) text += " of " + std::to_string(count) + " " + NameOf(type);
  constexpr std::array kNames = {"sum", "product", "maximum", "minimum"};
  if (reduction != kNone) text += std::string(" (") + kNames[reduction] + ")";
  if (root >= 0) text += " with root " + std::to_string(root);
  return text;
}

View::View(int file, uint64_t offset, uint64_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  void* address = mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file, static_cast<off_t>(offset));
  if (address == MAP_FAILED) FailOf("mapping a message");
  data_ = static_cast<char*>(address);
}

View::View(View&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

View::~View() {
  if (data_) munmap(data_, bytes_);
}

Group::Group(const Process& owner, int file, uint32_t size, uint32_t rank)
    : size_(size), rank_(rank) {
  const int board = OpenOf(owner, file);
  board_ = Map(board);
  close(board);
  try {
    Join();
  } catch (const Failure&) {
    Leave();
    throw;
  }
}

Group::~Group() { Leave(); }

void Group::Leave() {
  if (claimed_) MemberOf(rank_).left = 1;
  Changed();
  for (const int arena : arenas_) close(arena);
  munmap(board_, bytes_);
}

// Every rank gives the file the same length, the first does it.
Group::Board* Group::Map(int file) {
  const uint64_t channels = size_ + uint64_t{size_} * size_;
  bytes_ = RoundUp(sizeof(Board) + size_ * sizeof(Member) + channels * sizeof(Channel));
  struct stat status = {};
  if (fstat(file, &status) != 0) FailOf("fstat");
  // It never shrinks: a rank that is wrong about the size must not take memory from the others.
  const bool grows = static_cast<uint64_t>(status.st_size) < bytes_;
  if (grows && ftruncate(file, static_cast<off_t>(bytes_)) != 0) FailOf("ftruncate");
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (address == MAP_FAILED) FailOf("mapping a group's memory");
  return static_cast<Board*>(address);
}

void Group::Join() {
  uint32_t size = 0;
  if (!board_->size.compare_exchange_strong(size, size_) && size != size_) {
    throw Failure(kBadArgument, "rank " + std::to_string(rank_) + " joins a group of " +
                                    std::to_string(size_) + ", and another one of " +
                                    std::to_string(size));
  }
  Member& self = MemberOf(rank_);
  if (self.claimed.exchange(1)) {
    throw Failure(kBadArgument, "two processes join a group as rank " + std::to_string(rank_));
  }
  claimed_ = true;
  arenas_.assign(size_, -1);
  arenas_[rank_] = MakeMemory("ascendsim-arena");
  self.process = Process::Self();
  self.arena = arenas_[rank_];
  self.joined = 1;
  Changed();
  const auto missing = [this](std::atomic<uint32_t> Member::* step) {
    std::vector<uint32_t> ranks;
    for (uint32_t i = 0; i < size_; ++i) {
      if (!(MemberOf(i).*step)) ranks.push_back(i);
    }
    return ranks;
  };
  Await([&] { return missing(&Member::joined); }, "join");
  for (uint32_t i = 0; i < size_; ++i) {
    if (i != rank_) arenas_[i] = OpenOf(MemberOf(i).process, MemberOf(i).arena);
  }
  self.opened = 1;
  Changed();
  Await([&] { return missing(&Member::opened); }, "join");
}

Group::Member& Group::MemberOf(uint32_t rank) const {
  return reinterpret_cast<Member*>(board_ + 1)[rank];
}

Group::Channel& Group::ChannelOf(const Message& message) const {
  auto* channels = reinterpret_cast<Channel*>(&MemberOf(size_));
  const bool all = message.to == kAll;
  return channels[all ? message.from : size_ + uint64_t{message.from} * size_ + message.to];
}

Group::Slot& Group::SlotOf(const Message& message) const {
  return ChannelOf(message).slots[message.number % kSlots];
}

void Group::AwaitRoom(const Message& message) {
  if (message.number < kSlots) return;
  const Message before = {message.from, message.to, message.number - kSlots};
  if (Read(before)) return;
  Insist(before);
  const auto missing = [&] {
    std::vector<uint32_t> ranks;
    for (uint32_t i = 0; i < size_ && !Read(before); ++i) {
      if (message.to == i || (message.to == kAll && i != rank_)) ranks.push_back(i);
    }
    return ranks;
  };
  Await(missing, "receive what was sent before");
}

void Group::Post(const Message& message, const Call& call, const std::vector<Piece>& pieces,
                 const Timing& timing) {
  AwaitRoom(message);
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  const uint64_t offset = end_.fetch_add(RoundUp(bytes));
  uint64_t at = offset;
  for (const Piece& piece : pieces) {
    Write(arenas_[rank_], piece, at);
    at += piece.bytes;
  }
  Slot& slot = SlotOf(message);
  slot.offset = offset;
  slot.bytes = bytes;
  slot.timing = timing;
  slot.call[call.Text().copy(slot.call.data(), kText - 1)] = '\0';
  slot.readers = message.to == kAll ? size_ : 1;
  slot.posted = message.number + 1;
  Changed();
}

bool Group::Posted(const Message& message) const {
  return SlotOf(message).posted > message.number;
}

bool Group::Read(const Message& message) const {
  const Slot& slot = SlotOf(message);
  const uint64_t posted = slot.posted;
  return posted > message.number + 1 || (posted == message.number + 1 && slot.readers == 0);
}

View Group::Open(const Message& message) const {
  const Slot& slot = SlotOf(message);
  return {arenas_[message.from], slot.offset, slot.bytes};
}

std::string Group::CallOf(const Message& message) const { return SlotOf(message).call.data(); }

Timing Group::TimingOf(const Message& message) const { return SlotOf(message).timing; }

void Group::Release(const Message& message) {
  Slot& slot = SlotOf(message);
  const uint64_t offset = slot.offset, bytes = RoundUp(slot.bytes);
  if (--slot.readers > 0) return;
  // The sender may use the slot from here on.
  if (bytes > 0) {
    fallocate(arenas_[message.from], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(offset), static_cast<off_t>(bytes));
  }
  Changed();
}

void Group::Ask(const Message& message) {
  RaiseTo(ChannelOf(message).asked, message.number + 1);
}

bool Group::Asked(const Message& message) const {
  return ChannelOf(message).asked > message.number;
}

void Group::Insist(const Message& message) {
  RaiseTo(ChannelOf(message).insisted, message.number + 1);
}

bool Group::Insisted(const Message& message) const {
  return ChannelOf(message).insisted > message.number;
}

bool Group::Gone(uint32_t rank) const {
  const Member& member = MemberOf(rank);
  return member.joined && (member.left || !member.process.Lives());
}

std::string Group::Describe(uint32_t rank) const {
  const Member& member = MemberOf(rank);
  std::string text = "rank " + std::to_string(rank) + " of " + std::to_string(size_);
  if (member.joined) text += " (process " + std::to_string(member.process.number) + ")";
  return text;
}

std::string Group::Overdue(const std::vector<uint32_t>& ranks, const char* act) const {
  std::string text;
  for (const uint32_t rank : ranks) text += (text.empty() ? "" : ", ") + Describe(rank);
  std::ostringstream seconds;
  seconds << Settings().collective_timeout_s;
  return text + " did not " + act + " within " + seconds.str() +
         " s\n  why      busy elsewhere, waiting for something else, or never there"
         "\n  instead  let all ranks do the same in the same order; collective_timeout_s is how "
         "long a rank waits";
}

// Sleeps until something changes, and looks now and then whether the others live.
void Group::Await(const Missing& missing, const char* act) {
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const auto deadline = Deadline();
  for (auto look = now() + kPatience; true;) {
    const uint32_t seen = board_->changes;
    if (missing().empty()) return;
    Sleep(seen, kPatience);
    if (now() < look) continue;
    look = now() + kPatience;
    Check(missing, act, deadline);
  }
}

Group::Moment Group::Deadline() {
  const std::chrono::duration<double> seconds(Settings().collective_timeout_s);
  return std::chrono::steady_clock::now() + std::chrono::duration_cast<Moment::duration>(seconds);
}

// What those did last that have ended may have been their part: so it looks twice.
void Group::Check(const Missing& missing, const char* act, Moment deadline) const {
  const auto before = missing();
  std::vector<uint32_t> gone;
  std::copy_if(before.begin(), before.end(), std::back_inserter(gone),
               [this](uint32_t rank) { return Gone(rank); });
  const auto still = missing();
  if (still.empty()) return;
  const auto lost = std::find_first_of(gone.begin(), gone.end(), still.begin(), still.end());
  if (lost != gone.end()) {
    const bool left = MemberOf(*lost).left;
    throw Failure(kRemote, Describe(*lost) + (left ? " has left the group" : " has ended"));
  }
  if (std::chrono::steady_clock::now() > deadline) throw Failure(kTimeout, Overdue(still, act));
}

void Group::Promise(uint64_t until_ns) {
  if (MemberOf(rank_).promise >= until_ns) return;
  RaiseTo(MemberOf(rank_).promise, until_ns);
  Changed();
}

uint64_t Group::PromiseOf(uint32_t rank) const { return MemberOf(rank).promise; }

uint32_t Group::Changes() const { return board_->changes; }

void Group::Sleep(uint32_t seen) const { Sleep(seen, kMoment); }

void Group::Sleep(uint32_t seen, std::chrono::nanoseconds longest) const {
  const timespec patience = {0, longest.count()};
  syscall(SYS_futex, &board_->changes, FUTEX_WAIT, seen, &patience, nullptr, 0);
}

void Group::Changed() {
  ++board_->changes;
  syscall(SYS_futex, &board_->changes, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace ascendsim::hccl
