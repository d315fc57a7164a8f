// SPDX-License-Identifier: Apache-2.0
// The movements of the local permutation. Those that read rows (unpermute, permute_bwd) take one kernel. Those that write rows
// take two, since a row that no route maps to becomes zero, and one that two routes map to has one owner: owner_kernel finds
// the owner of each row, the first route that has it. Each row then is written by its owner's warp alone.
#include "moe/cuda/report.cuh"
#include "moe/permute/cuda/kernels.h"

#include "base/device/kernel_addresses.h"
#include "moe/permute/cuda/rows.cuh"

namespace epx::moe::cuda {
namespace {

constexpr uint32_t kNoOwner = ~0u; // what owners are set to; there are fewer routes

__device__ inline int64_t num_routes(const RowMap& map) {
  return map.num_tokens * map.top_k;
}

// Returns the row of a route, or -1 for none and for a bad one.
__device__ inline int64_t row_of(const RowMap& map, int64_t route) {
  const int64_t row = map.rows[route];
  return row >= 0 && row < map.num_rows ? row : -1;
}

__device__ inline void report_bad_row(const RowMap& map, int64_t route, const ErrorSink& errors) {
  const int64_t row = map.rows[route];
  if (row < -1 || row >= map.num_rows)
    report(errors, EPX_MOE_ERROR_ROW, route / map.top_k, route % map.top_k, row, map.num_rows);
}

// A thread takes one route after the other.
__global__ void __launch_bounds__(kThreads)
    owner_kernel(const __grid_constant__ RowMap map, uint32_t* owners, const __grid_constant__ ErrorSink errors) {
  const int64_t num_threads = static_cast<int64_t>(gridDim.x) * kThreads;
#pragma unroll 1
  for (int64_t route = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; route < num_routes(map);
       route += num_threads) {
    if (const int64_t row = row_of(map, route); row >= 0)
      atomicMin(&owners[row], static_cast<uint32_t>(route));
    else
      report_bad_row(map, route, errors);
  }
}

cudaError_t find_owners(const RowMap& map, uint32_t* owners, const ErrorSink& errors, const LaunchTarget& target) {
  if (map.num_rows > 0)
    if (const cudaError_t error =
            cudaMemsetAsync(owners, 0xff, static_cast<size_t>(map.num_rows) * sizeof(*owners), stream_of(target));
        error != cudaSuccess)
      return error;
  const int64_t routes = map.num_tokens * map.top_k;
  if (routes == 0) return cudaSuccess;
  return epx::cuda::launch(&owner_kernel, grid_of_warps((routes + kWarp - 1) / kWarp, target), stream_of(target), map,
                           owners, errors);
}

// The items of a kernel that writes rows: first the routes, then the rows, 32 at a time, if it zeroes them.
__host__ __device__ inline int64_t num_row_items(const RowMap& map, bool zeroes_pads) {
  return map.num_tokens * map.top_k + (zeroes_pads ? (map.num_rows + kWarp - 1) / kWarp : 0);
}

// Calls write(route, row), where row is -1 if the route owns none, and zero(row) for rows that no route owns. All lanes call
// both.
template <typename Write, typename Zero>
__device__ inline void for_each_row_item(const RowMap& map, bool zeroes_pads, const uint32_t* owners,
                                         const ErrorSink& errors, const Write& write, const Zero& zero) {
  for_each_item(num_row_items(map, zeroes_pads), [&](int64_t item) {
    if (item < num_routes(map)) {
      const int64_t row = row_of(map, item);
      const bool is_owner = row >= 0 && owners[row] == static_cast<uint32_t>(item);
      if (row >= 0 && !is_owner && lane() == 0)
        report(errors, EPX_MOE_ERROR_DUPLICATE_ROW, item / map.top_k, item % map.top_k, row);
      write(item, is_owner ? row : -1);
      return;
    }
    const int64_t first = (item - num_routes(map)) * kWarp;
    const int64_t row = first + lane();
    unsigned lanes = __ballot_sync(~0u, row < map.num_rows && owners[row] == kNoOwner ? 1 : 0);
    for (; lanes != 0; lanes &= lanes - 1)
      zero(first + epx::cuda::lowest_bit(lanes));
  });
}

//   warps  what they do                                                              what they wait for
//   all    copy a token to the row of a route, or zero those of 32 rows that         nothing
//          no route owns, one item after the other
template <typename Unit>
__global__ void __launch_bounds__(kThreads) permute_kernel(const __grid_constant__ PermuteCall call) {
  const auto* const tokens = static_cast<const std::byte*>(call.tokens);
  auto* const rows = static_cast<std::byte*>(call.rows);
  const auto* const weights = static_cast<const std::byte*>(call.topk_weights);
  auto* const row_weights = static_cast<std::byte*>(call.row_weights);
  // Without tokens topk_weights may be NULL where row_weights are not, and these are to become zero all the same.
  const bool has_weight_byte = row_weights != nullptr && lane() < call.weight_bytes;
  for_each_row_item(
      call.map, call.zeroes_pads, call.owners, call.errors,
      [&](int64_t route, int64_t row) {
        if (row < 0) return;
        copy_units<Unit>(tokens + route / call.map.top_k * call.row_bytes, rows + row * call.row_bytes, call.row_bytes);
        if (has_weight_byte) row_weights[row * call.weight_bytes + lane()] = weights[route * call.weight_bytes + lane()];
      },
      [&](int64_t row) {
        zero_units<Unit>(rows + row * call.row_bytes, call.row_bytes);
        if (has_weight_byte) row_weights[row * call.weight_bytes + lane()] = std::byte{0};
      });
}

// A warp sums so many tiles of a token at a time, so that their loads are in flight together and few tokens keep many warps
// busy.
constexpr int kTilesPerItem = 4;
constexpr int64_t kItemElements = kTilesPerItem * kWarpTile;

//   warps  what they do                                                              what they wait for
//   all    sum 1024 elements of the rows of a token, one item after the other        nothing
template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads) sum_kernel(const __grid_constant__ SumCall call) {
  const RowMap& map = call.map;
  const int64_t items_per_token = (call.hidden + kItemElements - 1) / kItemElements;
  for_each_item(map.num_tokens * items_per_token, [&](int64_t item) {
    const int64_t token = item / items_per_token;
    const int64_t first_route = token * map.top_k;
    const int64_t first = item % items_per_token * kItemElements + lane() * kFragment;
    float acc[kTilesPerItem][kFragment] = {};
#pragma unroll 1
    for (int64_t k = 0; k < map.top_k; ++k) {
      const int64_t row = row_of(map, first_route + k);
      if (row < 0) continue;
      const float weight = call.topk_weights != nullptr ? call.topk_weights[first_route + k] : 1.0f;
      const T* const from = static_cast<const T*>(call.rows) + row * call.hidden;
      Fragment<T> fragments[kTilesPerItem];
#pragma unroll
      for (int tile = 0; tile < kTilesPerItem; ++tile)
        fragments[tile] = load_fragment<kVector>(from, first + tile * kWarpTile, call.hidden);
        // Without weights the step is acc + x, which fma(1, x, acc) equals. Elements beyond the row's end are never stored.
#pragma unroll
      for (int tile = 0; tile < kTilesPerItem; ++tile)
#pragma unroll
        for (int i = 0; i < kFragment; ++i)
          acc[tile][i] = __fmaf_rn(weight, to_float(fragments[tile].elements[i]), acc[tile][i]);
    }
    T* const to = static_cast<T*>(call.tokens) + token * call.hidden;
#pragma unroll
    for (int tile = 0; tile < kTilesPerItem; ++tile) {
      Fragment<T> fragment;
#pragma unroll
      for (int i = 0; i < kFragment; ++i)
        fragment.elements[i] = from_float<T>(acc[tile][i]);
      store_fragment<kVector>(to, first + tile * kWarpTile, call.hidden, fragment);
    }
    if (item % items_per_token != 0) return; // the rest is done once for each token
    for (int64_t k = lane(); k < map.top_k; k += kWarp) {
      const int64_t row = row_of(map, first_route + k);
      report_bad_row(map, first_route + k, call.errors);
      if (call.grad_topk_weights != nullptr)
        call.grad_topk_weights[first_route + k] = row >= 0 ? call.grad_row_weights[row] : 0.0f;
    }
  });
}

//   warps  what they do                                                              what they wait for
//   all    scale a token to the row of a route, and multiply it by another one;      nothing
//          or zero those of 32 rows that no route owns, one item after the other
template <typename T, bool kVector>
__global__ void __launch_bounds__(kThreads) unpermute_bwd_kernel(const __grid_constant__ UnpermuteBwdCall call) {
  const int64_t hidden = call.hidden;
  auto* const grad_rows = static_cast<T*>(call.grad_rows);
  const auto* const rows = static_cast<const T*>(call.rows);
  for_each_row_item(
      call.map, true, call.owners, call.errors,
      [&](int64_t route, int64_t row) {
        float acc[kFragment] = {};
        if (row >= 0) {
          const T* const grad = static_cast<const T*>(call.grad_tokens) + route / call.map.top_k * hidden;
          const float weight = call.topk_weights != nullptr ? call.topk_weights[route] : 1.0f;
#pragma unroll 2
          for (int64_t h = lane() * kFragment; h < hidden; h += kWarpTile) {
            Fragment<T> fragment = load_fragment<kVector>(grad, h, hidden);
            if (rows != nullptr) {
              const Fragment<T> factors = load_fragment<kVector>(rows + row * hidden, h, hidden);
#pragma unroll
              for (int i = 0; i < kFragment; ++i) // an absent element takes no step, which could make a -0 a +0
                if (kVector || h + i < hidden)
                  acc[i] = __fmaf_rn(to_float(fragment.elements[i]), to_float(factors.elements[i]), acc[i]);
            }
            if (call.topk_weights != nullptr) { // else the bits stay, those of a NaN too
#pragma unroll
              for (T& element : fragment.elements)
                element = from_float<T>(__fmul_rn(weight, to_float(element)));
            }
            store_fragment<kVector>(grad_rows + row * hidden, h, hidden, fragment);
          }
        }
        if (call.grad_topk_weights == nullptr) return;
        const float product = reduce_tree(acc);
        if (lane() == 0) call.grad_topk_weights[route] = row >= 0 ? product : 0.0f;
      },
      [&](int64_t row) {
        for (int64_t h = lane() * kFragment; h < hidden; h += kWarpTile)
          store_fragment<kVector>(grad_rows + row * hidden, h, hidden, Fragment<T>{});
      });
}

// Whether rows of `row_bytes` bytes at these addresses, OR-ed together, can be moved by units of so many bytes.
bool fits_units(uint64_t address_bits, int64_t row_bytes, uint64_t unit) {
  return (address_bits | static_cast<uint64_t>(row_bytes)) % unit == 0;
}
uint64_t bits_of(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

// Calls launch.template operator()<T, kVector>() for elements of `dtype`.
template <typename Launch>
cudaError_t with_row_type(epx_dtype dtype, uint64_t address_bits, int64_t hidden, const Launch& launch) {
  const bool is_vector = address_bits % 16 == 0 && hidden % kFragment == 0;
  return with_element_type(dtype, [&]<typename T>(T) {
    return is_vector ? launch.template operator()<T, true>() : launch.template operator()<T, false>();
  });
}

} // namespace

std::vector<const void*> permute_and_sum_kernels() {
  return epx::cuda::addresses_of(&owner_kernel, &permute_kernel<uint4>, &permute_kernel<uint32_t>,
                                 &permute_kernel<uint16_t>, &permute_kernel<uint8_t>, &sum_kernel<float, true>,
                                 &sum_kernel<float, false>, &sum_kernel<__half, true>, &sum_kernel<__half, false>,
                                 &sum_kernel<__nv_bfloat16, true>, &sum_kernel<__nv_bfloat16, false>);
}

int launch_permute(const PermuteCall& call, const LaunchTarget& target) {
  if (const cudaError_t error = find_owners(call.map, call.owners, call.errors, target); error != cudaSuccess) return error;
  const epx::cuda::Grid grid = grid_of_warps(num_row_items(call.map, call.zeroes_pads), target);
  if (grid.blocks == 0) return cudaSuccess;
  const uint64_t bits = bits_of(call.tokens) | bits_of(call.rows);
  const auto kernel = fits_units(bits, call.row_bytes, 16)  ? &permute_kernel<uint4>
                      : fits_units(bits, call.row_bytes, 4) ? &permute_kernel<uint32_t>
                      : fits_units(bits, call.row_bytes, 2) ? &permute_kernel<uint16_t>
                                                            : &permute_kernel<uint8_t>;
  return epx::cuda::launch(kernel, grid, stream_of(target), call);
}

int launch_sum(const SumCall& call, const LaunchTarget& target) {
  if (call.map.num_tokens == 0) return cudaSuccess;
  const int64_t items_per_token = (call.hidden + kItemElements - 1) / kItemElements;
  const epx::cuda::Grid grid = grid_of_warps(call.map.num_tokens * items_per_token, target);
  return with_row_type(call.dtype, bits_of(call.rows) | bits_of(call.tokens), call.hidden, [&]<typename T, bool kVector>() {
    return epx::cuda::launch(&sum_kernel<T, kVector>, grid, stream_of(target), call);
  });
}

int launch_unpermute_bwd(const UnpermuteBwdCall& call, const LaunchTarget& target) {
  if (const cudaError_t error = find_owners(call.map, call.owners, call.errors, target); error != cudaSuccess) return error;
  const epx::cuda::Grid grid = grid_of_warps(num_row_items(call.map, true), target);
  if (grid.blocks == 0) return cudaSuccess;
  const uint64_t bits = bits_of(call.grad_tokens) | bits_of(call.grad_rows) | bits_of(call.rows);
  return with_row_type(call.dtype, bits, call.hidden, [&]<typename T, bool kVector>() {
    return epx::cuda::launch(&unpermute_bwd_kernel<T, kVector>, grid, stream_of(target), call);
  });
}

} // namespace epx::moe::cuda
