// SPDX-License-Identifier: Apache-2.0
// combine and dispatch_bwd with a row format, in both layouts: a rank's partial sum of a token travels quantised from float32. A
// lane has the elements of quantised_row.cuh, and the same ones of all rows of a sum, so that nothing but rows and sums goes
// through memory. There is no low-latency path, and no split of a row.
//
//   warps    do                                                         wait for
//   send     sum the rows of a peer's token that has slots here,        the entry barrier
//            quantise the sum, store it into the home rank's staging,
//            and then the row's ready flag
//   receive  add what the peers have sent of a token of this rank in    the entry barrier; the ready flag of each peer that
//            rank order, and the sum of the rows that stay here, which  the token goes to
//            is quantised and dequantised like the others
#include "runtime/stages/cuda/gather/quantised_gather.h"

#include "base/device/launch.h"
#include "runtime/stages/cuda/gather/gather_rows.cuh"
#include "runtime/stages/cuda/gather/weight_grads.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows/quantised_row.cuh"

namespace epx::cuda {
namespace {

// Each warp has one.
template <typename T>
class QuantisedGather {
public:
  __device__ QuantisedGather(const GatherParams& params, const Movement& movement)
      : params_(params), args_(params.call), movement_(movement), call_(movement.call()), rows_(params, movement.call()),
        wire_(params.call.format, params.call.hidden), whole_{0, 1, 0, params.call.hidden},
        is_vector_(params.call.hidden % kLaneElements == 0 &&
                   (reinterpret_cast<uint64_t>(params.rows) | reinterpret_cast<uint64_t>(params.out)) % sizeof(uint4) ==
                       0) {}

  __device__ void send(const WarpAssignment& warp) const {
    const int64_t tiles = movement_.num_peer_tokens();
#pragma unroll 1
    for (int64_t tile = warp.index; tile < tiles; tile = movement_.next_tile(warp, tiles)) {
      const Movement::PeerToken peer = movement_.peer_token(static_cast<uint32_t>(tile));
      if (movement_.is_active(peer.rank) && peer.token < movement_.tokens_of(peer.rank))
        send_token(peer.rank, movement_.slots_of(peer.rank, peer.token));
    }
  }

  __device__ void sum(const WarpAssignment& warp) const {
    const int64_t tiles = args_.num_tokens;
#pragma unroll 1
    for (int64_t token = movement_.first_tile(warp, tiles); token < tiles; token = movement_.next_tile(warp, tiles))
      if (!sum_token(token)) return;
  }

private:
  // The codes of a lane's elements of a tile, and their scale.
  struct Codes {
    LaneCodes elements;
    uint32_t scale;
  };

  __device__ void send_token(int home, const TokenSlots& found) const {
    if (found.slots.size() == 0) return;
    std::byte* const to = reinterpret_cast<std::byte*>(rows_.staged_sum(home, found.token, found.rank_ordinal, whole_));
    if (is_vector_)
      send_sum<true>(found.slots, to);
    else
      send_sum<false>(found.slots, to);
    if (params_.weight_grads != nullptr) send_weight_grads(home, found);
    __syncwarp(); // what all lanes have stored comes before the release
    if (lane() == 0) call_.signal(rows_.ready_flag_at(home, found.token, found.rank_ordinal, whole_));
  }

  template <bool kIsVector>
  __device__ void send_sum(const WarpList<int32_t>& slots, std::byte* to) const {
    const int shift = block_shift_of(args_.format);
    const int scale_bytes = static_cast<int>(single_element_bytes(args_.format.scales));
#pragma unroll 1
    for (int64_t h = lane() * kLaneElements; h - lane() * kLaneElements < args_.hidden; h += kQuantisedTile) {
      const Codes codes = quantised_sum<kIsVector>(slots, h);
      codes.elements.template store<kIsVector>(to, h, args_.hidden, 1);
      if (h < args_.hidden && h % args_.format.block() == 0)
        store_scale(to + wire_.scales + (h >> shift) * scale_bytes, scale_bytes, codes.scale);
    }
  }

  __device__ void send_weight_grads(int home, const TokenSlots& found) const {
    const auto send = [&](int k, float grad) {
      rows_.staged_weights(home)[route_index(found.token, args_.top_k, k)] = grad;
    };
    if (args_.is_rank_major()) {
      for_each_weight_grad(params_, movement_, found.first_slot, send);
      return;
    }
    for (int first = 0; first < found.slots.size(); first += kWarp)
      if (found.slots.has_own(first))
        send(movement_.k_of_slot(found.slots.own(first)), params_.weight_grads[found.slots.own(first)]);
  }

  // Sums the rows in slots of this rank in order, at the lane's elements of a tile. All lanes call this.
  template <bool kIsVector>
  __device__ Codes quantised_sum(const WarpList<int32_t>& slots, int64_t h) const {
    float sum[kLaneElements] = {};
    LaneWords<T> next; // whose loads are in flight while the row before it is added
    next.template load<kIsVector>(rows_.row_of(slots[0], whole_), h, args_.hidden);
#pragma unroll 1
    for (int i = 0; i < slots.size(); ++i) {
      float x[kLaneElements];
      next.unpack(x);
      const float weight = rows_.weight_of(slots[i]);
      if (i + 1 < slots.size()) next.template load<kIsVector>(rows_.row_of(slots[i + 1], whole_), h, args_.hidden);
#pragma unroll
      for (int element = 0; element < kLaneElements; ++element)
        sum[element] = __fmaf_rn(weight, x[element], sum[element]);
    }
    Codes codes;
    codes.elements = quantise_lane(args_.format, sum, 1.0f, codes.scale);
    return codes;
  }

  // Returns false when the group has failed.
  __device__ bool sum_token(int64_t token) const {
    const WarpRoutes routes = movement_.routes_of(token);
    const uint64_t live = routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t own = live & routes.mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    if (!rows_.wait_for_peers(movement_, token, whole_, routes, live & ~own)) return false;
    Arrivals arrivals;
#pragma unroll 1
    for (uint64_t left = live; left != 0; left &= left - 1) {
      const int k = lowest_bit(left);
      const int rank_ordinal = movement_.rank_ordinal_of(routes.rank_ordinal(k));
      arrivals.rank_ordinals |= uint64_t{1} << rank_ordinal;
      if ((own >> k & 1) == 0) continue;
      arrivals.own_slots.append(routes.slot(k));
      arrivals.own_ordinal = rank_ordinal;
    }
    if (is_vector_)
      sum_arrivals<true>(token, arrivals);
    else
      sum_arrivals<false>(token, arrivals);
    if (params_.weight_grads_out != nullptr) collect_weight_grads(token, routes, live);
    if (call_.scribbles_staging()) {
      RowSplits scribbled = whole_; // a row in staging may have fewer bytes than one of T
      scribbled.size = wire_.bytes / static_cast<int64_t>(sizeof(T));
      rows_.scribble_staging(token, scribbled);
    }
    return true;
  }

  // What there is of a token.
  struct Arrivals {
    uint64_t rank_ordinals = 0; // a bit for each rank that has rows of it; rank ordinals ascend with the rank
    int own_ordinal = -1;
    WarpList<int32_t> own_slots; // in k order
  };

  template <bool kIsVector>
  __device__ void sum_arrivals(int64_t token, const Arrivals& arrivals) const {
    T* const out = rows_.out(token, whole_);
#pragma unroll 1
    for (int64_t h = lane() * kLaneElements; h - lane() * kLaneElements < args_.hidden; h += kQuantisedTile) {
      float sum[kLaneElements] = {};
#pragma unroll 1
      for (uint64_t left = arrivals.rank_ordinals; left != 0; left &= left - 1) {
        const int rank_ordinal = lowest_bit(left);
        const Codes codes = rank_ordinal == arrivals.own_ordinal ? quantised_sum<kIsVector>(arrivals.own_slots, h)
                                                                 : staged_codes<kIsVector>(token, rank_ordinal, h);
        float x[kLaneElements];
        dequantise_lane(args_.format, codes.elements, formats::scale_value(args_.format.scales, codes.scale, 0.0f), x);
#pragma unroll
        for (int element = 0; element < kLaneElements; ++element)
          sum[element] += x[element];
      }
      LaneWords<T> words;
      words.pack(sum);
      words.template store<kIsVector>(out, h, args_.hidden);
    }
  }

  template <bool kIsVector>
  __device__ Codes staged_codes(int64_t token, int rank_ordinal, int64_t h) const {
    const auto* const row = reinterpret_cast<const std::byte*>(rows_.staged_sum(call_.rank(), token, rank_ordinal, whole_));
    const int scale_bytes = static_cast<int>(single_element_bytes(args_.format.scales));
    Codes codes{};
    codes.elements.template load<kIsVector>(row, h, args_.hidden, 1);
    if (h < args_.hidden)
      codes.scale = load_scale(row + wire_.scales + (h >> block_shift_of(args_.format)) * scale_bytes, scale_bytes);
    return codes;
  }

  __device__ void collect_weight_grads(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k) continue;
      if (!args_.is_rank_major()) {
        rows_.collect_weight_grad(token, k, routes.own(first), (live >> k & 1) != 0);
        continue;
      }
      collect_weight_grad(params_, token, k, movement_.kept_route(token, k), [&](float& grad) {
        grad = rows_.staged_weights(call_.rank())[route_index(token, args_.top_k, k)];
        return true;
      });
    }
  }

  const GatherParams& params_;
  const MovementCall& args_;
  const Movement& movement_;
  const CallSession& call_;
  GatherRows<T> rows_;
  WireRow wire_;
  RowSplits whole_; // all of a row
  bool is_vector_;  // LaneWords
};

template <typename T>
__device__ __forceinline__ void gather_quantised(const GatherParams& params, const Movement& movement) {
  const QuantisedGather<T> gather(params, movement);
  WarpAssignment warp = assign_warp_role(params.role_counts, params.group.context.shape.num_ranks);
  if (warp.role == WarpRole::send) {
    gather.send(warp);
    if (lane() == 0) movement.call().sent(static_cast<unsigned>(warp.count));
    warp = join_receivers(params.role_counts);
  }
  if (warp.role == WarpRole::receive) gather.sum(warp);
}

__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    quantised_gather_kernel(const __grid_constant__ GatherParams params) {
  pdl_wait(params);
  const Movement movement(params);
  movement.post();
  if (movement.begin()) {
    if (params.call.dtype == EPX_FLOAT32)
      gather_quantised<float>(params, movement);
    else if (params.call.dtype == EPX_FLOAT16)
      gather_quantised<__half>(params, movement);
    else
      gather_quantised<__nv_bfloat16>(params, movement);
  }
  leave(params.group);
}

} // namespace

const void* quantised_gather_kernel_address() {
  return reinterpret_cast<const void*>(&quantised_gather_kernel);
}

cudaError_t launch_quantised_gather(const Launcher& launcher, const MovementCall& call, const CallDescriptor& descriptor,
                                    const GatherTensors& tensors) {
  const GatherGrid grid =
      launcher.plan.next_gather(call.num_tokens, call.top_k, row_bytes(call.dtype, call.hidden), false, launcher.stream);
  const GatherParams params{make_movement_params(launcher.group, grid.role_counts, call, descriptor), tensors};
  return launch_cooperative(&quantised_gather_kernel, grid.grid, launcher.stream, params);
}

} // namespace epx::cuda
