// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/layer_round.h"

#include <bit>
#include <cstring>

#include "epx/epx.hpp"
#include "tests/support/check.h"
#include "tests/support/values.h"

namespace epx::test {

namespace {

// These values are small integers and halves of them, which are exact in bfloat16, also after every step below.
float token_at(int rank, int t, int h) {
  return static_cast<float>(32 * rank + 8 * t + h);
}
float grad_at(int rank, int t, int h) {
  return static_cast<float>(1 + rank + t + h);
}
float weight_at(int k) {
  return k == 0 ? 0.5F : 1.0F;
}
std::byte sidecar_at(int rank, int t, int i) {
  return static_cast<std::byte>(64 * rank + 8 * t + i + 1);
}
int expert_at(int rank, int t, int k) {
  return (rank + t + k) % kExperts;
}
// The rows of slice i from a rank.
int slice_rows_at(int rank, int i) {
  return (rank + i) % 3;
}

uint16_t to_bf16(float value) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
}
float from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

float dot_at(int rank, int t) {
  float sum = 0;
  for (int h = 0; h < kHidden; ++h)
    sum += token_at(rank, t, h) * grad_at(rank, t, h);
  return sum;
}

void check_value(float actual, float expected, const char* what, int64_t row, int column) {
  check(actual == expected, "{}[{}, {}] is {}, expected {}", what, row, column, actual, expected);
}

} // namespace

epx_group_config round_config() {
  GroupConfig config;
  config.num_experts = kExperts;
  config.max_tokens_per_rank = kMaxTokens;
  config.hidden_dim = kHiddenDim;
  config.max_top_k = kMaxTopK;
  config.max_alignment = kMaxAlignment;
  config.max_token_dtype = kDtype;
  config.max_sidecar_bytes = kMaxSidecarBytes;
  config.transport = EPX_TRANSPORT_HOST;
  config.timeout_ms = 20000;
  return config;
}

void set_prepare_dispatch(Calls& calls) {
  epx_prepare_dispatch_args& args = calls.prepare_dispatch;
  args.struct_size = sizeof(args);
  args.layer = calls.prepare.layer;
  args.handle_mem = calls.prepare.handle_mem;
  args.handle_mem_bytes = calls.prepare.handle_mem_bytes;
  args.stream = calls.prepare.stream;
  args.topk_idx = calls.prepare.topk_idx;
  args.counts = calls.prepare.counts;
  args.offsets = calls.prepare.offsets;
  args.global_counts = calls.prepare.global_counts;
  args.info = calls.prepare.info;
  args.slot = calls.prepare.slot;
  args.slot_origin = calls.prepare.slot_origin;
  args.tokens = calls.dispatch.tokens;
  args.topk_weights = calls.dispatch.topk_weights;
  args.recv_tokens = calls.dispatch.recv_tokens;
  args.recv_weights = calls.dispatch.recv_weights;
  args.pads = calls.dispatch.pads;
  args.reserved0 = calls.dispatch.reserved0;
  args.format = calls.dispatch.format;
  args.zone_stride = calls.prepare.zone_stride;
}

void give_format(Calls& c, Op op, const FormatCase& format) {
  epx_row_format& given = c.format;
  check_ok(epx_row_format_init(&given, format.scaling), "epx_row_format_init");
  given.dtype = format.dtype;
  given.amax_floor = format.amax_floor;
  c.dispatch.format = c.dispatch_rank_major.format = &given;
  c.combine_bwd.format = c.combine_rank_major_bwd.format = &given;
  c.combine.format = c.dispatch_bwd.format = c.combine_rank_major.format = c.dispatch_rank_major_bwd.format = &given;
  c.tokens.dtype = c.grad_out.dtype = format.token_dtype(kDtype);
  c.recv_tokens.dtype = c.recv_rows.dtype = format.recv_dtype(kDtype);
  c.grad_expert_out.dtype = c.grad_rows.dtype = format.recv_dtype(kDtype);
  if (format.way != FormatWay::on_wire && format.scaling != EPX_SCALING_BLOCK128) c.combine_bwd.recv_weights = nullptr;
  const bool is_nv = format.scaling == EPX_SCALING_NV;
  if (format.way == FormatWay::given) {
    c.scales.dtype = format.scales;
    given.scales = &c.scales;
    if (is_nv) given.row_scales = &c.row_scales;
  }
  if (format.way == FormatWay::on_wire) return;
  const int64_t rows =
      op == Op::dispatch_rank_major || op == Op::combine_rank_major_bwd ? kRanks * kRowsPerSource : c.recv_tokens.sizes[0];
  const int64_t ld = (rows + 3) / 4 * 4;
  given.scale_layout = format.layouts[0];
  c.recv_scales.dtype = format.scales;
  if (given.scale_layout == EPX_SCALES_ROWS) c.recv_scales.sizes[0] = rows;
  if (given.scale_layout == EPX_SCALES_COLUMNS || given.scale_layout == EPX_SCALES_PACKED) c.recv_scales.sizes[1] = ld;
  if (given.scale_layout == EPX_SCALES_PACKED) c.recv_scales.dtype = EPX_INT32;
  if (given.scale_layout == EPX_SCALES_TILES)
    c.recv_scales = epx_tensor_3d(c.recv_scales.data, format.scales, (rows + 127) / 128, 1, 512);
  given.recv_scales = &c.recv_scales;
  c.recv_row_scales.sizes[0] = rows;
  if (is_nv) given.recv_row_scales = &c.recv_row_scales;
}

epx_status call(Op op, const Calls& calls) {
  switch (op) {
#define EPX_TEST_CALL(NUMBER, name, ...)                                                                                   \
  case Op::name:                                                                                                           \
    return epx_##name(calls.group, calls.without_args ? nullptr : &calls.name);
    EPX_OPERATIONS(EPX_TEST_CALL)
#undef EPX_TEST_CALL
  }
  fail_check("no such operation");
}

LayerRound::LayerRound(epx_group group, int rank) : group_(group), rank_(rank), num_tokens_(4 - rank) {
  const epx_group_info info = GroupView(group).query();
  num_local_ = info.num_local_experts;
  num_rows_ = info.max_recv_tokens_per_rank;
  handle_bytes_ = GroupView(group).handle_mem_size({kTopK, kAlignment});
  lay_out();
  fill_inputs();
}

void LayerRound::lay_out() {
  const auto rows = static_cast<size_t>(num_rows_);
  const auto tokens = static_cast<size_t>(num_tokens_);
  std::array<size_t, kNumBuffers> bytes{};
  bytes[kTopkIdx] = tokens * kTopK * sizeof(int64_t);
  bytes[kTokens] = bytes[kGradOut] = bytes[kOut] = bytes[kGradTokens] = tokens * kHidden * sizeof(uint16_t);
  bytes[kSidecar] = tokens * kSidecarBytes;
  bytes[kTopkWeights] = bytes[kGradTopkWeights] = tokens * kTopK * sizeof(float);
  bytes[kHandle] = handle_bytes_;
  bytes[kCounts] = static_cast<size_t>(num_local_) * sizeof(int32_t);
  bytes[kOffsets] = static_cast<size_t>(num_local_ + 1) * sizeof(int32_t);
  bytes[kGlobalCounts] = kRanks * kExperts * sizeof(int32_t);
  bytes[kInfo] = 5 * sizeof(int64_t);
  bytes[kSlot] = tokens * kTopK * sizeof(int32_t);
  bytes[kSlotOrigin] = rows * 3 * sizeof(int32_t);
  bytes[kRecvTokens] = bytes[kGradExpertOut] = rows * kHidden * sizeof(uint16_t);
  bytes[kRecvSidecar] = rows * kSidecarBytes;
  bytes[kRecvWeights] = bytes[kGradRecvWeights] = rows * sizeof(float);
  bytes[kScales] = bytes[kRowScales] = tokens * sizeof(float); // a row has one scale
  bytes[kEncodeScale] = sizeof(float);
  bytes[kRecvScales] = bytes[kRecvRowScales] = (rows + 3) * sizeof(float);
  constexpr size_t kRowCount = kRanks * kRowsPerSource;
  bytes[kRowHandle] = handle_bytes_;
  bytes[kRecvRows] = bytes[kGradRows] = kRowCount * kHidden * sizeof(uint16_t);
  bytes[kRecvRowSidecar] = kRowCount * kSidecarBytes;
  bytes[kRecvRowIdx] = kRowCount * kTopK * sizeof(int32_t);
  bytes[kRecvRowWeights] = kRowCount * kTopK * sizeof(float);
  bytes[kSourceCounts] = kRanks * sizeof(int64_t);
  bytes[kOperand] = kOperandRows * kHidden * sizeof(uint16_t);
  bytes[kOutput] = kOutputRows * kHidden * sizeof(uint16_t);
  bytes[kInputOffsets] = bytes[kSendSizes] = bytes[kOutputOffsets] = bytes[kRecvSizes] = kSlices * sizeof(int32_t);
  size_t end = 0;
  for (int buffer = 0; buffer < kNumBuffers; ++buffer) {
    first_block_[buffer] = end;
    end += (bytes[buffer] + sizeof(Block) - 1) / sizeof(Block);
  }
  first_block_[kNumBuffers] = end;
  arena_.resize(end);
}

void LayerRound::fill_inputs() {
  for (int t = 0; t < num_tokens_; ++t) {
    for (int h = 0; h < kHidden; ++h) {
      as<uint16_t>(kTokens)[t * kHidden + h] = to_bf16(token_at(rank_, t, h));
      as<uint16_t>(kGradOut)[t * kHidden + h] = to_bf16(grad_at(rank_, t, h));
    }
    for (int i = 0; i < kSidecarBytes; ++i)
      at(kSidecar)[t * kSidecarBytes + i] = sidecar_at(rank_, t, i);
    for (int k = 0; k < kTopK; ++k)
      as<float>(kTopkWeights)[t * kTopK + k] = weight_at(k);
  }
  for (int row = 0; row < kOperandRows; ++row)
    for (int h = 0; h < kHidden; ++h)
      as<uint16_t>(kOperand)[row * kHidden + h] = to_bf16(token_at(rank_, row, h));
  for (int i = 0; i < kSlices; ++i) {
    const int peer = i / kSlicesPerRank, of_peer = rank_ * kSlicesPerRank + i % kSlicesPerRank; // a slice from the peer
    as<int32_t>(kInputOffsets)[i] = 3 * i;
    as<int32_t>(kSendSizes)[i] = slice_rows_at(rank_, i);
    as<int32_t>(kOutputOffsets)[i] = 3 * of_peer + 1;
    as<int32_t>(kRecvSizes)[i] = slice_rows_at(peer, of_peer);
  }
  unmask();
}

void LayerRound::mask(int t, int k, int64_t index) {
  as<int64_t>(kTopkIdx)[t * kTopK + k] = index;
  masked_[t * kTopK + k] = true;
}

void LayerRound::unmask() {
  for (int t = 0; t < num_tokens_; ++t) {
    for (int k = 0; k < kTopK; ++k)
      as<int64_t>(kTopkIdx)[t * kTopK + k] = expert_at(rank_, t, k);
  }
  masked_.fill(false);
}

std::unique_ptr<Calls> LayerRound::calls() {
  auto made = std::make_unique<Calls>();
  Calls& c = *made;
  c.group = group_;
  c.topk_idx = epx_tensor_2d(at(kTopkIdx), EPX_INT64, num_tokens_, kTopK);
  c.counts = epx_tensor_1d(at(kCounts), EPX_INT32, num_local_);
  c.offsets = epx_tensor_1d(at(kOffsets), EPX_INT32, num_local_ + 1);
  c.global_counts = epx_tensor_2d(at(kGlobalCounts), EPX_INT32, kRanks, kExperts);
  c.info = epx_tensor_1d(at(kInfo), EPX_INT64, 5);
  c.slot = epx_tensor_2d(at(kSlot), EPX_INT32, num_tokens_, kTopK);
  c.slot_origin = epx_tensor_2d(at(kSlotOrigin), EPX_INT32, num_rows_, 3);
  c.tokens = epx_tensor_2d(at(kTokens), kDtype, num_tokens_, kHidden);
  c.tokens.sidecar = at(kSidecar);
  c.tokens.sidecar_row_bytes = kSidecarBytes;
  c.topk_weights = epx_tensor_2d(at(kTopkWeights), EPX_FLOAT32, num_tokens_, kTopK);
  c.expert_out = c.recv_tokens = epx_tensor_2d(at(kRecvTokens), kDtype, num_rows_, kHidden);
  c.recv_tokens.sidecar = at(kRecvSidecar);
  c.recv_tokens.sidecar_row_bytes = kSidecarBytes;
  c.recv_weights = epx_tensor_1d(at(kRecvWeights), EPX_FLOAT32, num_rows_);
  c.out = epx_tensor_2d(at(kOut), kDtype, num_tokens_, kHidden);
  c.grad_out = epx_tensor_2d(at(kGradOut), kDtype, num_tokens_, kHidden);
  c.grad_recv = c.grad_expert_out = epx_tensor_2d(at(kGradExpertOut), kDtype, num_rows_, kHidden);
  c.grad_recv_weights = epx_tensor_1d(at(kGradRecvWeights), EPX_FLOAT32, num_rows_);
  c.grad_tokens = epx_tensor_2d(at(kGradTokens), kDtype, num_tokens_, kHidden);
  c.grad_topk_weights = epx_tensor_2d(at(kGradTopkWeights), EPX_FLOAT32, num_tokens_, kTopK);

  c.row_expert_out = c.recv_rows = epx_tensor_3d(at(kRecvRows), kDtype, kRanks, kRowsPerSource, kHidden);
  c.recv_rows.sidecar = at(kRecvRowSidecar);
  c.recv_rows.sidecar_row_bytes = kSidecarBytes;
  c.recv_row_idx = epx_tensor_3d(at(kRecvRowIdx), EPX_INT32, kRanks, kRowsPerSource, kTopK);
  c.recv_row_weights = epx_tensor_3d(at(kRecvRowWeights), EPX_FLOAT32, kRanks, kRowsPerSource, kTopK);
  c.source_counts = epx_tensor_1d(at(kSourceCounts), EPX_INT64, kRanks);
  c.grad_rows = epx_tensor_3d(at(kGradRows), kDtype, kRanks, kRowsPerSource, kHidden);

  c.operand = epx_tensor_2d(at(kOperand), kDtype, kOperandRows, kHidden);
  c.output = epx_tensor_2d(at(kOutput), kDtype, kOutputRows, kHidden);
  c.input_offsets = epx_tensor_1d(at(kInputOffsets), EPX_INT32, kSlices);
  c.send_sizes = epx_tensor_1d(at(kSendSizes), EPX_INT32, kSlices);
  c.output_offsets = epx_tensor_1d(at(kOutputOffsets), EPX_INT32, kSlices);
  c.recv_sizes = epx_tensor_1d(at(kRecvSizes), EPX_INT32, kSlices);

  c.scales = epx_tensor_2d(at(kScales), EPX_FLOAT32, num_tokens_, 1);
  c.row_scales = epx_tensor_1d(at(kRowScales), EPX_FLOAT32, num_tokens_);
  c.encode_scale = epx_tensor_1d(at(kEncodeScale), EPX_FLOAT32, 1);
  c.recv_scales = epx_tensor_2d(at(kRecvScales), EPX_FLOAT32, 1, 1);
  c.recv_row_scales = epx_tensor_1d(at(kRecvRowScales), EPX_FLOAT32, 1);

  const auto begin = [this](auto& args) {
    args.struct_size = sizeof(args);
    args.layer = {kTopK, kAlignment};
    args.handle_mem = at(kHandle);
    args.handle_mem_bytes = handle_bytes_;
  };
  begin(c.prepare);
  c.prepare.topk_idx = &c.topk_idx;
  c.prepare.counts = &c.counts;
  c.prepare.offsets = &c.offsets;
  c.prepare.global_counts = &c.global_counts;
  c.prepare.info = &c.info;
  c.prepare.slot = &c.slot;
  c.prepare.slot_origin = &c.slot_origin;
  begin(c.dispatch);
  c.dispatch.tokens = &c.tokens;
  c.dispatch.topk_weights = &c.topk_weights;
  c.dispatch.recv_tokens = &c.recv_tokens;
  c.dispatch.recv_weights = &c.recv_weights;
  set_prepare_dispatch(c);
  begin(c.combine);
  c.combine.expert_out = &c.expert_out;
  c.combine.recv_weights = &c.recv_weights;
  c.combine.out = &c.out;
  begin(c.combine_bwd);
  c.combine_bwd.grad_out = &c.grad_out;
  c.combine_bwd.expert_out = &c.expert_out;
  c.combine_bwd.recv_weights = &c.recv_weights;
  c.combine_bwd.grad_expert_out = &c.grad_expert_out;
  c.combine_bwd.grad_recv_weights = &c.grad_recv_weights;
  begin(c.dispatch_bwd);
  c.dispatch_bwd.grad_recv = &c.grad_recv;
  c.dispatch_bwd.grad_recv_weights = &c.grad_recv_weights;
  c.dispatch_bwd.grad_tokens = &c.grad_tokens;
  c.dispatch_bwd.grad_topk_weights = &c.grad_topk_weights;

  const auto begin_rank_major = [&](auto& args) {
    begin(args);
    args.layer.alignment = 0;
    args.handle_mem = at(kRowHandle);
  };
  begin_rank_major(c.dispatch_rank_major);
  c.dispatch_rank_major.tokens = &c.tokens;
  c.dispatch_rank_major.topk_idx = &c.topk_idx;
  c.dispatch_rank_major.topk_weights = &c.topk_weights;
  c.dispatch_rank_major.recv_tokens = &c.recv_rows;
  c.dispatch_rank_major.recv_topk_idx = &c.recv_row_idx;
  c.dispatch_rank_major.recv_weights = &c.recv_row_weights;
  c.dispatch_rank_major.counts = &c.source_counts;
  begin_rank_major(c.combine_rank_major);
  c.combine_rank_major.expert_out = &c.row_expert_out;
  c.combine_rank_major.out = &c.out;
  begin_rank_major(c.combine_rank_major_bwd);
  c.combine_rank_major_bwd.grad_out = &c.grad_out;
  c.combine_rank_major_bwd.grad_expert_out = &c.grad_rows;
  begin_rank_major(c.dispatch_rank_major_bwd);
  c.dispatch_rank_major_bwd.grad_recv = &c.grad_rows;
  c.dispatch_rank_major_bwd.grad_recv_weights = &c.recv_row_weights;
  c.dispatch_rank_major_bwd.grad_tokens = &c.grad_tokens;
  c.dispatch_rank_major_bwd.grad_topk_weights = &c.grad_topk_weights;

  c.ragged_all_to_all.struct_size = sizeof(c.ragged_all_to_all);
  c.ragged_all_to_all.operand = &c.operand;
  c.ragged_all_to_all.output = &c.output;
  c.ragged_all_to_all.input_offsets = &c.input_offsets;
  c.ragged_all_to_all.send_sizes = &c.send_sizes;
  c.ragged_all_to_all.output_offsets = &c.output_offsets;
  c.ragged_all_to_all.recv_sizes = &c.recv_sizes;
  return made;
}

std::vector<std::byte> LayerRound::memory() const {
  std::vector<std::byte> bytes(arena_.size() * sizeof(Block));
  std::memcpy(bytes.data(), arena_.data(), bytes.size());
  return bytes;
}

void LayerRound::scribble_outputs() {
  const size_t blocks = first_block_[kNumBuffers] - first_block_[kFirstOutput];
  std::memset(at(kFirstOutput), std::to_integer<int>(kScribble), blocks * sizeof(Block));
}

void LayerRound::run(Op op) {
  check_ok(call(op, *calls()), "a good call");
}

void LayerRound::run_all() {
  run_and_check({Op::prepare, Op::dispatch, Op::combine, Op::combine_bwd, Op::dispatch_bwd});
}

void LayerRound::run_fused() {
  run_and_check({Op::prepare_dispatch, Op::combine, Op::combine_bwd, Op::dispatch_bwd});
}

void LayerRound::run_and_check(std::initializer_list<Op> operations) {
  scribble_outputs();
  for (const Op op : operations)
    run(op);
  check_results();
  const epx_group_report report = GroupView(group_).status();
  check(report.message[0] == '\0', "after a good round the group reports: {}", report.message);
}

int32_t LayerRound::slot(int t, int k) const {
  return as<int32_t>(kSlot)[t * kTopK + k];
}

float LayerRound::kept_weight(int t) const {
  float sum = 0;
  for (int k = 0; k < kTopK; ++k)
    sum += kept(t, k) ? weight_at(k) : 0;
  return sum;
}

template <typename Expected>
void LayerRound::check_row(Buffer buffer, int64_t row, const char* what, const Expected& expected_at) const {
  for (int h = 0; h < kHidden; ++h)
    check_value(from_bf16(as<uint16_t>(buffer)[row * kHidden + h]), expected_at(h), what, row, h);
}

template <typename Expected>
void LayerRound::check_sidecar(Buffer buffer, int64_t row, const Expected& expected_at) const {
  for (int i = 0; i < kSidecarBytes; ++i)
    check(at(buffer)[row * kSidecarBytes + i] == expected_at(i), "byte {} of the sidecar of row {} is wrong", i, row);
}

void LayerRound::check_received() const {
  const int32_t rows_in_use = as<int32_t>(kOffsets)[num_local_];
  check(rows_in_use > 0 && rows_in_use <= num_rows_, "{} rows in use of {}", rows_in_use, num_rows_);
  for (int32_t s = 0; s < rows_in_use; ++s) {
    const int32_t* origin = as<int32_t>(kSlotOrigin) + 3 * s;
    const int rank = origin[0];
    const int t = origin[1];
    const bool zero = rank < 0;
    check_value(as<float>(kRecvWeights)[s], zero ? 0 : weight_at(origin[2]), "recv_weights", s, 0);
    check_row(kRecvTokens, s, "recv_tokens", [&](int h) { return zero ? 0 : token_at(rank, t, h); });
    check_sidecar(kRecvSidecar, s, [&](int i) { return zero ? std::byte{0} : sidecar_at(rank, t, i); });
  }
}

bool LayerRound::goes_to(int source, int t, int k) const {
  const int first = rank_ == 0 ? 0 : 3; // local expert
  return expert_at(source, t, k) >= first && expert_at(source, t, k) < first + num_local_;
}

void LayerRound::run_rank_major() {
  scribble_outputs();
  for (const Op op :
       {Op::dispatch_rank_major, Op::combine_rank_major, Op::combine_rank_major_bwd, Op::dispatch_rank_major_bwd})
    run(op);
  const int first_expert = rank_ == 0 ? 0 : 3;
  for (int source = 0; source < kRanks; ++source) {
    int rows = 0;
    for (int t = 0; t < 4 - source; ++t) {
      if (!goes_to(source, t, 0) && !goes_to(source, t, 1)) continue;
      const int row = source * kRowsPerSource + rows++;
      check_row(kRecvRows, row, "rank-major rows", [&](int h) { return token_at(source, t, h); });
      check_row(kGradRows, row, "their gradients", [&](int h) { return grad_at(source, t, h); });
      check_sidecar(kRecvRowSidecar, row, [&](int i) { return sidecar_at(source, t, i); });
      for (int k = 0; k < kTopK; ++k) {
        const bool is_here = goes_to(source, t, k);
        check_equal(as<int32_t>(kRecvRowIdx)[row * kTopK + k], is_here ? expert_at(source, t, k) - first_expert : -1,
                    "a local expert");
        check_value(as<float>(kRecvRowWeights)[row * kTopK + k], is_here ? weight_at(k) : 0, "rank-major weights", row, k);
      }
    }
    check_equal(as<int64_t>(kSourceCounts)[source], int64_t{rows}, "the rows of a source");
    for (int row = rows; row < kRowsPerSource; ++row)
      for (size_t byte = 0; byte < kHidden * sizeof(uint16_t); ++byte)
        check(at(kRecvRows)[static_cast<size_t>(source * kRowsPerSource + row) * kHidden * sizeof(uint16_t) + byte] ==
                  kScribble,
              "row {} of source {} was written", row, source);
  }
  for (int t = 0; t < num_tokens_; ++t) {
    const int ranks = (expert_at(rank_, t, 0) < 3) == (expert_at(rank_, t, 1) < 3) ? 1 : 2;
    const auto times = static_cast<float>(ranks);
    check_row(kOut, t, "out", [&](int h) { return times * token_at(rank_, t, h); });
    check_row(kGradTokens, t, "grad_tokens", [&](int h) { return times * grad_at(rank_, t, h); });
    for (int k = 0; k < kTopK; ++k)
      check_value(as<float>(kGradTopkWeights)[t * kTopK + k], weight_at(k), "grad_topk_weights", t, k);
  }
}

void LayerRound::run_ragged() {
  scribble_outputs();
  run(Op::ragged_all_to_all);
  for (int row = 0; row < kOutputRows; ++row) {
    // The slice that may land here: number `of_source` of its rank.
    const int number = (row - 1) / 3, source = number / kSlicesPerRank;
    const int of_source = rank_ * kSlicesPerRank + number % kSlicesPerRank, n = (row - 1) % 3;
    if (row > 0 && number < kSlices && n < slice_rows_at(source, of_source)) {
      check_row(kOutput, row, "ragged rows", [&](int h) { return token_at(source, 3 * of_source + n, h); });
      continue;
    }
    for (size_t byte = 0; byte < kHidden * sizeof(uint16_t); ++byte)
      check(at(kOutput)[static_cast<size_t>(row) * kHidden * sizeof(uint16_t) + byte] == kScribble,
            "row {} of output was written, on which no slice lands", row);
  }
}

void LayerRound::check_results() {
  check_received();
  const int32_t rows_in_use = as<int32_t>(kOffsets)[num_local_];
  for (int32_t s = 0; s < rows_in_use; ++s) {
    const int32_t* origin = as<int32_t>(kSlotOrigin) + 3 * s;
    const bool pad = origin[0] < 0;
    check_value(as<float>(kGradRecvWeights)[s], pad ? 0 : dot_at(origin[0], origin[1]), "grad_recv_weights", s, 0);
    check_row(kGradExpertOut, s, "grad_expert_out",
              [&](int h) { return pad ? 0 : weight_at(origin[2]) * grad_at(origin[0], origin[1], h); });
  }
  for (int t = 0; t < num_tokens_; ++t) {
    check_row(kOut, t, "out", [&](int h) { return kept_weight(t) * token_at(rank_, t, h); });
    check_row(kGradTokens, t, "grad_tokens", [&](int h) { return kept_weight(t) * grad_at(rank_, t, h); });
    for (int k = 0; k < kTopK; ++k) {
      check_value(as<float>(kGradTopkWeights)[t * kTopK + k], kept(t, k) ? dot_at(rank_, t) : 0, "grad_topk_weights", t, k);
      check((slot(t, k) >= 0) == kept(t, k), "slot[{}, {}] is {}", t, k, slot(t, k));
    }
  }
}

} // namespace epx::test
