// SPDX-License-Identifier: Apache-2.0
// These scenarios run the rank-major layout.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

using Bytes = std::vector<std::byte>;

constexpr epx_combine_precision kPrecisionsOfGroups[] = {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT};

void run_rank_major(const std::function<void(Case&)>& change) {
  run_changed([&](Case& c) {
    c.layer.rank_major = RankMajorRows::exact;
    change(c);
  });
}

// Makes the calls that follow a dispatch_rank_major.
void follow(LayerRun& layer, const Workload& work) {
  layer.combine_rank_major(work);
  layer.combine_rank_major_bwd(work);
  layer.dispatch_rank_major_bwd(work);
}

} // namespace

TEST_CASE("rank-major: M that is exact, larger, larger than any source can need, too small, and none") {
  for (const auto rows :
       {RankMajorRows::exact, RankMajorRows::max_tokens, RankMajorRows::more, RankMajorRows::fewer, RankMajorRows::none}) {
    for (const auto precision : kPrecisionsOfGroups) {
      run_rank_major([&](Case& c) {
        c.group.precision = precision;
        c.layer.rank_major = rows;
        c.iterations = 3;
      });
    }
  }
}

TEST_CASE("rank-major: duplicate, masked and bad indices, int32 and int64") {
  for (const auto dtype : {EPX_INT32, EPX_INT64}) {
    run_rank_major([&](Case& c) {
      c.layer.index_dtype = dtype;
      c.layer.counts_dtype = dtype == EPX_INT32 ? EPX_INT64 : EPX_INT32;
      c.layer.routing = RoutingStyle::repeated;
      c.layer.top_k = 4;
      c.layer.percent_masked = 20;
      c.layer.percent_bad = 15;
    });
  }
  run_rank_major([](Case& c) { c.layer.percent_masked = 100; });
}

TEST_CASE("rank-major: integers of other dtypes on each rank") {
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::exact;
  const Workload work = make_workload(c.group, c.layer, 60);
  for (const int first : {0, 1}) {
    on_every_rank([&](const RankContext& context) {
      LayerCase mine = c.layer;
      const bool has_wide_indices = (context.rank + first) % 2 == 0;
      mine.index_dtype = has_wide_indices ? EPX_INT64 : EPX_INT32;
      mine.counts_dtype = has_wide_indices ? EPX_INT32 : EPX_INT64; // of recv_topk_idx too
      GroupRun group(context, c.group);
      LayerRun layer(group, mine, Placement::random, 61);
      run_iteration(group, layer, work);
    });
  }
}

TEST_CASE("rank-major: rows beyond M are reported by the dispatch alone") {
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::fewer;
  c.layer.routing = RoutingStyle::hot; // on the rank of the hot expert
  const Workload work = make_workload(c.group, c.layer, 62);
  CHECK(std::ranges::any_of(work.rank_major->plan.ranks, [](const auto& rank) { return rank.dropped_here > 0; }));
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::random, 63);
    layer.dispatch_rank_major(work);
    group.check_status(); // takes its event
    layer.combine_rank_major(work);
    group.check_status();
    layer.combine_rank_major_bwd(work);
    group.check_status();
    layer.dispatch_rank_major_bwd(work);
    group.check_status();
  });
}

TEST_CASE("rank-major: one hot expert, fewer experts than ranks, and ranks without tokens") {
  run_rank_major([](Case& c) {
    c.layer.routing = RoutingStyle::hot;
    c.layer.tokens = TokenCount::full;
  });
  run_rank_major([](Case& c) {
    c.layer.routing = RoutingStyle::hot;
    c.layer.rank_major = RankMajorRows::fewer;
  });
  run_rank_major([](Case& c) { c.group.num_experts = std::max(1, c.group.num_ranks - 1); });
  run_rank_major([](Case& c) {
    c.layer.tokens = TokenCount::none_on_one;
    c.iterations = 3;
  });
  run_rank_major([](Case& c) { c.layer.tokens = TokenCount::none; });
}

TEST_CASE("rank-major: top-1, top-33 and top-64") {
  for (const int top_k : {1, 33, 64}) {
    run_rank_major([&](Case& c) {
      c.group.max_tokens = 8;
      c.group.max_top_k = 64;
      c.layer.top_k = top_k;
      c.layer.percent_masked = top_k > 1 ? 10 : 0;
    });
  }
}

TEST_CASE("rank-major: dtypes, odd hidden sizes, sidecars, weights, and memory that peers reach") {
  for (const auto dtype : {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16}) {
    for (const int hidden : {1, 33, 1024}) {
      for (const auto placement : {Placement::plain, Placement::in_place}) {
        run_rank_major([&](Case& c) {
          c.placement = placement;
          c.group.hidden_dim = hidden;
          c.group.max_sidecar_bytes = 40;
          c.layer.hidden = hidden;
          c.layer.combine_hidden = (hidden + 1) / 2;
          c.layer.dtype = dtype;
          c.layer.combine_dtype = dtype;
          c.layer.sidecar_bytes = hidden == 33 ? 0 : hidden == 1 ? 16 : 33;
          c.layer.dispatch_weights = hidden != 33;
          c.layer.dispatch_bwd_grads = hidden != 1;
          c.iterations = 1;
        });
      }
    }
  }
}

TEST_CASE("rank-major: more rows than the low-latency path takes, whichever ranks have so many tokens") {
  struct Form {
    TokenCount tokens;
    Placement placement;
  };
  for (const Form form : {Form{TokenCount::full, Placement::plain}, Form{TokenCount::none_on_one, Placement::plain},
                          Form{TokenCount::full, Placement::in_place}, Form{TokenCount::ragged, Placement::in_place}}) {
    run_rank_major([&](Case& c) {
      c.placement = form.placement;
      c.arena_bytes = 1 << 20;
      c.group.max_tokens = 520; // the low-latency path takes 512
      c.group.hidden_dim = c.layer.hidden = c.layer.combine_hidden = 24;
      c.group.num_comm_sms = form.placement == Placement::plain ? 0 : 2;
      c.group.max_sidecar_bytes = 8;
      c.layer.sidecar_bytes = 8;
      c.layer.tokens = form.tokens;
      c.layer.rank_major = RankMajorRows::max_tokens; // M decides the path
      if (form.placement == Placement::in_place) {
        c.layer.top_k = 33; // the routes of a row take a whole warp
        c.group.max_top_k = 33;
      }
      c.iterations = 2;
    });
  }
}

TEST_CASE("rank-major: few rows of many tokens, which take the low-latency path") {
  for (const auto rows : {RankMajorRows::exact, RankMajorRows::fewer}) {
    run_rank_major([&](Case& c) {
      c.group.max_tokens = 1100; // blocks see 512 at a time
      c.group.hidden_dim = c.layer.hidden = c.layer.combine_hidden = 24;
      c.layer.percent_masked = 97;
      c.layer.percent_bad = 1;
      c.layer.rank_major = rows;
      c.iterations = 1;
    });
  }
}

TEST_CASE("rank-major: a small receive capacity drops nothing") {
  run_rank_major([](Case& c) {
    c.group.max_recv_rows = 10 * c.group.num_ranks;
    c.group.overflow = EPX_OVERFLOW_DROP;
    c.layer.rank_major = RankMajorRows::max_tokens;
  });
}

TEST_CASE("rank-major: both layouts in flight, and calls in any order") {
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::exact;
  LayerCase other = c.layer;
  other.top_k = 2;
  other.hidden = 31;
  const Workload work = make_workload(c.group, c.layer, 95);
  const Workload other_work = make_workload(c.group, other, 96);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 18);
    LayerRun layer(group, c.layer, Placement::random, 97);
    LayerRun neighbour(group, other, Placement::random, 98);
    layer.dispatch_rank_major(work);
    layer.prepare(work);
    neighbour.dispatch_rank_major(other_work);
    Rng same_everywhere(99);
    for (int i = 0; i < 40; ++i) {
      const epx_operation operation = same_everywhere.pick(
          {EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_RANK_MAJOR, EPX_OP_COMBINE_RANK_MAJOR,
           EPX_OP_COMBINE_RANK_MAJOR_BWD, EPX_OP_DISPATCH_RANK_MAJOR_BWD, EPX_OP_NONE});
      if (operation == EPX_OP_NONE)
        follow(neighbour, other_work);
      else
        layer.call(operation, work);
    }
    group.check_status();
  });
}

TEST_CASE("rank-major: compact rows, whatever M, T, K, H, dtypes, and where the tensors lie") {
  const auto run_compact = [](const std::function<void(Case&)>& change) {
    run_rank_major([&](Case& c) {
      c.layer.rank_major_compact = true;
      change(c);
    });
  };
  for (const auto rows :
       {RankMajorRows::exact, RankMajorRows::max_tokens, RankMajorRows::more, RankMajorRows::fewer, RankMajorRows::none})
    for (const auto placement : {Placement::plain, Placement::in_place})
      for (const auto tokens : {TokenCount::ragged, TokenCount::none_on_one})
        run_compact([&](Case& c) {
          c.layer.rank_major = rows;
          c.layer.tokens = tokens;
          c.layer.percent_masked = 20;
          c.placement = placement;
          c.group.max_sidecar_bytes = c.layer.sidecar_bytes = 24;
        });
  for (const int top_k : {1, 33})
    run_compact([&](Case& c) {
      c.group.max_tokens = 8;
      c.group.max_top_k = c.layer.top_k = top_k;
      c.layer.percent_masked = top_k > 1 ? 10 : 0;
      c.layer.counts_dtype = EPX_INT64;
    });
  for (const auto dtype : {EPX_FLOAT32, EPX_BFLOAT16})
    run_compact([&](Case& c) {
      c.group.hidden_dim = c.layer.hidden = c.layer.combine_hidden = 33;
      c.layer.dtype = c.layer.combine_dtype = dtype;
      c.layer.dispatch_weights = c.layer.dispatch_bwd_grads = dtype == EPX_FLOAT32;
    });
  run_compact([](Case& c) { c.group.precision = EPX_COMBINE_EXACT; });
  run_compact([](Case& c) { c.layer.routing = RoutingStyle::hot; }); // all other ranks have no rows
  run_compact([](Case& c) { c.layer.tokens = TokenCount::none; });
}

TEST_CASE("rank-major: more compact rows than the low-latency path takes") {
  for (const auto placement : {Placement::plain, Placement::in_place})
    run_rank_major([&](Case& c) {
      c.placement = placement;
      c.arena_bytes = 1 << 20;
      c.group.max_tokens = 520;
      c.group.hidden_dim = c.layer.hidden = c.layer.combine_hidden = 24;
      c.group.num_comm_sms = placement == Placement::plain ? 0 : 2;
      c.group.max_sidecar_bytes = c.layer.sidecar_bytes = 8;
      c.layer.tokens = TokenCount::ragged;
      c.layer.rank_major = RankMajorRows::max_tokens;
      c.layer.rank_major_compact = true;
      c.layer.percent_masked = 30;
    });
}

TEST_CASE("rank-major: strided and compact plans by turns in one group") {
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::max_tokens;
  LayerCase compact = c.layer;
  compact.rank_major_compact = true;
  const Workload work = make_workload(c.group, c.layer, 130);
  const Workload compact_work = make_workload(c.group, compact, 131);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 18);
    LayerRun layer(group, c.layer, Placement::random, 132);
    LayerRun neighbour(group, compact, Placement::random, 133);
    for (int i = 0; i < 3; ++i) {
      layer.dispatch_rank_major(work);
      neighbour.dispatch_rank_major(compact_work);
      follow(layer, work);
      follow(neighbour, compact_work);
    }
    group.check_status();
  });
}

TEST_CASE("rank-major: with compact rows, handle memory of zeros, and of an earlier dispatch") {
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::exact;
  c.layer.rank_major_compact = true;
  const int lost_rank = c.group.num_ranks / 2;
  for (const bool is_stale : {false, true}) {
    const Workload spoiled = make_workload(c.group, c.layer, 140, {lost_rank, is_stale});
    on_every_rank([&](const RankContext& context) {
      GroupRun group(context, c.group);
      group.add_arena(1 << 18);
      LayerRun layer(group, c.layer, Placement::random, 141);
      layer.dispatch_rank_major(spoiled);
      const Bytes earlier = layer.rank_major_handle();
      if (is_stale) layer.dispatch_rank_major(spoiled);
      if (group.rank() == lost_rank) layer.use_foreign_rank_major_handle(is_stale ? earlier : Bytes(earlier.size()));
      if (is_stale ? c.group.num_ranks > 1 : group.rank() == lost_rank) layer.expect_mismatch(!is_stale);
      follow(layer, spoiled);
      group.check_status();
    });
  }
}

TEST_CASE("rank-major: handle memory of prepare, of zeros, and of another M") {
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::exact;
  c.layer.alignment = 1;
  LayerCase larger = c.layer;
  larger.rank_major = RankMajorRows::more;
  const int lost_rank = c.group.num_ranks - 1;
  const Workload spoiled = make_workload(c.group, c.layer, 100, {lost_rank, false});
  const Workload good = make_workload(c.group, c.layer, 101);
  const Workload other_rows = make_workload(c.group, larger, 100);
  for (const int kind : {0, 1, 2}) {
    on_every_rank([&](const RankContext& context) {
      GroupRun group(context, c.group);
      group.add_arena(1 << 18);
      LayerRun layer(group, c.layer, Placement::random, 102);
      LayerRun neighbour(group, larger, Placement::random, 103);
      layer.prepare(spoiled);
      neighbour.dispatch_rank_major(other_rows);
      layer.dispatch_rank_major(spoiled);
      if (group.rank() == lost_rank) {
        const Bytes zeros(layer.handle().size());
        layer.use_foreign_rank_major_handle(kind == 0 ? layer.handle() : kind == 1 ? zeros : neighbour.rank_major_handle());
        layer.expect_mismatch(true);
      }
      follow(layer, spoiled);
      group.check_status();
      run_iteration(group, layer, good);
    });
  }
}

TEST_CASE("rank-major: handle memory in the calls of the other layout") {
  Case c = base_case();
  c.layer.alignment = 1;
  c.layer.rank_major = RankMajorRows::exact;
  const Workload spoiled = make_workload(c.group, c.layer, 110, {0, false});
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::random, 111);
    layer.dispatch_rank_major(spoiled);
    layer.prepare(spoiled);
    if (group.rank() == 0) {
      layer.use_foreign_handle(layer.rank_major_handle());
      layer.expect_mismatch(true);
    }
    layer.movements(spoiled);
    group.check_status();
  });
}

TEST_CASE("rank-major: with handle memory of an earlier dispatch no rows travel between ranks that disagree") {
  Case c = base_case();
  c.layer.rank_major = RankMajorRows::exact;
  const int lost_rank = c.group.num_ranks / 2;
  const Workload spoiled = make_workload(c.group, c.layer, 120, {lost_rank, true});
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 18);
    LayerRun layer(group, c.layer, Placement::random, 121);
    layer.dispatch_rank_major(spoiled);
    const Bytes earlier = layer.rank_major_handle();
    layer.dispatch_rank_major(spoiled);
    if (group.rank() == lost_rank) layer.use_foreign_rank_major_handle(earlier);
    if (c.group.num_ranks > 1) layer.expect_mismatch(false);
    follow(layer, spoiled);
    group.check_status();
  });
}

} // namespace epx::test
