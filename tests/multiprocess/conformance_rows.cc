// SPDX-License-Identifier: Apache-2.0
// These scenarios vary the rows: length, dtype, sidecar, weights, and how rows are summed.
#include <algorithm>

#include <doctest/doctest.h>

#include "tests/multiprocess/conformance.h"

namespace epx::test {

namespace {
constexpr epx_dtype kDtypes[] = {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16};
constexpr epx_combine_precision kPrecisions[] = {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT};
} // namespace

TEST_CASE("odd hidden sizes, and calls with fewer than hidden_dim") {
  for (const auto dtype : kDtypes) {
    for (const int hidden : {1, 3, 127, 255, 257}) {
      run_changed([&](Case& c) {
        c.group.max_tokens = 6;
        c.group.hidden_dim = hidden == 3 ? 1000 : hidden;
        c.layer.hidden = hidden;
        c.layer.combine_hidden = (hidden + 1) / 2;
        c.layer.dtype = dtype;
        c.layer.combine_dtype = dtype;
        c.iterations = 1;
      });
    }
  }
}

TEST_CASE("each dtype within each wider or equal max_token_dtype") {
  for (const auto max_dtype : kDtypes) {
    for (const auto dtype : kDtypes) {
      if (dtype == EPX_FLOAT32 && max_dtype != EPX_FLOAT32) continue;
      for (const auto precision : kPrecisions) {
        run_changed([&](Case& c) {
          c.group.max_dtype = max_dtype;
          c.group.precision = precision;
          c.layer.dtype = dtype;
          c.layer.combine_dtype = max_dtype; // another dtype on the way back
        });
      }
    }
  }
}

TEST_CASE("sidecars") {
  for (const int bytes : {0, 1, 3, 16, 33}) {
    run_changed([&](Case& c) {
      c.group.max_sidecar_bytes = 40;
      c.layer.sidecar_bytes = bytes;
    });
  }
}

TEST_CASE("with and without weights, forward and backward") {
  for (const auto precision : kPrecisions) {
    for (const int choice : {0, 1, 2, 3}) {
      run_changed([&](Case& c) {
        const bool first = (choice & 1) != 0;
        const bool second = (choice & 2) != 0;
        c.group.precision = precision;
        c.layer.dispatch_weights = first;
        c.layer.combine_weights = second;
        c.layer.combine_bwd_weights = first;
        c.layer.combine_bwd_grads = second;
        c.layer.dispatch_bwd_grads = first;
      });
    }
  }
}

TEST_CASE("rows in epx_mem_alloc memory yield the same bits as staged ones") {
  for (const auto placement : {Placement::plain, Placement::in_place, Placement::random}) {
    for (const auto precision : kPrecisions) {
      run_changed([&](Case& c) {
        c.placement = placement;
        c.num_arenas = 3;
        c.arena_bytes = 1 << 20;
        c.iterations = 3;
        c.group.precision = precision;
        c.group.max_sidecar_bytes = 12;
        c.layer.sidecar_bytes = 12;
        c.layer.rows = RecvRows::any;
      });
    }
  }
}

TEST_CASE("more bytes than any internal step is likely to move at once") {
  for (const int num_comm_sms : {0, 1})
    run_changed([&](Case& c) {
      c.group.max_tokens = 300;
      c.group.num_comm_sms = num_comm_sms;
      c.group.hidden_dim = 1500;
      c.layer.hidden = 1500;
      c.layer.combine_hidden = 1499;
      c.layer.top_k = 2;
      c.iterations = 1;
    });
}

TEST_CASE("rows of whole longer h-tiles, and others, in sums of few and of many rows") {
  struct Rows {
    epx_combine_precision precision;
    int top_k;
    int num_comm_sms;
    epx_dtype dtype;
    int hidden = 3584, combine_hidden = 1792;
  };
  // Three short h-tiles and one fragment, in two splits; and one short h-tile and one fragment.
  constexpr int kHidden = 3080, kCombineHidden = 1032;
  // 200 tokens take no low-latency path, and warps take whole rows. In precision wire with up to 16 routes they take batches of
  // tokens: on one SM of as many as they can, on four of two, too. On the host transport all that is the same, and slow.
  const int tokens = is_on_host() ? 24 : 200;
  const auto cases =
      variants_of_this_run({Rows{EPX_COMBINE_WIRE, 1, 4, EPX_BFLOAT16}, Rows{EPX_COMBINE_WIRE, 2, 1, EPX_FLOAT16},
                            Rows{EPX_COMBINE_WIRE, 7, 1, EPX_BFLOAT16}, Rows{EPX_COMBINE_WIRE, 7, 4, EPX_FLOAT16},
                            Rows{EPX_COMBINE_WIRE, 16, 4, EPX_BFLOAT16}, Rows{EPX_COMBINE_WIRE, 40, 1, EPX_BFLOAT16},
                            Rows{EPX_COMBINE_EXACT, 2, 1, EPX_BFLOAT16}, Rows{EPX_COMBINE_EXACT, 40, 1, EPX_FLOAT16},
                            Rows{EPX_COMBINE_WIRE, 2, 4, EPX_FLOAT16, kHidden, kCombineHidden},
                            Rows{EPX_COMBINE_WIRE, 40, 1, EPX_BFLOAT16, kHidden, kCombineHidden},
                            Rows{EPX_COMBINE_EXACT, 7, 1, EPX_BFLOAT16, kCombineHidden, kHidden}});
  for (const Rows& rows : cases)
    run_changed([&](Case& c) {
      c.group.num_experts = 48;
      c.group.max_top_k = rows.top_k;
      c.group.num_comm_sms = rows.num_comm_sms;
      c.group.max_tokens = rows.top_k == 40 ? std::min(tokens, 40) : tokens;
      c.group.precision = rows.precision;
      c.group.hidden_dim = std::max(rows.hidden, rows.combine_hidden);
      c.layer.hidden = rows.hidden;
      c.layer.combine_hidden = rows.combine_hidden;
      c.layer.dtype = c.layer.combine_dtype = rows.dtype;
      c.layer.top_k = rows.top_k;
      c.iterations = 1;
    });
}

TEST_CASE("rows longer than any internal step is likely to move at once") {
  for (const auto placement : {Placement::plain, Placement::in_place}) {
    run_changed([&](Case& c) {
      c.group.max_tokens = 24;
      c.group.num_comm_sms = 1;
      c.group.hidden_dim = 9004; // float32: a multiple of 16 bytes
      c.layer.hidden = 9004;
      c.layer.combine_hidden = 9000;
      c.layer.combine_bwd_weights = false;
      c.layer.dtype = c.layer.combine_dtype = EPX_FLOAT32;
      c.layer.top_k = 3;
      c.iterations = 4;
      c.placement = placement;
      c.arena_bytes = 16 << 20;
    });
  }
}

} // namespace epx::test
