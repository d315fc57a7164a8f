// Gather: rows go from slots to their tokens' home ranks and are summed. combine weighs them; dispatch_bwd does not, and brings
// the weights' gradients along.
//
// Precision wire: a warp takes a token that has slots on this rank, sums them and stores one partial row into the home rank's
// staging. Precision exact: a warp takes a slot and stores its row there. Once all ranks have sent, a warp takes a token of this
// rank and sums what has come home, at places that depend only on the token and the rank's order, or the route.
#include "runtime/stages/cuda/kernels.h"

#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/launch.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows.cuh"

namespace epx::cuda {
namespace {

constexpr int kThreads = 512;

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
      : params_(params), group_(params.group), args_(params.call), movement_(movement),
        records_(movement.plan().slot_records), layout_(params.group.context.layout) {}

  __device__ void send() const {
    const bool exact = group_.context.shape.precision == EPX_COMBINE_EXACT;
    const int64_t rows_in_use = movement_.plan().header->rows_in_use;
    for (int64_t slot = global_warp(); slot < rows_in_use; slot += num_warps()) {
      const SlotRecord record = records_[slot];
      if (record.source < 0 || !movement_.is_active(record.source)) continue;
      if (slot < args_.recv_rows) send_slot(slot, record, exact);
      if (!exact && record.first != 0) send_partial(slot, record);
    }
  }

  __device__ void sum() const {
    for (int64_t token = global_warp(); token < args_.num_tokens; token += num_warps()) {
      if (group_.context.shape.precision == EPX_COMBINE_EXACT)
        sum_routes(token);
      else
        sum_partials(token);
      if (params_.carried_out != nullptr) collect_weights(token);
    }
  }

private:
  __device__ const T* row_of(int64_t slot) const { return reinterpret_cast<const T*>(params_.rows) + slot * args_.hidden; }
  __device__ std::byte* staged_row(int owner, int64_t row) const {
    return group_.window().at<std::byte>(owner, layout_.gather_rows.offset + row * layout_.row_stride);
  }
  __device__ float* staged_weights(int owner) const {
    return group_.window().at<float>(owner, layout_.gather_weights.offset);
  }

  // What travels for each route by itself.
  __device__ void send_slot(int64_t slot, const SlotRecord& record, bool exact) const {
    const int64_t route = route_index(record.token, args_.top_k, record.k);
    if (exact) copy_row(staged_row(record.source, route), params_.rows + slot * row_bytes(), row_bytes());
    const float* weights = params_.carried_weights != nullptr ? params_.carried_weights
                           : exact                            ? params_.row_weights
                                                              : nullptr;
    if (weights != nullptr && lane() == 0) staged_weights(record.source)[route] = weights[slot];
  }

  // The sum over the live slots of one token here, in k order, rounded once.
  __device__ void send_partial(int64_t head, const SlotRecord& record) const {
    bool is_empty = true;
    for (int64_t slot = head; slot >= 0 && is_empty; slot = records_[slot].next_slot)
      is_empty = slot >= args_.recv_rows;
    if (is_empty) return;
    auto* const to = reinterpret_cast<T*>(
        staged_row(record.source, partial_staging_row(group_.context.shape, record.token, args_.top_k, record.order)));
    for (int64_t h = lane() * kRun; h < args_.hidden; h += kStretch) {
      float acc[kRun] = {};
      for (int64_t slot = head; slot >= 0; slot = records_[slot].next_slot) {
        if (slot >= args_.recv_rows) continue;
        if (params_.row_weights != nullptr)
          add_weighted(acc, row_of(slot), h, params_.row_weights[slot]);
        else
          add(acc, row_of(slot), h);
      }
      store_run(to, h, args_.hidden, acc);
    }
  }

  __device__ void sum_partials(int64_t token) const {
    const Route* const routes = movement_.plan().routes + token * args_.top_k;
    uint64_t partials = 0; // one bit for each rank that sent one, by order, which ascends with the rank
    for (int k = 0; k < args_.top_k; ++k)
      if (movement_.is_live(routes[k])) partials |= uint64_t{1} << routes[k].order;
    for (int64_t h = lane() * kRun; h < args_.hidden; h += kStretch) {
      float acc[kRun] = {};
      for (uint64_t left = partials; left != 0; left &= left - 1) {
        const int order = __ffsll(static_cast<long long>(left)) - 1;
        add(acc,
            reinterpret_cast<const T*>(
                staged_row(group_.context.rank, partial_staging_row(group_.context.shape, token, args_.top_k, order))),
            h);
      }
      store_run(out_row(token), h, args_.hidden, acc);
    }
  }

  __device__ void sum_routes(int64_t token) const {
    const Route* const routes = movement_.plan().routes + token * args_.top_k;
    const float* const weights = params_.row_weights != nullptr ? staged_weights(group_.context.rank) : nullptr;
    for (int64_t h = lane() * kRun; h < args_.hidden; h += kStretch) {
      float acc[kRun] = {};
      for (int k = 0; k < args_.top_k; ++k) {
        if (!movement_.is_live(routes[k])) continue;
        const int64_t route = route_index(token, args_.top_k, k);
        const auto* row = reinterpret_cast<const T*>(staged_row(group_.context.rank, route));
        if (weights != nullptr)
          add_weighted(acc, row, h, weights[route]);
        else
          add(acc, row, h);
      }
      store_run(out_row(token), h, args_.hidden, acc);
    }
  }

  __device__ void collect_weights(int64_t token) const {
    for (int k = lane(); k < args_.top_k; k += kWarp) {
      const int64_t route = route_index(token, args_.top_k, k);
      params_.carried_out[route] =
          movement_.is_live(movement_.plan().routes[route]) ? staged_weights(group_.context.rank)[route] : 0.0f;
    }
  }

  __device__ T* out_row(int64_t token) const { return reinterpret_cast<T*>(params_.out) + token * args_.hidden; }
  __device__ int64_t row_bytes() const { return args_.hidden * static_cast<int64_t>(sizeof(T)); }

  __device__ void add_weighted(float (&acc)[kRun], const T* row, int64_t h, float weight) const {
    float x[kRun];
    load_run(row, h, args_.hidden, x);
    for (int i = 0; i < kRun; ++i)
      acc[i] = __fmaf_rn(weight, x[i], acc[i]);
  }
  __device__ void add(float (&acc)[kRun], const T* row, int64_t h) const {
    float x[kRun];
    load_run(row, h, args_.hidden, x);
    for (int i = 0; i < kRun; ++i)
      acc[i] = __fadd_rn(acc[i], x[i]);
  }

  const GatherParams& params_;
  const DeviceGroup& group_;
  const MovementCall& args_;
  const Movement& movement_;
  const SlotRecord* records_;
  const WindowLayout& layout_;
};

template <typename T>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ GatherParams params) {
  Movement movement(params.group, params.call, params.layout);
  if (!movement.begin(params.offer)) return;
  const Gather<T> gather(params, movement);
  if (movement.takes_part()) gather.send();
  movement.call().sent();
  if (!movement.call().wait(EPX_PHASE_COMPLETE)) return;
  if (movement.takes_part()) gather.sum();
  movement.call().end();
}

cudaError_t launch(const GatherParams& params, const LaunchShape& shape, cudaStream_t stream) {
  const Grid grid{shape.movement_blocks, kThreads};
  if (params.call.dtype == EPX_FLOAT32) return launch_cooperative(&gather_kernel<float>, grid, stream, params);
  if (params.call.dtype == EPX_FLOAT16) return launch_cooperative(&gather_kernel<__half>, grid, stream, params);
  return launch_cooperative(&gather_kernel<__nv_bfloat16>, grid, stream, params);
}

} // namespace

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
