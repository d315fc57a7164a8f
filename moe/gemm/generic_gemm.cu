// SPDX-License-Identifier: Apache-2.0
// The grouped GEMM for every dtype, shape and alignment: fp32 FMA units, no tensor cores. It is also what runs on machines
// without a GPU, where the tests emulate its kernel.
//
//   warps   what they do                                                           what they wait for
//   all     load a pipeline stage of a and b into shared memory, then each thread  only barriers of the block
//           multiplies a fragment of 4 x 4 elements of the block's tile of d
#include "moe/gemm/generic_gemm.h"

#include <cstring>
#include <type_traits>

#include "base/device/kernel_addresses.h"
#include "base/device/launch.h"
#include "moe/cuda/elements.cuh"
#include "moe/cuda/warps.cuh"
#include "moe/gemm/zones.cuh"
#include "runtime/formats/elements.h"

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

// The scales of an operand of FLOAT8_E4M3 as a matrix of outer index and block of the inner one.
struct Scales {
  int64_t outer_stride; // floats
  int64_t block_stride;
  int outer_block; // outer indices that have a scale in common

  __device__ float at(const float* scales, int64_t outer, int64_t block) const {
    return scales[outer / outer_block * outer_stride + block * block_stride];
  }
};

struct E4M3Code {
  uint8_t bits;
};
using epx::moe::cuda::to_float;
__device__ inline float to_float(E4M3Code code) {
  return formats::decode<formats::E4M3>(code.bits);
}

struct GemmParams {
  GroupedGemm gemm;
  Operand a, b;
  Scales a_scales, b_scales;
};

// The product of one expert.
struct Problem {
  int64_t m, n, k;
  int64_t a_offset, b_offset, d_offset, d_stride; // elements
};

__device__ Problem problem_of(const GroupedGemm& gemm, int expert) {
  const Zone zone = zone_of(gemm.zones, expert);
  if (gemm.product == Product::kWeightGradient) {
    return {gemm.m,
            gemm.n,
            zone.num_rows,
            zone.first_row * (has_columns(gemm) ? 1 : gemm.a_stride),
            zone.first_row * (has_columns(gemm) ? 1 : gemm.b_stride),
            expert * gemm.d_stride,
            gemm.n};
  }
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

// Adds what a thread has of a block's sum, times the scales, to its sum, and clears the first. `row` and `column` are those of the
// thread's fragment.
__device__ void promote(const GemmParams& params, const Problem& problem, int expert, int64_t row, int64_t column,
                        int64_t block, float (&of_block)[kFragment][kFragment], float (&sum)[kFragment][kFragment]) {
  const ScaleOffsets offsets = scale_offsets(params.gemm, zone_of(params.gemm.zones, expert), expert);
#pragma unroll
  for (int i = 0; i < kFragment; ++i)
#pragma unroll
    for (int j = 0; j < kFragment; ++j) {
      if (row + i < problem.m && column + j < problem.n) {
        const float a_scale = params.a_scales.at(params.gemm.a_scales + offsets.a, row + i, block);
        const float b_scale = params.b_scales.at(params.gemm.b_scales + offsets.b, column + j, block);
        sum[i][j] = __fmaf_rn(of_block[i][j], __fmul_rn(a_scale, b_scale), sum[i][j]);
      }
      of_block[i][j] = 0.0f;
    }
}

template <typename In, typename Out>
__global__ void __launch_bounds__(kGemmThreads) grouped_gemm_kernel(const __grid_constant__ GemmParams params) {
  constexpr bool kIsScaled = std::is_same_v<In, E4M3Code>;
  static_assert(kQuantiseBlock % kStage == 0);
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
    float sum[kFragment][kFragment] = {};                       // of a block where operands are scaled
    [[maybe_unused]] float promoted[kFragment][kFragment] = {}; // of the blocks before it
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
      if constexpr (kIsScaled)
        if (const int64_t end = k + stage_end; end % kQuantiseBlock == 0 || end == problem.k)
          promote(params, problem, tile.expert, tile.row + thread_row, tile.column + thread_column, k / kQuantiseBlock, sum,
                  promoted);
    }
    if constexpr (kIsScaled) memcpy(sum, promoted, sizeof(sum));
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
  if (gemm.product == Product::kWeightGradient && !has_columns(gemm)) return {1, gemm.a_stride};
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
  if (has_columns(gemm)) return {gemm.b_stride, 1};
  return {1, gemm.b_stride};
}
// `size`: of the outer index.
Scales scales_of(const GroupedGemm& gemm, int64_t size, int outer_block) {
  if (gemm.product == Product::kWeightGradient) return {1, size, 1};
  return {gemm.k / kQuantiseBlock, 1, outer_block};
}

template <typename Run>
auto with_operand_type(epx_dtype dtype, Run&& run) {
  if (dtype == EPX_FLOAT8_E4M3) return run(E4M3Code{}, __nv_bfloat16{});
  return with_element_type(dtype, [&]<typename In>(In in) { return run(in, in); });
}

} // namespace

std::vector<const void*> generic_gemm_kernels(epx_dtype in_dtype) {
  return with_operand_type(in_dtype, []<typename In, typename Out>(In, Out) {
    return epx::cuda::addresses_of(&grouped_gemm_kernel<In, float>, &grouped_gemm_kernel<In, Out>);
  });
}

cudaError_t launch_generic_gemm(const GroupedGemm& gemm, const LaunchTarget& target) {
  const GemmParams params{gemm, operand_a(gemm), operand_b(gemm), scales_of(gemm, gemm.m, 1),
                          scales_of(gemm, gemm.n, kQuantiseBlock)};
  const epx::cuda::Grid grid{target.num_sms * kGemmBlocksPerSm, kGemmThreads};
  const cudaStream_t stream = stream_of(target);
  return with_operand_type(gemm.in_dtype, [&]<typename In, typename Out>(In, Out) {
    if (gemm.out_dtype == EPX_FLOAT32) return epx::cuda::launch(&grouped_gemm_kernel<In, float>, grid, stream, params);
    return epx::cuda::launch(&grouped_gemm_kernel<In, Out>, grid, stream, params);
  });
}

} // namespace epx::moe::cuda
