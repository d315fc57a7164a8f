// SPDX-License-Identifier: Apache-2.0
// In these scenarios prepare_dispatch makes the plan and moves the rows. Every other scenario makes that call too, beside
// prepare and dispatch (run_iteration); here are the numbers of tokens for which ranks take different paths on GPUs, and
// layers that nothing has prepared before.
#include <doctest/doctest.h>

#include <vector>

#include "tests/multiprocess/conformance.h"

namespace epx::test {

namespace {

// More tokens than the low-latency path takes.
constexpr int kManyTokens = 520;

Case case_of_many_tokens() {
  Case c = base_case();
  c.group.max_tokens = kManyTokens;
  c.group.hidden_dim = c.layer.hidden = c.layer.combine_hidden = 24;
  c.group.max_sidecar_bytes = 20;
  c.group.max_alignment = 128;
  c.iterations = 2;
  return c;
}

} // namespace

TEST_CASE("prepare_dispatch of ranks with one token, none and many") {
  for (const int alignment : {1, 128}) {
    for (const Placement placement : {Placement::plain, Placement::in_place}) {
      Case c = case_of_many_tokens();
      c.layer.tokens = TokenCount::mixed;
      c.layer.alignment = alignment;
      c.layer.sidecar_bytes = alignment == 1 ? 20 : 0;
      c.layer.rows = RecvRows::any;
      c.layer.pads_untouched = placement == Placement::in_place;
      c.layer.percent_bad = 5;
      c.placement = placement;
      c.arena_bytes = 1 << 20;
      run_everywhere(c);
    }
  }
}

TEST_CASE("prepare_dispatch of many tokens on every rank, and of any number") {
  for (const TokenCount tokens : {TokenCount::full, TokenCount::ragged}) {
    Case c = case_of_many_tokens();
    c.layer.tokens = tokens;
    c.layer.dispatch_weights = tokens == TokenCount::full;
    run_everywhere(c);
  }
}

TEST_CASE("prepare_dispatch of a few tokens on every rank") {
  for (const int tokens : {1, 6}) {
    for (const bool pads_untouched : {false, true}) {
      Case c = base_case();
      c.group.max_tokens = tokens;
      c.group.max_sidecar_bytes = 32;
      c.group.hidden_dim = c.layer.hidden = c.layer.combine_hidden = 1032; // two LL chunks of bfloat16
      c.layer.tokens = tokens == 1 ? TokenCount::full : TokenCount::ragged;
      c.layer.alignment = pads_untouched ? 16 : 1;
      c.layer.pads_untouched = pads_untouched;
      c.layer.sidecar_bytes = pads_untouched ? 0 : 32;
      c.layer.dispatch_weights = !pads_untouched;
      c.layer.rows = RecvRows::any;
      c.layer.percent_bad = 5;
      run_everywhere(c);
    }
  }
}

TEST_CASE("prepare_dispatch of mixed numbers of tokens drops what overflows") {
  Case c = case_of_many_tokens();
  c.layer.tokens = TokenCount::mixed;
  c.group.max_recv_rows = 100;
  c.layer.alignment = 16;
  run_everywhere(c);
}

TEST_CASE("prepare_dispatch of rows that are not aligned, with duplicate experts") {
  for (const TokenCount tokens : {TokenCount::mixed, TokenCount::ragged}) {
    Case c = case_of_many_tokens();
    c.group.max_tokens = tokens == TokenCount::mixed ? kManyTokens : 20;
    c.layer.hidden = c.layer.combine_hidden = 21;
    c.layer.dtype = c.layer.combine_dtype = EPX_BFLOAT16;
    c.layer.sidecar_bytes = 5;
    c.layer.tokens = tokens;
    c.layer.routing = RoutingStyle::repeated;
    run_everywhere(c);
  }
}

// On GPUs a rank with few SMs writes rows of many tokens in place, and another one into staging; 40 tokens are few, but more
// than one SM takes on the low-latency path.
TEST_CASE("many tokens, and 40, where a rank has few SMs and the others have more") {
  for (const int num_comm_sms : {16, 1}) {
    for (const Placement placement : {Placement::plain, Placement::in_place}) {
      Case c = case_of_many_tokens();
      if (num_comm_sms == 1) c.group.max_tokens = 40;
      c.layer.tokens = TokenCount::full;
      c.layer.dispatch_weights = true;
      c.layer.sidecar_bytes = 20;
      const Workload work = make_workload(c.group, c.layer, c.seed);
      on_every_rank([&](const RankContext& context) {
        GroupCase group_case = c.group;
        group_case.num_comm_sms = context.rank == 0 ? num_comm_sms : 0;
        GroupRun group(context, group_case);
        group.add_arena(1 << 20);
        LayerRun layer(group, c.layer, placement, c.seed);
        run_iteration(group, layer, work);
      });
    }
  }
}

TEST_CASE("prepare_dispatch needs no prepare before it") {
  const Case c = base_case();
  std::vector<Workload> works;
  for (uint64_t i = 0; i < 3; ++i)
    works.push_back(make_workload(c.group, c.layer, 300 + i));
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::random, 303);
    for (const Workload& work : works) {
      layer.prepare_dispatch(work);
      layer.combine(work);
      layer.prepare_dispatch(work);
      layer.combine_bwd(work);
      layer.dispatch(work);
      layer.dispatch_bwd(work);
      group.check_status();
    }
  });
}

} // namespace epx::test
