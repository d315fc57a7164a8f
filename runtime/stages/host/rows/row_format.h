// SPDX-License-Identifier: Apache-2.0
// A row format says what travels for a row of scatter. A format F has
//   F(call)                      of one call; it may own memory
//   F::kIsReceiveFormat          whether the row travels as the receive tensor has it, so that a sender may store it there
//   encode(wire, row, token)     writes what travels for the row [H] of a token, at most WindowLayout::row_stride bytes
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

// A row of 8 or 4 bits with its scales: WireRow. It is quantised once for all ranks that it goes to.
class QuantisedRows {
public:
  template <typename Call> // with format_tensors
  explicit QuantisedRows(const Call& call)
      : call_(call), tensors_(call.format_tensors), wire_(call.format, call.hidden),
        element_bytes_(call.format.element_bytes(call.hidden)), scale_bytes_(call.format.scale_bytes(call.hidden)),
        recv_bytes_(epx::row_bytes(call.recv_dtype, call.hidden)), quantised_(static_cast<size_t>(wire_.bytes)) {}

  static constexpr bool kIsReceiveFormat = false;
  void encode(std::byte* wire, const std::byte* row, int64_t token) {
    if (token != quantised_token_) quantise(row, token);
    quantised_token_ = token;
    std::memcpy(wire, quantised_.data(), quantised_.size());
  }
  void store(std::byte* to, int64_t index, const std::byte* wire, const float* weight) const {
    if (tensors_.recv_scales == nullptr) {
      dequantise(wire, call_.recv_dtype, weight, to);
      return;
    }
    std::memcpy(to, wire, static_cast<size_t>(element_bytes_));
    store_scales(index, wire + wire_.scales, weight);
    if (tensors_.recv_row_scales != nullptr) tensors_.recv_row_scales[index] = row_scale_of(wire);
  }
  void clear(std::byte* to, int64_t index) const {
    std::memset(to, 0, static_cast<size_t>(recv_bytes_));
    if (tensors_.recv_scales != nullptr) store_scales(index, nullptr, nullptr);
    if (tensors_.recv_row_scales != nullptr) tensors_.recv_row_scales[index] = 0.0f;
  }
  float dot(const std::byte* wire, epx_dtype dtype, const std::byte* x) {
    dequantised_.resize(static_cast<size_t>(call_.hidden));
    auto* const row = reinterpret_cast<std::byte*>(dequantised_.data());
    dequantise(wire, EPX_FLOAT32, nullptr, row);
    return kernels_.dot(EPX_FLOAT32, row, dtype, x, call_.hidden);
  }

private:
  float row_scale_of(const std::byte* wire) const {
    float row_scale = 0.0f;
    if (call_.format.has_row_scale()) std::memcpy(&row_scale, wire + wire_.row_scale, sizeof(row_scale));
    return row_scale;
  }
  void dequantise(const std::byte* wire, epx_dtype dtype, const float* weight, std::byte* to) const {
    kernels_.dequantise(call_.format, dtype, wire, wire + wire_.scales, row_scale_of(wire), weight, call_.hidden, to);
  }
  void quantise(const std::byte* row, int64_t token) {
    std::byte* const wire = quantised_.data();
    float row_scale = 0.0f;
    if (tensors_.scales != nullptr) {
      std::memcpy(wire, row, static_cast<size_t>(element_bytes_));
      std::memcpy(wire + wire_.scales, tensors_.scales + token * scale_bytes_, static_cast<size_t>(scale_bytes_));
      if (tensors_.row_scales != nullptr) row_scale = tensors_.row_scales[token];
    } else {
      kernels_.quantise(call_.format, call_.dtype, row, call_.hidden, tensors_.encode_scale, wire, wire + wire_.scales,
                        &row_scale);
    }
    if (call_.format.has_row_scale()) std::memcpy(wire + wire_.row_scale, &row_scale, sizeof(row_scale));
  }

  // Stores the scales of row `index`, zeros where `scales` is NULL, and the fill behind them. Scales that take a weight are
  // float32.
  void store_scales(int64_t index, const std::byte* scales, const float* weight) const {
    const ScaleLayout& layout = tensors_.recv_layout;
    if (weight != nullptr) {
      for (int64_t place = 0; place < layout.num_scales; ++place) {
        float scale;
        std::memcpy(&scale, scales + place * layout.scale_bytes, sizeof(scale));
        scale *= *weight;
        std::memcpy(tensors_.recv_scales + layout.offset(index, place), &scale, sizeof(scale));
      }
      return;
    }
    if (layout.layout == EPX_SCALES_ROWS) {
      std::byte* const to = tensors_.recv_scales + layout.offset(index, 0);
      if (scales != nullptr)
        std::memcpy(to, scales, static_cast<size_t>(scale_bytes_));
      else
        std::memset(to, 0, static_cast<size_t>(scale_bytes_));
      return;
    }
    const auto bytes = static_cast<size_t>(layout.scale_bytes);
    for (int64_t place = 0; place < layout.places(); ++place) {
      std::byte* const to = tensors_.recv_scales + layout.offset(index, place);
      if (scales != nullptr && place < layout.num_scales)
        std::memcpy(to, scales + place * layout.scale_bytes, bytes);
      else
        std::memset(to, 0, bytes);
    }
  }

  const MovementCall& call_;
  const FormatTensors& tensors_;
  const rows::RowKernels& kernels_ = rows::row_kernels();
  WireRow wire_;
  int64_t element_bytes_, scale_bytes_, recv_bytes_; // of a row
  std::vector<std::byte> quantised_;                 // what travels for quantised_token_
  int64_t quantised_token_ = -1;
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
