// SPDX-License-Identifier: Apache-2.0
// Products of FLOAT8_E4M3 with scales of blocks, by wgmma and TMA. The blocks of a cluster share a tile of a, 256 rows, and
// have neighbouring tiles of b, 128 columns of d; they are resident until no tile is left.
//
//   warps                   what they do                                               what they wait for
//   0                       one thread loads blocks of 128 of the inner index by TMA:  a free stage of shared memory,
//                           of a every other box of 64 rows, for both thread blocks;   in both thread blocks
//                           of b its tile
//   1                       loads the scales of kRowsByWeight, of every row             the same
//   2 and 3                 nothing
//   warp group 1 and 2      multiply every other box by the tile of b, and add the     a full stage
//                           product, times its scales, to the sums; then they store
//
// While one group adds a product to its sums, the other one multiplies.
#include "moe/gemm/sm90/fp8_gemm.h"

#include <type_traits>
#include <utility>

#include <cuda.h>
#include <cuda_bf16.h>

#include <cute/arch/cluster_sm90.hpp>
#include <cute/arch/copy_sm90_desc.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_desc.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

#include "moe/cuda/warps.cuh"
#include "moe/gemm/gemm_workspace.h"
#include "moe/gemm/sm90/cluster_launch.h"
#include "moe/gemm/zones.cuh"

namespace epx::moe::cuda::sm90 {
namespace {

using Mma = cute::SM90::GMMA::MMA_64x128x32_F32E4M3E4M3_SS_TN<>;
using FullBarrier = cutlass::arch::ClusterTransactionBarrier;
using EmptyBarrier = cutlass::arch::ClusterBarrier;

constexpr int kBlock = kQuantiseBlock; // bytes of a row of a stage, which are its elements, too
constexpr int kMmaInner = 32;
constexpr int kBoxRows = 64;
constexpr int kNumGroups = 2; // of warps that multiply
constexpr int kBoxesOfGroup = 2;
constexpr int kTileRows = kBoxRows * kBoxesOfGroup * kNumGroups;
constexpr int kTileColumns = 128;
constexpr int kSums = kBoxRows * kTileColumns / 128; // of a thread, of each box
constexpr int kClusterSize = 2;
constexpr int kStages = 3;
constexpr int kWarpGroup = 128;
constexpr int kThreadsOfBlock = kWarpGroup * (1 + kNumGroups);
constexpr int kConsumerWarps = kNumGroups * kWarpGroup / kWarp;
constexpr int kLoaderRegisters = 40, kConsumerRegisters = 232;

constexpr int kRowsOfWarp = 16;
constexpr int kRowPad = 8; // elements; so the lanes of a warp write without bank conflicts

template <typename T>
struct alignas(1024) Shared { // as a swizzle of 128 bytes wants it
  uint8_t a[kStages][kTileRows * kBlock];
  uint8_t b[kStages][kTileColumns * kBlock];
  float a_scales[kStages][kTileRows];
  float b_scales[kStages][kTileColumns]; // of kRowsByWeight the first one, which all columns have in common
  alignas(16) T d[kConsumerWarps][kRowsOfWarp][kTileColumns + kRowPad];
  FullBarrier full[kStages];
  EmptyBarrier empty[kStages];
};

// The columns of a zone, [m, R] and [1, n, R] where R is the zone's end: TMA reads zeros beyond it, where other zones may be.
struct ZoneMaps {
  CUtensorMap a, b;
};

struct Fp8GemmParams {
  GroupedGemm gemm;
  CUtensorMap a;   // [rows, inner], or [m, N] of a weight gradient
  CUtensorMap b;   // [experts, n, inner], or [1, n, N]
  ZoneMaps* zones; // [experts], of a weight gradient
};

// fits_tensor_cores() says that sizes have 32 bits.
struct Tile {
  int expert;
  int first_zone_row;
  int first_row;    // within the expert's rows of d
  int num_rows;     // from there to the end of these
  int first_column; // beyond n where the number of tiles is odd
  int num_boxes;    // of a that have rows
  int inner;        // the length of the sums
};

// The tiles of a cluster, in order. Their number depends on the zones, so every thread finds them for itself.
template <bool kIsGradient>
class Tiles {
public:
  __device__ explicit Tiles(const GroupedGemm& gemm) : gemm_(gemm), index_(static_cast<int>(blockIdx.x) / kClusterSize) {
    enter(0);
  }

  __device__ bool next(Tile& tile) {
    while (expert_ < gemm_.zones.num_experts && index_ >= num_tiles_) {
      index_ -= num_tiles_;
      enter(expert_ + 1);
    }
    if (expert_ >= gemm_.zones.num_experts) return false;
    const int row_tiles = (rows_ + kTileRows - 1) / kTileRows;
    const int pair = index_ / row_tiles;
    tile.expert = expert_;
    tile.first_zone_row = first_zone_row_;
    tile.first_row = (index_ - pair * row_tiles) * kTileRows;
    tile.num_rows = rows_ - tile.first_row;
    tile.first_column = (pair * kClusterSize + static_cast<int>(blockIdx.x) % kClusterSize) * kTileColumns;
    tile.num_boxes = min((tile.num_rows + kBoxRows - 1) / kBoxRows, kTileRows / kBoxRows);
    tile.inner = kIsGradient ? zone_rows_ : static_cast<int>(gemm_.k);
    index_ += static_cast<int>(gridDim.x) / kClusterSize;
    return true;
  }

private:
  __device__ void enter(int expert) {
    expert_ = expert;
    if (expert >= gemm_.zones.num_experts) return;
    const Zone zone = zone_of(gemm_.zones, expert);
    first_zone_row_ = static_cast<int>(zone.first_row);
    // TMA reads columns from aligned addresses only: a zone that begins elsewhere has no product.
    const bool is_readable = !kIsGradient || first_zone_row_ % static_cast<int>(kTmaAlignment) == 0;
    zone_rows_ = is_readable ? static_cast<int>(zone.num_rows) : 0;
    rows_ = kIsGradient ? static_cast<int>(gemm_.m) : zone_rows_;
    if (kIsGradient && zone_rows_ == 0 && gemm_.accumulate) rows_ = 0;
    const int pairs = (static_cast<int>(gemm_.n) / kTileColumns + kClusterSize - 1) / kClusterSize;
    num_tiles_ = (rows_ + kTileRows - 1) / kTileRows * pairs;
  }

  const GroupedGemm& gemm_;
  int index_; // of the next tile, in those of the expert
  int expert_ = 0;
  int num_tiles_ = 0;
  int first_zone_row_ = 0, zone_rows_ = 0;
  int rows_ = 0;
};

// The stage that is loaded or read next, and the phase of its barriers.
struct Stage {
  int index = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++index < kStages) return;
    index = 0;
    phase ^= 1;
  }
};

__device__ inline int num_blocks(const Tile& tile) {
  return (tile.inner + kBlock - 1) / kBlock;
}

// The scale of the tile's first row.
template <bool kIsGradient>
__device__ inline const float* first_a_scale(const GroupedGemm& gemm, const Tile& tile) {
  const int64_t first = scale_offsets(gemm, {tile.first_zone_row, 0}, tile.expert).a;
  return gemm.a_scales + first + tile.first_row * (kIsGradient ? 1 : gemm.k / kBlock);
}

// The scale of the tile's first column, or that of all its columns. A tile beyond n has those of the last one.
template <bool kIsGradient>
__device__ inline const float* first_b_scale(const GroupedGemm& gemm, const Tile& tile) {
  const int64_t column = min(tile.first_column, static_cast<int>(gemm.n) - kTileColumns);
  const int64_t first = scale_offsets(gemm, {tile.first_zone_row, 0}, tile.expert).b;
  return gemm.b_scales + first + (kIsGradient ? column : column / kTileColumns * (gemm.k / kBlock));
}

// Makes the maps of a zone that has rows. Each block has an expert, and a warp for each map.
__global__ void __launch_bounds__(2 * kWarp) make_zone_maps_kernel(const __grid_constant__ Fp8GemmParams params) {
  const Zone zone = zone_of(params.gemm.zones, static_cast<int>(blockIdx.x));
  if (zone.num_rows == 0) return; // nothing is loaded
  ZoneMaps& maps = params.zones[blockIdx.x];
  const bool is_a = threadIdx.x < kWarp;
  __shared__ alignas(128) cute::TmaDescriptor made[2];
  cute::TmaDescriptor& own = made[is_a ? 0 : 1];
  static_assert(sizeof(own) == kWarp * sizeof(uint32_t) && sizeof(maps.a) == sizeof(own));
  reinterpret_cast<uint32_t*>(&own)[lane()] = reinterpret_cast<const uint32_t*>(is_a ? &params.a : &params.b)[lane()];
  __syncthreads();
  if (lane() == 0)
    asm volatile(
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 0, %1;" ::"r"(cute::cast_smem_ptr_to_uint(&own)),
        "r"(static_cast<int>(zone.first_row + zone.num_rows))
        : "memory");
  __syncthreads();
  cute::tma_descriptor_cp_fence_release(reinterpret_cast<cute::TmaDescriptor*>(is_a ? &maps.a : &maps.b), own);
}

template <bool kIsGradient, typename T>
__device__ void load(const Fp8GemmParams& params, Shared<T>& shared) {
  constexpr auto kHint = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  constexpr uint16_t kBoth = 0x3;
  const GroupedGemm& gemm = params.gemm;
  const auto rank = static_cast<int>(cute::block_rank_in_cluster());
  Tiles<kIsGradient> tiles(gemm);
  Stage stage;
  int expert = -1;
  const CUtensorMap *a = &params.a, *b = &params.b;
  for (Tile tile; tiles.next(tile);) {
    if (kIsGradient && tile.expert != expert) {
      expert = tile.expert;
      a = &params.zones[expert].a;
      b = &params.zones[expert].b;
      cute::tma_descriptor_fence_acquire(reinterpret_cast<const cute::TmaDescriptor*>(a));
      cute::tma_descriptor_fence_acquire(reinterpret_cast<const cute::TmaDescriptor*>(b));
    }
    int inner = kIsGradient ? tile.first_zone_row : 0;
    const int first_row = tile.first_row + (kIsGradient ? 0 : tile.first_zone_row);
    const float* b_scales = first_b_scale<kIsGradient>(gemm, tile);
    const float* a_scales = first_a_scale<kIsGradient>(gemm, tile);
    const int scaled_rows = min(tile.num_rows, kTileRows);
    const uint32_t bytes = (tile.num_boxes * kBoxRows + kTileColumns) * kBlock +
                           (kIsGradient ? (scaled_rows + kTileColumns) * static_cast<uint32_t>(sizeof(float)) : 0);
    for (int block = 0; block < num_blocks(tile); ++block, stage.advance()) {
      shared.empty[stage.index].wait(stage.phase ^ 1);
      auto* const full = reinterpret_cast<uint64_t*>(&shared.full[stage.index]);
      shared.full[stage.index].arrive_and_expect_tx(bytes);
      for (int box = rank; box < tile.num_boxes; box += kClusterSize)
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(a, full, kBoth, kHint, &shared.a[stage.index][box * kBoxRows * kBlock],
                                               inner, first_row + box * kBoxRows);
      cute::SM90_TMA_LOAD_3D::copy(b, full, kHint, shared.b[stage.index], inner, tile.first_column,
                                   kIsGradient ? 0 : tile.expert);
      if constexpr (kIsGradient) {
        cute::SM90_BULK_COPY_G2S::copy(b_scales, full, shared.b_scales[stage.index], kTileColumns * sizeof(float));
        cute::SM90_BULK_COPY_G2S::copy(a_scales, full, shared.a_scales[stage.index],
                                       scaled_rows * static_cast<int>(sizeof(float)));
        a_scales += gemm.m;
        b_scales += gemm.n;
      }
      inner += kBlock;
    }
  }
}

// Copies four bytes to shared memory; an arrival of the same thread at a barrier waits for them.
__device__ inline void copy_scale(const float* from, float* to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to)), "l"(from) : "memory");
}

// Loads the scales of kRowsByWeight. All lanes of a warp call this.
template <typename T>
__device__ void load_scales(const Fp8GemmParams& params, Shared<T>& shared) {
  const GroupedGemm& gemm = params.gemm;
  const auto blocks = static_cast<int>(gemm.k) / kBlock;
  Tiles<false> tiles(gemm);
  Stage stage;
  for (Tile tile; tiles.next(tile);) {
    const float* a_scales = first_a_scale<false>(gemm, tile) + lane() * blocks;
    const float* b_scale = first_b_scale<false>(gemm, tile);
    for (int block = 0; block < blocks; ++block, ++a_scales, ++b_scale, stage.advance()) {
      shared.empty[stage.index].wait(stage.phase ^ 1);
      const float* scale = a_scales;
#pragma unroll 1
      for (int row = lane(); row < min(tile.num_rows, kTileRows); row += kWarp, scale += kWarp * blocks)
        copy_scale(scale, &shared.a_scales[stage.index][row]);
      if (lane() == 0) copy_scale(b_scale, shared.b_scales[stage.index]);
      cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<uint64_t*>(&shared.full[stage.index]));
    }
  }
}

// Rows of kBlock bytes whose chunks of 16 bytes lie swizzled.
__device__ inline uint64_t descriptor_of(const void* rows) {
  cute::GmmaDescriptor descriptor;
  descriptor.bitfield.start_address_ = static_cast<uint16_t>(cute::cast_smem_ptr_to_uint(rows) >> 4);
  descriptor.bitfield.leading_byte_offset_ = 1;
  descriptor.bitfield.stride_byte_offset_ = 8 * kBlock >> 4;
  descriptor.bitfield.layout_type_ = static_cast<uint8_t>(cute::SM90::GMMA::LayoutType::B128);
  return descriptor;
}

template <size_t... kIndices>
__device__ inline void multiply(uint64_t a, uint64_t b, float (&product)[kSums], bool adds,
                                std::index_sequence<kIndices...>) {
  Mma::fma(a, b, product[kIndices]..., adds ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

__device__ inline void fence(float (&product)[kSums]) {
  for (float& value : product)
    cute::warpgroup_fence_operand(value);
}

// The product of a box and the tile of b.
__device__ inline void multiply(const uint8_t* a, const uint8_t* b, float (&product)[kSums]) {
  fence(product);
  cute::warpgroup_arrive();
  const uint64_t a_descriptor = descriptor_of(a), b_descriptor = descriptor_of(b);
#pragma unroll
  for (int inner = 0; inner < kBlock; inner += kMmaInner)
    multiply(a_descriptor + (inner >> 4), b_descriptor + (inner >> 4), product, inner > 0,
             std::make_index_sequence<kSums>{});
  cute::warpgroup_commit_batch();
  cute::warpgroup_wait<0>();
  fence(product);
}

// The scales of a thread's rows of a box, and that of b where all columns have one.
struct Scales {
  float a[2];
  float b;
};

// Adds the scaled product to the sums. Element 4 j + 2 i + c is of the thread's row 8 i and of column 8 j + 2 (lane % 4) + c.
template <bool kIsGradient>
__device__ inline void promote(const float (&product)[kSums], const Scales& scales, const float* b_scales,
                               float (&sums)[kSums]) {
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
    const float2 b =
        kIsGradient ? reinterpret_cast<const float2*>(b_scales)[4 * j + lane() % 4] : float2{scales.b, scales.b};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[4 * j + 2 * i] += product[4 * j + 2 * i] * (scales.a[i] * b.x);
      sums[4 * j + 2 * i + 1] += product[4 * j + 2 * i + 1] * (scales.a[i] * b.y);
    }
  }
}

__device__ inline void store_pair(float* place, float a, float b) {
  *reinterpret_cast<float2*>(place) = {a, b};
}
__device__ inline void store_pair(__nv_bfloat16* place, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(place) = __float22bfloat162_rn({a, b});
}

__device__ inline void add(float* d, uint4 values) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(d), "f"(__uint_as_float(values.x)),
               "f"(__uint_as_float(values.y)), "f"(__uint_as_float(values.z)), "f"(__uint_as_float(values.w))
               : "memory");
}

// Stores the rows of a warp, of which num_rows are in d, or adds them to it, which is FLOAT32 then. They pass through
// shared memory, so that neighbouring lanes have neighbouring elements.
template <typename T, int kPitch>
__device__ void store(const float (&sums)[kSums], T (&rows)[kRowsOfWarp][kPitch], T* d, int64_t stride, int num_rows,
                      bool accumulate) {
  constexpr int kElements = sizeof(uint4) / sizeof(T), kLanesOfRow = kTileColumns / kElements;
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      store_pair(&rows[lane() / 4 + 8 * i][8 * j + 2 * (lane() % 4)], sums[4 * j + 2 * i], sums[4 * j + 2 * i + 1]);
  __syncwarp();
  constexpr int kRowsAtOnce = kWarp / kLanesOfRow;
  const int first_row = lane() / kLanesOfRow, column = lane() % kLanesOfRow * kElements;
  T* place = d + first_row * stride + column;
#pragma unroll
  for (int row = 0; row < kRowsOfWarp; row += kRowsAtOnce, place += kRowsAtOnce * stride) {
    if (row + first_row >= num_rows) break;
    const uint4 values = *reinterpret_cast<const uint4*>(&rows[row + first_row][column]);
    if constexpr (std::is_same_v<T, float>)
      if (accumulate) {
        add(place, values);
        continue;
      }
    *reinterpret_cast<uint4*>(place) = values;
  }
}

// A thread that multiplies. It has two rows of each of its group's boxes: row_of_box, and the eighth one behind it.
struct Consumer {
  int warp, group, row_of_box;
  Stage stage; // that is read next
};

template <typename T>
__device__ inline void release(Consumer& consumer, Shared<T>& shared) {
  __syncwarp(); // all lanes have read scales
  shared.empty[consumer.stage.index].arrive(static_cast<uint32_t>(lane()), lane() < kClusterSize);
  consumer.stage.advance();
}

// Multiplies the first kBoxes boxes of the consumer's group, and stores them.
template <bool kIsGradient, int kBoxes, typename T>
__device__ void consume(const GroupedGemm& gemm, const Tile& tile, Consumer& consumer, Shared<T>& shared) {
  float sums[kBoxes][kSums] = {};
  for (int inner = tile.inner; inner > 0; inner -= kBlock) {
    const int stage = consumer.stage.index;
    shared.full[stage].wait(consumer.stage.phase);
#pragma unroll
    for (int i = 0; i < kBoxes; ++i) {
      float product[kSums];
      const int first_row = (consumer.group + i * kNumGroups) * kBoxRows;
      const float* const rows = &shared.a_scales[stage][first_row + consumer.row_of_box];
      const Scales scales = {{rows[0], rows[8]}, shared.b_scales[stage][0]};
      multiply(&shared.a[stage][first_row * kBlock], shared.b[stage], product);
      promote<kIsGradient>(product, scales, shared.b_scales[stage], sums[i]);
    }
    release(consumer, shared);
  }
  if (tile.first_column >= gemm.n) return;
  const int64_t stride = kIsGradient ? gemm.n : gemm.d_stride;
#pragma unroll
  for (int i = 0; i < kBoxes; ++i) {
    const int row = (consumer.group + i * kNumGroups) * kBoxRows + consumer.warp * kRowsOfWarp % kBoxRows;
    const int64_t first = (kIsGradient ? 0 : tile.first_zone_row) + tile.first_row + row;
    T* const d =
        static_cast<T*>(gemm.d) + (kIsGradient ? tile.expert * gemm.d_stride : 0) + first * stride + tile.first_column;
    store(sums[i], shared.d[consumer.warp], d, stride, tile.num_rows - row, gemm.accumulate);
  }
}

template <bool kIsGradient, typename T>
__device__ void consume(const Fp8GemmParams& params, Shared<T>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp - kWarpGroup / kWarp;
  Consumer consumer = {warp, warp * kWarp / kWarpGroup, warp * kRowsOfWarp % kBoxRows + lane() / 4, {}};
  Tiles<kIsGradient> tiles(params.gemm);
  for (Tile tile; tiles.next(tile);) {
    if (tile.num_boxes > consumer.group + kNumGroups)
      consume<kIsGradient, 2>(params.gemm, tile, consumer, shared);
    else if (tile.num_boxes > consumer.group)
      consume<kIsGradient, 1>(params.gemm, tile, consumer, shared);
    else
      for (int block = 0; block < num_blocks(tile); ++block) {
        shared.full[consumer.stage.index].wait(consumer.stage.phase);
        release(consumer, shared);
      }
  }
}

template <bool kIsGradient, typename T>
__global__ void __launch_bounds__(kThreadsOfBlock, 1) fp8_gemm_kernel(const __grid_constant__ Fp8GemmParams params) {
  extern __shared__ __align__(1024) unsigned char fp8_gemm_shared_memory[];
  auto& shared = *reinterpret_cast<Shared<T>*>(fp8_gemm_shared_memory);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      shared.full[stage].init(kIsGradient ? 1 : 1 + kWarp); // arrivals of the loaders
      shared.empty[stage].init(kConsumerWarps * kClusterSize);
    }
    cutlass::arch::fence_barrier_init();
  }
  cute::cluster_sync();
  if (threadIdx.x < kWarpGroup) {
    cutlass::arch::warpgroup_reg_dealloc<kLoaderRegisters>();
    if (threadIdx.x == 0) load<kIsGradient>(params, shared);
    if (!kIsGradient && threadIdx.x / kWarp == 1) load_scales(params, shared);
  } else {
    cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
    consume<kIsGradient, T>(params, shared);
  }
  __syncwarp();
  cute::cluster_sync(); // the other block of the cluster may still write to this one's memory
}

// The driver's function that makes tensormaps, which the runtime has no name for.
struct TensorMapEncoder {
  decltype(&cuTensorMapEncodeTiled) encode;
  cudaError_t error;
};
TensorMapEncoder find_tensor_map_encoder() {
  constexpr unsigned kSince = 12000; // the version of CUDA that has it
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSince, cudaEnableDefault, &found);
  if (error == cudaSuccess && found != cudaDriverEntryPointSuccess) error = cudaErrorNotSupported;
  return {reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function), error};
}

// A tensor of FLOAT8_E4M3 with two or three dimensions, the innermost first, that is loaded in boxes of kBlock x box_rows.
cudaError_t make_tensor_map(CUtensorMap* map, const void* data, int rank, const cuuint64_t* sizes,
                            const cuuint64_t* strides, cuuint32_t box_rows) {
  static const TensorMapEncoder encoder = find_tensor_map_encoder(); // the same for all calls of the process
  if (encoder.error != cudaSuccess) return encoder.error;
  const cuuint32_t box[] = {kBlock, box_rows, 1}, steps[] = {1, 1, 1};
  const CUresult result =
      encoder.encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<cuuint32_t>(rank), const_cast<void*>(data), sizes,
                     strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t make_tensor_maps(Fp8GemmParams& params) {
  const GroupedGemm& gemm = params.gemm;
  const auto size = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const bool is_gradient = gemm.product == Product::kWeightGradient;
  // Tensors without rows may have no address. Nothing is loaded then.
  const bool has_rows = gemm.zones.num_rows > 0;
  const int64_t rows = has_rows ? gemm.zones.num_rows : int64_t{kTmaAlignment};
  const void* const a = has_rows ? gemm.a : gemm.d;
  const void* const b = has_rows || !is_gradient ? gemm.b : gemm.d;
  const cuuint64_t a_sizes[] = {size(is_gradient ? rows : gemm.k), size(is_gradient ? gemm.m : rows)};
  const cuuint64_t a_strides[] = {size(has_rows ? gemm.a_stride : rows)};
  if (const cudaError_t error = make_tensor_map(&params.a, a, 2, a_sizes, a_strides, kBoxRows); error != cudaSuccess)
    return error;
  const int64_t b_row = is_gradient ? (has_rows ? gemm.b_stride : rows) : gemm.k;
  const cuuint64_t b_sizes[] = {size(is_gradient ? rows : gemm.k), size(gemm.n),
                                size(is_gradient ? 1 : gemm.zones.num_experts)};
  const cuuint64_t b_strides[] = {size(b_row), size(is_gradient ? b_row * gemm.n : gemm.b_stride)};
  return make_tensor_map(&params.b, b, 3, b_sizes, b_strides, kTileColumns);
}

template <bool kIsGradient, typename T>
cudaError_t launch(const Fp8GemmParams& params, const LaunchTarget& target) {
  const auto blocks = static_cast<unsigned>(std::max(target.num_sms / kClusterSize, 1) * kClusterSize);
  const ClusterGrid grid = {dim3(blocks), dim3(kThreadsOfBlock), dim3(kClusterSize), sizeof(Shared<T>)};
  return launch_clusters(reinterpret_cast<const void*>(&fp8_gemm_kernel<kIsGradient, T>), grid, stream_of(target), params);
}

} // namespace

std::vector<const void*> fp8_gemm_kernels() {
  return {reinterpret_cast<const void*>(&make_zone_maps_kernel),
          reinterpret_cast<const void*>(&fp8_gemm_kernel<false, __nv_bfloat16>),
          reinterpret_cast<const void*>(&fp8_gemm_kernel<true, __nv_bfloat16>),
          reinterpret_cast<const void*>(&fp8_gemm_kernel<true, float>)};
}

cudaError_t launch_fp8_gemm(const GroupedGemm& gemm, const LaunchTarget& target) {
  const bool is_gradient = gemm.product == Product::kWeightGradient;
  if (gemm.zones.num_rows == 0 && !is_gradient) return cudaSuccess;
  Fp8GemmParams params{};
  params.gemm = gemm;
  if (const cudaError_t error = make_tensor_maps(params); error != cudaSuccess) return error;
  if (!is_gradient) return launch<false, __nv_bfloat16>(params, target);
  params.zones = static_cast<ZoneMaps*>(gemm.tensor_core_workspace);
  const epx::cuda::Grid grid{gemm.zones.num_experts, 2 * kWarp};
  const cudaError_t error = epx::cuda::launch(&make_zone_maps_kernel, grid, stream_of(target), params);
  if (error != cudaSuccess) return error;
  if (gemm.out_dtype == EPX_FLOAT32) return launch<true, float>(params, target);
  return launch<true, __nv_bfloat16>(params, target);
}

} // namespace epx::moe::cuda::sm90
