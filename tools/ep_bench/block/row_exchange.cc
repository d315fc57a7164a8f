// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/row_exchange.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace epx::bench {

void BootstrapRowExchange::gather_counts(const Buffer& counts) {
  counts_ = peers_.gather(std::span<const int32_t>(counts.read<int32_t>()));
}

std::span<int32_t> BootstrapRowExchange::staging(int64_t count) {
  staging_.resize(static_cast<size_t>(count));
  return staging_;
}

void BootstrapRowExchange::upload(std::span<const int32_t> staged, const Buffer& to) {
  std::ranges::copy(std::as_bytes(staged), to.data());
}

void BootstrapRowExchange::exchange(const std::byte* send, std::span<const int64_t> send_rows, std::byte* receive,
                                    std::span<const int64_t> receive_rows, int64_t row_bytes) {
  const int me = peers_.rank();
  const int64_t mine = std::reduce(send_rows.begin(), send_rows.end());
  const int64_t most = std::ranges::max(peers_.gather(mine));
  const std::vector<int64_t> all_rows = peers_.gather(send_rows); // [P, P]
  std::vector<std::byte> padded(static_cast<size_t>(most * row_bytes));
  std::copy_n(send, mine * row_bytes, padded.begin());
  const std::vector<std::byte> all = peers_.gather(std::span<const std::byte>(padded));
  for (int source = 0; source < peers_.num_ranks(); ++source) {
    const int64_t* const rows = all_rows.data() + int64_t{source} * peers_.num_ranks();
    const int64_t before = std::reduce(rows, rows + me);
    receive = std::copy_n(all.data() + (source * most + before) * row_bytes, receive_rows[source] * row_bytes, receive);
  }
}

} // namespace epx::bench
