// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/fibers.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <boost/context/fiber.hpp>
#include <boost/context/fixedsize_stack.hpp>
#include <boost/context/stack_context.hpp>

#include "base/random.h"

namespace epx::emulation {
namespace {

namespace context = boost::context;

constexpr size_t kStackBytes = size_t{64} << 10;
// After so many passes without progress the block's thread sleeps, longer each time: a pass resumes all fibers that poll, and the
// blocks that the others wait for need the cores.
constexpr int kMaxIdlePasses = 4;
constexpr std::chrono::microseconds kFirstSleep{50}, kLongestSleep{400};
constexpr int kSeenWordsLog2 = 10;

// Stacks are kept for later grids: most of the time of a small grid would otherwise go into mapping and unmapping them.
class StackCache {
public:
  // EPX_EMULATED_STACKS: so many are there from the beginning, and have been written to. How many blocks of a grid run at a time,
  // and so how many stacks are kept, is chance. A test that counts memory has them made before it counts.
  StackCache() {
    const char* const text = std::getenv("EPX_EMULATED_STACKS");
    for (int left = text != nullptr ? std::atoi(text) : 0; left > 0; --left) {
      const context::stack_context stack = allocator_.allocate();
      std::memset(static_cast<std::byte*>(stack.sp) - stack.size, 0, stack.size);
      stacks_.push_back(stack);
    }
  }

  context::stack_context take() {
    const std::scoped_lock lock(mutex_);
    if (stacks_.empty()) return allocator_.allocate();
    const context::stack_context stack = stacks_.back();
    stacks_.pop_back();
    return stack;
  }
  void put_back(const context::stack_context& stack) {
    const std::scoped_lock lock(mutex_);
    stacks_.push_back(stack);
  }

private:
  std::mutex mutex_;
  context::fixedsize_stack allocator_{kStackBytes};
  std::vector<context::stack_context> stacks_;
};

StackCache& stack_cache() {
  static auto* const kCache = new StackCache; // a grid may still run while the process ends
  return *kCache;
}

// What boost::context calls a stack allocator.
struct CachedStack {
  context::stack_context allocate() { return stack_cache().take(); }
  void deallocate(context::stack_context& stack) { stack_cache().put_back(stack); }
};

// A barrier of `expected` fibers, which also exchange values. There are values of two generations, since a fast fiber may
// arrive again before a slow one has read.
struct Barrier {
  int expected;
  int arrived = 0;
  uint64_t generation = 0;
  bool has_polled = false; // in vain, one of those that have arrived
};

struct Warp {
  Barrier barrier;
  std::array<std::array<uint64_t, kLanes>, 2> values{};
};

enum class State { ready, waiting, ended };

struct Thread {
  context::fiber fiber;
  State state = State::ready;
  uint3 index{};
  bool has_polled = false; // in vain, since its last barrier
};

struct SeenWord {
  const void* word = nullptr;
  uint64_t value = 0;
};

class Block {
public:
  Block(uint3 index, dim3 grid, int threads, size_t shared_bytes, const std::function<void()>& kernel)
      : position_{{}, index, dim3(static_cast<unsigned>(threads)), grid}, kernel_(kernel),
        shared_(shared_bytes + kAlignment, kUndefined), barrier_{threads}, threads_(static_cast<size_t>(threads)) {
    for (int first = 0; first < threads; first += kLanes)
      warps_.push_back({{std::min(kLanes, threads - first)}});
    for (size_t i = 0; i < threads_.size(); ++i) {
      threads_[i].index = {static_cast<unsigned>(i), 0, 0};
      threads_[i].fiber = context::fiber(std::allocator_arg, CachedStack{}, [this](context::fiber&& left) {
        *left_ = std::move(left);
        kernel_();
        running_->state = State::ended;
        end_thread();
        return leave(running_->fiber);
      });
    }
  }

  void run() { *left_ = leave(scheduler_).resume(); }

  const ThreadPosition& position() const { return position_; }
  std::byte* shared() {
    const auto address = reinterpret_cast<uintptr_t>(shared_.data());
    return shared_.data() + (kAlignment - address % kAlignment) % kAlignment;
  }

  void pause() {
    running_->has_polled = true;
    suspend();
  }
  // Words that share an entry count as changed each time, which costs only the sleep.
  void observe(const void* word, uint64_t value) {
    SeenWord& seen = seen_[(reinterpret_cast<uintptr_t>(word) >> 2) * 0x9e3779b97f4a7c15u >> (64 - kSeenWordsLog2)];
    if (seen.word == word && seen.value == value) return;
    seen = {word, value};
    running_->has_polled = false;
    made_progress_ = true;
  }

  int64_t reduce_block(int64_t value) {
    const uint64_t generation = barrier_.generation;
    sums_[generation % 2] += value;
    arrive(barrier_, 0, threads_.size());
    wait_for(barrier_, generation);
    return sums_[generation % 2];
  }

  const std::array<uint64_t, kLanes>& gather_warp(uint64_t value) {
    const size_t index = position_.thread.x / kLanes;
    Warp& warp = warps_[index];
    const uint64_t generation = warp.barrier.generation;
    warp.values[generation % 2][position_.thread.x % kLanes] = value;
    arrive(warp.barrier, index * kLanes, std::min(threads_.size(), (index + 1) * kLanes));
    wait_for(warp.barrier, generation);
    return warp.values[generation % 2];
  }

private:
  static constexpr size_t kAlignment = 128;
  // What a kernel finds in shared memory: large finite numbers of every type that rows have.
  static constexpr std::byte kUndefined{0xee};

  void arrive(Barrier& barrier, size_t first, size_t end) {
    ++barrier.arrived;
    barrier.has_polled |= std::exchange(running_->has_polled, false);
    complete(barrier, first, end);
  }
  void complete(Barrier& barrier, size_t first, size_t end) {
    if (barrier.arrived < barrier.expected || barrier.arrived == 0) return;
    barrier.arrived = 0;
    ++barrier.generation;
    if (&barrier == &barrier_) sums_[barrier.generation % 2] = 0;
    for (size_t i = first; i < end; ++i)
      if (threads_[i].state == State::waiting && waits_at_[i] == &barrier) threads_[i].state = State::ready;
    // A warp that polls together votes on what it finds, which is no progress.
    if (!std::exchange(barrier.has_polled, false)) made_progress_ = true;
  }
  void wait_for(Barrier& barrier, uint64_t generation) {
    while (barrier.generation == generation) {
      running_->state = State::waiting;
      waits_at_[position_.thread.x] = &barrier;
      suspend();
    }
  }
  // Barriers do not wait for a thread that has ended.
  void end_thread() {
    ++num_ended_;
    made_progress_ = true;
    --barrier_.expected;
    complete(barrier_, 0, threads_.size());
    const size_t index = position_.thread.x / kLanes;
    --warps_[index].barrier.expected;
    complete(warps_[index].barrier, index * kLanes, std::min(threads_.size(), (index + 1) * kLanes));
  }

  // Fibers switch to each other, without a scheduler between them: in most tests switches take most of the time. Whatever is
  // switched to finds in left_ where it is to keep the fiber that it comes from.
  void suspend() {
    Thread* const suspended = running_;
    context::fiber next = leave(suspended->fiber);
    if (running_ != suspended) *left_ = std::move(next).resume();
  }
  // Returns what runs next: a thread, or run() when all have ended. Until then its caller's fiber is kept in `own`.
  context::fiber leave(context::fiber& own) {
    left_ = &own;
    Thread* const next = next_ready();
    if (next == nullptr) return std::move(scheduler_);
    running_ = next;
    position_.thread = next->index;
    return std::move(next->fiber);
  }

  // Each pass resumes every thread that is ready, forwards or backwards from a random one.
  Thread* next_ready() {
    while (num_ended_ < threads_.size()) {
      for (; left_of_pass_ > 0; --left_of_pass_) {
        Thread& thread = threads_[next_];
        if (forwards_)
          next_ = next_ + 1 < threads_.size() ? next_ + 1 : 0;
        else
          next_ = next_ > 0 ? next_ - 1 : threads_.size() - 1;
        if (thread.state != State::ready) continue;
        --left_of_pass_;
        return &thread;
      }
      idle_passes_ = made_progress_ ? 0 : idle_passes_ + 1;
      if (idle_passes_ > kMaxIdlePasses)
        std::this_thread::sleep_for(std::min(kFirstSleep * (idle_passes_ - kMaxIdlePasses), kLongestSleep));
      else if (idle_passes_ > 0)
        std::this_thread::yield();
      begin_pass();
    }
    return nullptr;
  }
  void begin_pass() {
    made_progress_ = false;
    random_ = random_ * 6364136223846793005u + 1442695040888963407u;
    next_ = (random_ >> 33) % threads_.size();
    forwards_ = (random_ >> 20 & 1) != 0;
    left_of_pass_ = threads_.size();
  }

  ThreadPosition position_; // of the running thread
  const std::function<void()>& kernel_;
  std::vector<std::byte> shared_;
  Barrier barrier_;
  std::array<int64_t, 2> sums_{};
  std::vector<Thread> threads_;
  std::vector<Barrier*> waits_at_ = std::vector<Barrier*>(threads_.size());
  std::vector<Warp> warps_;
  std::array<SeenWord, size_t{1} << kSeenWordsLog2> seen_{}; // by a hash of the address
  context::fiber scheduler_;                                 // run()
  context::fiber* left_ = nullptr;
  Thread* running_ = nullptr;
  size_t num_ended_ = 0;

  // The pass over the threads.
  uint64_t random_ = random_u64();
  size_t next_ = 0, left_of_pass_ = 0;
  int idle_passes_ = 0;
  bool forwards_ = false, made_progress_ = true;
};

constinit thread_local Block* this_block = nullptr;

// EPX_EMULATED_START_DELAY_US: about half of the blocks start so many microseconds after the others of their grid.
std::chrono::microseconds start_delay() {
  const char* const text = std::getenv("EPX_EMULATED_START_DELAY_US");
  return std::chrono::microseconds(text != nullptr && random_u64() % 2 != 0 ? std::atol(text) : 0);
}

} // namespace

constinit thread_local const ThreadPosition* running_position = nullptr;

void run_grid(int blocks, int threads, size_t shared_bytes, const std::function<void()>& kernel) {
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(blocks));
  for (int index = 0; index < blocks; ++index)
    workers.emplace_back([&, index] {
      if (const auto delay = start_delay(); delay.count() > 0) std::this_thread::sleep_for(delay);
      Block block({static_cast<unsigned>(index), 0, 0}, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes, kernel);
      this_block = &block;
      running_position = &block.position();
      block.run();
      this_block = nullptr;
      running_position = nullptr;
    });
  for (std::thread& worker : workers)
    worker.join();
}

std::byte* dynamic_shared_memory() {
  return this_block->shared();
}
void pause() {
  this_block->pause();
}
void observe(const void* word, uint64_t value) {
  this_block->observe(word, value);
}
int64_t reduce_block(int64_t value) {
  return this_block->reduce_block(value);
}
const std::array<uint64_t, kLanes>& gather_warp(uint64_t value) {
  return this_block->gather_warp(value);
}

} // namespace epx::emulation
