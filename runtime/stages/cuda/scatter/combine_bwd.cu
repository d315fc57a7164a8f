// SPDX-License-Identifier: Apache-2.0
// combine_bwd as a scatter; scatter.cu describes those.
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/scatter/scatter_kernel.cuh"

namespace epx::cuda {
namespace {

// Weights' gradients, which rank-major calls do not have, have kernels of their own, since a kernel with both loops would spill
// the registers of either.
template <typename T, bool kHasProducts>
struct CombineBwd {
  using Format = PlainRows;

  CombineBwdCall call;
  int64_t row_bytes;

  __device__ const std::byte* input_rows() const { return call.grad_out; }
  __device__ static const float* input_weights() { return nullptr; }
  __device__ static const std::byte* input_sidecar() { return nullptr; }
  static constexpr int64_t sidecar_bytes() { return 0; }
  __device__ static PlainRows format() { return {}; }
  __device__ int64_t recv_row_bytes() const { return row_bytes; }
  __device__ int64_t wire_row_bytes() const { return row_bytes; }
  __device__ std::byte* rows() const { return call.grad_expert_out; }
  static constexpr bool clears_pads() { return true; }
  static constexpr bool kMixesPaths = false, kTakesRankMajor = !kHasProducts;
  static constexpr bool kStagesOwnRows = false;
  __device__ void store(TmaRowPipeline& pipeline, const SourceRow& source_row, int32_t slot, int64_t index, float) const {
    const auto* const row = reinterpret_cast<const T*>(source_row.row.row);
    if constexpr (kHasProducts) {
      store_with_products(pipeline, row, slot);
    } else {
      const bool is_slot = slot >= 0;
      std::byte* const to = is_slot ? call.grad_expert_out + index * row_bytes : nullptr;
      const float factor = is_slot && call.recv_weights != nullptr ? call.recv_weights[slot] : 1.0f;
      if (call.recv_weights != nullptr)
        scale_row_to_destinations(pipeline, row, call.hidden, reinterpret_cast<T*>(to), factor);
      else
        begin_copy_row_to_destinations(pipeline, source_row.row.row, row_bytes,
                                       slot != source_row.slot_in_place ? to : nullptr);
    }
  }
  __device__ void clear_beside_rows(int32_t slot, int64_t /*row*/) const {
    if (kHasProducts && slot >= 0) call.grad_recv_weights[slot] = 0.0f;
  }

private:
  // Lanes that have a slot come first. Slots descend: the first may alias the gradient's row, and is overwritten last.
  __device__ void store_with_products(TmaRowPipeline& pipeline, const T* grad, int32_t slot) const {
    const bool is_weighted = call.recv_weights != nullptr;
    const int slots = __popc(__ballot_sync(~0u, slot >= 0 ? 1 : 0));
    const auto bits = [](const void* place) { return reinterpret_cast<uint64_t>(place); };
    // Where the first rows and the size of a row are aligned, all rows are.
    const bool is_aligned = is_vectorizable(bits(grad) | bits(call.expert_out) | bits(call.grad_expert_out), call.hidden);
    const int at_a_time = is_aligned ? kMaxProducts : 1;
#pragma unroll 1
    for (int first = (slots - 1) / at_a_time * at_a_time; first >= 0; first -= at_a_time) {
      const int count = min(at_a_time, slots - first);
      const int32_t own = from_lane(slot, min(first + lane(), kWarp - 1)); // lane i has the slot `first` + i
      const bool has_own = lane() < count;
      T* const to = has_own ? reinterpret_cast<T*>(call.grad_expert_out + own * row_bytes) : nullptr;
      const T* const x = has_own ? reinterpret_cast<const T*>(call.expert_out + own * row_bytes) : nullptr;
      const float weight = has_own && is_weighted ? call.recv_weights[own] : 1.0f;
      float product;
      if (is_aligned)
        product = scale_and_multiply(pipeline.begin_generic(), grad, x, count, call.hidden, to, is_weighted, weight);
      else
        product = scale_and_multiply_elements(grad, from_lane(x, 0), call.hidden, from_lane(to, 0), is_weighted,
                                              from_lane(weight, 0));
      if (has_own) call.grad_recv_weights[own] = product;
    }
  }
};

// combine_bwd of rows that have a format. This rank's own rows pass through staging, too: the weights and the dot products need
// the row as it travelled.
struct QuantisedCombineBwd {
  using Format = QuantisedRows;

  CombineBwdCall call;
  int64_t row_bytes; // of grad_out: input_row_bytes()

  __device__ const std::byte* input_rows() const { return call.grad_out; }
  __device__ static const float* input_weights() { return nullptr; }
  __device__ static const std::byte* input_sidecar() { return nullptr; }
  static constexpr int64_t sidecar_bytes() { return 0; }
  __device__ QuantisedRows format() const { return QuantisedRows(call); }
  __device__ int64_t recv_row_bytes() const { return epx::row_bytes(call.recv_dtype, call.hidden); }
  __device__ int64_t wire_row_bytes() const { return WireRow(call.format, call.hidden).bytes; }
  __device__ std::byte* rows() const { return call.grad_expert_out; }
  static constexpr bool clears_pads() { return true; }
  static constexpr bool kMixesPaths = false, kTakesRankMajor = true;
  static constexpr bool kStagesOwnRows = true;
  __device__ void store(TmaRowPipeline& pipeline, const SourceRow& source_row, int32_t slot, int64_t index, float) const {
    const bool is_slot = slot >= 0;
    if (!is_slot) index = -1;
    std::byte* const to =
        is_slot && slot != source_row.slot_in_place ? call.grad_expert_out + index * recv_row_bytes() : nullptr;
    if (call.recv_weights != nullptr)
      format().begin_receive_weighted(pipeline, source_row.row, index, to, is_slot ? call.recv_weights[slot] : 1.0f);
    else
      format().begin_receive(pipeline, source_row.row, row_bytes, index, to);
    if (call.grad_recv_weights == nullptr) return;
    const int64_t expert_bytes = epx::row_bytes(call.expert_dtype, call.hidden);
    for (unsigned left = __ballot_sync(~0u, is_slot ? 1 : 0); left != 0; left &= left - 1) {
      const int32_t one = from_lane(slot, lowest_bit(left));
      const float product = format().dot(source_row.row, call.expert_dtype, call.expert_out + one * expert_bytes);
      if (lane() == 0) call.grad_recv_weights[one] = product;
    }
  }
  __device__ void clear_beside_rows(int32_t slot, int64_t row) const {
    if (call.grad_recv_weights != nullptr && slot >= 0) call.grad_recv_weights[slot] = 0.0f;
    format().clear_scales(slot >= 0 ? row : -1);
  }
};

template <typename T>
cudaError_t launch_combine_bwd_as(const Launcher& launcher, const CombineBwdCall& call, const CallDescriptor& descriptor) {
  const int64_t row_bytes = epx::row_bytes(call.dtype, call.hidden);
  if (call.grad_recv_weights != nullptr) return launch_scatter(launcher, CombineBwd<T, true>{call, row_bytes}, descriptor);
  return launch_scatter(launcher, CombineBwd<T, false>{call, row_bytes}, descriptor);
}

} // namespace

std::vector<const void*> combine_bwd_kernels() {
  return {reinterpret_cast<const void*>(&scatter_kernel<QuantisedCombineBwd>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<float, false>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<float, true>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__half, false>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__half, true>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__nv_bfloat16, false>>),
          reinterpret_cast<const void*>(&scatter_kernel<CombineBwd<__nv_bfloat16, true>>)};
}

cudaError_t launch_combine_bwd(const Launcher& launcher, const CombineBwdCall& call) {
  const CallDescriptor descriptor = describe(call, launcher.place_of(call, call.grad_expert_out));
  if (call.format.is_quantised())
    return launch_scatter(launcher, QuantisedCombineBwd{call, input_row_bytes(call)}, descriptor);
  if (call.dtype == EPX_FLOAT32) return launch_combine_bwd_as<float>(launcher, call, descriptor);
  if (call.dtype == EPX_FLOAT16) return launch_combine_bwd_as<__half>(launcher, call, descriptor);
  return launch_combine_bwd_as<__nv_bfloat16>(launcher, call, descriptor);
}

} // namespace epx::cuda
