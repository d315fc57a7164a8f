// SPDX-License-Identifier: Apache-2.0
// A row format says what travels for a row of scatter. It is a policy of those that send and receive rows (row_sender.cuh,
// Scatter, RankMajorDispatch). docs/recipes.md tells how to add one; that of the host transport is
// runtime/stages/host/rows/row_format.h.
//
// On the high-throughput path a warp moves a row to the address that each lane passes, or NULL. The move may be only begun:
// pipeline.finish() ends it. `bytes` are those of a row of the sender's tensor.
//   begin_send     from the sender's tensor into staging, or into receive rows where the format allows it
//   begin_receive  from staging into the receive tensors; each lane passes the row's index there beside its address
//   begin_keep     from the sender's tensor into its own receive tensors, which get what a peer would have got
//   clear_scales   zeros what the receive tensors have beside the rows that the lanes pass; -1: none
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

// The row itself.
class PlainRows {
public:
  PlainRows() = default;
  __device__ explicit PlainRows(const MovementCall& /*call*/) {}

  // The row travels as the receive tensor has it, so that a sender may store it there.
  static constexpr bool kIsReceiveFormat = true;
  template <bool kUnaligned>
  using LlChunks = PlainChunks<kUnaligned>;

  __device__ static void begin_send(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes, int64_t /*token*/,
                                    std::byte* to) {
    begin_copy_row_to_destinations(pipeline, from, bytes, to);
  }
  __device__ static void begin_receive(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes, int64_t /*index*/,
                                       std::byte* to) {
    begin_copy_row_to_destinations(pipeline, from, bytes, to);
  }
  __device__ static void begin_keep(TmaRowPipeline& pipeline, const std::byte* from, int64_t bytes, int64_t /*token*/,
                                    int64_t /*index*/, std::byte* to) {
    begin_copy_row_to_destinations(pipeline, from, bytes, to);
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

  __device__ void begin_send(TmaRowPipeline& pipeline, const std::byte* from, int64_t /*bytes*/, int64_t token,
                             std::byte* to) const {
    QuantisedPlace place;
    if (to != nullptr)
      place = {to, to + wire_.scales,
               call_.format.has_row_scale() ? reinterpret_cast<float*>(to + wire_.row_scale) : nullptr};
    const ScaleLayout layout{EPX_SCALES_ROWS, tensors_.recv_layout.scale_bytes, tensors_.recv_layout.num_scales, 1};
    begin_move(pipeline, from, token, layout, place);
  }
  __device__ void begin_receive(TmaRowPipeline& pipeline, const std::byte* from, int64_t /*bytes*/, int64_t index,
                                std::byte* to) const {
    const QuantisedSource source = staged(from);
    if (tensors_.recv_scales == nullptr)
      dequantise(pipeline, source, to, NoWeight{});
    else
      begin_copy(pipeline, source, tensors_.recv_layout, received_place(index, to), NoWeight{});
  }
  // The same times a weight, which is that of the lane's row.
  __device__ void begin_receive_weighted(TmaRowPipeline& pipeline, const std::byte* from, int64_t index, std::byte* to,
                                         float weight) const {
    const QuantisedSource source = staged(from);
    if (tensors_.recv_scales == nullptr)
      dequantise(pipeline, source, to, PlaceWeight{weight});
    else
      begin_copy(pipeline, source, tensors_.recv_layout, received_place(index, to), PlaceWeight{weight});
  }
  // Returns the dot product of a row in staging, without a weight, and a row of `dtype`. All lanes pass the same.
  __device__ float dot(const std::byte* from, epx_dtype dtype, const std::byte* x) const {
    const QuantisedSource source = staged(from);
    if (dtype == EPX_FLOAT32) return dot_row(call_.format, source, call_.hidden, reinterpret_cast<const float*>(x));
    if (dtype == EPX_FLOAT16) return dot_row(call_.format, source, call_.hidden, reinterpret_cast<const __half*>(x));
    return dot_row(call_.format, source, call_.hidden, reinterpret_cast<const __nv_bfloat16*>(x));
  }
  __device__ void begin_keep(TmaRowPipeline& pipeline, const std::byte* from, int64_t /*bytes*/, int64_t token,
                             int64_t index, std::byte* to) const {
    begin_move(pipeline, from, token, tensors_.recv_layout, received_place(index, to));
  }
  __device__ void clear_scales(int64_t index) const {
    if (tensors_.recv_scales != nullptr)
      cuda::clear_scales(tensors_.recv_scales, tensors_.recv_row_scales, tensors_.recv_layout, index);
  }

private:
  __device__ QuantisedSource staged(const std::byte* from) const {
    return {from, from + wire_.scales,
            call_.format.has_row_scale() ? *reinterpret_cast<const float*>(from + wire_.row_scale) : 0.0f};
  }
  __device__ QuantisedPlace received_place(int64_t index, std::byte* to) const {
    if (to == nullptr) return {};
    return {to, tensors_.recv_scales != nullptr ? tensors_.recv_scales + tensors_.recv_layout.row_offset(index) : nullptr,
            tensors_.recv_row_scales != nullptr ? tensors_.recv_row_scales + index : nullptr};
  }

  // The row of a token of this rank, which comes quantised, or is quantised here.
  __device__ void begin_move(TmaRowPipeline& pipeline, const std::byte* from, int64_t token, const ScaleLayout& layout,
                             const QuantisedPlace& to) const {
    if (tensors_.scales != nullptr) {
      const int64_t scale_bytes = call_.format.scale_bytes(call_.hidden);
      begin_copy(
          pipeline,
          {from, tensors_.scales + token * scale_bytes, tensors_.row_scales != nullptr ? tensors_.row_scales[token] : 0.0f},
          layout, to, NoWeight{});
    } else if (call_.dtype == EPX_FLOAT32) {
      begin_quantise_row<float>(pipeline, call_.format, from, call_.hidden, tensors_.encode_scale, layout, to);
    } else if (call_.dtype == EPX_FLOAT16) {
      begin_quantise_row<__half>(pipeline, call_.format, from, call_.hidden, tensors_.encode_scale, layout, to);
    } else {
      begin_quantise_row<__nv_bfloat16>(pipeline, call_.format, from, call_.hidden, tensors_.encode_scale, layout, to);
    }
  }
  template <typename Weight>
  __device__ void begin_copy(TmaRowPipeline& pipeline, const QuantisedSource& from, const ScaleLayout& layout,
                             const QuantisedPlace& to, Weight weight) const {
    begin_copy_row_to_destinations(pipeline, from.row, call_.format.element_bytes(call_.hidden), to.row,
                                   [&] { copy_scales_to_places(from, layout, to, weight); });
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
