// SPDX-License-Identifier: Apache-2.0
// These scenarios vary the routing: which rank owns which experts, which ranks have tokens, and the indices.
#include <doctest/doctest.h>

#include "tests/multiprocess/conformance.h"

namespace epx::test {

TEST_CASE("experts that the ranks do not divide") {
  for (const int experts_beyond : {1, 2, 5}) {
    run_changed([&](Case& c) { c.group.num_experts = 2 * c.group.num_ranks + experts_beyond; });
  }
}

TEST_CASE("fewer experts than ranks") {
  run_changed([](Case& c) { c.group.num_experts = 1; });
  run_changed([](Case& c) { c.group.num_experts = std::max(1, c.group.num_ranks - 1); });
}

TEST_CASE("more than a thousand experts") {
  run_changed([](Case& c) {
    c.group.num_experts = 1025;
    c.layer.alignment = 1;
    c.group.max_alignment = 1;
  });
}

TEST_CASE("one rank has no tokens") {
  run_changed([](Case& c) {
    c.layer.tokens = TokenCount::none_on_one;
    c.iterations = 4; // the seed chooses another rank each time
  });
}

TEST_CASE("no rank has tokens") {
  run_changed([](Case& c) { c.layer.tokens = TokenCount::none; });
}

TEST_CASE("all ranks have as many tokens as allowed") {
  run_changed([](Case& c) { c.layer.tokens = TokenCount::full; });
}

TEST_CASE("a group for one token") {
  run_changed([](Case& c) {
    c.group.max_tokens = 1;
    c.layer.tokens = TokenCount::full;
  });
}

TEST_CASE("one hot expert") {
  for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
    run_changed([&](Case& c) {
      c.layer.routing = RoutingStyle::hot;
      c.layer.tokens = TokenCount::full;
      c.group.precision = precision;
    });
  }
}

TEST_CASE("duplicate experts in a row") {
  run_changed([](Case& c) {
    c.layer.routing = RoutingStyle::repeated;
    c.layer.top_k = 4;
  });
}

TEST_CASE("masked routes") {
  run_changed([](Case& c) { c.layer.percent_masked = 40; });
  run_changed([](Case& c) { c.layer.percent_masked = 100; });
}

TEST_CASE("bad indices, also those that are valid in their low 32 bits") {
  for (const auto index_dtype : {EPX_INT32, EPX_INT64}) {
    run_changed([&](Case& c) {
      c.layer.percent_bad = 20;
      c.layer.percent_masked = 10;
      c.layer.index_dtype = index_dtype;
    });
  }
}

TEST_CASE("int32 and int64 indices and counts") {
  for (const auto index_dtype : {EPX_INT32, EPX_INT64}) {
    for (const auto counts_dtype : {EPX_INT32, EPX_INT64}) {
      run_changed([&](Case& c) {
        c.layer.index_dtype = index_dtype;
        c.layer.counts_dtype = counts_dtype;
      });
    }
  }
}

TEST_CASE("top-1, top-32, top-64") {
  for (const int top_k : {1, 32, 64}) {
    for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      run_changed([&](Case& c) {
        c.group.max_tokens = 8;
        c.group.max_top_k = 64;
        c.group.precision = precision;
        c.layer.top_k = top_k;
        c.layer.percent_masked = top_k > 1 ? 10 : 0;
      });
    }
  }
}

TEST_CASE("alignments of 0, 1, 16 and 128") {
  for (const int alignment : {0, 1, 16, 128}) {
    run_changed([&](Case& c) {
      c.group.max_alignment = 128;
      c.layer.alignment = alignment;
    });
  }
}

TEST_CASE("overflow is reported or silent, and drops the same routes either way") {
  for (const auto overflow : {EPX_OVERFLOW_ERROR, EPX_OVERFLOW_DROP}) {
    for (const int64_t capacity : {40, 7, 3}) { // 3 is less than the alignment: everything is dropped
      run_changed([&](Case& c) {
        c.group.overflow = overflow;
        c.group.max_recv_rows = capacity;
        c.layer.tokens = TokenCount::full;
        c.layer.routing = RoutingStyle::skewed;
      });
    }
  }
}

TEST_CASE("fewer receive rows than the plan has, chosen afresh in each call") {
  for (const auto rows : {RecvRows::exact, RecvRows::fewer, RecvRows::more, RecvRows::any}) {
    run_changed([&](Case& c) {
      c.layer.rows = rows;
      c.layer.sidecar_bytes = 5;
      c.group.max_sidecar_bytes = 8;
    });
  }
}

} // namespace epx::test
