// SPDX-License-Identifier: Apache-2.0
// The tables of what was measured, and EPX_TUNING's entries.
#include "runtime/tuning/tuning.h"

#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "base/error.h"

namespace {

using namespace epx;

constexpr GpuKind kHopper{9, 0};

std::string refusal_of(const char* text) {
  try {
    with_entries(measured_tuning(kHopper, 1), text);
  } catch (const StatusError& error) {
    CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
    return error.message();
  }
  return "";
}

TEST_CASE("a number of ranks that was not measured has the table of the next larger one") {
  CHECK(measured_tuning(kHopper, 2).scatter_sender_blocks == 32);
  CHECK(&measured_tuning(kHopper, 3) == &measured_tuning(kHopper, 4));
  CHECK(&measured_tuning(kHopper, 5) == &measured_tuning(kHopper, 8));
  CHECK(&measured_tuning(kHopper, 72) == &measured_tuning(kHopper, 8));
  CHECK(&measured_tuning(kHopper, 1) != &measured_tuning(kHopper, 2));
}

TEST_CASE("a kind of GPU that was not measured has the tables of H200") {
  CHECK(&measured_tuning({10, 3}, 2) == &measured_tuning(kHopper, 2));
}

TEST_CASE("entries take the place of those of the table, the last one of a name") {
  const Tuning& table = measured_tuning(kHopper, 4);
  const Tuning tuning = with_entries(table, "batch_grid=7,ll_many_sms=1,batch_grid=9");
  CHECK(tuning.batch_grid == 9);
  CHECK(tuning.ll_many_sms == 1);
  CHECK(tuning.full_grid == table.full_grid);
  CHECK(with_entries(table, "").batch_grid == table.batch_grid);
}

TEST_CASE("an entry that is wrong is refused by one sentence") {
  CHECK(refusal_of("batch_grid=7,") == ""); // a list may end with a comma
  for (const char* text : {"batch=7", ",batch_grid=7", "=7", " batch_grid=7", "batch_grid:7"}) {
    CAPTURE(text);
    CHECK(refusal_of(text).find("it takes name=value,... of sms_left_to_others, full_grid, ") != std::string::npos);
  }
  for (const char* text : {"full_grid=95", "full_grid=1025", "full_grid=", "full_grid=128x", "full_grid=-1", "full_grid"}) {
    CAPTURE(text);
    CHECK(refusal_of(text) ==
          std::string("the environment variable EPX_TUNING has \"") + text + "\"; the value must be 96..1024");
  }
}

TEST_CASE("on few SMs the low-latency path has limits") {
  const Tuning& tuning = measured_tuning(kHopper, 4);
  CHECK(ll_limits(tuning, 0).max_chunks == 0);
  CHECK(ll_limits(tuning, 16).max_chunks == 480);
  CHECK(ll_limits(tuning, 79).max_gathered_routes == 8192);
  CHECK(ll_limits(tuning, 80).max_gathered_routes == kMaxGatheredRoutes);
  CHECK(ll_limits(tuning, 80).max_chunks == std::numeric_limits<int64_t>::max());
}

} // namespace
