// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM for every dtype, shape and alignment: fp32 FMA units, no tensor cores. It is also what runs on machines
// without a GPU, where the tests emulate its kernel.
//
//   warps   what they do                                                           what they wait for
//   all     load a pipeline stage of a and b into shared memory, then each thread  only barriers of the block
//           multiplies a fragment of 4 x 4 elements of the block's tile of d
#include "moe/gemm/generic_gemm.h"

#include "base/device/kernel_addresses.h"
#include "base/device/launch.h"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/gemm/zones.cuh"

namespace epx::moe::cuda {
namespace {

constexpr int kTile = 64;    // rows and columns of a tile of d
constexpr int kStage = 16;   // inner indices of a pipeline stage
constexpr int kFragment = 4; // rows and columns of a thread
constexpr int kGemmThreads = (kTile / kFragment) * (kTile / kFragment);
constexpr int kGemmBlocksPerSm = 4;

// An operand of the product as a matrix of outer (row of d, or column of d) and inner index.
struct Operand {
  int64_t outer_stride; // elements
  int64_t inner_stride;
};

struct GemmParams {
  GroupedGemm gemm;
  Operand a, b;
};

// The product of one expert.
struct Problem {
  int64_t m, n, k;
  int64_t a_offset, b_offset, d_offset, d_stride; // elements
};

__device__ Problem problem_of(const GroupedGemm& gemm, int expert) {
  const Zone zone = zone_of(gemm.zones, expert);
  if (gemm.product == Product::kWeightGradient)
    return {gemm.m,
            gemm.n,
            zone.num_rows,
            zone.first_row * gemm.a_stride,
            zone.first_row * gemm.b_stride,
            expert * gemm.d_stride,
            gemm.n};
  return {
      zone.num_rows, gemm.n, gemm.k, zone.first_row * gemm.a_stride, expert * gemm.b_stride, zone.first_row * gemm.d_stride,
      gemm.d_stride};
}

struct Tile {
  int expert;
  int64_t row, column; // of d, the first
};

// Hands out the tiles of all experts: block b gets those with the numbers b, b + gridDim.x, ...
class TileScheduler {
public:
  __device__ explicit TileScheduler(const GroupedGemm& gemm) : gemm_(gemm), next_(blockIdx.x) {}

  // Returns false when there are no more tiles.
  __device__ bool next(Tile& tile) {
    const int64_t columns = (gemm_.n + kTile - 1) / kTile;
    for (; expert_ < gemm_.zones.num_experts; ++expert_) {
      const int64_t tiles = (problem_of(gemm_, expert_).m + kTile - 1) / kTile * columns;
      if (next_ < first_ + tiles) break;
      first_ += tiles;
    }
    if (expert_ == gemm_.zones.num_experts) return false;
    const int64_t index = next_ - first_;
    tile = {expert_, index / columns * kTile, index % columns * kTile};
    next_ += gridDim.x;
    return true;
  }

private:
  const GroupedGemm& gemm_;
  int64_t next_;      // the number of this block's next tile
  int64_t first_ = 0; // the number of expert_'s first tile
  int expert_ = 0;
};

// Loads [kTile outer, kStage inner] elements of an operand from (outer, inner) on; what lies beyond the ends is zero. Lanes
// take neighbours of the index that is contiguous.
template <typename T>
__device__ void load_stage(const T* from, const Operand& operand, int64_t outer, int64_t outer_end, int64_t inner,
                           int64_t inner_end, float (&stage)[kStage][kTile]) {
  const bool is_inner_contiguous = operand.inner_stride == 1;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kStage; i += kGemmThreads) {
    const int o = is_inner_contiguous ? i / kStage : i % kTile;
    const int k = is_inner_contiguous ? i % kStage : i / kTile;
    const bool is_inside = outer + o < outer_end && inner + k < inner_end;
    stage[k][o] =
        is_inside ? to_float(from[(outer + o) * operand.outer_stride + (inner + k) * operand.inner_stride]) : 0.0f;
  }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kGemmThreads) grouped_gemm_kernel(const __grid_constant__ GemmParams params) {
  __shared__ float a_stage[kStage][kTile];
  __shared__ float b_stage[kStage][kTile];
  const GroupedGemm& gemm = params.gemm;
  const int thread_row = static_cast<int>(threadIdx.x) / (kTile / kFragment) * kFragment;
  const int thread_column = static_cast<int>(threadIdx.x) % (kTile / kFragment) * kFragment;
  TileScheduler scheduler(gemm);
  for (Tile tile; scheduler.next(tile);) {
    const Problem problem = problem_of(gemm, tile.expert);
    const In* const a = static_cast<const In*>(gemm.a) + problem.a_offset;
    const In* const b = static_cast<const In*>(gemm.b) + problem.b_offset;
    float sum[kFragment][kFragment] = {};
    for (int64_t k = 0; k < problem.k; k += kStage) {
      load_stage(a, params.a, tile.row, problem.m, k, problem.k, a_stage);
      load_stage(b, params.b, tile.column, problem.n, k, problem.k, b_stage);
      __syncthreads();
      const int stage_end = static_cast<int>(min(int64_t{kStage}, problem.k - k));
#pragma unroll 4
      for (int s = 0; s < stage_end; ++s)
#pragma unroll
        for (int i = 0; i < kFragment; ++i)
#pragma unroll
          for (int j = 0; j < kFragment; ++j)
            sum[i][j] = __fmaf_rn(a_stage[s][thread_row + i], b_stage[s][thread_column + j], sum[i][j]);
      __syncthreads();
    }
    Out* const d = static_cast<Out*>(gemm.d) + problem.d_offset;
#pragma unroll
    for (int i = 0; i < kFragment; ++i)
#pragma unroll
      for (int j = 0; j < kFragment; ++j) {
        const int64_t row = tile.row + thread_row + i;
        const int64_t column = tile.column + thread_column + j;
        if (row >= problem.m || column >= problem.n) continue;
        Out& element = d[row * problem.d_stride + column];
        element = from_float<Out>(gemm.accumulate ? __fadd_rn(to_float(element), sum[i][j]) : sum[i][j]);
      }
  }
}

Operand operand_a(const GroupedGemm& gemm) {
  if (gemm.product == Product::kWeightGradient) return {1, gemm.a_stride};
  return {gemm.a_stride, 1};
}
Operand operand_b(const GroupedGemm& gemm) {
  switch (gemm.product) {
  case Product::kRowsByWeight:
    return {gemm.k, 1};
  case Product::kRowsByTransposedWeight:
    return {1, gemm.n};
  case Product::kWeightGradient:
    break;
  }
  return {1, gemm.b_stride};
}

} // namespace

std::vector<const void*> generic_gemm_kernels(epx_dtype in_dtype) {
  return with_element_type(in_dtype, []<typename In>(In) {
    return epx::cuda::addresses_of(&grouped_gemm_kernel<In, float>, &grouped_gemm_kernel<In, In>);
  });
}

cudaError_t launch_generic_gemm(const GroupedGemm& gemm, const LaunchTarget& target) {
  const GemmParams params{gemm, operand_a(gemm), operand_b(gemm)};
  const epx::cuda::Grid grid{target.num_sms * kGemmBlocksPerSm, kGemmThreads};
  const cudaStream_t stream = stream_of(target);
  return with_element_type(gemm.in_dtype, [&]<typename In>(In) {
    if (gemm.out_dtype == EPX_FLOAT32) return epx::cuda::launch(&grouped_gemm_kernel<In, float>, grid, stream, params);
    return epx::cuda::launch(&grouped_gemm_kernel<In, In>, grid, stream, params);
  });
}

} // namespace epx::moe::cuda
