// Gather: rows go from slots to their tokens' home ranks and are summed. combine weighs them; dispatch_bwd does not, and brings
// the weights' gradients along.
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
constexpr int kSenders = 8; // of each block; they read about twice what they send

struct GatherParams {
  DeviceGroup group;
  HandleLayout layout;
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
  __device__ Gather(const GatherParams& params, const Movement& movement)
      : params_(params), group_(params.group), args_(params.call), movement_(movement), call_(movement.call()),
        layout_(params.group.context.layout), is_exact_(params.group.context.shape.precision == EPX_COMBINE_EXACT) {}

  __device__ void send(const Role& role) const {
    const int64_t num_peer_tokens = movement_.num_peer_tokens();
    for (int64_t index = role.index; index < num_peer_tokens; index += role.count) {
      const Movement::PeerToken peer = movement_.peer_token(index);
      if (movement_.is_active(peer.rank) && peer.token < movement_.tokens_of(peer.rank)) send_token(peer.rank, peer.token);
    }
  }

  // False: the group has failed.
  __device__ bool sum(const Role& role) const {
    for (int64_t token = role.index; token < args_.num_tokens; token += role.count)
      if (!sum_token(token)) return false;
    return true;
  }

private:
  __device__ const T* row_of(int64_t slot) const { return reinterpret_cast<const T*>(params_.rows) + slot * args_.hidden; }
  __device__ T* staged_row(int owner, int64_t row) const {
    return group_.window().at<T>(owner, layout_.gather_rows.offset + row * layout_.row_stride);
  }
  __device__ float* staged_weights(int owner) const {
    return group_.window().at<float>(owner, layout_.gather_weights.offset);
  }
  // A word for each rank that a token goes to.
  __device__ uint64_t* arrival_at(int owner, int64_t token, int order) const {
    return group_.window().at<uint64_t>(owner, layout_.gather_arrivals.offset) +
           partial_staging_row(group_.context.shape, token, args_.top_k, order);
  }

  __device__ void send_token(int home, int64_t token) const {
    const WarpList<int32_t> slots = movement_.live_slots(home, token);
    if (slots.size() == 0) return;
    const SlotRecord* const records = movement_.plan().slot_records;
    const int order = records[slots[0]].order;
    if (is_exact_) {
      for (int i = 0; i < slots.size(); ++i) {
        const int64_t slot = slots[i];
        copy_row(reinterpret_cast<std::byte*>(staged_row(home, route_index(token, args_.top_k, records[slot].k))),
                 reinterpret_cast<const std::byte*>(row_of(slot)), args_.hidden * static_cast<int64_t>(sizeof(T)));
      }
    } else {
      Terms<T> terms;
      for (int i = 0; i < slots.size(); ++i)
        append(terms, slots[i]);
      sum_rows<false>(terms, staged_row(home, partial_staging_row(group_.context.shape, token, args_.top_k, order)),
                      args_.hidden);
    }
    const float* const weights = params_.carried_weights != nullptr ? params_.carried_weights
                                 : is_exact_                        ? params_.row_weights
                                                                    : nullptr;
    if (weights != nullptr)
      for (int first = 0; first < slots.size(); first += kWarp)
        if (slots.has_own(first))
          staged_weights(home)[route_index(token, args_.top_k, records[slots.own(first)].k)] = weights[slots.own(first)];
    __syncwarp(); // what all lanes have stored comes before what one tells
    if (lane() == 0) call_.tell_arrival(arrival_at(home, token, order));
  }

  // A row of this rank's own.
  __device__ void append(Terms<T>& terms, int64_t slot) const {
    if (params_.row_weights != nullptr)
      terms.append(row_of(slot), params_.row_weights[slot]);
    else
      terms.append(row_of(slot));
  }

  __device__ bool sum_token(int64_t token) const {
    const Route* const routes = movement_.plan().routes + token * args_.top_k;
    uint64_t live = 0;        // routes, a bit each
    uint64_t orders = 0;      // ranks that have live slots, a bit each by order, which ascends with the rank
    int own_order = kMaxTopK; // of this rank
    for (int k = 0; k < args_.top_k; ++k) {
      const Route route = routes[k];
      if (!movement_.is_live(route)) continue;
      live |= uint64_t{1} << k;
      orders |= uint64_t{1} << route.order;
      if (route.rank == call_.rank()) own_order = route.order;
    }
    if (!wait_for_peers(token, routes, live)) return false;
    const Terms<T> terms = is_exact_ ? routes_of(token, routes, live) : partials_of(token, routes, live, orders, own_order);
    sum_rows<true>(terms, reinterpret_cast<T*>(params_.out) + token * args_.hidden, args_.hidden);
    if (params_.carried_out != nullptr) collect_weights(token, routes, live);
    if (call_.poisons_staging()) poison_staging(token);
    return true;
  }

  // Each lane for the ranks of some routes.
  __device__ bool wait_for_peers(int64_t token, const Route* routes, uint64_t live) const {
    bool ok = true;
    for (int k = lane(); k < args_.top_k && ok; k += kWarp)
      if ((live >> k & 1) != 0 && routes[k].rank != call_.rank())
        ok = call_.wait_for_arrival(arrival_at(call_.rank(), token, routes[k].order), routes[k].rank);
    const bool all = __all_sync(~0u, ok ? 1 : 0) != 0;
    __syncwarp(); // every lane sees what each has acquired
    return all;
  }

  __device__ Terms<T> routes_of(int64_t token, const Route* routes, uint64_t live) const {
    const float* const weights = params_.row_weights != nullptr ? staged_weights(call_.rank()) : nullptr;
    Terms<T> terms;
    for (int k = 0; k < args_.top_k; ++k) {
      if ((live >> k & 1) == 0) continue;
      const int64_t route = route_index(token, args_.top_k, k);
      if (routes[k].rank == call_.rank())
        append(terms, routes[k].slot);
      else if (weights != nullptr)
        terms.append(staged_row(call_.rank(), route), weights[route]);
      else
        terms.append(staged_row(call_.rank(), route));
    }
    return terms;
  }

  __device__ Terms<T> partials_of(int64_t token, const Route* routes, uint64_t live, uint64_t orders, int own_order) const {
    Terms<T> terms;
    for (; orders != 0; orders &= orders - 1) {
      const int order = __ffsll(static_cast<long long>(orders)) - 1;
      if (order != own_order) {
        terms.append(staged_row(call_.rank(), partial_staging_row(group_.context.shape, token, args_.top_k, order)));
        continue;
      }
      for (int k = 0; k < args_.top_k; ++k) {
        if ((live >> k & 1) == 0 || routes[k].rank != call_.rank()) continue;
        terms.inner |= uint64_t{1} << terms.size();
        append(terms, routes[k].slot);
      }
      terms.ends_of_inner = uint64_t{1} << (terms.size() - 1);
    }
    return terms;
  }

  __device__ void collect_weights(int64_t token, const Route* routes, uint64_t live) const {
    for (int k = lane(); k < args_.top_k; k += kWarp) {
      const int64_t route = route_index(token, args_.top_k, k);
      float weight = 0.0f;
      if ((live >> k & 1) != 0)
        weight =
            routes[k].rank == call_.rank() ? params_.carried_weights[routes[k].slot] : staged_weights(call_.rank())[route];
      params_.carried_out[route] = weight;
    }
  }

  __device__ void poison_staging(int64_t token) const {
    const int per_token = is_exact_ ? args_.top_k : min(args_.top_k, call_.num_ranks());
    for (int64_t row = token * per_token; row < (token + 1) * per_token; ++row)
      poison_row(reinterpret_cast<std::byte*>(staged_row(call_.rank(), row)), layout_.row_stride);
    for (int k = lane(); k < args_.top_k; k += kWarp)
      staged_weights(call_.rank())[route_index(token, args_.top_k, k)] = NAN;
  }

  const GatherParams& params_;
  const DeviceGroup& group_;
  const MovementCall& args_;
  const Movement& movement_;
  const Call& call_;
  const WindowLayout& layout_;
  bool is_exact_;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams params) {
  Movement movement(params.group, params.call, params.layout);
  if (!movement.begin(params.offer)) return;
  const Gather<T> gather(params, movement);
  const Role role = role_of_warp(kSenders, params.group.context.shape.num_ranks);
  bool ok = true;
  if (role.sends) {
    if (movement.takes_part()) gather.send(role);
    movement.call().sent_by_warp(static_cast<unsigned>(role.count));
  } else if (movement.takes_part()) {
    ok = gather.sum(role);
  }
  if (__syncthreads_and(ok ? 1 : 0) != 0) movement.call().end();
}

cudaError_t launch(const GatherParams& params, const LaunchShape& shape, cudaStream_t stream) {
  const Grid grid{shape.gather_blocks, kThreads};
  if (params.call.dtype == EPX_FLOAT32) return launch_cooperative(&gather_kernel<float>, grid, stream, params);
  if (params.call.dtype == EPX_FLOAT16) return launch_cooperative(&gather_kernel<__half>, grid, stream, params);
  return launch_cooperative(&gather_kernel<__nv_bfloat16>, grid, stream, params);
}

} // namespace

int gather_threads() {
  return kThreads;
}
std::vector<const void*> gather_kernels() {
  return {reinterpret_cast<const void*>(&gather_kernel<float>), reinterpret_cast<const void*>(&gather_kernel<__half>),
          reinterpret_cast<const void*>(&gather_kernel<__nv_bfloat16>)};
}

cudaError_t launch_combine(const DeviceGroup& group, const LaunchShape& shape, const CombineCall& call,
                           cudaStream_t stream) {
  CallPost offer{};
  offer.weights = call.recv_weights != nullptr ? 1 : 0;
  offer.rows_allocation = -1;
  const HandleLayout layout = make_handle_layout(group.context.shape, call.top_k);
  return launch({group, layout, call, offer, call.expert_out, call.recv_weights, nullptr, call.out, nullptr}, shape,
                stream);
}

cudaError_t launch_dispatch_bwd(const DeviceGroup& group, const LaunchShape& shape, const DispatchBwdCall& call,
                                cudaStream_t stream) {
  CallPost offer{};
  offer.weights = call.grad_recv_weights != nullptr ? 2 : 0;
  offer.rows_allocation = -1;
  const HandleLayout layout = make_handle_layout(group.context.shape, call.top_k);
  return launch({group, layout, call, offer, call.grad_recv, nullptr, call.grad_recv_weights, call.grad_tokens,
                 call.grad_topk_weights},
                shape, stream);
}

} // namespace epx::cuda
