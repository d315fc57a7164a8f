// SPDX-License-Identifier: Apache-2.0
// How the rows of dispatch travel (--row-format, --quantised-input, --wire-format, --scale-layout), and the partial sums of
// combine and dispatch_bwd (--sum-format); the bytes of a row.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <utility>

#include "epx/epx.hpp"
#include "tools/ep_bench/options.h"

namespace epx::bench {

// QuantisedRow is what a row consists of that an option names.
struct QuantisedRow {
  epx_scaling scaling;
  epx_dtype elements;
  epx_dtype scales; // of one scale; those of a packed tensor are in INT32

  bool has_row_scale() const { return scaling == EPX_SCALING_NV; }
};

// Returns the options that name a format, with what they name.
std::array<std::pair<const char*, NamedFormat>, 3> named_formats(const Options& options);

// Return a row of dispatch, and a partial sum. Precondition: the options have a format for it.
QuantisedRow quantised_row(const Options& options);
QuantisedRow quantised_sum(const Options& options);

// Returns the format of dispatch without its tensors; an empty one for rows that travel as they are.
RowFormat row_format(const Options& options);

// Return the dtypes of dispatch's tensors. All others have that of the options.
epx_dtype tokens_dtype(const Options& options);
epx_dtype recv_tokens_dtype(const Options& options);

// Returns the bytes of recv_scales for so many rows; 0 where none arrive.
int64_t recv_scales_bytes(const Options& options, int64_t rows);

// RowBytes are those of a row where an operation reads it, on its way to another rank, and where it lands. On their way the
// rows of combine and dispatch_bwd are partial sums. A quantised row has its scales in the bytes, and no holes for alignment.
struct RowBytes {
  int64_t input = 0;
  int64_t wire = 0;
  int64_t received = 0;

  // Returns whether a row lands in another form than it travels in. One of dispatch then lies in the receiver's staging first;
  // partial sums always do.
  bool is_converted_on_landing() const { return wire != received; }
  bool operator==(const RowBytes&) const = default;
};

// `operation` must move rows.
RowBytes row_bytes_of(const Options& options, epx_operation operation);

// Returns "fp8-mx, quantised in the call, scales in rows" of dispatch; empty for rows that travel as they are.
std::string row_format_text(const Options& options);

} // namespace epx::bench
