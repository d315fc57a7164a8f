// SPDX-License-Identifier: Apache-2.0
// WindowLayout defines every offset and byte count of the group's window once, for host and device.
//
// Every rank has one such window, into which every rank of the group may store. Where kernels access the windows, LL packets
// take the place of plain words in two regions (call_descriptors, counts), which are larger for that, and there are regions
// that kernels alone use; these take no bytes where the host accesses the windows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "base/checked_math.h"
#include "base/dtypes.h"
#include "base/operations.h"
#include "runtime/config.h"
#include "runtime/formats/row_format.h"
#include "runtime/formats/scale_layout.h"
#include "transport/peer_window.h"

namespace epx {

constexpr int64_t kRegionAlignment = 256; // bytes; regions share no cache line, and bulk copies are aligned
constexpr int64_t kRowAlignment = 16;     // bytes, for vector loads and bulk copies; staged sidecars are padded to it
// Staged rows are padded to lines, since bulk stores that begin between two lines take more of the wire (docs/tuning.md).
constexpr int64_t kStagedRowAlignment = 128;

// A flag has two cache lines of its own, since the adjacent-line prefetcher fetches pairs.
struct alignas(128) Flag {
  uint64_t value; // in `complete` a sequence number, which only grows; in `abort_record` and `waiting` a packed word, or 0
};

// An address in an allocation of the group (epx_mem_alloc, epx_mem_register). Every peer resolves the same pair to the same
// bytes of this rank's memory.
struct AllocationPlace {
  int64_t allocation; // its number; -1: in no allocation, so that peers cannot access it
  int64_t offset;     // bytes

  constexpr bool is_registered() const { return allocation >= 0; }
};
constexpr AllocationPlace kNotRegistered{-1, 0};

// Each rank announces its call to every peer at the entry barrier: it writes a CallDescriptor into the peer's window. See
// runtime/stages/call_descriptor.h, which makes them.
struct alignas(128) CallDescriptor {
  // Agreed fields: all ranks must pass the same values.
  uint8_t operation;
  uint8_t top_k;
  uint8_t weights : 4;     // bit 0: weights are passed; bit 1: weight gradients are wanted
  uint8_t row_spacing : 4; // dispatch_rank_major: epx_row_spacing; ragged_all_to_all: epx_slice_direction
  uint8_t dtype;           // of what is read
  uint8_t recv_dtype;      // of what is written
  uint8_t scaling;         // of the row format, as the next two
  uint8_t element_dtype;
  uint8_t scale_dtype;
  int32_t alignment;
  int32_t hidden;        // ragged_all_to_all: the bytes of a row
  int32_t sidecar_bytes; // per row
  uint32_t amax_floor;   // of the row format: the bits of a float
  // mem_free: number of the allocation; rank-major calls: M, the rows of a source; prepare: the stride of zones;
  // ragged_all_to_all: the number of slices.
  int64_t subject;
  // Fields of this rank.
  int64_t num_tokens; // T; ragged_all_to_all: N, the rows of operand
  // Movements: HandleHeader::plan_id, or 0 when the handle memory is not usable. prepare and prepare_dispatch of kernels: the
  // sequence number of this call. Other calls: 0.
  uint64_t plan_id;
  int64_t recv_rows; // N; ragged_all_to_all: M, the rows of output
  // Number of the allocation that holds the rows [N, H], and their offset in it in bytes; -1: none, or not used. In a scatter
  // and in dispatch_rank_major peers store receive rows there; in a gather of the host transport they read the rows there.
  int64_t rows_allocation;
  int64_t rows_offset;
  int64_t stages_rows; // scatter: 1 if this rank's rows go into staging even where they could be written in place
  // Host transport only: the same for the weights of the rows of a gather.
  int64_t weights_allocation;
  int64_t weights_offset;
  // Host transport only: stored last, with release order. Kernels store the sequence number beside each word (LlField).
  uint64_t sequence;
};

// LL packets carry small data between kernels (flag in data, as in NCCL's LL protocol): each packet holds a value and the
// call's sequence number, and is stored and loaded by one single-copy atomic access of 8 or 16 bytes, so that whoever sees the
// number has the value. No fence and no separate flag is needed. An Epoch is the number's low half; no packet stays unwritten
// for exactly 2^32 calls and is then waited for.
struct alignas(16) LlField {
  uint64_t value;
  uint64_t sequence;
};
using Epoch = uint32_t;
struct alignas(8) LlPacket8 {
  int32_t value;
  Epoch epoch;
};

// Between kernels those words of a CallDescriptor that they use travel in an LL packet each.
constexpr int kNumDescriptorWords = offsetof(CallDescriptor, weights_allocation) / sizeof(uint64_t);
constexpr int kNumAgreedWords = offsetof(CallDescriptor, num_tokens) / sizeof(uint64_t); // these come first
// num_tokens, plan_id and recv_rows come behind those: what the low-latency path needs.
constexpr int kNumLlPathWords = offsetof(CallDescriptor, rows_allocation) / sizeof(uint64_t) - kNumAgreedWords;
static_assert(kNumLlPathWords == 3);
struct alignas(256) LlCallDescriptor {
  LlField words[kNumDescriptorWords];
};
static_assert(sizeof(LlCallDescriptor) == 256);

// An LL packet of three words. Rows of the low-latency path travel through staging of their own in lines of eight such packets,
// of which the last one alone has an epoch (as in NCCL's LL128 protocol); in place of the others' epochs there is data. A warp
// moves an LL chunk of a row at a time: twelve lines, and four packets for the words that their epochs displace. That is 4 %
// more bytes than the row has, but a line can be loaded as soon as its epoch is seen.
struct alignas(16) LlPacket16 {
  uint32_t values[3];
  Epoch epoch;
};
constexpr int kLlChunkBytes = 1536;
constexpr int kLlLinePackets = 8;
constexpr int64_t kLlChunkPackets = kLlChunkBytes / sizeof(LlPacket16) + kLlLinePackets;
static_assert(kLlChunkPackets % kLlLinePackets == 0 &&
              kRegionAlignment % (kLlLinePackets * sizeof(LlPacket16)) == 0); // of lines
constexpr int64_t ll_chunks_of(int64_t row_bytes) {
  return (row_bytes + kLlChunkBytes - 1) / kLlChunkBytes;
}

// A chunk of a quantised row is the WireRow of a part of its elements, so that a receiver needs no other chunk. Returns how many
// elements a part has but for the last one: whole blocks, a multiple of four of them where scales are bytes, which are then
// copied by words.
constexpr int ll_part_elements(const WireFormat& format) {
  switch (format.scaling) {
  case EPX_SCALING_NV:
    return 2688;
  case EPX_SCALING_BLOCK128_POW2:
    return format.scales == EPX_FLOAT32 ? 1408 : 1024;
  default:
    return 1408;
  }
}
constexpr int64_t ll_chunks_of(const WireFormat& format, int64_t hidden) {
  return (hidden + ll_part_elements(format) - 1) / ll_part_elements(format);
}
static_assert(std::ranges::all_of(
    std::initializer_list<WireFormat>{{EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0f},
                                      {EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0f},
                                      {EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0f},
                                      {EPX_SCALING_MX, EPX_FLOAT8_E5M2, EPX_FLOAT8_E8M0, 0.0f},
                                      {EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_FLOAT8_E4M3, 0.0f}},
    [](const WireFormat& format) {
      const int elements = ll_part_elements(format);
      return WireRow(format, elements).bytes <= kLlChunkBytes && elements % format.block() == 0 &&
             (format.scales == EPX_FLOAT32 || elements / format.block() % ScaleLayout::kPerWord == 0) &&
             format.scale_bytes(elements) <= 32 * kRowAlignment; // a vector of scales for each lane of a warp
    }));
// Returns how many chunks a row of a group takes at most. `dtype` is its max_token_dtype, of which a row has `bytes` bytes.
constexpr int64_t max_ll_chunks(epx_dtype dtype, int64_t hidden, int64_t bytes) {
  const WireFormat most_chunks = dtype == EPX_FLOAT4_E2M1
                                     ? WireFormat{EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_FLOAT8_E4M3, 0.0f}
                                     : WireFormat{EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0f};
  return std::max(ll_chunks_of(bytes), ll_chunks_of(most_chunks, hidden));
}

// Returns to how many other ranks a row may go; at least 1.
inline int max_copies_of_row(const GroupShape& shape) {
  return std::max(1, std::min(shape.num_ranks - 1, shape.max_top_k));
}

// Limits of the low-latency path, which sizes of memory follow from, so that they are the same on every GPU; within them
// LlLimits has what pays on the group's GPUs. More than kMinLlTokens must fit into the routing all-gather with max_top_k routes
// each, so that the table of their slots keeps the handle memory within its bound (epx.h).
constexpr int kMaxLlTokens = 512;                  // of one rank
constexpr int kMaxLlTokensOfAllRanks = 2048;       // together
constexpr int kMinLlTokens = 128;                  // of one rank, to which the two limits below do not apply
constexpr int64_t kMaxLlBytes = int64_t{32} << 20; // of rows that a rank sends, once for each rank that they may go to
constexpr int kMaxGatheredRoutes = 16384;          // of the routing all-gather, all ranks together

struct LlLimits {
  int64_t max_chunks;          // of one rank's longest rows; 0: no row takes the path
  int64_t max_gathered_routes; // of the routing all-gather, all ranks together
};

inline int64_t max_ll_tokens(const GroupShape& shape) {
  const int64_t by_bytes =
      kMaxLlBytes / (max_wire_bytes(shape.max_token_dtype, shape.hidden_dim) * max_copies_of_row(shape));
  const int64_t by_routes = kMaxGatheredRoutes / (int64_t{shape.num_ranks} * shape.max_top_k);
  const int64_t tokens = std::clamp<int64_t>(std::min(by_bytes, by_routes), kMinLlTokens, kMaxLlTokens);
  return std::min({int64_t{shape.max_tokens_per_rank}, tokens, int64_t{kMaxLlTokensOfAllRanks / shape.num_ranks}});
}

// One rank's record has this size in an exchange of small host-side records (allocation of memory).
constexpr int64_t kExchangeRecordBytes = 512;

// Returns the bytes from one staged row, or sidecar, to the next.
inline int64_t row_pitch(int64_t bytes, const char* what) {
  return checked_round_up(bytes, kRowAlignment, what);
}

// Returns the bytes from one staged row to the next, which are those of the longest row that the group takes.
inline int64_t staged_row_stride(const GroupShape& shape, const char* what) {
  return checked_round_up(max_wire_bytes(shape.max_token_dtype, shape.hidden_dim), kStagedRowAlignment, what);
}

// A region is a contiguous range of bytes of the window.
struct Region {
  int64_t offset;
  int64_t bytes;
};

// Says who ended the group and why. It is packed into one word so that one compare-and-swap publishes all of it. The word is 0
// while nobody has.
struct AbortRecord {
  epx_status status;
  epx_operation operation; // ABORTED: the call that was interrupted; NONE where epx_group_abort was called
  int32_t culprit;
  uint64_t sequence;
  epx_phase phase = EPX_PHASE_NONE; // TIMEOUT: the phase in which the rank that gave up had waited
};
constexpr int kAbortSequenceBits = 38;
constexpr uint64_t kAbortSequenceMask = (uint64_t{1} << kAbortSequenceBits) - 1;

static_assert(kLastOperation < 16); // an operation has four bits

constexpr uint64_t pack(const AbortRecord& abort_record) {
  return static_cast<uint64_t>(abort_record.status) << 60 | static_cast<uint64_t>(abort_record.operation) << 56 |
         static_cast<uint64_t>(abort_record.culprit) << 40 |
         static_cast<uint64_t>(abort_record.phase) << kAbortSequenceBits | (abort_record.sequence & kAbortSequenceMask);
}

constexpr AbortRecord unpack_abort_record(uint64_t word) {
  return {static_cast<epx_status>(word >> 60), static_cast<epx_operation>(word >> 56 & 0xf),
          static_cast<int32_t>(word >> 40 & 0xffff), word & kAbortSequenceMask,
          static_cast<epx_phase>(word >> kAbortSequenceBits & 0x3)};
}

// Anything in the process of a rank can overwrite its window: a record is validated before it is used.
constexpr bool is_sound(const AbortRecord& abort_record, int num_ranks) {
  return abort_record.status > EPX_SUCCESS && abort_record.status <= EPX_ERROR_INTERNAL &&
         abort_record.operation >= EPX_OP_NONE && abort_record.operation <= kLastOperation &&
         abort_record.phase <= EPX_PHASE_COMPLETE && abort_record.culprit >= 0 && abort_record.culprit < num_ranks;
}

// Says which peer a rank waits for. It is packed into one word. The word is 0 while it waits for nobody.
struct Waiting {
  uint64_t sequence; // of the call
  epx_phase phase;
  int32_t peer;
};

constexpr uint64_t pack(const Waiting& waiting) {
  return waiting.sequence << 20 | static_cast<uint64_t>(waiting.phase) << 16 | static_cast<uint64_t>(waiting.peer);
}

constexpr Waiting unpack_waiting(uint64_t word) {
  return {word >> 20, static_cast<epx_phase>(word >> 16 & 0xf), static_cast<int32_t>(word & 0xffff)};
}

constexpr bool is_sound(const Waiting& waiting, int num_ranks) {
  return (waiting.phase == EPX_PHASE_ARRIVE || waiting.phase == EPX_PHASE_COMPLETE) && waiting.peer >= 0 &&
         waiting.peer < num_ranks;
}

// Of ragged_all_to_all: what a rank tells a peer of the slices between them (runtime/layout/slices.h), and the most rounds in
// which rows pass through staging.
constexpr int kNumSliceFields = 4;
constexpr int kMaxSliceRounds = 512;

// Gather signals the splits of a row one by one, and moves them so where warps have few of them (docs/tuning.md).
constexpr int kMaxRowSplits = 2;

struct WindowLayout {
  // Control.
  Region abort_record; // Flag: packed AbortRecord
  Region waiting;      // Flag: packed Waiting; read by peers that time out
  // By source rank: CallDescriptor [P]; kernels: LlCallDescriptor [2, P], by parity of the call.
  Region call_descriptors;
  Region complete; // Flag [P], by source rank: last call whose data from that rank has all been stored here
  // ragged_all_to_all. Epoch [2, P, kMaxSliceRounds], by peer: rounds that it has stored here, and has copied there. Host
  // transport: Flag [P], by source rank: the call and its last step.
  Region slice_flags;
  // kExchangeRecordBytes [P], by source rank; dispatch_rank_major: RankMajorCounts; kernels: LlPacket16 [2], by parity.
  Region board;
  // Prepare.
  Region counts;          // routes from each rank to each expert: int32 [2, P, E], by parity; kernels: LlPacket8 [2, P, E]
  Region gathered_routes; // LlPacket8 [2, P, gathered_routes_per_rank], by parity and source rank: experts; kernels only
  Region slice_records;   // int32 [P, kNumSliceFields, EPX_MAX_SLICES / P], by peer; kernels: LlPacket8 [2, ...], by parity
  Region ll_slot_records; // LlSlotRecord [R]; see rank_major_routes()
  Region first_slots;     // LlPacket8 [P, max_tokens]: each token's first slot here, by source rank; kernels only
  // Scatter (dispatch, combine_bwd), stored by the token's rank.
  Region scatter_rows;          // [scatter_staging_rows, row_stride]
  Region scatter_sidecars;      // [scatter_staging_rows, sidecar_stride]
  Region scatter_weights;       // float [R], by slot
  Region scatter_token_weights; // float [P, max_tokens, max_top_k], by source rank: those of prepare_dispatch; kernels only
  Region scatter_ready_flags;   // Epoch [P, max_tokens]: last call that stored the token's row; kernels only
  // Gather (combine, dispatch_bwd), stored by the expert's rank.
  Region gather_rows;        // [gather_staging_rows, row_stride]
  Region gather_weights;     // float [max_tokens * max_top_k], by (token, k)
  Region gather_ready_flags; // Epoch [gather_staging_rows, kMaxRowSplits]: last call that stored the split; kernels only
  // LL staging of the same two, double-buffered by parity of the call: a sender need not know how far the peer is. Only kernels
  // use it; the gather's exists in precision wire only.
  Region ll_scatter_rows;    // LlPacket16 [2, P, ll_tokens, ll_chunks, kLlChunkPackets], by source rank: row, then sidecar
  Region ll_scatter_weights; // LlPacket8 [2, P, ll_tokens, max_top_k], by source rank: the bits of floats
  Region ll_rank_major_routes; // RankMajorRoute [2, P, ll_tokens, max_top_k], by source rank
  Region ll_gather_rows;       // LlPacket16 [2, ll_tokens, min(P, max_top_k), ll_row_chunks, kLlChunkPackets]
  Region ll_gather_weights;    // LlPacket8 [2, ll_tokens, max_top_k]: the bits of floats

  int64_t row_stride;           // bytes
  int64_t sidecar_stride;       // bytes
  int64_t scatter_staging_rows; // rows
  int64_t gather_staging_rows;  // rows
  bool scatter_by_token;        // a staged row lies at (source, token); otherwise at the token's first slot
  int64_t ll_tokens;            // largest T of any rank, or M of dispatch_rank_major, for the LL path
  int64_t gathered_routes_per_rank;
  int64_t ll_row_chunks;
  int64_t ll_chunks; // of a row and its sidecar

  int64_t total_bytes;
  int64_t control_bytes() const { return counts.offset; }

  // RankMajorRoute [P, min(M, max_tokens), K]: those of dispatch_rank_major, at most R. They overlay ll_slot_records, which
  // prepare stores. Ranks store either once all of them have begun the call, and so have read what the last one left there.
  // Nobody clears them: prepare polls the epochs of records where routes may lie, so both have one at the same place.
  constexpr const Region& rank_major_routes() const { return ll_slot_records; }
};

// Returns whether the rows of a rank with so many tokens fit the staging of the low-latency path. So it may send them there before
// it knows of the others' (prepare_dispatch): its peers learn the number from its call descriptor.
constexpr bool fits_ll_staging(const WindowLayout& layout, int64_t num_tokens, int top_k) {
  return num_tokens >= 0 && num_tokens <= layout.ll_tokens && num_tokens * top_k <= layout.gathered_routes_per_rank;
}

// Limits the low-latency path to what pays on the GPUs of the group. The limits are the same on all ranks.
inline void limit_ll_path(WindowLayout& layout, int num_ranks, const LlLimits& limits) {
  layout.ll_tokens = std::min(layout.ll_tokens, limits.max_chunks / layout.ll_row_chunks);
  layout.gathered_routes_per_rank = std::min(layout.gathered_routes_per_rank, limits.max_gathered_routes / num_ranks);
}

constexpr int64_t kLlSlotRecordBytes = 16; // sizeof(LlSlotRecord), runtime/layout/slots.h, and sizeof(RankMajorRoute)

// The layout for kernels is the larger one. Throws StatusError when the sizes cannot be represented.
inline WindowLayout make_window_layout(const GroupShape& shape, WindowAccess access) {
  const char* what = "the group's window";
  const int64_t ranks = shape.num_ranks;
  const int64_t tokens = shape.max_tokens_per_rank;
  WindowLayout layout{};
  const auto append = [&](Region& region, int64_t count, int64_t bytes_each) {
    region.offset = layout.total_bytes;
    region.bytes = checked_round_up(checked_mul(count, bytes_each, what), kRegionAlignment, what);
    layout.total_bytes = checked_add(layout.total_bytes, region.bytes, what);
  };
  const bool has_kernels = access == WindowAccess::by_kernels;
  const auto append_for_kernels = [&](Region& region, int64_t count, int64_t bytes_each) {
    append(region, has_kernels ? count : 0, bytes_each);
  };

  const int64_t max_row_bytes = row_pitch(max_wire_bytes(shape.max_token_dtype, shape.hidden_dim), what);
  layout.row_stride = staged_row_stride(shape, what);
  layout.sidecar_stride = row_pitch(shape.max_sidecar_bytes, what);
  // A token's row is staged once per receiver: by (source, token), or, where that table would be the larger one, by slot.
  layout.scatter_by_token = ranks * tokens <= shape.max_recv_tokens;
  layout.scatter_staging_rows = std::min(ranks * tokens, shape.max_recv_tokens);
  const bool exact = shape.precision == EPX_COMBINE_EXACT;
  layout.gather_staging_rows = tokens * (exact ? shape.max_top_k : std::min(shape.num_ranks, shape.max_top_k));

  layout.ll_tokens = max_ll_tokens(shape);
  layout.gathered_routes_per_rank = kMaxGatheredRoutes / ranks;
  layout.ll_row_chunks = max_ll_chunks(shape.max_token_dtype, shape.hidden_dim, max_row_bytes);
  layout.ll_chunks = layout.ll_row_chunks + ll_chunks_of(layout.sidecar_stride);

  append(layout.abort_record, 1, sizeof(Flag));
  append(layout.waiting, 1, sizeof(Flag));
  append(layout.call_descriptors, has_kernels ? 2 * ranks : ranks,
         has_kernels ? sizeof(LlCallDescriptor) : sizeof(CallDescriptor));
  append(layout.complete, ranks, sizeof(Flag));
  append(layout.slice_flags, has_kernels ? 2 * ranks * kMaxSliceRounds : ranks, has_kernels ? sizeof(Epoch) : sizeof(Flag));
  append(layout.board, ranks, kExchangeRecordBytes);
  append(layout.counts, checked_mul(2 * ranks, shape.num_experts, what), has_kernels ? sizeof(LlPacket8) : sizeof(int32_t));
  append_for_kernels(layout.gathered_routes, 2 * ranks * layout.gathered_routes_per_rank, sizeof(LlPacket8));
  append(layout.slice_records, int64_t{has_kernels ? 2 : 1} * kNumSliceFields * EPX_MAX_SLICES,
         has_kernels ? sizeof(LlPacket8) : sizeof(int32_t));
  append(layout.ll_slot_records, shape.max_recv_tokens, kLlSlotRecordBytes);
  append_for_kernels(layout.first_slots, ranks * tokens, sizeof(LlPacket8));
  append(layout.scatter_rows, layout.scatter_staging_rows, layout.row_stride);
  append(layout.scatter_sidecars, layout.scatter_staging_rows, layout.sidecar_stride);
  append(layout.scatter_weights, shape.max_recv_tokens, sizeof(float));
  append_for_kernels(layout.scatter_token_weights, checked_mul(ranks * tokens, shape.max_top_k, what), sizeof(float));
  append_for_kernels(layout.scatter_ready_flags, ranks * tokens, sizeof(Epoch));
  append(layout.gather_rows, layout.gather_staging_rows, layout.row_stride);
  append(layout.gather_weights, tokens * shape.max_top_k, sizeof(float));
  append_for_kernels(layout.gather_ready_flags, layout.gather_staging_rows * kMaxRowSplits, sizeof(Epoch));
  const int64_t ll_rows = 2 * layout.ll_tokens; // both parities
  append_for_kernels(layout.ll_scatter_rows, checked_mul(ll_rows * ranks, layout.ll_chunks * kLlChunkPackets, what),
                     sizeof(LlPacket16));
  append_for_kernels(layout.ll_scatter_weights, ll_rows * ranks * shape.max_top_k, sizeof(LlPacket8));
  append_for_kernels(layout.ll_rank_major_routes, ll_rows * ranks * shape.max_top_k, kLlSlotRecordBytes);
  append_for_kernels(layout.ll_gather_rows,
                     exact ? 0
                           : checked_mul(ll_rows * std::min(shape.num_ranks, shape.max_top_k),
                                         layout.ll_row_chunks * kLlChunkPackets, what),
                     sizeof(LlPacket16));
  append_for_kernels(layout.ll_gather_weights, exact ? 0 : ll_rows * shape.max_top_k, sizeof(LlPacket8));
  return layout;
}

} // namespace epx
