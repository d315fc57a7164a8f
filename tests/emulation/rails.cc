// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/rails.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include "base/error.h"
#include "tests/emulation/streams.h"

namespace epx::emulation {
namespace {

constexpr uint64_t kMailboxBytes = uint64_t{32} << 10;

// Ranks that make different calls may expect other sizes than are sent. As with NCCL, such a transfer does not end well; the
// group finds out why, and ends it. A size that is wrong for another reason is an error of the library, after this time.
constexpr std::chrono::seconds kTimeToEnd{10};

// A ring of bytes from one rank to another, in the window of the one that reads. Both counts only grow.
struct Mailbox {
  int32_t reader;               // the process of the one that reads; 0 before it has its rails
  alignas(64) uint64_t written; // by the sender
  alignas(64) uint64_t read;    // by the receiver
  alignas(64) std::byte bytes[kMailboxBytes];
};

// What a task exchanges with a rank. As with NCCL, a size of 0 takes no part. In the mailbox a word comes before the bytes:
// their number, and whether they are an all-gather's. NCCL has other connections for those, so that they never meet other
// transfers.
constexpr int64_t kIsGathered = int64_t{1} << 62;
struct Part {
  int peer;
  const std::byte* send;
  int64_t send_bytes;
  std::byte* recv;
  int64_t recv_bytes;
  int64_t flags = 0; // or kIsGathered
};

// Copies between the ring, from `position` on, and memory.
template <typename Copy>
void each_piece(uint64_t position, uint64_t count, const Copy& copy) {
  for (uint64_t done = 0; done < count;) {
    const uint64_t at = (position + done) % kMailboxBytes;
    const uint64_t piece = std::min(count - done, kMailboxBytes - at);
    copy(at, done, piece);
    done += piece;
  }
}

// Bytes that go out, or are to come, in the order of their mailbox.
struct ByteRange {
  std::byte* memory;
  uint64_t bytes;
};

// EPX_TEST_BREAKS_RAILS, which a test may set between two calls: how the network of this rank fails.
enum class Break {
  none,
  at_once, // "at_once": transfers are refused
  later,   // "later": those that have been enqueued do not end, and the rails know it
  unseen   // "unseen": likewise, but nobody knows it
};
Break break_of_network() {
  const char* const found = std::getenv("EPX_TEST_BREAKS_RAILS");
  const std::string name = found != nullptr ? found : "";
  if (name == "at_once") return Break::at_once;
  if (name == "later") return Break::later;
  return name == "unseen" ? Break::unseen : Break::none;
}

bool has_died(int process) {
  std::ifstream file(fmt::format("/proc/{}/stat", process));
  std::string number, name;
  char state = 'X';
  return !(file >> number >> name >> state) || state == 'Z' || state == 'X';
}

class MailboxRails final : public Rails {
public:
  MailboxRails(std::shared_ptr<Window> window, int64_t offset, int ranks_per_node)
      : state_(std::make_shared<State>(std::move(window), offset)), ranks_per_node_(ranks_per_node) {
    cudaGetDevice(&device_);
    const PeerWindow view = state_->window->view();
    for (int source = 0; source < view.num_ranks; ++source)
      std::atomic_ref(state_->mailbox(view.rank, source).reader).store(::getpid());
  }
  MailboxRails(const MailboxRails&) = delete;
  MailboxRails& operator=(const MailboxRails&) = delete;
  ~MailboxRails() override { state_->has_ended = true; } // tasks of graphs may outlive it

  void all_gather(const void* mine, void* all, int64_t bytes, epx_stream stream) override {
    const PeerWindow window = state_->window->view();
    std::vector<Part> parts;
    for (int peer = 0; peer < window.num_ranks; ++peer)
      if (peer != window.rank)
        parts.push_back({peer, static_cast<const std::byte*>(mine), bytes, static_cast<std::byte*>(all) + peer * bytes,
                         bytes, kIsGathered});
    enqueue_parts(std::move(parts), stream, [=, rank = window.rank] {
      std::memmove(static_cast<std::byte*>(all) + rank * bytes, mine, static_cast<size_t>(bytes));
    });
  }

  void exchange(std::span<const RailTransfer> transfers, epx_stream stream) override {
    const int index = state_->window->view().rank % ranks_per_node_;
    std::vector<Part> parts;
    for (const RailTransfer& transfer : transfers)
      if (transfer.send_bytes > 0 || transfer.recv_bytes > 0)
        parts.push_back({transfer.node * ranks_per_node_ + index, static_cast<const std::byte*>(transfer.send),
                         transfer.send_bytes, static_cast<std::byte*>(transfer.recv), transfer.recv_bytes});
    if (!parts.empty()) enqueue_parts(std::move(parts), stream, [] {});
  }

  // As ncclCommAbort, frees pinned memory in a thread of its own.
  void abort() noexcept override {
    if (state_->has_ended.exchange(true)) return;
    try {
      std::thread([device = device_] {
        void* pinned = nullptr;
        cudaSetDevice(device);
        if (cudaHostAlloc(&pinned, 1, cudaHostAllocDefault) == cudaSuccess) cudaFreeHost(pinned);
      }).detach();
    } catch (const std::system_error&) { // a limit of threads, which some tests set
    }
  }
  bool has_ended() const noexcept override { return state_->has_ended; }
  bool is_broken() const noexcept override { return break_of_network() == Break::later; }

private:
  struct State {
    State(std::shared_ptr<Window> of_all, int64_t at) : window(std::move(of_all)), offset(at) {}
    std::shared_ptr<Window> window;
    int64_t offset;
    std::atomic<bool> has_ended{false};
    std::atomic<bool> is_busy{false};

    Mailbox& mailbox(int owner, int source) const { return window->view().at<Mailbox>(owner, offset)[source]; }
    int reader_of(int peer) const { return std::atomic_ref(mailbox(peer, window->view().rank).reader).load(); }
    void run(const std::vector<Part>& parts);
    bool ends_in_time() const;
    bool advance_send(int peer, ByteRange& range) const;
    bool advance_recv(int peer, ByteRange& range) const;
  };

  template <typename First>
  void enqueue_parts(std::vector<Part> parts, epx_stream stream, First first) {
    if (has_ended()) fail(EPX_ERROR_ABORTED, "the rails between the nodes of the group were aborted");
    const auto peer_is_dead = [&](const Part& part) {
      const int process = state_->reader_of(part.peer);
      return process != 0 && has_died(process);
    };
    const auto is_other_peer = [&](const Part& part) { return part.peer != parts.front().peer; };
    if (break_of_network() == Break::at_once ||
        std::ranges::any_of(parts, peer_is_dead)) // NCCL's connections break likewise
      throw BrokenRailError("ncclGroupEnd: remote process exited or there was a network error",
                            std::ranges::any_of(parts, is_other_peer) ? -1 : parts.front().peer);
    enqueue(static_cast<cudaStream_t>(stream), [state = state_, parts = std::move(parts), first] {
      if (state->has_ended) return;
      first();
      state->run(parts);
    });
  }

  std::shared_ptr<State> state_;
  int device_ = 0;
  int ranks_per_node_;
};

// Both return whether a byte has moved.
bool MailboxRails::State::advance_send(int peer, ByteRange& range) const {
  const int rank = window->view().rank;
  Mailbox& box = mailbox(peer, rank);
  const uint64_t written = box.written;
  const uint64_t room = kMailboxBytes - (written - std::atomic_ref(box.read).load(std::memory_order_acquire));
  const uint64_t count = std::min(room, range.bytes);
  if (count == 0) return false;
  each_piece(written, count,
             [&](uint64_t at, uint64_t done, uint64_t piece) { std::memcpy(box.bytes + at, range.memory + done, piece); });
  std::atomic_ref(box.written).store(written + count, std::memory_order_release);
  range = {range.memory + count, range.bytes - count};
  return true;
}
bool MailboxRails::State::advance_recv(int peer, ByteRange& range) const {
  Mailbox& box = mailbox(window->view().rank, peer);
  const uint64_t read = box.read;
  const uint64_t count = std::min(std::atomic_ref(box.written).load(std::memory_order_acquire) - read, range.bytes);
  if (count == 0) return false;
  each_piece(read, count,
             [&](uint64_t at, uint64_t done, uint64_t piece) { std::memcpy(range.memory + done, box.bytes + at, piece); });
  std::atomic_ref(box.read).store(read + count, std::memory_order_release);
  range = {range.memory + count, range.bytes - count};
  return true;
}

bool MailboxRails::State::ends_in_time() const {
  const auto deadline = std::chrono::steady_clock::now() + kTimeToEnd;
  while (!has_ended && std::chrono::steady_clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return has_ended;
}

// Moves all parts at the same time, those of a rank one after the other in each direction.
void MailboxRails::State::run(const std::vector<Part>& parts) {
  if (is_busy.exchange(true)) {
    std::fprintf(stderr, "the emulation: two streams use the rails of rank %d at the same time\n", window->view().rank);
    std::abort();
  }
  struct OfPeer {
    std::vector<ByteRange> send, recv;
    size_t sent = 0, received = 0;
  };
  std::vector<OfPeer> peers(static_cast<size_t>(window->view().num_ranks));
  std::vector<int64_t> sizes(2 * parts.size()); // sent, and then received
  for (size_t i = 0; i < parts.size(); ++i) {
    const Part& part = parts[i];
    OfPeer& peer = peers[static_cast<size_t>(part.peer)];
    sizes[2 * i] = part.send_bytes | part.flags;
    const auto add = [](std::vector<ByteRange>& ranges, int64_t& size, std::byte* memory, int64_t bytes) {
      if (bytes == 0) return;
      ranges.push_back({reinterpret_cast<std::byte*>(&size), sizeof(size)});
      ranges.push_back({memory, static_cast<uint64_t>(bytes)});
    };
    add(peer.send, sizes[2 * i], const_cast<std::byte*>(part.send), part.send_bytes);
    add(peer.recv, sizes[2 * i + 1], part.recv, part.recv_bytes);
  }
  bool is_done = false;
  while (break_of_network() != Break::none && !has_ended)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  for (int idle = 0; !is_done && !has_ended;) {
    is_done = true;
    bool has_moved = false;
    for (size_t rank = 0; rank < peers.size(); ++rank) {
      OfPeer& peer = peers[rank];
      const auto advance = [&](std::vector<ByteRange>& ranges, size_t& first, auto step) {
        while (first < ranges.size() && (this->*step)(static_cast<int>(rank), ranges[first])) {
          has_moved = true;
          if (ranges[first].bytes == 0) ++first;
        }
        if (first < ranges.size()) is_done = false;
      };
      advance(peer.send, peer.sent, &State::advance_send);
      advance(peer.recv, peer.received, &State::advance_recv);
    }
    idle = has_moved ? 0 : idle + 1;
    if (idle > 64)
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    else if (idle > 0)
      std::this_thread::yield();
  }
  if (is_done)
    for (size_t i = 0; i < parts.size(); ++i)
      if (const int64_t expected = parts[i].recv_bytes | parts[i].flags;
          parts[i].recv_bytes > 0 && sizes[2 * i + 1] != expected && !ends_in_time()) {
        std::fprintf(stderr, "the emulation: rank %d expects %#llx bytes (or-ed with flags) by rail, rank %d sends %#llx\n",
                     window->view().rank, static_cast<long long>(expected), parts[i].peer,
                     static_cast<long long>(sizes[2 * i + 1]));
        std::abort();
      }
  is_busy = false;
}

} // namespace

int64_t mailbox_bytes(int num_ranks) {
  return num_ranks * static_cast<int64_t>(sizeof(Mailbox));
}

std::unique_ptr<Rails> make_rails(std::shared_ptr<Window> window, int64_t offset, int ranks_per_node) {
  return std::make_unique<MailboxRails>(std::move(window), offset, ranks_per_node);
}

} // namespace epx::emulation
