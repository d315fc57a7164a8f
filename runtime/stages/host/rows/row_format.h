// SPDX-License-Identifier: Apache-2.0
// A row format says what travels for a row of scatter. A format F has
//   F(call)                      of one call; it may own memory
//   F::kIsReceiveFormat          whether the row travels as the receive tensor has it, so that a sender may store it there
//   encode(wire, row, token)     writes what travels for the row [H] of a token, at most WindowLayout::row_stride bytes. They stay
//                                as they are while the same token is encoded for other ranks
//   store(to, index, wire, w)    writes what has travelled into row `index` of the receive tensors, which is at `to`, times *w
//                                unless w is NULL
//   clear(to, index)             zeros that row
//   dot(wire, dtype, x)          returns the dot product of what has travelled and a row of `dtype`
// It has no virtual function, since it is called for each row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "base/dtypes.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/rows.h"
#include "runtime/stages/host/rows/wire_rows.h"
#include "runtime/stages/stages.h"

namespace epx::host {

// The row itself.
class PlainRows {
public:
  explicit PlainRows(const MovementCall& call)
      : call_(call), bytes_(static_cast<size_t>(epx::row_bytes(call.dtype, call.hidden))) {}

  static constexpr bool kIsReceiveFormat = true;
  void encode(std::byte* wire, const std::byte* row, int64_t) const { std::memcpy(wire, row, bytes_); }
  void store(std::byte* to, int64_t, const std::byte* wire, const float* weight) const {
    if (weight != nullptr)
      kernels_.scale(call_.dtype, to, wire, *weight, call_.hidden);
    else if (to != wire) // a sender may have stored it there
      std::memcpy(to, wire, bytes_);
  }
  void clear(std::byte* to, int64_t) const { std::memset(to, 0, bytes_); }
  float dot(const std::byte* wire, epx_dtype dtype, const std::byte* x) const {
    return kernels_.dot(call_.dtype, wire, dtype, x, call_.hidden);
  }

private:
  const MovementCall& call_;
  const rows::RowKernels& kernels_ = rows::row_kernels();
  size_t bytes_;
};

// A row of 8 or 4 bits with its scales: WireRow. It is quantised once, into the staging of the first rank that it goes to.
class QuantisedRows {
public:
  template <typename Call> // with format_tensors
  explicit QuantisedRows(const Call& call)
      : call_(call), tensors_(call.format_tensors), rows_(call.format, call.hidden),
        recv_bytes_(static_cast<size_t>(epx::row_bytes(call.recv_dtype, call.hidden))) {}

  static constexpr bool kIsReceiveFormat = false;
  void encode(std::byte* wire, const std::byte* row, int64_t token) {
    if (tensors_.scales != nullptr) {
      rows_.copy(row, tensors_.scales + token * static_cast<int64_t>(rows_.scale_bytes()),
                 tensors_.row_scales != nullptr ? tensors_.row_scales[token] : 0.0f, wire);
    } else if (token == encoded_token_) {
      std::memcpy(wire, encoded_, static_cast<size_t>(rows_.bytes()));
    } else {
      rows_.quantise(call_.dtype, row, tensors_.encode_scale, wire);
      encoded_token_ = token;
      encoded_ = wire;
    }
  }
  void store(std::byte* to, int64_t index, const std::byte* wire, const float* weight) const {
    if (tensors_.recv_scales == nullptr) {
      rows_.dequantise(wire, call_.recv_dtype, weight, to);
      return;
    }
    std::memcpy(to, wire, rows_.element_bytes());
    store_scales(index, rows_.scales(wire), weight);
    if (tensors_.recv_row_scales != nullptr) tensors_.recv_row_scales[index] = rows_.row_scale(wire);
  }
  void clear(std::byte* to, int64_t index) const {
    std::memset(to, 0, recv_bytes_);
    if (tensors_.recv_scales != nullptr) store_scales(index, nullptr, nullptr);
    if (tensors_.recv_row_scales != nullptr) tensors_.recv_row_scales[index] = 0.0f;
  }
  float dot(const std::byte* wire, epx_dtype dtype, const std::byte* x) {
    dequantised_.resize(static_cast<size_t>(call_.hidden));
    auto* const row = reinterpret_cast<std::byte*>(dequantised_.data());
    rows_.dequantise(wire, EPX_FLOAT32, nullptr, row);
    return rows::row_kernels().dot(EPX_FLOAT32, row, dtype, x, call_.hidden);
  }

private:
  // Stores the scales of row `index`, zeros where `scales` is NULL, and the fill behind them. Scales that take a weight are
  // float32.
  void store_scales(int64_t index, const std::byte* scales, const float* weight) const {
    const ScaleLayout& layout = tensors_.recv_layout;
    if (layout.layout == EPX_SCALES_ROWS && scales != nullptr && weight == nullptr) {
      std::memcpy(tensors_.recv_scales + layout.offset(index, 0), scales, rows_.scale_bytes());
      return;
    }
    const auto bytes = static_cast<size_t>(layout.scale_bytes);
    for (int64_t place = 0; place < layout.places(); ++place) {
      float scale = 0.0f; // or a code in its first byte
      if (scales != nullptr && place < layout.num_scales) std::memcpy(&scale, scales + place * layout.scale_bytes, bytes);
      if (weight != nullptr) scale *= *weight;
      std::memcpy(tensors_.recv_scales + layout.offset(index, place), &scale, bytes);
    }
  }

  const MovementCall& call_;
  const FormatTensors& tensors_;
  WireRows rows_;
  size_t recv_bytes_;                  // of a row
  const std::byte* encoded_ = nullptr; // where encoded_token_ was quantised
  int64_t encoded_token_ = -1;
  std::vector<float> dequantised_; // [H] of a dot product
};

// Calls body(std::type_identity<F>{}) with the format F of a scatter.
template <typename Body>
void with_row_format(const MovementCall& call, const Body& body) {
  if (!call.format.is_quantised()) {
    body(std::type_identity<PlainRows>{});
    return;
  }
  const DefaultFloatEnvironment environment;
  body(std::type_identity<QuantisedRows>{});
}

} // namespace epx::host
