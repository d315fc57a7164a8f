// Gather: rows go from slots to their tokens' home ranks and are summed. combine weighs them; dispatch_bwd does not, and brings
// the weights' gradients along.
//
// With many tokens some warps send while others receive; with few, all warps send, then receive.
//
//   senders    A warp takes a peer's token that has slots here. Precision wire: it sums them and stores one partial row into the
//              home rank's staging. Precision exact: it stores each row there. Then it tells the home rank.
//   receivers  A warp takes a token of this rank, waits for the peers that it goes to, and sums what has come home with the rows
//              of this rank's own slots, which go nowhere.
#include <cmath>

#include "runtime/stages/cuda/kernels.h"

#include "runtime/base/device/launch.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows.cuh"

namespace epx::cuda {
namespace {

constexpr int kThreads = 512;

struct GatherParams {
  DeviceGroup group;
  HandleLayout layout;
  Division division;
  MovementCall call;
  CallPost offer;
  const std::byte* rows;        // [N, H]
  const float* row_weights;     // [N]; applied in the sum; may be NULL
  const float* carried_weights; // [N]; carried home beside the rows; may be NULL
  std::byte* out;               // [T, H]
  float* carried_out;           // [T, K]; NULL iff carried_weights is
};

template <typename T>
class Gather {
public:
  __device__ Gather(const GatherParams& params, const Movement& movement, RowStream& stream)
      : params_(params), group_(params.group), args_(params.call), movement_(movement), call_(movement.call()),
        stream_(stream), layout_(params.group.context.layout),
        is_exact_(params.group.context.shape.precision == EPX_COMBINE_EXACT) {
    divide();
  }

  // The slots that the warp sends first: looked up while the ranks meet.
  __device__ TokenSlots first_slots(const Role& role) const {
    if (!role.sends) return {};
    const Movement::PeerToken peer = movement_.peer_token(quotient(role.index, num_parts_));
    return peer.token < movement_.most_tokens() ? movement_.slots_of(peer.rank, peer.token) : TokenSlots{};
  }

  __device__ void send(const Role& role, const TokenSlots& first) const {
    const int64_t items = movement_.num_peer_tokens() * num_parts_;
#pragma unroll 1
    for (int64_t item = role.index; item < items; item += role.count) {
      const Movement::PeerToken peer = movement_.peer_token(quotient(item, num_parts_));
      if (!movement_.is_active(peer.rank) || peer.token >= movement_.tokens_of(peer.rank)) continue;
      send_token(peer.rank, peer.token, part_at(item),
                 item == role.index ? first : movement_.slots_of(peer.rank, peer.token));
    }
  }

  __device__ void sum(const Role& role) const {
    const int64_t items = args_.num_tokens * num_parts_;
#pragma unroll 1
    for (int64_t item = role.index; item < items; item += role.count)
      if (!sum_token(quotient(item, num_parts_), part_at(item))) return;
  }

private:
  // When tokens are few, several warps share a row: each takes a part on its own, from the slots to the sum. All ranks divide
  // alike.
  struct Part {
    int index;
    int64_t first; // element
    int64_t elements;
  };
  static constexpr int64_t kMostItems = 2048;                                                // parts that senders take
  static constexpr int64_t kUnit = RowStream::kPieceBytes / static_cast<int64_t>(sizeof(T)); // of elements in a part

  __device__ void divide() {
    const auto peers = max(call_.num_ranks() - 1, 1);
    const auto tokens = static_cast<int>(min(max(movement_.most_tokens(), int64_t{1}), kMostItems));
    const int most = is_exact_ ? 1 : max(1, min(static_cast<int>(kMostItems) / (tokens * peers), kMaxGatherParts));
    const auto units = static_cast<int>((args_.hidden + kUnit - 1) / kUnit);
    const int units_of_part = (units + most - 1) / most;
    part_elements_ = units_of_part * kUnit;
    num_parts_ = (units + units_of_part - 1) / units_of_part;
  }
  __device__ static int64_t quotient(int64_t item, int parts) {
    return parts == 1 ? item : item / parts;
  }
  __device__ Part part_at(int64_t item) const {
    const int part = num_parts_ == 1 ? 0 : static_cast<int>(item % num_parts_);
    return {part, part * part_elements_, min(part_elements_, args_.hidden - part * part_elements_)};
  }

  __device__ const T* row_of(int64_t slot) const {
    return reinterpret_cast<const T*>(params_.rows) + slot * args_.hidden;
  }
  __device__ T* staged_row(int owner, int64_t row) const {
    return group_.window().at<T>(owner, layout_.gather_rows.offset + row * layout_.row_stride);
  }
  __device__ float* staged_weights(int owner) const {
    return group_.window().at<float>(owner, layout_.gather_weights.offset);
  }
  // For each part of what a rank sends of a token.
  __device__ Tag* arrival_at(int owner, int64_t token, int order, int part) const {
    return group_.window().at<Tag>(owner, layout_.gather_arrivals.offset) +
           partial_staging_row(group_.context.shape, token, args_.top_k, order) * kMaxGatherParts + part;
  }

  __device__ void send_token(int home, int64_t token, const Part& part, const TokenSlots& found) const {
    const WarpList<int32_t>& slots = found.slots;
    if (slots.size() == 0) return;
    const float* const weights = params_.carried_weights != nullptr ? params_.carried_weights
                                 : is_exact_                        ? params_.row_weights
                                                                    : nullptr;
    if (is_exact_ || (weights != nullptr && part.index == 0)) // a row of precision exact has one part
      for (int first = 0; first < slots.size(); first += kWarp)
        send_routes(home, token, slots.has_own(first) ? slots.own(first) : -1, weights);
    if (!is_exact_) {
      Terms<T> terms;
      for (int first = 0; first < slots.size(); first += kWarp) {
        const int32_t mine = slots.has_own(first) ? slots.own(first) : -1;
        const float weight = weight_of(mine);
        for (int i = first; i < slots.size() && i < first + kWarp; ++i)
          append(terms, part, from_lane(mine, i % kWarp), from_lane(weight, i % kWarp));
      }
      const int64_t row = partial_staging_row(group_.context.shape, token, args_.top_k, found.order);
      sum_rows<false>(stream_, terms, staged_row(home, row) + part.first, part.elements);
    }
    stream_.finish(); // what all lanes have stored comes before what one tells
    if (lane() == 0) call_.tell_arrival(arrival_at(home, token, found.order, part.index));
  }

  // Each lane names a slot, or -1. Precision exact: their rows travel; and their weights, if there are any.
  __device__ void send_routes(int home, int64_t token, int32_t slot, const float* weights) const {
    const int64_t route = slot >= 0 ? route_index(token, args_.top_k, movement_.plan().slot_records[slot].k) : 0;
    if (weights != nullptr && slot >= 0) staged_weights(home)[route] = weights[slot];
    if (!is_exact_) return;
    for (unsigned left = __ballot_sync(~0u, slot >= 0 ? 1 : 0); left != 0; left &= left - 1) {
      const int one = __ffs(static_cast<int>(left)) - 1;
      begin_to_spread_row(stream_, reinterpret_cast<const std::byte*>(row_of(from_lane(slot, one))),
                          args_.hidden * static_cast<int64_t>(sizeof(T)),
                          lane() == one ? reinterpret_cast<std::byte*>(staged_row(home, route)) : nullptr);
    }
  }

  // Of a row of this rank's own, as the lane's slot names it.
  __device__ float weight_of(int32_t slot) const {
    return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
  }
  __device__ void append(Terms<T>& terms, const Part& part, int64_t slot, float weight) const {
    terms.append(row_of(slot) + part.first, weight);
  }

  __device__ bool sum_token(int64_t token, const Part& part) const {
    const WarpRoutes routes = movement_.routes_of(token);
    const auto mask_of = [&](const auto& holds) { // a bit for each route that it holds for
      return static_cast<uint64_t>(__ballot_sync(~0u, holds(routes.low) ? 1 : 0)) |
             static_cast<uint64_t>(__ballot_sync(~0u, holds(routes.high) ? 1 : 0)) << kWarp;
    };
    const uint64_t live = mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t own = live & mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    if (!wait_for_peers(token, part, routes, live & ~own)) return false;
    const Terms<T> terms =
        is_exact_ ? terms_of_routes(token, routes, live, own) : terms_of_ranks(token, part, routes, live, own);
    sum_rows<true>(stream_, terms, reinterpret_cast<T*>(params_.out) + token * args_.hidden + part.first, part.elements);
    if (params_.carried_out != nullptr && part.index == 0) collect_weights(token, routes, live);
    if (call_.poisons_staging()) poison_staging(token, part);
    return true;
  }

  // Each lane for the ranks of its routes. `awaited`: a bit for each route.
  __device__ bool wait_for_peers(int64_t token, const Part& part, const WarpRoutes& routes, uint64_t awaited) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp)
      if (const Route& route = routes.own(first); ok && (awaited >> (first + lane()) & 1) != 0)
        ok = call_.wait_for_arrival(arrival_at(call_.rank(), token, route.order, part.index), route.rank);
    const bool all = __all_sync(~0u, ok ? 1 : 0) != 0;
    __syncwarp(); // every lane sees what each has acquired
    return all;
  }

  // In k order.
  __device__ Terms<T> terms_of_routes(int64_t token, const WarpRoutes& routes, uint64_t live, uint64_t own) const {
    const float* const weights = params_.row_weights != nullptr ? staged_weights(call_.rank()) : nullptr;
    Terms<T> terms;
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const bool is_own = (own >> (first + lane()) & 1) != 0;
      float weight = 1.0f; // of the lane's route
      if (is_own)
        weight = weight_of(routes.own(first).slot);
      else if (weights != nullptr && (live >> (first + lane()) & 1) != 0)
        weight = weights[route_index(token, args_.top_k, first + lane())];
      for (int k = first; k < args_.top_k && k < first + kWarp; ++k) {
        if ((live >> k & 1) == 0) continue;
        const T* const row =
            (own >> k & 1) != 0 ? row_of(routes.slot(k)) : staged_row(call_.rank(), route_index(token, args_.top_k, k));
        terms.append(row, from_lane(weight, k % kWarp));
      }
    }
    return terms;
  }

  // In rank order; the rows of this rank's own, which are the inner ones, in k order.
  __device__ Terms<T> terms_of_ranks(int64_t token, const Part& part, const WarpRoutes& routes, uint64_t live,
                                     uint64_t own) const {
    const float low_weight = weight_of((own >> lane() & 1) != 0 ? routes.low.slot : -1);
    const float high_weight = weight_of((own >> kWarp >> lane() & 1) != 0 ? routes.high.slot : -1);
    Terms<T> terms;
    int own_order = kMaxTopK; // of this rank
#pragma unroll 1
    for (uint64_t left = own; left != 0; left &= left - 1) {
      const int k = __ffsll(static_cast<long long>(left)) - 1;
      own_order = routes.order(k);
      append(terms, part, routes.slot(k), from_lane(k < kWarp ? low_weight : high_weight, k % kWarp));
    }
    terms.num_inner = terms.size();
    uint64_t orders = 0; // of the peers that have live slots, a bit each; it ascends with the rank
#pragma unroll 1
    for (uint64_t left = live & ~own; left != 0; left &= left - 1)
      orders |= uint64_t{1} << routes.order(__ffsll(static_cast<long long>(left)) - 1);
#pragma unroll 1
    for (; orders != 0; orders &= orders - 1) {
      const int order = __ffsll(static_cast<long long>(orders)) - 1;
      if (order < own_order) ++terms.own_position;
      terms.append(staged_row(call_.rank(), partial_staging_row(group_.context.shape, token, args_.top_k, order)) +
                   part.first);
    }
    return terms;
  }

  __device__ void collect_weights(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k) continue;
      const Route& route = routes.own(first);
      const int64_t index = route_index(token, args_.top_k, k);
      float weight = 0.0f;
      if ((live >> k & 1) != 0)
        weight = route.rank == call_.rank() ? params_.carried_weights[route.slot] : staged_weights(call_.rank())[index];
      params_.carried_out[index] = weight;
    }
  }

  __device__ void poison_staging(int64_t token, const Part& part) const {
    const int per_token = is_exact_ ? args_.top_k : min(args_.top_k, call_.num_ranks());
    for (int64_t row = token * per_token; row < (token + 1) * per_token; ++row)
      poison_row(reinterpret_cast<std::byte*>(staged_row(call_.rank(), row) + part.first),
                 part.elements * static_cast<int64_t>(sizeof(T)));
    if (part.index != 0) return;
    for (int k = lane(); k < args_.top_k; k += kWarp)
      staged_weights(call_.rank())[route_index(token, args_.top_k, k)] = NAN;
  }

  const GatherParams& params_;
  const DeviceGroup& group_;
  const MovementCall& args_;
  const Movement& movement_;
  const Call& call_;
  RowStream& stream_;
  const WindowLayout& layout_;
  bool is_exact_;
  int num_parts_;
  int64_t part_elements_;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams params) {
  Movement movement(params.group, params.call, params.layout);
  movement.post(params.offer);
  RowStream stream(dynamic_shared_memory<std::byte>(), static_cast<int>(threadIdx.x) / kWarp, kThreads / kWarp);
  const Gather<T> gather(params, movement, stream);
  const Role role = role_of_warp(params.division, params.group.context.shape.num_ranks, movement.has_few_tokens());
  const TokenSlots first = movement.is_usable() ? gather.first_slots(role) : TokenSlots{};
  if (!movement.begin(params.offer)) return;
  if (role.sends) {
    gather.send(role, first);
    if (lane() == 0) movement.call().sent(static_cast<unsigned>(role.count));
  }
  if (role.receives) gather.sum(role);
}

cudaError_t launch(const GatherParams& params, const LaunchShape& shape, cudaStream_t stream) {
  const Grid grid{shape.gather_blocks, kThreads, gather_shared_bytes()};
  if (params.call.dtype == EPX_FLOAT32) return launch_cooperative(&gather_kernel<float>, grid, stream, params);
  if (params.call.dtype == EPX_FLOAT16) return launch_cooperative(&gather_kernel<__half>, grid, stream, params);
  return launch_cooperative(&gather_kernel<__nv_bfloat16>, grid, stream, params);
}

} // namespace

int gather_threads() {
  return kThreads;
}
size_t gather_shared_bytes() {
  return kThreads / kWarp * RowStream::kSharedBytes;
}
std::vector<const void*> gather_kernels() {
  return {reinterpret_cast<const void*>(&gather_kernel<float>), reinterpret_cast<const void*>(&gather_kernel<__half>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16>)};
}

cudaError_t launch_combine(const DeviceGroup& group, const LaunchShape& shape, const CombineCall& call,
                           cudaStream_t stream) {
  const CallPost offer = offer_of(call, call.recv_weights != nullptr ? 1 : 0, 0, kNoReach);
  const HandleLayout layout = make_handle_layout(group.context.shape, call.top_k);
  return launch(
      {group, layout, shape.gather_division, call, offer, call.expert_out, call.recv_weights, nullptr, call.out, nullptr},
      shape, stream);
}

cudaError_t launch_dispatch_bwd(const DeviceGroup& group, const LaunchShape& shape, const DispatchBwdCall& call,
                                cudaStream_t stream) {
  const CallPost offer = offer_of(call, call.grad_recv_weights != nullptr ? 2 : 0, 0, kNoReach);
  const HandleLayout layout = make_handle_layout(group.context.shape, call.top_k);
  return launch({group, layout, shape.gather_division, call, offer, call.grad_recv, nullptr, call.grad_recv_weights,
                 call.grad_tokens, call.grad_topk_weights},
                shape, stream);
}

} // namespace epx::cuda
