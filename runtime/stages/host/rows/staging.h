// SPDX-License-Identifier: Apache-2.0
// Where staged rows, and what travels beside them, lie in the windows of the ranks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/layout/rank_major.h"
#include "runtime/layout/window_layout.h"
#include "runtime/stages/host/protocol/host_group.h"
#include "transport/peer_window.h"

namespace epx::host {

// The staging of scatter. Rows are numbered by scatter_staging_row(), those of dispatch_rank_major by their slot. `owner` is
// the rank that receives.
class ScatterStaging {
public:
  explicit ScatterStaging(const HostGroup& group) : window_(group.window), layout_(group.context.layout) {}

  std::byte* row(int owner, int64_t index) const { return at(owner, layout_.scatter_rows, index, layout_.row_stride); }
  std::byte* sidecar(int owner, int64_t index) const {
    return at(owner, layout_.scatter_sidecars, index, layout_.sidecar_stride);
  }
  float* weights(int owner) const { return window_.at<float>(owner, layout_.scatter_weights.offset); } // [R], by slot
  RankMajorRoute* routes(int owner, int64_t slot, int top_k) const {                                   // [K]
    return window_.at<RankMajorRoute>(owner, layout_.rank_major_routes().offset) + rank_major_route(slot, top_k);
  }

private:
  std::byte* at(int owner, const Region& region, int64_t index, int64_t stride) const {
    return window_.at<std::byte>(owner, region.offset + index * stride);
  }

  const PeerWindow& window_;
  const WindowLayout& layout_;
};

// The staging of gather. Rows are numbered by partial_staging_row(), in precision exact by route_index(). `home` is the rank
// that has the token.
class GatherStaging {
public:
  explicit GatherStaging(const HostGroup& group) : window_(group.window), layout_(group.context.layout) {}

  std::byte* row(int home, int64_t index) const {
    return window_.at<std::byte>(home, layout_.gather_rows.offset + index * layout_.row_stride);
  }
  float* weights(int home) const { return window_.at<float>(home, layout_.gather_weights.offset); } // by route_index()

private:
  const PeerWindow& window_;
  const WindowLayout& layout_;
};

} // namespace epx::host
