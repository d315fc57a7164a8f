// SPDX-License-Identifier: Apache-2.0
// Where a row in staging lies, with its sidecar, its weights and its ready flag: of scatter and of gather, on the
// high-throughput and on the low-latency (LL) path. The regions are those of WindowLayout, and the indices those of slots.h.
// `receiver` and `home` are the rank in whose window a place lies.
#pragma once

#include "runtime/layout/rank_major.h"
#include "runtime/layout/slots.h"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {

class Staging {
protected:
  __device__ explicit Staging(const DeviceGroup& group) : group_(group) {}

  __device__ const WindowLayout& layout() const { return group_.context.layout; }
  __device__ const GroupShape& shape() const { return group_.context.shape; }
  template <typename T>
  __device__ T* at(int rank, const Region& region, int64_t index) const {
    return group_.window().at<T>(rank, region.offset) + index;
  }
  __device__ std::byte* at_pitch(int rank, const Region& region, int64_t index, int64_t pitch) const {
    return group_.window().at<std::byte>(rank, region.offset + index * pitch);
  }

private:
  const DeviceGroup& group_;
};

// Scatter's rows on the high-throughput path. `row` is scatter_staging_row() of a token, or a slot of a rank-major plan.
// `token` is one of the source, or the number of a row that the source has for a rank-major receiver.
class ScatterStaging : Staging {
public:
  __device__ explicit ScatterStaging(const DeviceGroup& group) : Staging(group) {}

  __device__ int64_t row_of(int source, int64_t token, int32_t first_slot) const {
    return scatter_staging_row(layout(), shape(), source, token, first_slot);
  }
  __device__ std::byte* row(int receiver, int64_t row) const {
    return at_pitch(receiver, layout().scatter_rows, row, layout().row_stride);
  }
  __device__ std::byte* sidecar(int receiver, int64_t row) const {
    return at_pitch(receiver, layout().scatter_sidecars, row, layout().sidecar_stride);
  }
  __device__ float* weight_of_slot(int receiver, int32_t slot) const {
    return at<float>(receiver, layout().scatter_weights, slot);
  }
  // Where rows leave before their slots are known (MixedDispatch).
  __device__ float* weight_of_route(int receiver, int source, int64_t token, int k) const {
    return at<float>(receiver, layout().scatter_token_weights, route_index(index_of(source, token), shape().max_top_k, k));
  }
  // Rank-major: the routes [K] of the row in a slot.
  __device__ RankMajorRoute* routes(int receiver, int64_t slot, int top_k) const {
    return at<RankMajorRoute>(receiver, layout().rank_major_routes(), rank_major_route(slot, top_k));
  }
  __device__ Epoch* ready_flag(int receiver, int source, int64_t token) const {
    return at<Epoch>(receiver, layout().scatter_ready_flags, index_of(source, token));
  }

private:
  // The index of a source's token among all that the ranks may have.
  __device__ int64_t index_of(int source, int64_t token) const {
    return source * static_cast<int64_t>(shape().max_tokens_per_rank) + token;
  }
};

// Scatter's rows on the low-latency path, in a call of this parity. `row` is a token of the source, or the number of a row that
// the source has for a rank-major receiver.
class LlScatterStaging : Staging {
public:
  __device__ LlScatterStaging(const DeviceGroup& group, int64_t parity) : Staging(group), parity_(parity) {}

  // The sidecar's chunks follow those that a row may have.
  __device__ uint32_t first_sidecar_chunk() const { return static_cast<uint32_t>(layout().ll_row_chunks); }
  __device__ LlPacket16* chunk(int receiver, int source, int64_t row, uint32_t chunk) const {
    return at<LlPacket16>(receiver, layout().ll_scatter_rows,
                          ll_scatter_packet(layout(), shape(), parity_, source, row, chunk));
  }
  __device__ LlPacket8* weight(int receiver, int source, int64_t row, int k) const {
    return at<LlPacket8>(receiver, layout().ll_scatter_weights,
                         ll_scatter_weight(layout(), shape(), parity_, source, row, k));
  }
  // Rank-major: the routes [K] of a row.
  __device__ RankMajorRoute* routes(int receiver, int source, int64_t row) const {
    return at<RankMajorRoute>(receiver, layout().ll_rank_major_routes,
                              ll_scatter_weight(layout(), shape(), parity_, source, row, 0));
  }

private:
  int64_t parity_;
};

// Gather's rows on the high-throughput path. `row` is partial_staging_row() of a token, or in precision exact route_index().
class GatherStaging : Staging {
public:
  __device__ explicit GatherStaging(const DeviceGroup& group) : Staging(group) {}

  __device__ int64_t row_of(int64_t token, int top_k, int rank_ordinal) const {
    return partial_staging_row(shape(), token, top_k, rank_ordinal);
  }
  __device__ std::byte* row(int home, int64_t row) const {
    return at_pitch(home, layout().gather_rows, row, layout().row_stride);
  }
  // By route_index().
  __device__ float* weights(int home) const { return at<float>(home, layout().gather_weights, 0); }
  // Those of all splits follow each other.
  __device__ Epoch* ready_flag(int home, int64_t row, int split) const {
    return at<Epoch>(home, layout().gather_ready_flags, row * kMaxRowSplits + split);
  }
};

// Gather's rows on the low-latency path, in a call of this parity.
class LlGatherStaging : Staging {
public:
  __device__ LlGatherStaging(const DeviceGroup& group, int64_t parity) : Staging(group), parity_(parity) {}

  __device__ LlPacket16* chunk(int home, int64_t token, int rank_ordinal, uint32_t chunk) const {
    return at<LlPacket16>(home, layout().ll_gather_rows,
                          ll_gather_packet(layout(), shape(), parity_, token, rank_ordinal, chunk));
  }
  __device__ LlPacket8* weight(int home, int64_t token, int k) const {
    return at<LlPacket8>(home, layout().ll_gather_weights, ll_gather_weight(layout(), shape(), parity_, token, k));
  }

private:
  int64_t parity_;
};

} // namespace epx::cuda
