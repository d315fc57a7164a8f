// SPDX-License-Identifier: Apache-2.0
// Tests what ends a group whose calls overlap: CallSession::begin for blocks of two launches in a given order, which no
// schedule of streams makes for certain, and report_disagreement for descriptors that such calls leave.
#include <atomic>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "tests/emulation/device.h"

#include "runtime/stages/cuda/protocol/call_session.cuh"

namespace epx::cuda {
namespace {

constexpr int kBlocks = 2;

// What a block does: c constructs its call session, b begins, and l leaves.
struct Step {
  char grid; // a name
  int block;
  char what;
};

// Reads steps as "A0c A1c A0b".
std::vector<Step> parse(const std::string& text) {
  std::vector<Step> steps;
  std::istringstream words(text);
  for (std::string word; words >> word;)
    steps.push_back({word[0], word[1] - '0', word[2]});
  return steps;
}

struct Launch {
  char grid;
  uint32_t number; // DeviceGroup::launch
  CallSession::Part part = CallSession::kBegins;
};

constexpr int kRanks = 2;

// Rank 0 of a group of two ranks, with the windows of both.
class FirstRank {
public:
  FirstRank() {
    GroupContext& context = group_.context;
    context.shape.num_ranks = context.shape.ranks_per_node = kRanks;
    context.shape.num_experts = kRanks;
    context.shape.max_top_k = context.shape.max_alignment = 1;
    context.shape.max_tokens_per_rank = 1;
    context.shape.max_recv_tokens = 1;
    context.shape.hidden_dim = 8;
    context.shape.max_token_dtype = EPX_BFLOAT16;
    context.layout = make_window_layout(context.shape, WindowAccess::by_kernels);
    for (int rank = 0; rank < kRanks; ++rank) {
      windows_[rank].resize(static_cast<size_t>(context.layout.total_bytes) / sizeof(LlCallDescriptor) + 1);
      group_.bases[rank] = reinterpret_cast<std::byte*>(windows_[rank].data());
    }
    group_.state = &state_;
    group_.host_abort_record = &host_abort_record_;
    group_.record = record_.get();
    group_.timeout_ns = 60'000'000'000;
  }

  // Runs a grid of kBlocks blocks for each launch, whose blocks take the steps in their order. Returns how many steps had been
  // taken when the group failed; -1: it has not.
  int run(const std::vector<Launch>& launches, const std::string& order) {
    const std::vector<Step> steps = parse(order);
    std::atomic<int> taken = 0;
    std::vector<std::thread> grids;
    for (const Launch& launch : launches)
      grids.emplace_back([&] { run_grid(launch, steps, taken); });
    for (std::thread& grid : grids)
      grid.join();
    return failed_at_;
  }
  // Reports a disagreement with `mine` where the ranks have posted these descriptors to this one.
  void report(const CallDescriptor& mine, const CallDescriptor (&posted)[kRanks]) {
    emulation::run_grid(1, 1, 0, [&] {
      const CallContext call{group_, EPX_OP_DISPATCH, 1};
      for (int rank = 0; rank < kRanks; ++rank)
        for (int word = 0; word < kNumDescriptorWords; ++word)
          descriptor_at(call, 0, rank, 1)->words[word].value = reinterpret_cast<const uint64_t*>(&posted[rank])[word];
      report_disagreement(call, mine);
    });
  }
  epx_status status() const { return record_->failure.status; }
  // Returns whether each rank has an abort record in its window.
  bool has_told_all() const {
    bool all = true;
    for (const std::byte* const base : {group_.bases[0], group_.bases[1]})
      all &= reinterpret_cast<const Flag*>(base + group_.context.layout.abort_record.offset)->value != 0;
    return all;
  }

private:
  void run_grid(const Launch& launch, const std::vector<Step>& steps, std::atomic<int>& taken) {
    DeviceGroup group = group_;
    group.launch = launch.number;
    emulation::run_grid(kBlocks, kWarp, 0, [&] {
      // Waits until it is the block's turn to take a step. Returns false if it has none of that kind.
      const auto wait_for = [&](char what) {
        size_t step = 0;
        while (step < steps.size() && (steps[step].grid != launch.grid ||
                                       steps[step].block != static_cast<int>(blockIdx.x) || steps[step].what != what))
          ++step;
        for (int seen = taken.load(); step < steps.size() && seen < static_cast<int>(step); seen = taken.load())
          taken.wait(seen);
        return step < steps.size();
      };
      // All threads of the block have taken the step; none waits for the next one before this one is counted.
      const auto finish = [&] {
        __syncthreads();
        if (threadIdx.x == 0) {
          ++taken;
          if (state_.failed != 0 && failed_at_ < 0) failed_at_ = taken.load();
          taken.notify_all();
        }
        __syncthreads();
      };
      if (!wait_for('c')) return;
      const CallSession call(group, EPX_OP_DISPATCH, launch.part);
      finish();
      if (!wait_for('b')) return;
      call.begin();
      finish();
      if (!wait_for('l')) return;
      leave(group);
      finish();
    });
  }

  std::vector<LlCallDescriptor> windows_[kRanks]; // of bytes; only the alignment matters
  DeviceState state_{};
  std::unique_ptr<StatusRecord> record_ = std::make_unique<StatusRecord>();
  uint64_t host_abort_record_ = 0;
  DeviceGroup group_{};
  std::atomic<int> failed_at_ = -1;
};

constexpr auto kContinues = CallSession::kContinues;

TEST_CASE("calls in order, of one launch or two, and a call of two kernels, are no overlap") {
  const std::string in_order = "A0c A1c A1b A0b A0l A1l B1c B0c B0b B1b B0l B1l";
  CHECK(FirstRank().run({{'A', 1}, {'B', 2}}, in_order) == -1);
  CHECK(FirstRank().run({{'A', 1}, {'B', 1}}, in_order) == -1);
  CHECK(FirstRank().run({{'A', 1}, {'B', 1, kContinues}}, in_order) == -1);
}

TEST_CASE("a block finds that another launch overlaps with its own") {
  struct Case {
    std::string what;
    std::vector<Launch> launches;
    const char* order; // the last step finds the overlap
  };
  const Case cases[] = {
      {"the call before is still running", {{'A', 1}, {'B', 2}}, "A0c A1c A0b A1b A0l B0c B0b"},
      {"the first blocks of both", {{'A', 1}, {'B', 2}}, "A0c B0c A0b B0b"},
      {"a first and a second block", {{'A', 1}, {'B', 2}}, "A0c B1c A0b B1b"},
      {"the first blocks of one graph that runs twice", {{'A', 1}, {'B', 1}}, "A0c B0c A0b B0b"},
      {"the call has begun without the block", {{'A', 1}, {'B', 2}}, "B0c A0c A1c A0b A1b B0b"},
      {"the call has begun without the block, and ended", {{'A', 1}, {'B', 2}}, "B0c A0c A1c A0b A1b A0l A1l B0b"},
      {"between two kernels of a call",
       {{'A', 1}, {'C', 1, kContinues}, {'B', 2}},
       "A0c A1c A0b A1b A0l A1l C0c B0c B1c B0b B1b C0b"},
      {"between two kernels of a call, which goes on first",
       {{'A', 1}, {'C', 1, kContinues}, {'B', 2}},
       "A0c A1c A0b A1b A0l A1l B0c C0c C1c C0b C1b B0b"},
  };
  for (const Case& overlap : cases) {
    CAPTURE(overlap.what);
    FirstRank rank;
    CHECK(rank.run(overlap.launches, overlap.order) == static_cast<int>(parse(overlap.order).size()));
    CHECK(rank.status() == EPX_ERROR_OUT_OF_SEQUENCE);
    CHECK(rank.has_told_all());
  }
}

TEST_CASE("a descriptor of this rank itself with other fields than its call's is an overlap") {
  CallDescriptor mine{}, other{};
  mine.top_k = 8;
  other.top_k = 6;
  struct Case {
    std::string what;
    CallDescriptor posted[kRanks];
    epx_status status;
  };
  const Case cases[] = {{"the peer differs", {mine, other}, EPX_ERROR_MISMATCH},
                        {"this rank differs", {other, mine}, EPX_ERROR_OUT_OF_SEQUENCE},
                        {"both differ", {other, other}, EPX_ERROR_OUT_OF_SEQUENCE},
                        {"none differs any more", {mine, mine}, EPX_ERROR_OUT_OF_SEQUENCE}};
  for (const Case& posted : cases) {
    CAPTURE(posted.what);
    FirstRank rank;
    rank.report(mine, posted.posted);
    CHECK(rank.status() == posted.status);
    CHECK(rank.has_told_all() == (posted.status == EPX_ERROR_OUT_OF_SEQUENCE)); // ranks whose fields differ all know it
  }
}

} // namespace
} // namespace epx::cuda
