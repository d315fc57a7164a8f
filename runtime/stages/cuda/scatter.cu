// Scatter: rows go from tokens to slots. dispatch copies them; combine_bwd scales them and takes their products on arrival.
//
// A warp takes a token and stores its row once to each rank that it goes to: straight into the token's first live slot there
// when the receive rows lie in an allocation of the group, else into staging. Once all ranks have sent, a warp takes a token
// that came, and serves its slots on this rank.
#include "runtime/stages/cuda/kernels.h"

#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/launch.h"
#include "runtime/stages/cuda/movement.cuh"
#include "runtime/stages/cuda/rows.cuh"

namespace epx::cuda {
namespace {

constexpr int kThreads = 512;

// What a scatter sends. Rows of `row_bytes`; what is NULL or 0 does not travel.
struct ScatterInput {
  const std::byte* rows; // [T, H]
  int64_t row_bytes;
  const float* weights;     // [T, K]
  const std::byte* sidecar; // [T, sidecar_bytes]
  int64_t sidecar_bytes;
};

struct ScatterParams {
  DeviceGroup group;
  HandleLayout layout;
  ScatterInput input;
  CallPost offer;
};

__device__ std::byte* staged_row(const DeviceGroup& group, int receiver, int64_t staging_row) {
  const WindowLayout& layout = group.context.layout;
  return group.window().at<std::byte>(receiver, layout.scatter_rows.offset + staging_row * layout.row_stride);
}
__device__ std::byte* staged_sidecar(const DeviceGroup& group, int receiver, int64_t staging_row) {
  const WindowLayout& layout = group.context.layout;
  return group.window().at<std::byte>(receiver, layout.scatter_sidecars.offset + staging_row * layout.sidecar_stride);
}

// One warp sends one token.
__device__ void send_token(const DeviceGroup& group, const Movement& movement, const ScatterInput& input, int top_k,
                           int64_t token) {
  const Route* const routes = movement.plan().routes + token * top_k;
  const std::byte* const row = input.rows + token * input.row_bytes;
  uint64_t served = 0; // ranks that have the row, a bit each
  for (int k = 0; k < top_k; ++k) {
    const Route route = routes[k];
    if (!movement.is_live(route)) continue;
    if ((served >> route.rank & 1) == 0) {
      served |= uint64_t{1} << route.rank;
      int32_t first_slot = route.slot; // of the token on that rank, live or not: it names the staging row
      for (int other = k - 1; other >= 0; --other)
        if (routes[other].slot >= 0 && routes[other].rank == route.rank) first_slot = routes[other].slot;
      const int64_t staging_row =
          scatter_staging_row(group.context.layout, group.context.shape, group.context.rank, token, first_slot);
      std::byte* const in_place = movement.rows_of(route.rank);
      copy_row(in_place != nullptr ? in_place + route.slot * input.row_bytes : staged_row(group, route.rank, staging_row),
               row, input.row_bytes);
      if (input.sidecar_bytes > 0)
        copy_row(staged_sidecar(group, route.rank, staging_row), input.sidecar + token * input.sidecar_bytes,
                 input.sidecar_bytes);
    }
    if (input.weights != nullptr && lane() == 0)
      group.window().at<float>(route.rank, group.context.layout.scatter_weights.offset)[route.slot] =
          input.weights[token * top_k + k];
  }
}

// Takes the rows of one call on this rank. deliver(slot, row, sidecar, weight), absent(slot): one warp.
struct DispatchReceiver {
  DispatchCall call;
  int64_t row_bytes;

  __device__ std::byte* rows() const { return call.recv_tokens; }
  __device__ void deliver(int64_t slot, const std::byte* row, const std::byte* sidecar, float weight) const {
    std::byte* const to = call.recv_tokens + slot * row_bytes;
    if (to != row) copy_row(to, row, row_bytes);
    if (call.sidecar_bytes > 0) copy_row(call.recv_sidecar + slot * call.sidecar_bytes, sidecar, call.sidecar_bytes);
    if (call.recv_weights != nullptr && lane() == 0) call.recv_weights[slot] = weight;
  }
  __device__ void absent(int64_t slot) const {
    zero_row(call.recv_tokens + slot * row_bytes, row_bytes);
    if (call.sidecar_bytes > 0) zero_row(call.recv_sidecar + slot * call.sidecar_bytes, call.sidecar_bytes);
    if (call.recv_weights != nullptr && lane() == 0) call.recv_weights[slot] = 0.0f;
  }
};

template <typename T>
struct CombineBwdReceiver {
  CombineBwdCall call;
  int64_t row_bytes;

  __device__ std::byte* rows() const { return call.grad_expert_out; }
  __device__ void deliver(int64_t slot, const std::byte* row, const std::byte*, float) const {
    std::byte* const to = call.grad_expert_out + slot * row_bytes;
    const auto* const from = reinterpret_cast<const T*>(row);
    if (call.grad_recv_weights != nullptr) { // before the row is scaled where it lies
      const float product = dot_rows(from, reinterpret_cast<const T*>(call.expert_out + slot * row_bytes), call.hidden);
      if (lane() == 0) call.grad_recv_weights[slot] = product;
    }
    if (call.recv_weights != nullptr)
      scale_row(reinterpret_cast<T*>(to), from, call.recv_weights[slot], call.hidden);
    else if (to != row)
      copy_row(to, row, row_bytes);
  }
  __device__ void absent(int64_t slot) const {
    zero_row(call.grad_expert_out + slot * row_bytes, row_bytes);
    if (call.grad_recv_weights != nullptr && lane() == 0) call.grad_recv_weights[slot] = 0.0f;
  }
};

// One warp serves the slots of the token whose first slot here is `head`.
template <typename Receiver>
__device__ void receive_token(const DeviceGroup& group, const Movement& movement, const Receiver& receiver, int64_t head,
                              const SlotRecord& record) {
  const SlotRecord* const records = movement.plan().slot_records;
  const int64_t rows = receiver.call.recv_rows;
  const bool has_come = movement.is_active(record.source);
  const int64_t staging_row =
      scatter_staging_row(group.context.layout, group.context.shape, record.source, record.token, head);
  const bool in_place = movement.rows_of(group.context.rank) != nullptr;
  const auto* const weights = group.window().template local<float>(group.context.layout.scatter_weights.offset);

  int64_t first_live = -1; // where a row that was stored in place lies
  for (int64_t slot = head; slot >= 0 && first_live < 0; slot = records[slot].next_slot)
    if (slot < rows) first_live = slot;
  if (first_live < 0) return;
  const std::byte* const row =
      in_place ? receiver.rows() + first_live * receiver.row_bytes : staged_row(group, group.context.rank, staging_row);
  const auto serve = [&](int64_t slot) {
    if (has_come)
      receiver.deliver(slot, row, staged_sidecar(group, group.context.rank, staging_row), weights[slot]);
    else
      receiver.absent(slot);
  };
  for (int64_t slot = records[first_live].next_slot; slot >= 0; slot = records[slot].next_slot)
    if (slot < rows) serve(slot);
  __syncwarp(); // the other slots have read the row
  serve(first_live);
}

template <typename Receiver>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const __grid_constant__ ScatterParams params, const __grid_constant__ Receiver receiver) {
  const DeviceGroup& group = params.group;
  const MovementCall& args = receiver.call;
  Movement movement(group, args, params.layout);
  if (!movement.begin(params.offer)) return;
  if (movement.takes_part())
    for (int64_t token = global_warp(); token < args.num_tokens; token += num_warps())
      send_token(group, movement, params.input, args.top_k, token);
  movement.call().sent();
  if (!movement.call().wait(EPX_PHASE_COMPLETE)) return;
  if (movement.takes_part()) {
    const SlotRecord* const records = movement.plan().slot_records;
    for (int64_t slot = global_warp(); slot < movement.plan().header->rows_in_use; slot += num_warps()) {
      const SlotRecord record = records[slot];
      if (record.source < 0) {
        if (slot < args.recv_rows) receiver.absent(slot);
      } else if (record.first != 0) {
        receive_token(group, movement, receiver, slot, record);
      }
    }
  }
  movement.call().end();
}

template <typename Receiver>
cudaError_t launch(const DeviceGroup& group, const LaunchShape& shape, const ScatterInput& input, CallPost offer,
                   const Receiver& receiver, cudaStream_t stream) {
  const ScatterParams params{group, make_handle_layout(group.context.shape, receiver.call.top_k), input, offer};
  return launch_cooperative(&scatter_kernel<Receiver>, {shape.movement_blocks, kThreads}, stream, params, receiver);
}

CallPost offer_of(const Reach& reach, int32_t weights, int64_t sidecar_bytes) {
  CallPost offer{};
  offer.weights = weights;
  offer.sidecar_bytes = sidecar_bytes;
  offer.rows_allocation = reach.rows_allocation;
  offer.rows_offset = reach.rows_offset;
  return offer;
}

} // namespace

std::vector<const void*> scatter_kernels() {
  return {reinterpret_cast<const void*>(&scatter_kernel<DispatchReceiver>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwdReceiver<float>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwdReceiver<__half>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwdReceiver<__nv_bfloat16>>)};
}
int movement_threads() {
  return kThreads;
}

cudaError_t launch_dispatch(const DeviceGroup& group, const LaunchShape& shape, const DispatchCall& call,
                            const Reach& reach, cudaStream_t stream) {
  const int64_t row_bytes = call.hidden * element_bytes(call.dtype);
  const ScatterInput input{call.tokens, row_bytes, call.topk_weights, call.sidecar, call.sidecar_bytes};
  return launch(group, shape, input, offer_of(reach, call.topk_weights != nullptr ? 1 : 0, call.sidecar_bytes),
                DispatchReceiver{call, row_bytes}, stream);
}

cudaError_t launch_combine_bwd(const DeviceGroup& group, const LaunchShape& shape, const CombineBwdCall& call,
                               const Reach& reach, cudaStream_t stream) {
  const int64_t row_bytes = call.hidden * element_bytes(call.dtype);
  const ScatterInput input{call.grad_out, row_bytes, nullptr, nullptr, 0};
  const CallPost offer =
      offer_of(reach, (call.recv_weights != nullptr ? 1 : 0) | (call.grad_recv_weights != nullptr ? 2 : 0), 0);
  if (call.dtype == EPX_FLOAT32)
    return launch(group, shape, input, offer, CombineBwdReceiver<float>{call, row_bytes}, stream);
  if (call.dtype == EPX_FLOAT16)
    return launch(group, shape, input, offer, CombineBwdReceiver<__half>{call, row_bytes}, stream);
  return launch(group, shape, input, offer, CombineBwdReceiver<__nv_bfloat16>{call, row_bytes}, stream);
}

} // namespace epx::cuda
