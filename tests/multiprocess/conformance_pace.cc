// SPDX-License-Identifier: Apache-2.0
// Calls follow each other at once, and only the library synchronises the ranks, while some rank is always late: the next call
// must not overwrite what a rank still reads of the one before. Results are closed-form and are compared at the end.
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"
#include "tests/support/layer_memory.h"

namespace epx::test {

namespace {

constexpr int kRounds = 12;
constexpr int kTokens = 520; // more than the low-latency path takes, whose staging exists twice
constexpr int kTopK = 3;
constexpr int kHidden = 20;
constexpr int kExperts = 96;

int expert_of(int rank, int round, int token, int k) {
  return (rank * 31 + round * 7 + token * (round + 1) + k * 5) % kExperts;
}
float value_of(int rank, int round, int token, int h) {
  return static_cast<float>(((rank * kRounds + round) * kTokens + token) * 8 + h % 8);
}

GroupCase pace_group(int num_ranks, epx_combine_precision precision) {
  GroupCase group;
  group.num_ranks = num_ranks;
  group.num_experts = kExperts;
  group.max_tokens = kTokens;
  group.hidden_dim = kHidden;
  group.max_top_k = kTopK;
  group.max_alignment = 2;
  group.precision = precision;
  return group;
}

// Array is an array on the device.
template <typename T>
class Array {
public:
  Array(Device& device, int64_t count) : device_(&device), host_(static_cast<size_t>(count)) {
    data_ = device.allocate(bytes() + 1);
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  Array(Array&& other) noexcept
      : device_(other.device_), host_(std::move(other.host_)), data_(std::exchange(other.data_, nullptr)) {}
  ~Array() {
    if (data_ != nullptr) device_->free(data_);
  }
  std::byte* data() const { return data_; }
  size_t bytes() const { return host_.size() * sizeof(T); }
  std::vector<T>& host() { return host_; }
  void upload() { device_->write(data_, host_.data(), bytes()); }
  std::vector<T>& download() {
    device_->read(host_.data(), data_, bytes());
    return host_;
  }

private:
  Device* device_;
  std::vector<T> host_;
  std::byte* data_ = nullptr;
};

// Round has all that one round reads and writes.
struct Round {
  Round(Device& device, const GroupCase& group, size_t handle_bytes)
      : topk_idx(device, int64_t{kTokens} * kTopK), handle(device, static_cast<int64_t>(handle_bytes)),
        counts(device, kExperts), offsets(device, kExperts + 1),
        global_counts(device, static_cast<int64_t>(group.num_ranks) * kExperts),
        slot_origin(device, 3 * recv_capacity(group)), tokens(device, int64_t{kTokens} * kHidden),
        recv(device, recv_capacity(group) * kHidden), out(device, int64_t{kTokens} * kHidden) {}

  Array<int32_t> topk_idx;
  Array<std::byte> handle;
  Array<int32_t> counts;
  Array<int32_t> offsets;
  Array<int32_t> global_counts;
  Array<int32_t> slot_origin;
  Array<float> tokens;
  Array<float> recv;
  Array<float> out;
};

class Pace {
public:
  Pace(const RankContext& context, epx_combine_precision precision)
      : shape_(pace_group(context.num_ranks, precision)), group_(context, shape_), device_(*context.device),
        rng_(mix(5, static_cast<uint64_t>(context.rank))) {
    const size_t handle_bytes = group_.view().handle_mem_size({kTopK, 2});
    for (int round = 0; round < kRounds; ++round) {
      rounds_.emplace_back(device_, shape_, handle_bytes);
      Round& data = rounds_.back();
      for (int token = 0; token < kTokens; ++token) {
        for (int k = 0; k < kTopK; ++k)
          data.topk_idx.host()[static_cast<size_t>(token) * kTopK + static_cast<size_t>(k)] =
              expert_of(group_.rank(), round, token, k);
        for (int h = 0; h < kHidden; ++h)
          data.tokens.host()[static_cast<size_t>(token) * kHidden + static_cast<size_t>(h)] =
              value_of(group_.rank(), round, token, h);
      }
      data.topk_idx.upload();
      data.tokens.upload();
    }
  }

  // The call is collective: all later rounds receive into one allocation that the peers write and read in place.
  void share_rows() {
    const int64_t count = recv_capacity(shape_) * kHidden;
    group_.add_arena(count * static_cast<int64_t>(sizeof(float)));
    shared_rows_ = group_.arenas().back().base;
    garbage_.assign(static_cast<size_t>(count), -1.0F);
  }

  void prepare(int round) {
    maybe_be_late();
    Round& data = rounds_[static_cast<size_t>(round)];
    PrepareArgs args = tensors_of(data).prepare();
    args.global_counts = {data.global_counts.data(), EPX_INT32, {shape_.num_ranks, kExperts}};
    args.slot_origin = {data.slot_origin.data(), EPX_INT32, {recv_capacity(shape_), 3}};
    group_.view().prepare(args);
  }

  void dispatch(int round) {
    maybe_be_late();
    tensors_of(rounds_[static_cast<size_t>(round)]).call(group_.view(), EPX_OP_DISPATCH);
  }

  void combine(int round) { // the experts are the identity
    maybe_be_late();
    tensors_of(rounds_[static_cast<size_t>(round)]).call(group_.view(), EPX_OP_COMBINE);
    if (shared_rows_ == nullptr) return;
    device_.finish();
    device_.write(shared_rows_, garbage_.data(), garbage_.size() * sizeof(float)); // no rank reads these rows any more
  }

  void check_results() {
    device_.finish();
    for (int round = 0; round < kRounds; ++round) {
      check_counts(round);
      if (shared_rows_ == nullptr) check_rows(round);
      check_sums(round);
    }
  }

private:
  LayerMemory tensors_of(const Round& data) const {
    LayerMemory layer{.layer = {kTopK, 2},
                      .handle_mem = {data.handle.data(), data.handle.bytes()},
                      .stream = device_.stream(),
                      .num_tokens = kTokens,
                      .hidden = kHidden,
                      .num_rows = recv_capacity(shape_),
                      .num_local_experts = group_.info().num_local_experts};
    layer.topk_idx = data.topk_idx.data();
    layer.counts = data.counts.data();
    layer.offsets = data.offsets.data();
    layer.tokens = data.tokens.data();
    layer.recv_tokens = layer.expert_out = shared_rows_ != nullptr ? shared_rows_ : data.recv.data();
    layer.out = data.out.data();
    return layer;
  }

  void maybe_be_late() {
    if (rng_.chance(10)) std::this_thread::sleep_for(std::chrono::microseconds(rng_.below(300)));
  }

  void check_counts(int round) {
    const std::vector<int32_t>& counts = rounds_[static_cast<size_t>(round)].global_counts.download();
    std::vector<int32_t> expected(counts.size());
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      for (int token = 0; token < kTokens; ++token) {
        for (int k = 0; k < kTopK; ++k)
          ++expected[static_cast<size_t>(rank) * kExperts + static_cast<size_t>(expert_of(rank, round, token, k))];
      }
    }
    check(counts == expected, "round {}: global_counts are those of another call", round);
  }

  void check_rows(int round) {
    Round& data = rounds_[static_cast<size_t>(round)];
    const std::vector<int32_t>& origin = data.slot_origin.download();
    const std::vector<float>& recv = data.recv.download();
    int64_t num_rows = 0;
    for (size_t slot = 0; 3 * slot < origin.size(); ++slot) {
      if (origin[3 * slot] < 0) continue;
      ++num_rows;
      for (int h = 0; h < kHidden; ++h) {
        const float have = recv[slot * kHidden + static_cast<size_t>(h)];
        const float want = value_of(origin[3 * slot], round, origin[3 * slot + 1], h);
        if (have != want) fail_check("round {}: row {} holds {} instead of {}", round, slot, have, want);
      }
    }
    check(num_rows > 0, "round {}: no rows came", round);
  }

  void check_sums(int round) {
    const std::vector<float>& out = rounds_[static_cast<size_t>(round)].out.download();
    count_check();
    for (int token = 0; token < kTokens; ++token) {
      for (int h = 0; h < kHidden; ++h) {
        const float have = out[static_cast<size_t>(token) * kHidden + static_cast<size_t>(h)];
        const float want = kTopK * value_of(group_.rank(), round, token, h); // small integers: exact
        if (have != want) fail_check("round {}: token {} sums to {} instead of {}", round, token, have, want);
      }
    }
  }

  GroupCase shape_;
  GroupRun group_;
  Device& device_;
  Rng rng_;
  std::vector<Round> rounds_;
  std::byte* shared_rows_ = nullptr;
  std::vector<float> garbage_;
};

} // namespace

TEST_CASE("calls of one kind follow each other at once") {
  for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
    on_every_rank([&](const RankContext& context) {
      Pace pace(context, precision);
      for (int round = 0; round < kRounds; ++round)
        pace.prepare(round);
      for (int round = 0; round < kRounds; ++round)
        pace.dispatch(round);
      for (int round = 0; round < kRounds; ++round)
        pace.combine(round);
      pace.check_results();
    });
  }
}

TEST_CASE("layers share one allocation that is overwritten at once") {
  for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
    on_every_rank([&](const RankContext& context) {
      Pace pace(context, precision);
      pace.share_rows();
      for (int round = 0; round < kRounds; ++round)
        pace.prepare(round);
      for (int round = 0; round < kRounds; ++round) {
        pace.dispatch(round);
        pace.combine(round);
      }
      pace.check_results();
    });
  }
}

TEST_CASE("layers follow each other at once, and overlap") {
  for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
    on_every_rank([&](const RankContext& context) {
      Pace pace(context, precision);
      for (int round = 0; round <= kRounds; ++round) { // the next layer is prepared while one is dispatched
        if (round < kRounds) pace.prepare(round);
        if (round > 0) pace.dispatch(round - 1);
        if (round > 0) pace.combine(round - 1);
      }
      pace.check_results();
    });
  }
}

} // namespace epx::test
