// SPDX-License-Identifier: Apache-2.0
// In these scenarios dispatch leaves pads alone.
#include <doctest/doctest.h>

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

} // namespace epx::test
