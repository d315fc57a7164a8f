// SPDX-License-Identifier: Apache-2.0
// FormatData has the tensors of a row format, and format_of() passes those of one rank.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "epx/epx.hpp"
#include "runtime/reference/formats.h"
#include "tests/support/call_buffers.h"
#include "tests/support/case.h"
#include "tests/support/rng.h"

namespace epx::test {

// A vector has one entry per rank, or none where the tensor is not passed. Outputs hold what a call must have written into
// scribbled tensors.
struct FormatData {
  reference::Format format;
  std::vector<reference::Matrix> scales;              // [T, S]
  std::vector<std::vector<float>> row_scales;         // [T]
  std::vector<std::optional<float>> encode_scales;    // of the ranks that pass one
  std::vector<reference::ReceivedScales> recv_scales; // out
  std::vector<std::vector<float>> recv_row_scales;    // [N] out

  reference::FormatTensors tensors() { return {format, scales, row_scales, encode_scales, recv_scales, recv_row_scales}; }
};

reference::Format reference_format(const FormatCase& format);

// Returns the format without tensors; none where rows travel as they are.
RowFormat wire_format(const FormatCase& format);

// Returns inputs with any bytes and scribbled outputs, for T and N of each rank; none where the format has no tensors.
std::optional<FormatData> make_format_data(const FormatCase& format, int64_t hidden, const std::vector<int64_t>& tokens,
                                           const std::vector<int64_t>& rows, Rng& rng);

// Returns the format of one rank, whose tensors are copied to, or allocated in, the buffers of a call.
RowFormat format_of(CallBuffers& buffers, const FormatData& data, size_t rank);

} // namespace epx::test
