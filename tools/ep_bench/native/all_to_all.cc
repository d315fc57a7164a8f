// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/all_to_all.h"

#include <algorithm>
#include <cstring>
#include <numeric>

namespace epx::bench {

void BootstrapAllToAll::gather_counts(const Buffer& counts) {
  counts_ = peers_.gather(std::span<const int32_t>(counts.read<int32_t>()));
}

std::span<int32_t> BootstrapAllToAll::staging(int64_t count) {
  staging_.resize(static_cast<size_t>(count));
  return staging_;
}

void BootstrapAllToAll::upload(std::span<const int32_t> staged, const Buffer& to) {
  std::ranges::copy(std::as_bytes(staged), to.data());
}

void BootstrapAllToAll::exchange(const Buffer& send, std::span<const int64_t> sent, const Buffer& receive,
                                 std::span<const int64_t> received, int64_t row_bytes) {
  const int me = peers_.rank();
  const int64_t mine = std::reduce(sent.begin(), sent.end());
  const int64_t most = std::ranges::max(peers_.gather(mine));
  const std::vector<int64_t> all_sent = peers_.gather(sent); // [P, P]
  std::vector<std::byte> padded(static_cast<size_t>(most * row_bytes));
  std::copy_n(send.data(), mine * row_bytes, padded.begin());
  const std::vector<std::byte> all = peers_.gather(std::span<const std::byte>(padded));
  std::byte* to = receive.data();
  for (int source = 0; source < peers_.num_ranks(); ++source) {
    const int64_t* const rows = all_sent.data() + int64_t{source} * peers_.num_ranks();
    const int64_t before = std::reduce(rows, rows + me);
    to = std::copy_n(all.data() + (source * most + before) * row_bytes, received[source] * row_bytes, to);
  }
}

} // namespace epx::bench
