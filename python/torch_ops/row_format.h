// SPDX-License-Identifier: Apache-2.0
// Rows that travel in a row format: the C API's struct, views of what is sent, and new tensors for what arrives.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <vector>

#include "calls.h"

namespace epx_torch {

// What a dispatch sends and receives.
struct Rows {
  epx_tensor sent;
  Tensor recv_tokens;
  epx_tensor received;
};

// The arguments of an operator with a format. `fields` are scaling, dtype, dtype of scales, scale_layout and wire_only, as
// epx.RowFormat has them.
struct FormatInputs {
  const std::vector<int64_t>& fields;
  double amax_floor;
  const std::optional<Tensor>& scales; // of rows that come quantised
  const std::optional<Tensor>& row_scales;
  const std::optional<Tensor>& encode_scale;
};

// Points into itself, so it stays where it is.
class FormatRows : public Rows {
public:
  // lead: {N} or {P, M}.
  FormatRows(const Group& group, const Tensor& tokens, std::span<const int64_t> lead, const FormatInputs& inputs);
  FormatRows(const FormatRows&) = delete;
  FormatRows& operator=(const FormatRows&) = delete;

  const epx_row_format* format() const { return &format_; }

  // A tensor of no elements stands for one that does not arrive.
  Tensor recv_scales, recv_row_scales;

private:
  void view_scales(const Group& group, const FormatInputs& inputs);
  void make_recv_scales(const Group& group, std::span<const int64_t> lead, epx_dtype dtype);

  epx_row_format format_ = {};
  epx_tensor scales_ = {}, row_scales_ = {}, encode_scale_ = {}, recv_scales_ = {}, recv_row_scales_ = {};
};

} // namespace epx_torch
