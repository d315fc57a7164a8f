// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/copy_baseline.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "tools/ep_bench/workload/random.h"

namespace epx::bench {
namespace {

std::vector<int64_t> random_permutation(int64_t size, const RandomStream& random) {
  std::vector<int64_t> places(size);
  std::iota(places.begin(), places.end(), 0);
  for (int64_t i = size; i-- > 1;)
    std::swap(places[i], places[random.below(i, static_cast<uint32_t>(i + 1))]);
  return places;
}

} // namespace

CopyBaseline::CopyBaseline(std::span<const int64_t> row_counts, int64_t row_bytes, uint64_t seed) : row_bytes_(row_bytes) {
  int64_t most = 0;
  for (int64_t rows : row_counts) {
    places_.emplace(rows, random_permutation(rows, {seed, static_cast<uint64_t>(rows)}));
    most = std::max(most, rows);
  }
  target_.resize(most * row_bytes);
}

void CopyBaseline::scatter(std::span<const std::byte> source, int64_t rows) {
  const auto source_bytes = static_cast<int64_t>(source.size()) / row_bytes_ * row_bytes_; // of whole rows
  if (source_bytes == 0) return;
  const std::byte* from = source.data();
  const std::byte* const end = from + source_bytes;
  for (int64_t place : places_.at(rows)) {
    std::memcpy(target_.data() + place * row_bytes_, from, row_bytes_);
    from += row_bytes_;
    if (from == end) from = source.data();
  }
}

void CopyBaseline::gather(std::span<const std::byte> source, int64_t rows) {
  const int64_t source_rows = static_cast<int64_t>(source.size()) / row_bytes_;
  if (source_rows == 0) return;
  std::byte* to = target_.data();
  for (int64_t place : places_.at(rows)) {
    std::memcpy(to, source.data() + place % source_rows * row_bytes_, row_bytes_);
    to += row_bytes_;
  }
}

} // namespace epx::bench
