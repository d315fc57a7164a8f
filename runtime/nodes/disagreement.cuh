// SPDX-License-Identifier: Apache-2.0
// How a kernel tells the host that two ranks pass different AgreedFields in a call.
#pragma once

#include "base/device/memory_order.cuh"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/rail_records.h"

namespace epx::cuda {

struct AgreedFieldsOfRank {
  int rank;
  AgreedFields fields;
};

// One thread of the kernels of a call publishes the first disagreement that the group has had. The group fails because of it,
// so that later ones count for nothing, and the host may be reading this one.
__device__ inline void publish_disagreement(const MultiNodeDevice& nodes, const AgreedFieldsOfRank& one,
                                            const AgreedFieldsOfRank& other) {
  Disagreement& found = nodes.progress->disagreement;
  if (found.is_known != 0) return;
  found.sequence = nodes.state->sequence;
  const bool ascends = one.rank < other.rank;
  for (int i = 0; i < 2; ++i) {
    const AgreedFieldsOfRank& rank = (i == 0) == ascends ? one : other;
    found.ranks[i] = rank.rank;
    found.fields[i] = rank.fields;
  }
  // st.release: a host that has acquired `is_known` sees the stores above.
  store_release_sys(&found.is_known, uint64_t{1});
}

} // namespace epx::cuda
