// SPDX-License-Identifier: Apache-2.0
// Tests what no kernel does by itself: one TMA row pipeline that copies and clears alternately, with row readers in between,
// for rows of any length at any address.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <doctest/doctest.h>

#include "tests/emulation/device.h"

#include "runtime/stages/cuda/rows/row_reader.cuh"
#include "runtime/stages/cuda/rows/tma_row_pipeline.cuh"

namespace epx::cuda {
namespace {

std::vector<std::byte> row_of(size_t bytes, unsigned seed) {
  std::vector<std::byte> row(bytes);
  for (size_t i = 0; i < bytes; ++i)
    row[i] = static_cast<std::byte>((i * 2654435761u + seed * 40503u) >> 13);
  return row;
}

// Reads the rows from element `first` on, by a row reader, and copies what it sees.
template <bool kIsAligned>
void read_into(TmaRowPipeline& pipeline, const std::array<std::vector<std::byte>, 3>& rows,
               std::array<std::vector<std::byte>, 3>& copies, int64_t first, int lead) {
  using Element = __nv_bfloat16;
  const auto hidden = static_cast<int64_t>(rows[0].size() / sizeof(Element)) - first;
  RowReader<Element, kIsAligned> reader(pipeline.begin_generic(), hidden, lead);
  const auto elements = [&](auto& row) { return reinterpret_cast<Element*>(const_cast<std::byte*>(row.data())) + first; };
  for (int row = 0; row < 3; ++row)
    if (lane() == row) reader.set(row, {elements(rows[row]), elements(copies[row]), 0.0f});
  reader.begin(3);
  for (int h_tile = 0; h_tile < reader.h_tiles(); ++h_tile)
    for (int row = 0; row < 3; ++row) {
      typename RowReader<Element, kIsAligned>::Fragments fragments;
      reader.next(row, fragments);
      for (int i = 0; i < reader.kWarpTiles; ++i)
        store_elements(reader[row].to, int64_t{h_tile} * reader.kHTile + i * kWarpTile + lane() * kFragment - lead, hidden,
                       fragments[i]);
    }
  reader.end();
}

TEST_CASE("a TMA row pipeline copies and clears alternately, and readers use its memory") {
  for (const size_t bytes : {size_t{16}, size_t{kReaderStageBytes}, size_t{3 * TmaRowPipeline::kHalfBytes + 48}}) {
    CAPTURE(bytes);
    const std::array<std::vector<std::byte>, 3> rows{row_of(bytes, 1), row_of(bytes, 2), row_of(bytes, 3)};
    const std::vector<std::byte> zeros(bytes);
    for (int rounds = 1; rounds <= 4; ++rounds) {
      CAPTURE(rounds);
      std::array<std::vector<std::byte>, 3> read_before{zeros, zeros, zeros}, read_after = read_before;
      std::vector<std::byte> near = row_of(bytes, 7), far = near, cleared = near, read = near;
      emulation::run_grid(1, kWarp, TmaRowPipeline::kSharedBytes, [&] {
        TmaRowPipeline pipeline(emulation::dynamic_shared_memory(), 0, 1);
        for (int round = 0; round < rounds; ++round) {
          read_into<true>(pipeline, rows, read_before, 0, 0);
          pipeline.begin_copy_to_destinations(rows[2].data(), static_cast<int64_t>(bytes),
                                              lane() == 3    ? near.data()
                                              : lane() == 17 ? far.data()
                                                             : nullptr);
          pipeline.read(rows[1].data(), static_cast<int64_t>(bytes),
                        [&](int64_t offset, const std::byte* data, uint32_t data_bytes) {
                          for (uint32_t i = static_cast<uint32_t>(lane()); i < data_bytes; i += kWarp)
                            read[static_cast<size_t>(offset) + i] = data[i];
                        });
          read_into<true>(pipeline, rows, read_after, 0, 0);
          pipeline.finish();
          pipeline.make_zeros();
          pipeline.clear(static_cast<int64_t>(bytes), lane() == 31 ? cleared.data() : nullptr);
          pipeline.finish();
        }
      });
      CHECK(read_before == rows);
      CHECK(read_after == rows);
      CHECK(read == rows[1]);
      CHECK(near == rows[2]);
      CHECK(far == rows[2]);
      CHECK(cleared == zeros);
    }
  }
}

// Reads several rows of `hidden` elements in turn, between uses of the reader's memory.
template <typename Reader>
void check_list_reader(int64_t hidden, int num_rows) {
  using Element = __nv_bfloat16;
  std::vector<std::vector<std::byte>> rows, copies;
  for (int row = 0; row < num_rows; ++row)
    rows.push_back(row_of(static_cast<size_t>(hidden) * sizeof(Element), static_cast<unsigned>(row)));
  copies.assign(rows.size(), std::vector<std::byte>(rows[0].size()));
  std::vector<std::byte> cleared = rows[0];
  emulation::run_grid(1, kWarp, Reader::kRingBytes + TmaRowPipeline::kBarriersBytes, [&] {
    TmaRowPipeline pipeline(emulation::dynamic_shared_memory(), 0, 1, Reader::kRingBytes);
    for (int round = 0; round < 2; ++round) {
      const auto* const own =
          lane() < num_rows ? reinterpret_cast<const Element*>(rows[static_cast<size_t>(lane())].data()) : nullptr;
      Reader reader(pipeline.begin_generic(), own, num_rows, hidden);
      for (int h_tile = 0; h_tile < Reader::h_tiles(hidden); ++h_tile)
        for (int row = 0; row < num_rows; ++row) {
          reader.next();
          auto* const to = reinterpret_cast<Element*>(copies[static_cast<size_t>(row)].data());
          for (int i = 0; i < Reader::kWarpTiles; ++i)
            if (const int64_t h = h_tile * Reader::kHTile + i * kWarpTile + lane() * kFragment; h < hidden)
              store_vector(to + h, reader.fragment(i));
        }
      reader.end();
      pipeline.make_zeros();
      pipeline.clear(static_cast<int64_t>(cleared.size()), lane() == 0 ? cleared.data() : nullptr);
      pipeline.finish();
    }
  });
  CHECK(copies == rows);
  CHECK(cleared == std::vector<std::byte>(cleared.size()));
}

// Nothing beyond the rows is read, as AddressSanitizer tells.
TEST_CASE("a row reader of short h-tiles reads rows whose last h-tile is whole, or has a part of its fragments") {
  using Reader = ShortTileReader<__nv_bfloat16>;
  for (const int64_t hidden : {8, 248, 256, 264, 1016, 1024, 1032, 2016, 2880, 4096})
    for (const int num_rows : {1, 2, 7, 32}) {
      CAPTURE(hidden);
      CAPTURE(num_rows);
      CHECK(Reader::takes(hidden));
      check_list_reader<Reader>(hidden, num_rows);
    }
  CHECK(!Reader::takes(2881));
}

TEST_CASE("a row reader of long h-tiles goes from the rows of one sum to those of the next that has any") {
  using Element = __nv_bfloat16;
  using Reader = LongTileReader<Element>;
  constexpr int kRoom = 8;
  const std::vector<std::vector<int>> cases{{1}, {8, 8, 8, 8}, {0, 3, 0, 5}, {2, 0, 0, 1}, {4, 1, 2, 0}, {0, 0, 0, 0}};
  for (const int64_t h_tiles : {1, 3})
    for (const auto& sizes : cases)
      for (int first_sum = 0; first_sum < static_cast<int>(sizes.size()); ++first_sum) {
        CAPTURE(h_tiles);
        CAPTURE(sizes);
        CAPTURE(first_sum);
        const int64_t hidden = h_tiles * Reader::kHTile;
        const int num_sums = static_cast<int>(sizes.size()) - first_sum;
        std::vector<std::vector<std::byte>> rows;
        for (int row = 0; row < kWarp; ++row)
          rows.push_back(row_of(static_cast<size_t>(hidden) * sizeof(Element), static_cast<unsigned>(row)));
        auto copies = rows, expected = rows;
        for (int row = 0; row < kWarp; ++row) {
          std::vector<std::byte>& copy = copies[static_cast<size_t>(row)];
          copy.assign(copy.size(), std::byte{0});
          const auto sum = static_cast<size_t>(row / kRoom);
          if (sum >= sizes.size() || row / kRoom < first_sum || row % kRoom >= sizes[sum])
            expected[static_cast<size_t>(row)] = copy;
        }
        emulation::run_grid(1, kWarp, Reader::kRingBytes + TmaRowPipeline::kBarriersBytes, [&] {
          TmaRowPipeline pipeline(emulation::dynamic_shared_memory(), 0, 1, Reader::kRingBytes);
          const auto* const own = reinterpret_cast<const Element*>(rows[static_cast<size_t>(lane())].data());
          const int size = lane() < static_cast<int>(sizes.size()) ? sizes[static_cast<size_t>(lane())] : -1;
          Reader reader(pipeline.begin_generic(), {own, size, kRoom, first_sum, num_sums}, hidden);
          for (int sum = first_sum; sum < first_sum + num_sums; ++sum)
            for (int h_tile = 0; h_tile < Reader::h_tiles(hidden); ++h_tile)
              for (int row = 0; row < sizes[static_cast<size_t>(sum)]; ++row) {
                reader.next();
                auto* const to = reinterpret_cast<Element*>(copies[static_cast<size_t>(sum * kRoom + row)].data()) +
                                 h_tile * Reader::kHTile;
                for (int i = 0; i < Reader::kWarpTiles; ++i)
                  store_vector(to + i * kWarpTile + lane() * kFragment, reader.fragment(i));
              }
          reader.end();
        });
        CHECK(copies == expected);
      }
}

TEST_CASE("a row reader reads unaligned rows") {
  for (const size_t bytes : {size_t{2}, size_t{18}, size_t{1536}, size_t{5762}})
    for (int first = 0; first < 8; ++first)
      for (int lead = 0; lead < 8; ++lead) {
        if (bytes <= first * sizeof(__nv_bfloat16)) continue;
        CAPTURE(bytes);
        CAPTURE(first);
        CAPTURE(lead);
        const std::array<std::vector<std::byte>, 3> rows{row_of(bytes, 1), row_of(bytes, 2), row_of(bytes, 3)};
        std::array<std::vector<std::byte>, 3> copies = rows;
        for (auto& copy : copies)
          std::memset(copy.data() + first * sizeof(__nv_bfloat16), 0x77, bytes - first * sizeof(__nv_bfloat16));
        emulation::run_grid(1, kWarp, TmaRowPipeline::kSharedBytes, [&] {
          TmaRowPipeline pipeline(emulation::dynamic_shared_memory(), 0, 1);
          read_into<false>(pipeline, rows, copies, first, lead);
        });
        CHECK(copies == rows);
      }
}

} // namespace
} // namespace epx::cuda
