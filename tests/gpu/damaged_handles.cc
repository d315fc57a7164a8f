// SPDX-License-Identifier: Apache-2.0
// damaged_handles [--damages N] [--first F] [--seed S] [--timeout-ms T] [--percent-hard H]
// Makes calls with N damaged copies of handle memory. A damage may leave ranks waiting for rows that are never sent; they time
// out after T milliseconds, and make another group. So with peers only H of 100 damages may do that. Groups of several nodes
// need EPX_CHECK_HANDLE_MEM=1, with which no damage does that.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "runtime/layout/handle_limits.h"
#include "runtime/layout/handle_memory.h"
#include "tests/gpu/suite.h"
#include "tests/support/check.h"
#include "tests/support/damaged_layer.h"

namespace epx::test {
namespace {

GroupShape shape_of(const GroupCase& group) {
  GroupShape shape;
  shape.num_ranks = group.num_ranks;
  shape.num_experts = group.num_experts;
  shape.max_tokens_per_rank = group.max_tokens;
  shape.hidden_dim = group.hidden_dim;
  shape.max_top_k = group.max_top_k;
  shape.max_token_dtype = group.max_dtype;
  shape.max_recv_tokens = recv_capacity(group);
  return shape;
}

// The kernels' waits follow from routes at the tokens' rank, and from first_slots, ll_slots and rank ordinals at the experts'
// ranks. Every rank passes all receive rows.
class Waits {
public:
  explicit Waits(const DamagedCall& call)
      : call_(call), shape_(shape_of(call.group)), layout_(make_handle_layout(shape_, call.top_k)),
        num_slots_(call.rows_per_source < 0 ? shape_.max_recv_tokens
                                            : shape_.num_ranks * slots_per_source(shape_, call.rows_per_source)),
        limits_(shape_, call.top_k, num_slots_), good_(call.good.data(), layout_), damaged_(call.damaged.data(), layout_) {}

  bool are_kept() const {
    for (int64_t route = 0; route < call_.num_tokens * call_.top_k; ++route)
      if (!keeps_route(good_.routes[route], damaged_.routes[route])) return false;
    if (call_.rows_per_source >= 0) return keeps_rows();
    for (int64_t i = 0; i < int64_t{shape_.num_ranks} * shape_.max_tokens_per_rank; ++i)
      if (!keeps_slot(good_.first_slots[i], damaged_.first_slots[i])) return false;
    for (int64_t i = 0; i < shape_.num_ranks * int64_t{good_.header->ll_tokens} * call_.top_k; ++i) {
      const int64_t per_rank = int64_t{good_.header->ll_tokens} * call_.top_k;
      const int64_t at = i / per_rank * max_ll_tokens(shape_) * call_.top_k + i % per_rank;
      if (!keeps_slot(good_.ll_slots[at], damaged_.ll_slots[at])) return false;
    }
    return true;
  }

private:
  // Of a rank-major plan, what kernels wait for follows from the rows of each source, and the token, the rank ordinal and the
  // mask of each row.
  bool keeps_rows() const {
    const int64_t slots = slots_per_source(shape_, call_.rows_per_source);
    for (int source = 0; source < shape_.num_ranks; ++source) {
      const int64_t rows = limits_.rows(good_.source_rows[source], slots);
      if (limits_.rows(damaged_.source_rows[source], slots) != rows) return false;
      for (int64_t slot = source * slots; slot < source * slots + rows; ++slot) {
        const SlotRecord& good = good_.slot_records[slot];
        const SlotRecord& damaged = damaged_.slot_records[slot];
        if (!limits_.has_origin(damaged) || damaged.token != good.token || damaged.rank_ordinal != good.rank_ordinal)
          return false;
        if (call_.top_k == 1) continue;
        const RankMajorMask& mask = good_.masks(num_slots_)[slot];
        const RankMajorMask& damaged_mask = damaged_.masks(num_slots_)[slot];
        if (damaged_mask.low != mask.low || damaged_mask.high != mask.high) return false;
      }
    }
    return true;
  }

  bool keeps_route(const Route& good, const Route& damaged) const {
    if (call_.rows_per_source >= 0 && limits_.slot_of_kept(good) >= 0 && !limits_.is_route(good)) // of an earlier k's row
      return limits_.slot_of_kept(damaged) >= 0 && !limits_.is_route(damaged) && damaged.rank == good.rank;
    if (call_.rows_per_source >= 0 && !limits_.is_route(good) && limits_.slot_of_kept(damaged) >= 0) return false;
    const bool is_kept = limits_.is_route(good);
    if (is_kept != limits_.is_route(damaged)) return false;
    return !is_kept || (good.rank == damaged.rank &&
                        (call_.is_scatter || good.rank_ordinal == limits_.rank_ordinal(damaged.rank_ordinal)));
  }
  // In a scatter this rank waits for rows of its slots; in a gather the peers wait for them.
  bool keeps_slot(int32_t good, int32_t damaged) const {
    if (call_.is_scatter) return limits_.is_slot(good) || !limits_.is_slot(damaged);
    if (!limits_.is_slot(good)) return true;
    return limits_.is_slot(damaged) &&
           good_.slot_records[good].rank_ordinal == limits_.rank_ordinal(damaged_.slot_records[damaged].rank_ordinal);
  }

  const DamagedCall& call_;
  GroupShape shape_;
  HandleLayout layout_;
  int64_t num_slots_;
  HandleLimits limits_;
  HandleReader good_, damaged_;
};

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  setenv("EPX_TEST_ALTERNATES_PATHS", "1", 1); // all layers are small enough for the low-latency path
  return run_suite({[&](const RankContext& context) {
    DamageOptions options;
    options.count = option(argc, argv, "--damages", 1000);
    options.first = option(argc, argv, "--first", 0);
    options.seed = static_cast<uint64_t>(option(argc, argv, "--seed", 1));
    options.timeout_ms = option(argc, argv, "--timeout-ms", 2'000);
    options.percent_hard = static_cast<int>(option(argc, argv, "--percent-hard", context.num_ranks == 1 ? 20 : 2));
    GroupCase group;
    group.num_ranks = context.num_ranks;
    const bool is_over_nodes = num_nodes(group) > 1;
    const char* const checks = std::getenv("EPX_CHECK_HANDLE_MEM");
    check(!is_over_nodes || (checks != nullptr && std::strcmp(checks, "1") == 0),
          "over nodes this suite needs EPX_CHECK_HANDLE_MEM=1: which damages make ranks wait is known for one node alone");
    if (context.num_ranks > 1 && !is_over_nodes)
      options.keeps_waits = [](const DamagedCall& call) { return Waits(call).are_kept(); };
    const DamageCounts counts = run_damages(context, options);
    std::printf("rank %d of %d: %ld damages, %ld calls, %ld reported, %ld timeouts\n", context.rank, context.num_ranks,
                counts.damages, counts.calls, counts.reported, counts.timeouts);
  }});
}
