// SPDX-License-Identifier: Apache-2.0
// On the host transport the operations are compared with this plain memcpy of rows to scattered places.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace epx::bench {

class CopyBaseline {
public:
  // Prepares copies of any of these numbers of rows. Touches all memory that copies will write.
  CopyBaseline(std::span<const int64_t> row_counts, int64_t row_bytes, uint64_t seed);

  // Copies `rows` rows (one of the row_counts), taken from `source` in turn, to places in a random order that fill `rows`
  // rows of a buffer, as dispatch and combine_bwd do. A source of less than a row copies nothing.
  void scatter(std::span<const std::byte> source, int64_t rows);

  // Copies `rows` rows, taken from random places of `source`, to the first `rows` rows of a buffer in turn, as combine and
  // dispatch_bwd do. An empty source copies nothing.
  void gather(std::span<const std::byte> source, int64_t rows);

  std::span<const std::byte> target() const { return target_; }

private:
  int64_t row_bytes_;
  std::map<int64_t, std::vector<int64_t>> places_; // by number of rows: the place of each row
  std::vector<std::byte> target_;
};

} // namespace epx::bench
