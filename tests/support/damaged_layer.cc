// SPDX-License-Identifier: Apache-2.0
#include "tests/support/damaged_layer.h"

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/dtypes.h"
#include "tests/support/address_sanitizer.h"
#include "tests/support/check.h"
#include "tests/support/layer_memory.h"
#include "tests/support/rng.h"
#include "tests/support/values.h"

#if EPX_TEST_HAS_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#endif

namespace epx::test {
namespace {

constexpr int kMaxTokens = 6;
constexpr int kMaxHidden = 16;
constexpr int kMaxTopK = 6;
constexpr int kMaxAlignment = 4;
constexpr int kMaxSidecarBytes = 8;
constexpr int64_t kDamagesPerLayer = 25;
constexpr int64_t kLayersPerGroup = 20;
constexpr size_t kHeaderBytes = 72; // they tell what the handle memory belongs to; damage there is always found
constexpr size_t kTensorGuardBytes = 128;
constexpr std::byte kGuard{0x5c};
constexpr epx_dtype kDtype = EPX_BFLOAT16;

uint16_t small_bfloat16(Rng& rng) { // one of the numbers 1, 1.125, ... 1.875
  return static_cast<uint16_t>(0x3f80 | rng.below(8) << 4);
}

// Poisons, for the sanitizer, bytes that a movement may not touch.
void forbid([[maybe_unused]] const std::byte* from, [[maybe_unused]] size_t bytes) {
#if EPX_TEST_HAS_ADDRESS_SANITIZER
  ASAN_POISON_MEMORY_REGION(from, bytes);
#endif
}
void allow([[maybe_unused]] const std::byte* from, [[maybe_unused]] size_t bytes) {
#if EPX_TEST_HAS_ADDRESS_SANITIZER
  ASAN_UNPOISON_MEMORY_REGION(from, bytes);
#endif
}

// Groups of several nodes have one more precision, and are made more often so that few damages see all.
int64_t damages_per_group(bool is_over_nodes) {
  return kDamagesPerLayer * (is_over_nodes ? 2 : kLayersPerGroup);
}

bool is_over_nodes(const RankContext& context) {
  GroupCase group;
  group.num_ranks = context.num_ranks;
  return num_nodes(group) > 1;
}

// Returns the same group on all ranks for the same number.
GroupCase group_case(const RankContext& context, const DamageOptions& options, int64_t number) {
  Rng rng(mix(options.seed, mix(0x6709, static_cast<uint64_t>(number))));
  GroupCase group;
  group.num_ranks = context.num_ranks;
  group.num_experts = 5;
  group.max_tokens = kMaxTokens;
  group.hidden_dim = kMaxHidden;
  group.max_top_k = kMaxTopK;
  group.max_alignment = kMaxAlignment;
  group.max_sidecar_bytes = kMaxSidecarBytes;
  group.max_recv_rows = rng.chance(50) ? 0 : 4 * kMaxAlignment; // 0: staged by token; else by slot, where P is not 1
  group.max_dtype = kDtype;
  group.precision = number % 2 == 0 ? EPX_COMBINE_WIRE : EPX_COMBINE_EXACT;
  if (is_over_nodes(context) && number % 3 == 2) group.precision = EPX_COMBINE_NODE;
  group.overflow = EPX_OVERFLOW_DROP;
  group.num_comm_sms = number % 4 < 2 ? 0 : 4; // 0: kernels begin before the one before them has ended
  group.timeout_ms = options.timeout_ms;
  return group;
}

// GroupEnded is thrown when a rank has timed out waiting for rows that another rank's damaged handle memory left out.
struct GroupEnded {};

// Makes the calls of one layer, with tensors at fixed addresses. All throw GroupEnded when a timeout ended the group.
class DamagedLayer {
public:
  // `memory`: kMemoryBytes, of the device or from epx_mem_alloc. `number`: of the layer; the same on all ranks.
  // all_rows: N is R.
  DamagedLayer(GroupRun& group, std::byte* memory, uint64_t seed, int64_t number, bool all_rows, DamageCounts& counts);
  DamagedLayer(const DamagedLayer&) = delete;
  DamagedLayer& operator=(const DamagedLayer&) = delete;
  ~DamagedLayer() { allow(memory_, kMemoryBytes); }

  static constexpr size_t kMemoryBytes = size_t{32} * 1024;

  void prepare();
  static constexpr int kMovements = 4;
  void move(int movement);

  // Makes all calls with good handle memory; their outputs are the inputs of the damaged calls.
  void remember_outputs();
  void check_outputs();

  // Damages this rank's handle memory once. `rng` is this rank's.
  void damage(Rng& rng, int movement, bool hard, const DamageOptions& options);
  void mend();

  // Checks, after the calls have ended, that only the outputs have changed.
  void check_memory();

  // With EPX_CHECK_HANDLE_MEM, makes the call, which reports any damage, and then does not write the outputs.
  void move_checked(int movement);

private:
  enum Tensor : size_t {
    kTopkIdx,
    kTokens,
    kSidecar,
    kTopkWeights,
    kRows, // the experts' outputs: the input of combine, combine_bwd and dispatch_bwd
    kRowWeights,
    kHandle,
    kFirstOutput,
    kCounts = kFirstOutput,
    kRecvTopkIdx,
    kOffsets,
    kRecvTokens,
    kRecvScales,
    kRecvSidecar,
    kRecvWeights,
    kOut,
    kOutWeights,
    kNumTensors
  };
  struct Place {
    size_t offset = 0;
    size_t bytes = 0;
  };

  std::byte* at(Tensor tensor) const { return memory_ + places_[tensor].offset; }
  std::span<std::byte> image_of(Tensor tensor) {
    return std::span(image_).subspan(places_[tensor].offset, places_[tensor].bytes);
  }
  void draw_damage(Rng& rng, bool hard);
  void lay_out();
  void fill_in(Rng& rng);
  void watch_guards();
  void read_all();
  void write_handle() { device_.write(at(kHandle), image_of(kHandle).data(), places_[kHandle].bytes); }
  bool is_rank_major() const { return rows_per_source_ >= 0; }
  LayerMemory tensors() const;
  void make(epx_operation operation);
  void clear_outputs();
  void choose_format(Rng& rng);

  GroupRun& group_;
  Device& device_;
  DamageCounts& counts_;
  std::byte* memory_;
  Layer layer_;
  bool weighted_, has_sidecar_;
  epx_row_format format_{}, sum_format_{}; // scaling NONE: rows travel as they are
  bool arrives_quantised_ = false;
  epx_tensor recv_scales_{};
  int64_t hidden_, num_tokens_, num_rows_;
  int64_t rows_per_source_ = -1; // M of a rank-major layer
  epx_row_spacing row_spacing_ = EPX_ROWS_STRIDED;
  int64_t zone_stride_ = 0;
  std::array<Place, kNumTensors> places_{};
  std::vector<std::byte> image_; // the expected contents of the memory, except the outputs
  std::string message_;          // of the last call's report
  std::vector<std::byte> seen_;  // the contents of the memory when it was last read
  std::vector<std::byte> good_handle_;
  std::vector<size_t> used_words_; // the words of the handle memory that prepare has written
  std::array<std::vector<std::byte>, kMovements> good_outputs_;
};

DamagedLayer::DamagedLayer(GroupRun& group, std::byte* memory, uint64_t seed, int64_t number, bool all_rows,
                           DamageCounts& counts)
    : group_(group), device_(group.device()), counts_(counts), memory_(memory), image_(kMemoryBytes, kGuard),
      seen_(kMemoryBytes) {
  Rng same_everywhere(mix(seed, mix(0x1a7e4, static_cast<uint64_t>(number))));
  layer_ = {static_cast<int32_t>(same_everywhere.pick({kMaxTopK, kMaxTopK, 1, 3})),
            static_cast<int32_t>(same_everywhere.pick({1, 2, kMaxAlignment}))};
  hidden_ = same_everywhere.pick({kMaxHidden, 8, 5}); // a row of 8 elements has 16 bytes
  weighted_ = same_everywhere.chance(60);
  has_sidecar_ = same_everywhere.chance(50);
  Rng mine(mix(seed, mix(static_cast<uint64_t>(group.rank()), static_cast<uint64_t>(number))));
  num_tokens_ = mine.chance(70) ? kMaxTokens : mine.below(kMaxTokens);
  const int64_t capacity = group.info().max_recv_tokens_per_rank;
  if (group.shape().precision == EPX_COMBINE_WIRE && num_nodes(group.shape()) == 1 && same_everywhere.chance(40)) {
    const int64_t staging = capacity / (int64_t{group.shape().num_ranks} * layer_.top_k);
    rows_per_source_ = std::min<int64_t>(same_everywhere.pick({1, 4, kMaxTokens, kMaxTokens + 2}),
                                         staging >= kMaxTokens ? kMaxTokens + 2 : staging);
    layer_.alignment = 1;
  }
  num_rows_ = all_rows || mine.chance(60) ? capacity : mine.chance(50) ? capacity + 5 : mine.between(1, capacity);
  if (is_rank_major()) num_rows_ = group.shape().num_ranks * rows_per_source_;
  choose_format(same_everywhere);
  zone_stride_ = random_zone_stride(group.shape(), layer_.alignment, same_everywhere);
  if (same_everywhere.chance(50)) row_spacing_ = EPX_ROWS_COMPACT;
  lay_out();
  fill_in(mine);
}

// Formats of one scale for each row, in layouts whose places follow from the slot alone.
void DamagedLayer::choose_format(Rng& rng) {
  const epx_scaling scaling = rng.pick({EPX_SCALING_NONE, EPX_SCALING_NONE, EPX_SCALING_BLOCK128, EPX_SCALING_MX});
  if (scaling == EPX_SCALING_NONE) return;
  check_ok(epx_row_format_init(&format_, scaling), "epx_row_format_init");
  sum_format_ = format_;
  arrives_quantised_ = rng.chance(50);
  if (!arrives_quantised_) return;
  format_.scale_layout = rng.pick({EPX_SCALES_ROWS, EPX_SCALES_COLUMNS});
  format_.recv_scales = &recv_scales_;
}

void DamagedLayer::lay_out() {
  const auto tokens = static_cast<size_t>(num_tokens_), slots = static_cast<size_t>(num_rows_);
  const auto row_bytes = static_cast<size_t>(epx::row_bytes(kDtype, hidden_));
  const size_t routes = tokens * static_cast<size_t>(layer_.top_k);
  const auto experts = static_cast<size_t>(group_.info().num_local_experts);
  std::array<size_t, kNumTensors> bytes{};
  bytes[kTopkIdx] = routes * sizeof(int32_t);
  bytes[kTokens] = bytes[kOut] = tokens * row_bytes;
  bytes[kSidecar] = has_sidecar_ ? tokens * kMaxSidecarBytes : 0;
  bytes[kTopkWeights] = bytes[kOutWeights] = routes * sizeof(float);
  bytes[kRows] = bytes[kRecvTokens] = slots * row_bytes;
  const size_t per_row = is_rank_major() ? static_cast<size_t>(layer_.top_k) : 1;
  if (arrives_quantised_) { // a row has one scale
    const epx_dtype dtype = format_.scaling == EPX_SCALING_MX ? EPX_FLOAT8_E8M0 : EPX_FLOAT32;
    const int64_t leading_dimension = (num_rows_ + 3) / 4 * 4;
    const bool has_columns = format_.scale_layout == EPX_SCALES_COLUMNS;
    recv_scales_ =
        has_columns ? epx_tensor_2d(nullptr, dtype, 1, leading_dimension) : epx_tensor_2d(nullptr, dtype, num_rows_, 1);
    bytes[kRecvScales] = static_cast<size_t>(recv_scales_.sizes[0] * epx::row_bytes(dtype, recv_scales_.sizes[1]));
    bytes[kRecvTokens] = slots * static_cast<size_t>(epx::row_bytes(format_.dtype, hidden_));
  }
  bytes[kRowWeights] = bytes[kRecvWeights] = slots * per_row * sizeof(float);
  bytes[kRecvTopkIdx] = is_rank_major() ? slots * per_row * sizeof(int32_t) : 0;
  bytes[kRecvSidecar] = has_sidecar_ ? slots * kMaxSidecarBytes : 0;
  bytes[kHandle] = group_.view().handle_mem_size(layer_);
  bytes[kCounts] = (is_rank_major() ? static_cast<size_t>(group_.shape().num_ranks) : experts) * sizeof(int32_t);
  bytes[kOffsets] = (experts + 1) * sizeof(int32_t);
  size_t end = kTensorGuardBytes;
  for (size_t tensor = 0; tensor < kNumTensors; ++tensor) {
    places_[tensor] = {end, bytes[tensor]};
    end = (end + bytes[tensor] + kTensorGuardBytes + 15) / 16 * 16;
  }
  recv_scales_.data = at(kRecvScales);
  check(end <= kMemoryBytes, "a layer takes {} bytes, more than {}", end, kMemoryBytes);
  image_.resize(end);
  seen_.resize(end);
}

void DamagedLayer::fill_in(Rng& rng) {
  const auto each = [&](Tensor tensor, auto sample) {
    decltype(sample()) value{};
    for (size_t i = 0; i + sizeof(value) <= places_[tensor].bytes; i += sizeof(value)) {
      value = sample();
      std::memcpy(image_of(tensor).data() + i, &value, sizeof(value));
    }
  };
  each(kTopkIdx, [&] { return rng.chance(5) ? -1 : static_cast<int32_t>(rng.below(group_.shape().num_experts)); });
  for (const Tensor tensor : {kTokens, kRows})
    each(tensor, [&] { return small_bfloat16(rng); });
  each(kSidecar, [&] { return static_cast<uint8_t>(rng.below(256)); });
  for (const Tensor tensor : {kTopkWeights, kRowWeights})
    each(tensor, [&] { return static_cast<float>(rng.between(1, 4)); });
  device_.write(memory_, image_.data(), image_.size());
}

void DamagedLayer::prepare() {
  std::fill(image_of(kHandle).begin(), image_of(kHandle).end(), kScribble);
  write_handle();
  make(is_rank_major() ? EPX_OP_DISPATCH_RANK_MAJOR : EPX_OP_PREPARE);
  const auto handle = image_of(kHandle);
  device_.read(handle.data(), at(kHandle), handle.size());
  good_handle_.assign(handle.begin(), handle.end());
  for (size_t word = 0; word < handle.size(); word += sizeof(uint32_t))
    if (std::any_of(&handle[word], &handle[word] + sizeof(uint32_t), [](std::byte byte) { return byte != kScribble; }))
      used_words_.push_back(word);
  watch_guards();
}

LayerMemory DamagedLayer::tensors() const {
  LayerMemory layer{.layer = layer_,
                    .handle_mem = {at(kHandle), places_[kHandle].bytes},
                    .stream = device_.stream(),
                    .dtype = kDtype,
                    .num_tokens = num_tokens_,
                    .hidden = hidden_,
                    .num_rows = num_rows_,
                    .num_local_experts = group_.info().num_local_experts,
                    .zone_stride = zone_stride_,
                    .num_ranks = group_.shape().num_ranks,
                    .rows_per_source = rows_per_source_,
                    .row_spacing = row_spacing_};
  layer.topk_idx = at(kTopkIdx);
  layer.counts = at(kCounts);
  layer.offsets = at(kOffsets);
  layer.recv_topk_idx = at(kRecvTopkIdx);
  layer.tokens = layer.grad_out = at(kTokens);
  layer.recv_tokens = layer.grad_expert_out = at(kRecvTokens);
  layer.expert_out = layer.grad_recv = at(kRows);
  layer.out = layer.grad_tokens = at(kOut);
  if (weighted_) {
    layer.expert_weights = layer.bwd_weights = layer.grad_weights = at(kRowWeights);
    layer.grad_topk_weights = at(kOutWeights);
  }
  if (format_.scaling != EPX_SCALING_NONE) {
    layer.format = &format_;
    if (arrives_quantised_) layer.recv_dtype = format_.dtype;
    if (arrives_quantised_ && format_.scaling == EPX_SCALING_MX)
      layer.bwd_weights = nullptr; // which its scales do not take
    if (group_.shape().precision == EPX_COMBINE_WIRE) layer.sum_format = &sum_format_;
  }
  if (is_rank_major()) return layer; // whose dispatch carries rows alone
  if (weighted_) {
    layer.topk_weights = at(kTopkWeights);
    layer.recv_weights = at(kRecvWeights);
  }
  if (has_sidecar_) {
    layer.sidecar_bytes = kMaxSidecarBytes;
    layer.sidecar = at(kSidecar);
    layer.recv_sidecar = at(kRecvSidecar);
    layer.bwd_expert_out = at(kRows); // has_sidecar_ serves as a random choice here
    layer.grad_recv_weights = at(kRecvWeights);
  }
  return layer;
}

void DamagedLayer::make(epx_operation operation) {
  const epx_status status = tensors().try_call(group_.view(), operation);
  device_.finish();
  const epx_group_report report = group_.view().status();
  ++counts_.calls;
  message_ = report.message;
  counts_.reported += static_cast<int64_t>(report.event_counts[EPX_EVENT_HANDLE_MISMATCH]);
  if (status == EPX_SUCCESS && report.status == EPX_SUCCESS) return;
  const std::string message = report.message;
  check(device_.transport() != EPX_TRANSPORT_HOST && report.status == EPX_ERROR_TIMEOUT, "the group failed with {}: {}",
        epx_status_string(report.status), message);
  check_memory();
  throw GroupEnded();
}

void DamagedLayer::move(int movement) {
  constexpr epx_operation kExpertMajor[] = {EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD};
  constexpr epx_operation kRankMajor[] = {EPX_OP_COMBINE_RANK_MAJOR_BWD, EPX_OP_COMBINE_RANK_MAJOR,
                                          EPX_OP_COMBINE_RANK_MAJOR_BWD, EPX_OP_DISPATCH_RANK_MAJOR_BWD};
  make(is_rank_major() ? kRankMajor[movement] : kExpertMajor[movement]); // scatters and gathers by turns in both
}

void DamagedLayer::clear_outputs() {
  allow(memory_, image_.size());
  const size_t first = places_[kFirstOutput].offset;
  device_.write(memory_ + first, image_.data() + first, image_.size() - first);
  watch_guards();
}

void DamagedLayer::remember_outputs() {
  for (int movement = 0; movement < kMovements; ++movement) {
    clear_outputs();
    move(movement);
    check_memory();
    good_outputs_[static_cast<size_t>(movement)] = seen_;
  }
}

void DamagedLayer::check_outputs() {
  // A peer whose handle memory was damaged may have stored rows late, until it came to the group's next call.
  move(0);
  for (int movement = 0; movement < kMovements; ++movement) {
    clear_outputs();
    move(movement);
    check_memory();
    check(seen_ == good_outputs_[static_cast<size_t>(movement)],
          "movement {} gives another result with the same handle memory after calls with damaged ones", movement);
  }
}

void DamagedLayer::damage(Rng& rng, int movement, bool hard, const DamageOptions& options) {
  const DamagedCall call{group_.shape(),    group_.rank(),    layer_.top_k, num_tokens_,
                         movement % 2 == 0, rows_per_source_, good_handle_, image_of(kHandle)};
  do
    draw_damage(rng, hard);
  while (!hard && options.keeps_waits && !options.keeps_waits(call));
  write_handle();
}

void DamagedLayer::draw_damage(Rng& rng, bool hard) {
  const auto handle = image_of(kHandle);
  std::copy(good_handle_.begin(), good_handle_.end(), handle.begin());
  const auto any_word = [&]() -> size_t {
    if (rng.chance(5)) return static_cast<size_t>(rng.below(static_cast<int64_t>(handle.size() / 4))) * 4;
    const auto body =
        static_cast<size_t>(std::lower_bound(used_words_.begin(), used_words_.end(), kHeaderBytes) - used_words_.begin());
    const size_t first = rng.chance(97) ? body : 0;
    return used_words_[first + static_cast<size_t>(rng.below(static_cast<int64_t>(used_words_.size() - first)))];
  };
  const auto put = [&](size_t at, uint32_t value) { std::memcpy(handle.data() + at, &value, sizeof(value)); };
  const int64_t capacity = group_.info().max_recv_tokens_per_rank;
  if (hard) { // a run of bytes
    const size_t begin = any_word();
    const auto bytes = std::min(static_cast<size_t>(rng.pick({8, 12, 24, 64, 300, 4000})), handle.size() - begin);
    const size_t from = std::min(any_word(), handle.size() - bytes);
    const auto fill = static_cast<int>(rng.pick({0x00, 0xff, 0x7f, 0x01}));
    const int64_t kind = rng.below(3);
    if (kind == 0) std::memmove(handle.data() + begin, good_handle_.data() + from, bytes);
    if (kind == 1) std::memset(handle.data() + begin, fill, bytes);
    if (kind == 2)
      for (size_t i = 0; i < bytes; ++i)
        handle[begin + i] = static_cast<std::byte>(rng.below(256));
  } else {
    for (int64_t left = rng.between(1, 2); left > 0; --left) {
      const size_t at = any_word();
      switch (rng.below(4)) {
      case 0:
        handle[at + static_cast<size_t>(rng.below(4))] ^= static_cast<std::byte>(1 << rng.below(8));
        break;
      case 1:
        put(at, static_cast<uint32_t>(rng.next()));
        break;
      case 2: // in range, but wrong
        put(at, static_cast<uint32_t>(rng.between(-1, capacity)));
        break;
      default: // the smallest and largest numbers
        put(at, rng.pick({0x7fffffffu, 0x80000000u, 0xffffffffu, 0x7ffffff0u, static_cast<uint32_t>(capacity),
                          static_cast<uint32_t>(num_rows_)}));
      }
    }
  }
}

void DamagedLayer::move_checked(int movement) {
  const auto handle = image_of(kHandle);
  const bool is_damaged = std::any_of(used_words_.begin(), used_words_.end(), [&](size_t word) {
    return std::memcmp(&handle[word], &good_handle_[word], sizeof(uint32_t)) != 0;
  });
  const int64_t reported_before = counts_.reported;
  const std::vector<std::byte> before = seen_;
  move(movement);
  check_memory();
  check_equal(counts_.reported - reported_before, int64_t{is_damaged ? 1 : 0}, "damages reported");
  if (!is_damaged) return;
  if (std::memcmp(handle.data(), good_handle_.data(), kHeaderBytes) == 0)
    check(message_.find("what is behind its header is not what prepare stored there") != std::string::npos,
          "damage behind the header is reported as: {}", message_);
  for (size_t tensor = kFirstOutput; tensor < kNumTensors; ++tensor)
    check(std::memcmp(&before[places_[tensor].offset], &seen_[places_[tensor].offset], places_[tensor].bytes) == 0,
          "tensor {} has changed in a call that found the handle memory damaged", tensor);
}

void DamagedLayer::mend() {
  std::copy(good_handle_.begin(), good_handle_.end(), image_of(kHandle).begin());
  write_handle();
}

void DamagedLayer::watch_guards() {
  if (device_.transport() != EPX_TRANSPORT_HOST) return;
  size_t end = 0; // end of the previous tensor
  for (const Place& place : places_) {
    forbid(memory_ + end, place.offset - end);
    end = place.offset + place.bytes;
  }
  forbid(memory_ + end, image_.size() - end);
}

void DamagedLayer::read_all() {
  allow(memory_, image_.size());
  device_.read(seen_.data(), memory_, seen_.size());
  watch_guards();
}

void DamagedLayer::check_memory() {
  read_all();
  size_t begin = 0; // begin of the bytes between two outputs
  const auto compare = [&](size_t end) {
    if (std::memcmp(seen_.data() + begin, image_.data() + begin, end - begin) == 0) return;
    for (size_t i = begin; i < end; ++i)
      if (seen_[i] != image_[i]) {
        size_t tensor = 0;
        while (tensor + 1 < kNumTensors && places_[tensor + 1].offset <= i)
          ++tensor;
        fail_check("byte {} of tensor {} ({} bytes) or behind it was {:#x} and is {:#x}",
                   static_cast<int64_t>(i) - static_cast<int64_t>(places_[tensor].offset), tensor, places_[tensor].bytes,
                   std::to_integer<int>(image_[i]), std::to_integer<int>(seen_[i]));
      }
  };
  for (size_t tensor = kFirstOutput; tensor < kNumTensors; ++tensor) {
    compare(places_[tensor].offset);
    begin = places_[tensor].offset + places_[tensor].bytes;
  }
  compare(seen_.size());
  count_check();
}

// Everything that a group needs for its layers, until the group fails.
class DamagedGroup {
public:
  DamagedGroup(const RankContext& context, const DamageOptions& options, int64_t number)
      : device_(*context.device), group_(context, group_case(context, options, number)) {
    group_.add_arena(static_cast<int64_t>(DamagedLayer::kMemoryBytes));
    own_ = device_.allocate(DamagedLayer::kMemoryBytes);
  }
  DamagedGroup(const DamagedGroup&) = delete;
  DamagedGroup& operator=(const DamagedGroup&) = delete;
  ~DamagedGroup() { device_.free(own_); }

  GroupRun& group() { return group_; }
  std::byte* memory(bool in_place) { return in_place ? group_.arenas().front().base : own_; }

private:
  Device& device_;
  GroupRun group_;
  std::byte* own_ = nullptr;
};

// Makes the damages of one layer. `number` is the next damage's, and is counted up.
void run_layer(const RankContext& context, const DamageOptions& options, DamagedGroup& damaged, int64_t end,
               int64_t& number, DamageCounts& counts) {
  const int64_t layer_number = number / kDamagesPerLayer;
  DamagedLayer layer(damaged.group(), damaged.memory(layer_number % 3 == 0), options.seed, layer_number,
                     options.keeps_waits != nullptr, counts);
  const char* const checks = std::getenv("EPX_CHECK_HANDLE_MEM");
  const bool checks_all = checks != nullptr && std::strcmp(checks, "1") == 0;
  layer.prepare();
  layer.remember_outputs();
  while (number < end) {
    const auto salt = static_cast<uint64_t>(number++);
    Rng same_everywhere(mix(options.seed, salt));
    const auto movement = static_cast<int>(same_everywhere.below(DamagedLayer::kMovements));
    const bool hard = same_everywhere.chance(options.percent_hard);
    const int64_t only = same_everywhere.chance(50) ? same_everywhere.below(context.num_ranks) : -1; // -1: on all ranks
    Rng mine(mix(mix(options.seed, salt), static_cast<uint64_t>(context.rank) + 1));
    if (only < 0 || only == context.rank)
      layer.damage(mine, movement, hard, options);
    else
      layer.mend();
    ++counts.damages;
    if (checks_all) {
      layer.move_checked(movement);
    } else {
      layer.move(movement);
      layer.check_memory();
    }
  }
  layer.mend();
  layer.check_outputs();
}

// Makes calls until the group ends, or the last damage has been done. Returns the number of the next damage.
int64_t run_group(const RankContext& context, const DamageOptions& options, int64_t number, DamageCounts& counts) {
  const int64_t per_group = damages_per_group(is_over_nodes(context));
  const int64_t end = std::min(options.first + options.count, (number / per_group + 1) * per_group);
  DamagedGroup damaged(context, options, number / per_group);
  const int64_t begin = number;
  int64_t begin_of_layer = number;
  try {
    while (number < end) {
      begin_of_layer = number;
      run_layer(context, options, damaged, std::min(end, (number / kDamagesPerLayer + 1) * kDamagesPerLayer), number,
                counts);
    }
  } catch (const GroupEnded&) {
    ++counts.timeouts;
  } catch (const std::exception& failure) {
    fail_check("{}\n  in or before damage {}; again with: --first {} --damages {} --seed {}", describe(failure), number - 1,
               begin_of_layer, number - begin_of_layer, options.seed);
  }
  // When a group ends, some ranks notice it in one call, the others in the next. Their memory stays until all have noticed.
  const std::vector<uint64_t> reached = context.gather(static_cast<uint64_t>(number));
  number = static_cast<int64_t>(*std::max_element(reached.begin(), reached.end()));
  check(number > begin, "a group timed out before any handle memory was damaged");
  return number;
}

} // namespace

DamageCounts run_damages(const RankContext& context, const DamageOptions& options) {
  DamageCounts counts;
  for (int64_t number = options.first; number < options.first + options.count;)
    number = run_group(context, options, number, counts);
  // Of few damages none may be one that a call can see.
  check(counts.reported > 0 || options.count < 1000, "none of {} damages was reported", options.count);
  return counts;
}

} // namespace epx::test
