// SPDX-License-Identifier: Apache-2.0
// Tests what no kernel does by itself: one TMA row pipeline that reads, copies and clears alternately.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include "tests/emulation/device.h"

#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {
namespace {

std::vector<std::byte> row_of(size_t bytes, unsigned seed) {
  std::vector<std::byte> row(bytes);
  for (size_t i = 0; i < bytes; ++i)
    row[i] = static_cast<std::byte>((i * 2654435761u + seed * 40503u) >> 13);
  return row;
}

// Reads the rows and copies what it sees.
void read_into(TmaRowPipeline& pipeline, const std::array<std::vector<std::byte>, 3>& rows,
               std::array<std::vector<std::byte>, 3>& copies) {
  WarpList<const std::byte*> list;
  for (const auto& row : rows)
    list.append(row.data());
  const auto bytes = static_cast<int64_t>(rows[0].size());
  pipeline.begin_rows(list, bytes);
  for (int h_tile = 0; h_tile < TmaRowPipeline::h_tiles_of(bytes); ++h_tile)
    for (auto& copy : copies) {
      const std::byte* const data = pipeline.front();
      for (uint32_t i = static_cast<uint32_t>(lane()); i < TmaRowPipeline::bytes_of(h_tile, bytes); i += kWarp)
        copy[static_cast<size_t>(h_tile) * TmaRowPipeline::kStageBytes + i] = data[i];
      pipeline.pop();
    }
}

TEST_CASE("a TMA row pipeline reads, copies and clears alternately") {
  for (const size_t bytes :
       {size_t{16}, size_t{TmaRowPipeline::kStageBytes}, size_t{3 * TmaRowPipeline::kHalfBytes + 48}}) {
    CAPTURE(bytes);
    const std::array<std::vector<std::byte>, 3> rows{row_of(bytes, 1), row_of(bytes, 2), row_of(bytes, 3)};
    const std::vector<std::byte> zeros(bytes);
    for (int rounds = 1; rounds <= 4; ++rounds) {
      CAPTURE(rounds);
      std::array<std::vector<std::byte>, 3> read_before{zeros, zeros, zeros}, read_after = read_before;
      std::vector<std::byte> near = row_of(bytes, 7), far = near, cleared = near;
      emulation::run_grid(1, kWarp, TmaRowPipeline::kSharedBytes, [&] {
        TmaRowPipeline pipeline(emulation::dynamic_shared_memory(), 0, 1);
        for (int round = 0; round < rounds; ++round) {
          read_into(pipeline, rows, read_before);
          pipeline.begin_copy_to_destinations(rows[2].data(), static_cast<int64_t>(bytes),
                                              lane() == 3    ? near.data()
                                              : lane() == 17 ? far.data()
                                                             : nullptr);
          read_into(pipeline, rows, read_after);
          pipeline.finish();
          pipeline.make_zeros();
          pipeline.clear(static_cast<int64_t>(bytes), lane() == 31 ? cleared.data() : nullptr);
          pipeline.finish();
        }
      });
      CHECK(read_before == rows);
      CHECK(read_after == rows);
      CHECK(near == rows[2]);
      CHECK(far == rows[2]);
      CHECK(cleared == zeros);
    }
  }
}

} // namespace
} // namespace epx::cuda
