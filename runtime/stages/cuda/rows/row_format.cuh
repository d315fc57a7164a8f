// SPDX-License-Identifier: Apache-2.0
// A row format says what travels for a row of scatter. It is a policy of those that send and receive rows (row_sender.cuh,
// Scatter, RankMajorDispatch). docs/recipes.md tells how to add one; that of the host transport is
// runtime/stages/host/rows/row_format.h.
//
// On the high-throughput path a warp moves a row to the place that each lane passes. The move may be only begun:
// pipeline.finish() ends it. `bytes` are those of a row of the sender's tensor.
//   begin_send       from the sender's tensor to the lanes' places, at least one; meanwhile() runs before anything is stored.
//                    Receive tensors of this rank get what a peer would have got
//   begin_receive    what a peer has sent into the receive tensors; each lane passes the row's index there, or -1, and its
//                    address, or NULL where it lies in place
//   clear_scales     zeros what the receive tensors have beside the rows that the lanes pass; -1: none
//   comes_as_sent    whether the call's own rows are as a peer would have sent them, so that they are received, too
//   sends_own_rows   of formats that quantise: whether senders of Scatter store the rows that stay on their rank, too, so that
//                    those are quantised once
//   sends_in_place   whether a sender may store rows into a peer's receive rows. What they have beside them is staged all the same
// On the low-latency path LlChunks says what the chunks of a row are.
#pragma once

#include "runtime/stages/cuda/rows/ll_chunks.cuh"
#include "runtime/stages/cuda/rows/ll_quantised_chunks.cuh"
#include "runtime/stages/cuda/rows/quantised_row.cuh"
#include "runtime/stages/cuda/rows/ring_quantiser.cuh"
#include "runtime/stages/cuda/rows/rows.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"
#include "runtime/stages/stages.h"

namespace epx::cuda {

// Where a lane's row goes.
struct RowPlace {
  std::byte* row = nullptr;    // NULL: nowhere
  std::byte* staged = nullptr; // of a peer: its row in staging, also where `row` is another; NULL: `row` is this rank's
  int64_t index = -1;          // of this rank: that of the receive row
};

// A row that a peer has sent. A row that has come on the wire from another node is one of these to the rank that relays it.
struct ArrivedRow {
  const std::byte* row;    // in staging, or in place
  const std::byte* staged; // in staging
};

// The row itself.
class PlainRows {
public:
  PlainRows() = default;
  __device__ explicit PlainRows(const MovementCall& /*call*/) {}

  // The row travels as the receive tensor has it, and nothing beside it.
  static constexpr bool kIsReceiveFormat = true;
  template <bool kUnaligned>
  using LlChunks = PlainChunks<kUnaligned>;

  __device__ static constexpr bool sends_in_place() { return true; }
  __device__ static constexpr bool comes_as_sent() { return true; }
  template <typename Meanwhile = Nothing>
  __device__ static void begin_send(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes, int64_t /*token*/,
                                    const RowPlace& to, const Meanwhile& meanwhile = {}) {
    begin_copy_row_to_destinations(pipeline, from, bytes, to.row, meanwhile);
  }
  __device__ static void begin_receive(TmaRowPipeline& pipeline, const ArrivedRow& from, int64_t bytes, int64_t /*index*/,
                                       std::byte* to) {
    begin_copy_row_to_destinations(pipeline, from.row, bytes, to);
  }
  __device__ static void clear_scales(int64_t /*index*/) {}
};

// A row of 8 or 4 bits with its scales: WireRow.
class QuantisedRows {
public:
  // The call, which has format_tensors, must outlive this.
  template <typename Call>
  __device__ explicit QuantisedRows(const Call& call)
      : call_(call), tensors_(call.format_tensors), wire_(call.format, call.hidden) {}

  static constexpr bool kIsReceiveFormat = false;
  template <bool kUnaligned>
  using LlChunks = QuantisedChunks<kUnaligned>;

  // Rows that the receiver dequantises are not its receive rows.
  __device__ bool sends_in_place() const { return tensors_.keep_codes(); }
  __device__ bool comes_as_sent() const { return tensors_.come_on_wire; }
  __device__ bool sends_own_rows() const { return tensors_.quantise_for_all(); }
  template <typename Meanwhile = Nothing>
  __device__ void begin_send(TmaRowPipeline& pipeline, const std::byte* from, int64_t /*bytes*/, int64_t token,
                             const RowPlace& to, const Meanwhile& meanwhile = {}) const {
    const bool is_kept = to.row != nullptr && to.staged == nullptr;
    const QuantisedPlaces places{is_kept ? received_place(to.index, to.row) : staged_place(to), tensors_.recv_layout,
                                 __ballot_sync(~0u, is_kept ? 1 : 0)};
    begin_move(pipeline, from, token, places, meanwhile);
  }
  __device__ void begin_receive(TmaRowPipeline& pipeline, const ArrivedRow& from, int64_t /*bytes*/, int64_t index,
                                std::byte* to) const {
    receive(pipeline, from, index, to, NoWeight{});
  }
  // The same times a weight, which is that of the lane's row.
  __device__ void begin_receive_weighted(TmaRowPipeline& pipeline, const ArrivedRow& from, int64_t index, std::byte* to,
                                         float weight) const {
    receive(pipeline, from, index, to, PlaceWeight{weight});
  }
  // Returns the dot product of a row that a peer has sent, without a weight, and a row of `dtype`. All lanes pass the same.
  __device__ float dot(const ArrivedRow& from, epx_dtype dtype, const std::byte* x) const {
    const QuantisedSource source = source_of(from);
    if (dtype == EPX_FLOAT32) return dot_row(call_.format, source, call_.hidden, reinterpret_cast<const float*>(x));
    if (dtype == EPX_FLOAT16) return dot_row(call_.format, source, call_.hidden, reinterpret_cast<const __half*>(x));
    return dot_row(call_.format, source, call_.hidden, reinterpret_cast<const __nv_bfloat16*>(x));
  }
  __device__ void clear_scales(int64_t index) const {
    if (tensors_.recv_scales != nullptr)
      cuda::clear_scales(tensors_.recv_scales, tensors_.recv_row_scales, tensors_.recv_layout, index);
  }

private:
  __device__ QuantisedSource source_of(const ArrivedRow& from) const {
    return {from.row, from.staged + wire_.scales,
            call_.format.has_row_scale() ? *reinterpret_cast<const float*>(from.staged + wire_.row_scale) : 0.0f};
  }
  __device__ QuantisedSource source_of_token(const std::byte* from, int64_t token) const {
    return {from, tensors_.scales + token * call_.format.scale_bytes(call_.hidden),
            tensors_.row_scales != nullptr ? tensors_.row_scales[token] : 0.0f};
  }
  __device__ QuantisedPlace staged_place(const RowPlace& to) const {
    if (to.row == nullptr) return {};
    return {to.row, to.staged + wire_.scales,
            call_.format.has_row_scale() ? reinterpret_cast<float*>(to.staged + wire_.row_scale) : nullptr};
  }
  __device__ QuantisedPlace received_place(int64_t index, std::byte* to) const {
    if (index < 0) return {};
    return {to, tensors_.recv_scales != nullptr ? tensors_.recv_scales + tensors_.recv_layout.row_offset(index) : nullptr,
            tensors_.recv_row_scales != nullptr ? tensors_.recv_row_scales + index : nullptr};
  }

  // The row of a token of this rank, or of a rail peer, which comes quantised, or is quantised here.
  template <typename Meanwhile>
  __device__ void begin_move(TmaRowPipeline& pipeline, const std::byte* from, int64_t token, const QuantisedPlaces& to,
                             const Meanwhile& meanwhile) const {
    if (tensors_.come_quantised()) {
      begin_copy(pipeline, tensors_.come_on_wire ? source_of({from, from}) : source_of_token(from, token), to, NoWeight{},
                 meanwhile);
    } else if (call_.dtype == EPX_FLOAT32) {
      begin_quantise<float>(pipeline, from, to, meanwhile);
    } else if (call_.dtype == EPX_FLOAT16) {
      begin_quantise<__half>(pipeline, from, to, meanwhile);
    } else {
      begin_quantise<__nv_bfloat16>(pipeline, from, to, meanwhile);
    }
  }
  template <typename T, typename Meanwhile>
  __device__ void begin_quantise(TmaRowPipeline& pipeline, const std::byte* from, const QuantisedPlaces& to,
                                 const Meanwhile& meanwhile) const {
    begin_quantise_row<T>(pipeline, call_.format, from, call_.hidden, tensors_.encode_scale, to, meanwhile);
  }
  template <typename Weight, typename Meanwhile = Nothing>
  __device__ void begin_copy(TmaRowPipeline& pipeline, const QuantisedSource& from, const QuantisedPlaces& to,
                             Weight weight, const Meanwhile& meanwhile = {}) const {
    const auto copy_scales = [&] {
      meanwhile();
      copy_scales_to_places(from, to, weight);
    };
    if (__any_sync(~0u, to.own.row != nullptr ? 1 : 0) != 0)
      begin_copy_row_to_destinations(pipeline, from.row, call_.format.element_bytes(call_.hidden), to.own.row, copy_scales);
    else // all rows are in place
      copy_scales();
  }
  template <typename Weight>
  __device__ void receive(TmaRowPipeline& pipeline, const ArrivedRow& from, int64_t index, std::byte* to,
                          Weight weight) const {
    const QuantisedSource source = source_of(from);
    if (tensors_.recv_scales == nullptr)
      dequantise(pipeline, source, to, weight);
    else
      begin_copy(pipeline, source, {received_place(index, to), tensors_.recv_layout, ~0u}, weight);
  }
  template <typename Weight>
  __device__ void dequantise(TmaRowPipeline& pipeline, const QuantisedSource& from, std::byte* to, Weight weight) const {
    if (call_.recv_dtype == EPX_FLOAT32)
      begin_dequantise_row<float>(pipeline, call_.format, from, call_.hidden, to, weight);
    else if (call_.recv_dtype == EPX_FLOAT16)
      begin_dequantise_row<__half>(pipeline, call_.format, from, call_.hidden, to, weight);
    else
      begin_dequantise_row<__nv_bfloat16>(pipeline, call_.format, from, call_.hidden, to, weight);
  }

  const MovementCall& call_;
  const FormatTensors& tensors_;
  WireRow wire_;
};

} // namespace epx::cuda
