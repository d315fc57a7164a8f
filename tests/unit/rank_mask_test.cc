// SPDX-License-Identifier: Apache-2.0
#include "base/rank_mask.h"

#include <vector>

#include <doctest/doctest.h>

TEST_CASE("a mask holds the ranks that were set, up to rank 63") {
  epx::RankMask mask;
  CHECK(mask.is_empty());
  const std::vector<int> ranks{0, 5, 31, 32, 63};
  for (const int rank : ranks)
    mask.set(rank);
  mask.set(5); // again
  CHECK(mask.count() == 5);
  CHECK(mask.contains(63));
  CHECK_FALSE(mask.contains(33));
  CHECK(mask.count_below(0) == 0);
  CHECK(mask.count_below(32) == 3);
  CHECK(mask.count_below(63) == 4);
  std::vector<int> found;
  for (epx::RankMask left = mask; !left.is_empty(); left.remove_lowest())
    found.push_back(left.lowest());
  CHECK(found == ranks);
}
