// Where everything lies in the group's window: every offset and byte count, once, for host and device.
//
// Every rank has one such window, and every peer may store into it. The layout depends on the transport only in that regions
// which kernels alone use take no bytes on the host transport.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/checked_math.h"
#include "base/dtypes.h"
#include "runtime/config.h"

namespace epx {

constexpr int64_t kRegionAlignment = 256; // bytes; keeps regions off each other's cache lines, and bulk copies aligned
constexpr int64_t kRowAlignment = 16;     // bytes; staged rows are padded to it, for vector loads and bulk copies

// One flag, alone on two cache lines (the adjacent-line prefetcher pulls pairs).
struct alignas(128) Flag {
  uint64_t value; // a sequence number; only grows
};

// What a rank offers in one call to one peer. Written by that rank into the peer's window.
struct alignas(128) CallDescriptor {
  // Terms that all ranks must agree on.
  int32_t operation;
  int32_t top_k;
  int32_t alignment;
  int32_t hidden;
  int32_t dtype;
  int32_t weights;       // bit 0: weights are passed; bit 1: weight gradients are wanted
  int64_t sidecar_bytes; // per row
  int64_t allocation;    // mem_free: number of the allocation
  // This rank's own.
  int64_t num_tokens;         // T
  uint64_t plan_id;           // sequence number of the prepare that made the handle memory; 0: takes part without routes
  int64_t recv_rows;          // N
  int64_t rows_allocation;    // allocation that the receive rows lie in, where peers may reach them; -1: none
  int64_t rows_offset;        // bytes into that allocation
  int64_t weights_allocation; // the same for the receive weights of a gather
  int64_t weights_offset;
  // Stored last, with release order.
  uint64_t sequence;
};

// What kernels send each other in few words carries the call's sequence number in every word, and is stored and loaded at
// once: who sees the number has the value. No fence, no flag. (A Epoch is the number's low half; nothing lies unwritten for
// exactly 2^32 calls and is then waited for.)
struct alignas(16) LlField {
  uint64_t value;
  uint64_t sequence;
};
using Epoch = uint32_t;
struct alignas(8) LlPacket8 {
  int32_t value;
  Epoch epoch;
};

// A CallDescriptor between kernels: its words before `sequence` that they use, tagged each.
constexpr int kNumDescriptorWords = offsetof(CallDescriptor, weights_allocation) / sizeof(uint64_t);
struct alignas(256) LlCallDescriptor {
  LlField words[kNumDescriptorWords];
};
static_assert(sizeof(LlCallDescriptor) == 256);

// Rows of few tokens travel through staging of their own in such words, twelve bytes in each: more bytes than the row has,
// but a word is there as soon as it can be seen. A warp moves a chunk of a row at a time.
struct alignas(16) LlPacket16 {
  uint32_t values[3];
  Epoch epoch;
};
constexpr int kLlChunkBytes = 1536;
constexpr int64_t kLlChunkPackets = kLlChunkBytes / (3 * sizeof(uint32_t));
constexpr int64_t ll_chunks_of(int64_t row_bytes) {
  return (row_bytes + kLlChunkBytes - 1) / kLlChunkBytes;
}

constexpr int kMaxLlTokens = 128; // of a rank; with more, the bytes that tags take cost more than waiting for a row's end
constexpr int kMaxLlRows = 2048;  // of all ranks' few tokens
constexpr int kMaxGatheredRoutes = 8192; // of all ranks
inline int64_t max_ll_tokens(const GroupShape& shape) {
  return std::min({shape.max_tokens_per_rank, kMaxLlTokens, kMaxLlRows / shape.num_ranks});
}

// One rank's contribution to an exchange of small host-side records (allocation of memory).
constexpr int64_t kExchangeRecordBytes = 512;

// A run of bytes of the window.
struct Region {
  int64_t offset;
  int64_t bytes;
};

// Who ended the group and why, packed into one word so that one compare-and-swap publishes all of it. 0: nobody.
struct AbortRecord {
  epx_status status;
  epx_operation operation;
  int32_t culprit;
  uint64_t sequence;
  epx_phase phase = EPX_PHASE_NONE; // TIMEOUT: what the rank that gave up had waited in
};
constexpr int kAbortSequenceBits = 38;
constexpr uint64_t kAbortSequenceMask = (uint64_t{1} << kAbortSequenceBits) - 1;

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

// What lies in a window can be overwritten by anything in the process of a rank: a record is looked at before it is used.
constexpr bool is_sound(const AbortRecord& abort_record, int num_ranks) {
  return abort_record.status > EPX_SUCCESS && abort_record.status <= EPX_ERROR_INTERNAL &&
         abort_record.operation >= EPX_OP_NONE && abort_record.operation <= EPX_OP_MEM_FREE &&
         abort_record.phase <= EPX_PHASE_COMPLETE && abort_record.culprit >= 0 && abort_record.culprit < num_ranks;
}

// Whom a rank waits for, packed into one word. 0: nobody.
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

// Parts of a row that gather takes and tells of one by one. On 2 H200 combine (4096 tokens of 7168 bfloat16, top-8 of 256)
// took 220 us with whole rows and 207 with halves; thirds and quarters took longer than halves.
constexpr int kMaxRowSplits = 2;

struct WindowLayout {
  // Control.
  Region abort_record; // Flag: packed AbortRecord
  Region waiting;      // Flag: packed Waiting; read by peers that time out
  Region posts;        // by source rank: CallDescriptor [P]; of kernels LlCallDescriptor [2, P], by parity of the call
  Region complete;     // Flag [P], by source rank: last call whose data from there is all here
  Region board;        // kExchangeRecordBytes [P], by source rank
  // Prepare.
  Region counts; // routes from each rank to each expert: by parity: int32 [2, P, E]; of kernels LlPacket8 [2, P, E]
  Region gathered_routes; // LlPacket8 [2, P, gathered_routes_per_rank], by parity and source rank: experts; kernels only
  Region ll_slot_records; // LlSlotRecord [R]
  Region first_slots;     // LlPacket8 [P, max_tokens]: each token's first slot here, by source rank; kernels only
  // Scatter (dispatch, combine_bwd), stored by the token's rank.
  Region scatter_rows;        // [scatter_staging_rows, row_stride]
  Region scatter_sidecars;    // [scatter_staging_rows, sidecar_stride]
  Region scatter_weights;     // float [R], by slot
  Region scatter_ready_flags; // Epoch [P, max_tokens]: the last call in which the token's row came; kernels only
  // Gather (combine, dispatch_bwd), stored by the expert's rank.
  Region gather_rows;        // [gather_staging_rows, row_stride]
  Region gather_weights;     // float [max_tokens * max_top_k], by (token, k)
  Region gather_ready_flags; // Epoch [gather_staging_rows, kMaxRowSplits]: the last call in which a part came; kernels only
  // The same two with few tokens, by parity of the call: who stores there need not know where the peer is. Kernels only;
  // those of the gather in precision wire only.
  Region
      ll_scatter_rows; // LlPacket16 [2, P, ll_tokens, ll_chunks, kLlChunkPackets], by source rank: a row, then its sidecar
  Region ll_scatter_weights; // LlPacket8 [2, P, ll_tokens, max_top_k], by source rank: the bits of floats
  Region ll_gather_rows;     // LlPacket16 [2, ll_tokens, min(P, max_top_k), ll_row_chunks, kLlChunkPackets]
  Region ll_gather_weights;  // LlPacket8 [2, ll_tokens, max_top_k]: the bits of floats

  int64_t row_stride;           // bytes
  int64_t sidecar_stride;       // bytes
  int64_t scatter_staging_rows; // rows
  int64_t gather_staging_rows;  // rows
  bool scatter_by_token;        // a staged row lies at (source, token); otherwise at the token's first slot
  int64_t ll_tokens;            // of a rank that has the most; with more, tokens are not few
  int64_t gathered_routes_per_rank;
  int64_t ll_row_chunks;
  int64_t ll_chunks; // with those of the sidecar

  int64_t total_bytes;
  int64_t control_bytes() const { return counts.offset; }
};

constexpr int64_t kLlSlotRecordBytes = 16; // sizeof(LlSlotRecord), runtime/layout/slots.h

// `transport` is host or nccl; the layout of nccl is the larger one. Throws Error when the sizes cannot be represented.
inline WindowLayout make_window_layout(const GroupShape& shape, epx_transport transport) {
  const char* what = "the group's window";
  const int64_t ranks = shape.num_ranks;
  const int64_t tokens = shape.max_tokens_per_rank;
  WindowLayout layout{};
  const auto append = [&](Region& region, int64_t count, int64_t bytes_each) {
    region.offset = layout.total_bytes;
    region.bytes = checked_round_up(checked_mul(count, bytes_each, what), kRegionAlignment, what);
    layout.total_bytes = checked_add(layout.total_bytes, region.bytes, what);
  };
  const bool has_kernels = transport == EPX_TRANSPORT_NCCL;
  const auto append_for_kernels = [&](Region& region, int64_t count, int64_t bytes_each) {
    append(region, has_kernels ? count : 0, bytes_each);
  };

  layout.row_stride = checked_round_up(shape.hidden_dim * element_bytes(shape.max_token_dtype), kRowAlignment, what);
  layout.sidecar_stride = checked_round_up(shape.max_sidecar_bytes, kRowAlignment, what);
  // A token's row is staged once per receiver: by (source, token), or, where that table would be the larger one, by slot.
  layout.scatter_by_token = ranks * tokens <= shape.max_recv_tokens;
  layout.scatter_staging_rows = std::min(ranks * tokens, shape.max_recv_tokens);
  const bool exact = shape.precision == EPX_COMBINE_EXACT;
  layout.gather_staging_rows = tokens * (exact ? shape.max_top_k : std::min(shape.num_ranks, shape.max_top_k));

  layout.ll_tokens = max_ll_tokens(shape);
  layout.gathered_routes_per_rank = kMaxGatheredRoutes / ranks;
  layout.ll_row_chunks = ll_chunks_of(layout.row_stride);
  layout.ll_chunks = layout.ll_row_chunks + ll_chunks_of(layout.sidecar_stride);

  append(layout.abort_record, 1, sizeof(Flag));
  append(layout.waiting, 1, sizeof(Flag));
  append(layout.posts, has_kernels ? 2 * ranks : ranks, has_kernels ? sizeof(LlCallDescriptor) : sizeof(CallDescriptor));
  append(layout.complete, ranks, sizeof(Flag));
  append(layout.board, ranks, kExchangeRecordBytes);
  append(layout.counts, checked_mul(2 * ranks, shape.num_experts, what), has_kernels ? sizeof(LlPacket8) : sizeof(int32_t));
  append_for_kernels(layout.gathered_routes, 2 * ranks * layout.gathered_routes_per_rank, sizeof(LlPacket8));
  append(layout.ll_slot_records, shape.max_recv_tokens, kLlSlotRecordBytes);
  append_for_kernels(layout.first_slots, ranks * tokens, sizeof(LlPacket8));
  append(layout.scatter_rows, layout.scatter_staging_rows, layout.row_stride);
  append(layout.scatter_sidecars, layout.scatter_staging_rows, layout.sidecar_stride);
  append(layout.scatter_weights, shape.max_recv_tokens, sizeof(float));
  append_for_kernels(layout.scatter_ready_flags, ranks * tokens, sizeof(Epoch));
  append(layout.gather_rows, layout.gather_staging_rows, layout.row_stride);
  append(layout.gather_weights, tokens * shape.max_top_k, sizeof(float));
  append_for_kernels(layout.gather_ready_flags, layout.gather_staging_rows * kMaxRowSplits, sizeof(Epoch));
  const int64_t few = 2 * layout.ll_tokens;
  append_for_kernels(layout.ll_scatter_rows, checked_mul(few * ranks, layout.ll_chunks * kLlChunkPackets, what),
                     sizeof(LlPacket16));
  append_for_kernels(layout.ll_scatter_weights, few * ranks * shape.max_top_k, sizeof(LlPacket8));
  append_for_kernels(
      layout.ll_gather_rows,
      exact ? 0
            : checked_mul(few * std::min(shape.num_ranks, shape.max_top_k), layout.ll_row_chunks * kLlChunkPackets, what),
      sizeof(LlPacket16));
  append_for_kernels(layout.ll_gather_weights, exact ? 0 : few * shape.max_top_k, sizeof(LlPacket8));
  return layout;
}

} // namespace epx
