// SPDX-License-Identifier: Apache-2.0
// In these scenarios dispatch leaves pads alone, or zones lie a stride apart.
#include <doctest/doctest.h>

#include <algorithm>
#include <vector>

#include "tests/multiprocess/conformance.h"

namespace epx::test {

TEST_CASE("pads are left alone where dispatch is told so") {
  for (const int alignment : {1, 16, 128}) {
    run_changed([&](Case& c) {
      c.group.max_alignment = 128;
      c.group.max_sidecar_bytes = 8;
      c.layer.sidecar_bytes = 8;
      c.layer.alignment = alignment;
      c.layer.pads_untouched = true;
      c.layer.rows = RecvRows::any;
      c.iterations = 3;
    });
  }
}

TEST_CASE("pads are left alone, but the rows of a rank without handle memory become zero") {
  if (launcher().num_ranks() == 1) return; // a rank whose handle memory is wrong writes nothing
  Case c = base_case();
  c.layer.pads_untouched = true;
  const Workload good = make_workload(c.group, c.layer, 90);
  const Workload spoiled = make_workload(c.group, c.layer, 91, {1, false});
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun layer(group, c.layer, Placement::random, 92);
    layer.prepare(spoiled);
    if (group.rank() == 1) {
      layer.use_foreign_handle(std::vector<std::byte>(layer.handle().size()));
      layer.expect_mismatch(true);
    }
    layer.dispatch(spoiled);
    group.check_status();
    run_iteration(group, layer, good);
  });
}

TEST_CASE("zones lie a stride apart, and what they have no room for is dropped") {
  for (const int alignment : {1, 4, 16}) {
    for (const int64_t stride : {16, 32, 96}) {
      run_changed([&](Case& c) {
        c.group.max_alignment = 16;
        c.group.max_recv_rows = 3 * 96;
        c.group.max_sidecar_bytes = 8;
        c.group.overflow = stride == 32 ? EPX_OVERFLOW_DROP : EPX_OVERFLOW_ERROR;
        c.layer.sidecar_bytes = 8;
        c.layer.alignment = alignment;
        c.layer.zone_stride = stride;
        c.layer.rows = stride == 96 ? RecvRows::fewer : RecvRows::more;
        c.layer.pads_untouched = alignment == 4;
        c.iterations = 3;
      });
    }
  }
}

TEST_CASE("a layer whose zones lie a stride apart comes between others in one group") {
  Case c = base_case();
  LayerCase strided = c.layer;
  strided.zone_stride = 24 / std::max(strided.alignment, 1) * std::max(strided.alignment, 1);
  const Workload first = make_workload(c.group, c.layer, 70), second = make_workload(c.group, strided, 71);
  on_every_rank([&](const RankContext& context) {
    GroupRun group(context, c.group);
    LayerRun packed(group, c.layer, Placement::random, 72), apart(group, strided, Placement::random, 73);
    for (int i = 0; i < 2; ++i) {
      run_iteration(group, packed, first);
      run_iteration(group, apart, second);
    }
  });
}

} // namespace epx::test
