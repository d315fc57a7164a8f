#include "tools/ep_bench/floor_kernels.h"

#include <vector_types.h>

#include "runtime/base/device/bulk_copy.cuh"
#include "runtime/base/device/launch.h"

namespace epx::bench {
namespace {

using namespace cuda; // runtime/base/device

constexpr int kLanes = 32;
constexpr int kThreads = 512;
constexpr int kInFlight = 8; // 16-byte loads of a lane before its first store

__device__ int lane() {
  return static_cast<int>(threadIdx.x) % kLanes;
}
__device__ int warp_of_block() {
  return static_cast<int>(threadIdx.x) / kLanes;
}
// Neighbours in the grid's order are in different blocks: the last rows are shared by all of them.
__device__ int64_t global_warp() {
  return static_cast<int64_t>(warp_of_block()) * gridDim.x + blockIdx.x;
}
__device__ int64_t num_warps() {
  return static_cast<int64_t>(blockDim.x) / kLanes * gridDim.x;
}

// ---- Loads and stores ----

__global__ void __launch_bounds__(kThreads) wire_kernel(const __grid_constant__ WireParams params) {
  const int64_t words = params.row_bytes / static_cast<int64_t>(sizeof(uint4));
  for (int64_t row = global_warp(); row < params.rows; row += num_warps()) {
    const uint4* const from = reinterpret_cast<const uint4*>(params.source + row * params.row_bytes);
    const int32_t first = params.first[row], end = params.first[row + 1];
    for (int64_t begin = lane(); begin < words; begin += kLanes * kInFlight) {
      uint4 loaded[kInFlight];
      for (int i = 0; i < kInFlight; ++i)
        if (begin + i * kLanes < words) loaded[i] = from[begin + i * kLanes];
      for (int32_t place = first; place < end; ++place) {
        const RowPlace to = params.places[place];
        uint4* const target = reinterpret_cast<uint4*>(params.targets[to.rank] + to.row * params.row_bytes);
        for (int i = 0; i < kInFlight; ++i)
          if (begin + i * kLanes < words) target[begin + i * kLanes] = loaded[i];
      }
    }
  }
}

// `rows` rows, spread evenly over no fewer units: how many the units before this one take.
__device__ int64_t rows_before(int64_t unit, int64_t units, int64_t rows) {
  return unit * rows / units;
}

__global__ void __launch_bounds__(kThreads) local_kernel(const __grid_constant__ LocalParams params) {
  const int64_t words = params.row_bytes / static_cast<int64_t>(sizeof(uint4));
  const int64_t units = max(params.reads, params.writes);
  for (int64_t unit = global_warp(); unit < units; unit += num_warps()) {
    const int64_t read = rows_before(unit, units, params.reads), write = rows_before(unit, units, params.writes);
    const bool reads = rows_before(unit + 1, units, params.reads) > read;
    const bool writes = rows_before(unit + 1, units, params.writes) > write;
    const uint4* const from = reinterpret_cast<const uint4*>(params.source + read % params.source_rows * params.row_bytes);
    uint4* const to = reinterpret_cast<uint4*>(params.target + write % params.target_rows * params.row_bytes);
    for (int64_t begin = lane(); begin < words; begin += kLanes * kInFlight) {
      uint4 words_in_flight[kInFlight] = {};
      for (int i = 0; i < kInFlight; ++i)
        if (reads && begin + i * kLanes < words) words_in_flight[i] = from[begin + i * kLanes];
      if (writes) {
        for (int i = 0; i < kInFlight; ++i)
          if (begin + i * kLanes < words) to[begin + i * kLanes] = words_in_flight[i];
        continue;
      }
      // A store that hardly ever happens, without which the compiler would drop the loads.
      unsigned sum = 0;
      for (int i = 0; i < kInFlight; ++i)
        sum += words_in_flight[i].x + words_in_flight[i].y + words_in_flight[i].z + words_in_flight[i].w;
      if (sum == 0x600df00d) to[0] = words_in_flight[0];
    }
  }
}

// ---- Bulk copies ----

constexpr int kBulkWarps = 8;
constexpr int kStages = 3;               // pieces of a warp in flight
constexpr int64_t kMaxPieceBytes = 8192; // 192 KiB of an SM's 227
constexpr size_t kBulkSharedBytes = size_t{kBulkWarps} * kStages * kMaxPieceBytes;

// The pieces of the rows that one warp takes, in order. Rows are cut evenly.
class Pieces {
public:
  __device__ explicit Pieces(const WireParams& params)
      : per_row_((params.row_bytes + kMaxPieceBytes - 1) / kMaxPieceBytes),
        bytes_((params.row_bytes / kFloorRowUnit + per_row_ - 1) / per_row_ * kFloorRowUnit), row_bytes_(params.row_bytes),
        rows_(params.rows) {}

  __device__ bool has(int64_t piece) const { return row(piece) < rows_; }
  __device__ int64_t row(int64_t piece) const { return global_warp() + piece / per_row_ * num_warps(); }
  __device__ int64_t offset(int64_t piece) const { return piece % per_row_ * bytes_; } // in its row
  __device__ uint32_t bytes(int64_t piece) const { return static_cast<uint32_t>(min(bytes_, row_bytes_ - offset(piece))); }

private:
  int64_t per_row_, bytes_, row_bytes_, rows_;
};

__global__ void __launch_bounds__(kBulkWarps* kLanes) bulk_kernel(const __grid_constant__ WireParams params) {
  __shared__ LoadBarrier barriers[kBulkWarps][kStages];
  if (lane() != 0) return; // one lane does it all
  LoadBarrier* const loaded = barriers[warp_of_block()];
  std::byte* const stages = dynamic_shared_memory<std::byte>() + warp_of_block() * kStages * kMaxPieceBytes;
  for (int stage = 0; stage < kStages; ++stage)
    init_barrier(&loaded[stage]);
  fence_shared_before_bulk_copies();

  const Pieces pieces(params);
  const auto load_piece = [&](int64_t piece) {
    const int64_t stage = piece % kStages;
    begin_load(stages + stage * kMaxPieceBytes, params.source + pieces.row(piece) * params.row_bytes + pieces.offset(piece),
               pieces.bytes(piece), &loaded[stage]);
  };
  for (int64_t piece = 0; piece < kStages && pieces.has(piece); ++piece)
    load_piece(piece);
  for (int64_t piece = 0; pieces.has(piece); ++piece) {
    const int64_t stage = piece % kStages, row = pieces.row(piece);
    wait_for_load(&loaded[stage], static_cast<uint32_t>(piece / kStages % 2));
    for (int32_t place = params.first[row]; place < params.first[row + 1]; ++place) {
      const RowPlace to = params.places[place];
      begin_store(params.targets[to.rank] + to.row * params.row_bytes + pieces.offset(piece),
                  stages + stage * kMaxPieceBytes, pieces.bytes(piece));
    }
    end_store_group();
    // The previous piece's stage is loaded again as soon as its stores have read it; this piece's still run.
    const int64_t next = piece - 1 + kStages;
    if (piece > 0 && pieces.has(next)) {
      wait_for_store_reads<1>();
      load_piece(next);
    }
  }
  wait_for_stores();
}

} // namespace

cudaError_t launch_wire_floor(const WireParams& params, int blocks, cudaStream_t stream) {
  return launch(&wire_kernel, {blocks, kThreads}, stream, params);
}

cudaError_t launch_wire_floor_bulk(const WireParams& params, int blocks, cudaStream_t stream) {
  return launch(&bulk_kernel, {blocks, kBulkWarps * kLanes, kBulkSharedBytes}, stream, params);
}

cudaError_t launch_local_floor(const LocalParams& params, int blocks, cudaStream_t stream) {
  return launch(&local_kernel, {blocks, kThreads}, stream, params);
}

cudaError_t load_floor_kernels() {
  cudaError_t error = load(&wire_kernel);
  if (error == cudaSuccess) error = load(&local_kernel);
  return error != cudaSuccess ? error : load(&bulk_kernel, kBulkSharedBytes);
}

} // namespace epx::bench
