// SPDX-License-Identifier: Apache-2.0
// The rows that a dispatch sends and receives: views of tokens, and new tensors for what arrives, in a row format or without.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include <epx/epx.hpp>

#include "calls.h"

namespace epx_torch {

struct Rows {
  epx_tensor sent;
  Tensor recv_tokens;
  epx_tensor received;
};

// Rows without a format. `lead` is {N} or {P, M}.
Rows new_rows(const Group& group, const Tensor& tokens, std::span<const int64_t> lead);

// Has a sidecar travel with the rows. Returns what becomes of it: no elements where there is none.
Tensor attach(const Group& group, Rows& rows, const std::optional<Tensor>& sidecar);

// A format without tensors. `fields` are scaling, dtype, dtype of scales, scale_layout and wire_only, as epx.RowFormat has them,
// or none: that has no scaling.
epx::RowFormat format_of(const std::vector<int64_t>& fields, double amax_floor);

// A format for the wire alone, where `fields` are not empty. The pointer is of use as long as this object lives.
class WireFormat {
public:
  WireFormat(const std::vector<int64_t>& fields, double amax_floor) : format_(format_of(fields, amax_floor).get()) {}
  const epx_row_format* get() const { return format_.scaling != EPX_SCALING_NONE ? &format_ : nullptr; }

private:
  epx_row_format format_;
};

// The arguments of an operator with a format.
struct FormatInputs {
  const std::vector<int64_t>& fields;
  double amax_floor;
  const std::optional<Tensor>& scales; // of rows that come quantised
  const std::optional<Tensor>& row_scales;
  const std::optional<Tensor>& encode_scale;
};

// Rows with a format, which points into this object.
class FormatRows : public Rows {
public:
  FormatRows(const Group& group, const Tensor& tokens, std::span<const int64_t> lead, const FormatInputs& inputs);
  FormatRows(const FormatRows&) = delete;
  FormatRows& operator=(const FormatRows&) = delete;

  const epx_row_format* format() const { return &c_format_; }

  // A tensor of no elements stands for one that does not arrive.
  Tensor recv_scales, recv_row_scales;

private:
  void view_scales(const Group& group, const FormatInputs& inputs, ScalarType scale_dtype);
  void make_recv_scales(const Group& group, std::span<const int64_t> lead, ScalarType scale_dtype);

  epx::RowFormat format_;
  epx_row_format c_format_ = {};
};

} // namespace epx_torch
