// Gather: rows go from slots to their tokens' home ranks and are summed. combine weighs them; dispatch_bwd does not, and
// brings the weights' gradients along. With few tokens see gather_few.cuh; else:
//
//   senders    A warp takes a half of the rows of a peer's token that has slots here. Precision wire: it sums them and
//              stores the sum into the home rank's staging. Precision exact: it stores each of them there. Then it tells
//              the home rank.
//   receivers  A warp takes a half of a token of this rank, waits for the peers that the token goes to, and sums what has
//              come home with the rows of this rank's own slots, which go nowhere.
//
// Halves, since all senders' rows are under way together: the less a warp takes, the earlier the first ones arrive, and the
// less is left to do for receivers when the last have come.
#include <cmath>

#include "runtime/stages/cuda/kernels.h"

#include "runtime/base/device/launch.h"
#include "runtime/stages/cuda/gather_few.cuh"
#include "runtime/stages/cuda/gather_params.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows.cuh"

namespace epx::cuda {
namespace {

constexpr int kThreads = 512;

template <typename T>
class Gather {
public:
  __device__ Gather(const GatherParams& params, const Movement& movement, RowStream& stream)
      : params_(params), group_(params.group), args_(params.call), movement_(movement), call_(movement.call()),
        stream_(stream), layout_(params.group.context.layout),
        is_exact_(params.group.context.shape.precision == EPX_COMBINE_EXACT) {
    constexpr int64_t kPiece = RowStream::kPieceBytes / sizeof(T);
    const int64_t pieces = (args_.hidden + kPiece - 1) / kPiece;
    num_parts_ = pieces < kFewestPieces ? 1 : kMostRowParts;
    part_size_ = (pieces + num_parts_ - 1) / num_parts_ * kPiece;
  }

  __device__ void send(const Role& role) const {
    const int64_t items = movement_.num_peer_tokens() * num_parts_;
#pragma unroll 1
    for (int64_t item = role.index; item < items; item = movement_.next_item(role, items)) {
      const Movement::PeerToken peer = movement_.peer_token(token_of(item));
      if (movement_.is_active(peer.rank) && peer.token < movement_.tokens_of(peer.rank))
        send_part(peer.rank, peer.token, part_of(item));
    }
  }

  __device__ void sum(const Role& role) const {
    const int64_t items = args_.num_tokens * num_parts_;
#pragma unroll 1
    for (int64_t item = role.index; item < items; item = movement_.next_item(role, items))
      if (!sum_part(token_of(item), part_of(item))) return;
  }

private:
  static constexpr int kFewestPieces = 4; // of a row in parts: each part is looked up and waited for

  // What a warp takes of a row: elements [first, first + size).
  struct Part {
    int index;
    int64_t first;
    int64_t size;
  };

  // Items are the parts of the first token, of the second, and so on.
  __device__ int64_t token_of(int64_t item) const {
    return num_parts_ == 1 ? item : item / kMostRowParts;
  }
  __device__ Part part_of(int64_t item) const {
    const int index = num_parts_ == 1 ? 0 : static_cast<int>(item % kMostRowParts);
    const int64_t first = index * part_size_;
    return {index, first, min(args_.hidden - first, part_size_)};
  }

  __device__ const T* row_of(int64_t slot, const Part& part) const {
    return reinterpret_cast<const T*>(params_.rows) + slot * args_.hidden + part.first;
  }
  __device__ T* staged_row(int owner, int64_t row, const Part& part) const {
    return group_.window().at<T>(owner, layout_.gather_rows.offset + row * layout_.row_stride) + part.first;
  }
  __device__ float* staged_weights(int owner) const {
    return group_.window().at<float>(owner, layout_.gather_weights.offset);
  }
  __device__ Tag* arrival_at(int owner, int64_t token, int order, const Part& part) const {
    return group_.window().at<Tag>(owner, layout_.gather_arrivals.offset) +
           partial_staging_row(group_.context.shape, token, args_.top_k, order) * kMostRowParts + part.index;
  }

  __device__ void send_part(int home, int64_t token, const Part& part) const {
    const TokenSlots found = movement_.slots_of(home, token);
    const WarpList<int32_t>& slots = found.slots;
    if (slots.size() == 0) return;
    const float* weights = is_exact_ ? params_.row_weights : nullptr; // that travel
    if (params_.carried_weights != nullptr) weights = part.index == 0 ? params_.carried_weights : nullptr;
    if (is_exact_ || weights != nullptr)
      for (int first = 0; first < slots.size(); first += kWarp)
        send_routes(home, token, part, slots.has_own(first) ? slots.own(first) : -1, weights);
    if (!is_exact_) {
      Terms<T> terms;
      terms.rows = slots.map([&](int32_t slot) { return row_of(slot, part); });
      terms.weights = slots.map([&](int32_t slot) { return weight_of(slot); });
      terms.address_bits = reinterpret_cast<uint64_t>(params_.rows) | static_cast<uint64_t>(args_.hidden) * sizeof(T);
      const int64_t row = partial_staging_row(group_.context.shape, token, args_.top_k, found.order);
      sum_rows<false>(stream_, terms, staged_row(home, row, part), part.size);
    }
    stream_.finish(); // what all lanes have stored comes before what one tells
    if (lane() == 0) call_.tell_arrival(arrival_at(home, token, found.order, part));
  }

  // Each lane names a slot, or -1. In precision exact their rows travel; in either, their weights, if there are any.
  __device__ void send_routes(int home, int64_t token, const Part& part, int32_t slot, const float* weights) const {
    const int64_t route = slot >= 0 ? route_index(token, args_.top_k, movement_.k_of_slot(slot)) : 0;
    if (weights != nullptr && slot >= 0) staged_weights(home)[route] = weights[slot];
    if (!is_exact_) return;
    for (unsigned left = __ballot_sync(~0u, slot >= 0 ? 1 : 0); left != 0; left &= left - 1) {
      const int one = lowest_bit(left);
      begin_to_spread_row(stream_, reinterpret_cast<const std::byte*>(row_of(from_lane(slot, one), part)),
                          part.size * static_cast<int64_t>(sizeof(T)),
                          lane() == one ? reinterpret_cast<std::byte*>(staged_row(home, route, part)) : nullptr);
    }
  }

  // Of a row of this rank's own, as the lane's slot names it.
  __device__ float weight_of(int32_t slot) const {
    return params_.row_weights != nullptr && slot >= 0 ? params_.row_weights[slot] : 1.0f;
  }
  __device__ bool sum_part(int64_t token, const Part& part) const {
    const WarpRoutes routes = movement_.routes_of(token);
    const uint64_t live = routes.mask_of([&](const Route& route) { return movement_.is_live(route); });
    const uint64_t own = live & routes.mask_of([&](const Route& route) { return route.rank == call_.rank(); });
    if (!wait_for_peers(token, part, routes, live & ~own)) return false;
    const Terms<T> terms =
        is_exact_ ? terms_of_routes(token, part, routes, live, own) : terms_of_ranks(token, part, routes, live, own);
    sum_rows<true>(stream_, terms, reinterpret_cast<T*>(params_.out) + token * args_.hidden + part.first, part.size);
    if (params_.carried_out != nullptr && part.index == 0) collect_weights(token, routes, live);
    if (call_.poisons_staging()) poison_staging(token, part);
    return true;
  }

  // Each lane for the ranks of its routes. `awaited`: a bit for each route.
  __device__ bool wait_for_peers(int64_t token, const Part& part, const WarpRoutes& routes, uint64_t awaited) const {
    bool ok = true;
    for (int first = 0; first < args_.top_k; first += kWarp)
      if (const Route route = routes.own(first); ok && (awaited >> (first + lane()) & 1) != 0)
        ok = call_.wait_for_arrival(arrival_at(call_.rank(), token, movement_.order_of(route.order), part), route.rank);
    const bool all = __all_sync(~0u, ok ? 1 : 0) != 0;
    __syncwarp(); // every lane sees what each has acquired: a vote orders no memory
    return all;
  }

  // In k order.
  __device__ Terms<T> terms_of_routes(int64_t token, const Part& part, const WarpRoutes& routes, uint64_t live,
                                      uint64_t own) const {
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
        const T* const row = (own >> k & 1) != 0 ? row_of(routes.slot(k), part)
                                                 : staged_row(call_.rank(), route_index(token, args_.top_k, k), part);
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
      const int k = lowest_bit(left);
      own_order = routes.order(k);
      terms.append(row_of(routes.slot(k), part), from_lane(k < kWarp ? low_weight : high_weight, k % kWarp));
    }
    terms.num_inner = terms.size();
    uint64_t orders = 0; // of the peers that have live slots, a bit each; it ascends with the rank
#pragma unroll 1
    for (uint64_t left = live & ~own; left != 0; left &= left - 1)
      orders |= uint64_t{1} << movement_.order_of(routes.order(lowest_bit(left)));
#pragma unroll 1
    for (; orders != 0; orders &= orders - 1) {
      const int order = lowest_bit(orders);
      if (order < own_order) ++terms.own_position;
      terms.append(staged_row(call_.rank(), partial_staging_row(group_.context.shape, token, args_.top_k, order), part));
    }
    return terms;
  }

  __device__ void collect_weights(int64_t token, const WarpRoutes& routes, uint64_t live) const {
    for (int first = 0; first < args_.top_k; first += kWarp) {
      const int k = first + lane();
      if (k >= args_.top_k) continue;
      const Route route = routes.own(first);
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
      poison_row(reinterpret_cast<std::byte*>(staged_row(call_.rank(), row, part)),
                 part.size * static_cast<int64_t>(sizeof(T)));
    if (is_exact_ ? num_parts_ > 1 : part.index != 0) return; // in precision exact they are for the other part too
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
  int64_t part_size_; // elements
};

template <typename T, bool kRagged>
__device__ void gather_few(const GatherParams& params, Movement& movement) {
  if (!movement.begin_alone()) return;
  const FewGather<T, kRagged> gather(params, movement);
  gather.send();
  movement.call().sent_alone(kThreads / kWarp);
  PeerOffers* const offers = dynamic_shared_memory<PeerOffers>();
  gather.sum([&] { return movement.arrive_alone(params.offer, offers[threadIdx.x / kWarp]); });
}
template <typename T>
__device__ __noinline__ void gather_few_ragged(const GatherParams& params, Movement movement) {
  gather_few<T, true>(params, movement);
}

template <typename T>
__device__ __forceinline__ void gather_rows(const GatherParams& params) {
  Movement movement(params.group, params.call, params.layout);
  movement.post(params.offer);
  if (params.group.context.shape.precision == EPX_COMBINE_WIRE && movement.has_few_tokens()) {
    if (is_ragged(reinterpret_cast<uint64_t>(params.rows) | reinterpret_cast<uint64_t>(params.out),
                  params.call.hidden * static_cast<int64_t>(sizeof(T))))
      gather_few_ragged<T>(params, movement);
    else
      gather_few<T, false>(params, movement);
    return;
  }
  if (!movement.begin(params.offer)) return;
  RowStream stream(dynamic_shared_memory<std::byte>(), static_cast<int>(threadIdx.x) / kWarp, kThreads / kWarp);
  const Gather<T> gather(params, movement, stream);
  const Role role = role_of_warp(params.division, params.group.context.shape.num_ranks);
  if (role.job == Job::send) {
    gather.send(role);
    if (lane() == 0) movement.call().sent(static_cast<unsigned>(role.count));
  }
  if (role.job == Job::receive) gather.sum(role);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams params) {
  begin_early(params);
  gather_rows<T>(params);
  leave(params.group);
}

cudaError_t launch(GatherParams params, LaunchPlan& plan, cudaStream_t stream) {
  const auto [grid, division] =
      plan.next_gather(params.call.num_tokens, params.call.hidden * element_bytes(params.call.dtype), stream);
  params.division = division;
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

cudaError_t launch_combine(const DeviceGroup& group, LaunchPlan& plan, const CombineCall& call, cudaStream_t stream) {
  const CallPost offer = offer_of(call, call.recv_weights != nullptr ? 1 : 0, 0, kNoReach);
  const HandleLayout layout = make_handle_layout(group.context.shape, call.top_k);
  return launch({group, layout, {}, call, offer, call.expert_out, call.recv_weights, nullptr, call.out, nullptr}, plan,
                stream);
}

cudaError_t launch_dispatch_bwd(const DeviceGroup& group, LaunchPlan& plan, const DispatchBwdCall& call,
                                cudaStream_t stream) {
  const CallPost offer = offer_of(call, call.grad_recv_weights != nullptr ? 2 : 0, 0, kNoReach);
  const HandleLayout layout = make_handle_layout(group.context.shape, call.top_k);
  return launch({group,
                 layout,
                 {},
                 call,
                 offer,
                 call.grad_recv,
                 nullptr,
                 call.grad_recv_weights,
                 call.grad_tokens,
                 call.grad_topk_weights},
                plan, stream);
}

} // namespace epx::cuda
