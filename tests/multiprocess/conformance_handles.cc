// SPDX-License-Identifier: Apache-2.0
// In these scenarios several layers are in flight, and calls get handle memory that does not belong to them.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

using Bytes = std::vector<std::byte>;

// Returns the bytes that the lost rank passes instead of `own`, the right ones. `other_layer` belongs to another layer of the
// group, `other_group` to the same layer of another group.
using Spoil = Bytes (*)(const Bytes& own, const Bytes& other_layer, const Bytes& other_group);

Bytes other_layer(const Bytes& own, const Bytes& layer, const Bytes& /*group*/) {
  Bytes bytes = layer;
  bytes.resize(own.size());
  return bytes;
}
Bytes other_group(const Bytes& /*own*/, const Bytes& /*layer*/, const Bytes& group) {
  return group;
}
Bytes all_zero(const Bytes& own, const Bytes& /*layer*/, const Bytes& /*group*/) {
  return Bytes(own.size());
}

// Runs all calls of a layer while one rank's handle memory is wrong, and then everything once more with the right one.
void run_with_lost_rank(const RankContext& context, int lost_rank, const Workload& spoiled, const Workload& good,
                        Placement placement, Spoil spoil) {
  GroupRun group(context, good.group);
  GroupRun second_group(context, good.group);
  const LayerCase& layer_case = good.layer;
  LayerCase other_case = layer_case;
  other_case.top_k = layer_case.top_k - 1;
  LayerRun layer(group, layer_case, placement, 11);
  LayerRun neighbour(group, other_case, Placement::random, 12);
  LayerRun same_elsewhere(second_group, layer_case, Placement::random, 13);
  group.add_arena(1 << 20);

  neighbour.prepare(make_workload(good.group, other_case, 77));
  same_elsewhere.prepare(spoiled);
  layer.prepare(spoiled);
  if (group.rank() == lost_rank) {
    layer.use_foreign_handle(spoil(layer.handle(), neighbour.handle(), same_elsewhere.handle()));
    layer.expect_mismatch(true);
  }
  layer.movements(spoiled);
  group.check_status();
  run_iteration(group, layer, good);
}

void lose_a_rank(Spoil spoil) {
  for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
    Case c = base_case();
    c.group.precision = precision;
    c.group.max_sidecar_bytes = 8;
    c.layer.sidecar_bytes = 8;
    const Workload good = make_workload(c.group, c.layer, 6);
    for (const int lost_rank : {0, c.group.num_ranks - 1}) {
      const Workload spoiled = make_workload(c.group, c.layer, 5, {lost_rank, false});
      for (const auto placement : {Placement::random, Placement::in_place}) {
        on_every_rank(
            [&](const RankContext& context) { run_with_lost_rank(context, lost_rank, spoiled, good, placement, spoil); });
      }
    }
  }
}

} // namespace

TEST_CASE("several layers in flight") {
  Case c = base_case();
  const int num_layers = 3;
  std::vector<LayerCase> cases(num_layers, c.layer);
  cases[1].top_k = 1;
  cases[1].alignment = 16;
  cases[1].dtype = EPX_FLOAT32;
  cases[2].top_k = 4;
  cases[2].alignment = 0;
  cases[2].hidden = 31;
  std::vector<Workload> work;
  for (int i = 0; i < num_layers; ++i)
    work.push_back(make_workload(c.group, cases[static_cast<size_t>(i)], 100 + static_cast<uint64_t>(i)));

  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 18);
    std::vector<LayerRun> layers;
    for (int i = 0; i < num_layers; ++i) {
      layers.emplace_back(group, cases[static_cast<size_t>(i)], Placement::random, 20 + static_cast<uint64_t>(i));
    }
    for (size_t i = 0; i < layers.size(); ++i)
      layers[i].prepare(work[i]);
    const auto forward = [&](size_t i) {
      layers[i].dispatch(work[i]);
      layers[i].combine(work[i]);
    };
    const auto backward = [&](size_t i) {
      layers[i].combine_bwd(work[i]);
      layers[i].dispatch_bwd(work[i]);
    };
    forward(0);
    forward(1);
    backward(0);
    forward(2);
    backward(1);
    backward(2);
    group.check_status();
  });
}

TEST_CASE("one handle serves any number of calls in any order") {
  Case c = base_case();
  const Workload work = make_workload(c.group, c.layer, 3);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 16);
    LayerRun layer(group, c.layer, Placement::random, 4);
    layer.prepare(work);
    Rng same_everywhere(9);
    for (int i = 0; i < 40; ++i)
      layer.call(same_everywhere.pick({EPX_OP_DISPATCH, EPX_OP_COMBINE, EPX_OP_COMBINE_BWD, EPX_OP_DISPATCH_BWD}), work);
    group.check_status();
  });
}

TEST_CASE("handle memory of another layer") {
  lose_a_rank(other_layer);
}

TEST_CASE("handle memory of another group") {
  lose_a_rank(other_group);
}

TEST_CASE("handle memory of zeros") {
  lose_a_rank(all_zero);
}

TEST_CASE("with handle memory of an earlier prepare no rows travel between ranks that disagree") {
  Case c = base_case();
  const int lost_rank = c.group.num_ranks / 2;
  const Workload spoiled = make_workload(c.group, c.layer, 7, {lost_rank, true});
  const Workload good = make_workload(c.group, c.layer, 8);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 18);
    LayerRun layer(group, c.layer, Placement::random, 6);
    layer.prepare(spoiled);
    const Bytes earlier = layer.handle();
    layer.prepare(spoiled);
    if (group.rank() == lost_rank) layer.use_foreign_handle(earlier);
    if (c.group.num_ranks > 1) layer.expect_mismatch(false); // every rank reports it; a rank alone agrees with itself
    layer.movements(spoiled);
    group.check_status();
    run_iteration(group, layer, good);
  });
}

TEST_CASE("with handle memory of an earlier prepare of other routing a rank follows that") {
  Case c = base_case();
  c.layer.tokens = TokenCount::full; // T is that of both
  c.group.max_sidecar_bytes = 8;
  c.layer.sidecar_bytes = 8;
  const int lost_rank = c.group.num_ranks - 1;
  const Workload early = make_workload(c.group, c.layer, 9, {lost_rank, true});
  const Workload late = make_workload(c.group, c.layer, 10, {lost_rank, true});
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    group.add_arena(1 << 18);
    LayerRun layer(group, c.layer, Placement::random, 6);
    layer.prepare(early);
    const Bytes earlier = layer.handle();
    layer.prepare(late);
    const bool is_lost = group.rank() == lost_rank;
    if (is_lost) layer.use_foreign_handle(earlier);
    if (c.group.num_ranks > 1) layer.expect_mismatch(false);
    const Workload& work = is_lost ? early : late; // no row travels between ranks that have different ones
    layer.movements(work);
    group.check_status();
  });
}

TEST_CASE("handle memory with a damaged header") {
  Case c = base_case();
  const int lost_rank = c.group.num_ranks - 1;
  const Workload spoiled = make_workload(c.group, c.layer, 8, {lost_rank, false});
  const Workload good = make_workload(c.group, c.layer, 8);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::plain, 5);
    layer.prepare(spoiled);
    const Bytes own = layer.handle();
    for (size_t byte = 0; byte < 64; ++byte) { // each of these bytes matters
      if (group.rank() == lost_rank) {
        Bytes damaged = own;
        damaged[byte] ^= std::byte{0x10};
        layer.use_foreign_handle(damaged);
        layer.expect_mismatch(true);
      }
      layer.dispatch(spoiled);
    }
    group.check_status();
    run_iteration(group, layer, good);
  });
}

} // namespace epx::test
