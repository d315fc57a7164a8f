// SPDX-License-Identifier: Apache-2.0
// Warps of the kernels that measure the speed-of-light bound:
//
//   kernel              warps                what a warp does, and what it waits for
//   wire_kernel         all                  loads a row (16 bytes a lane) and stores it to all its places; waits for nothing
//   local_kernel        all                  loads one row and stores one row of local memory; waits for nothing
//   wire_bulk_kernel    8 a CTA, one lane    TMA loads a split of a row into a pipeline stage and stores it to all its places;
//                                            waits for the mbarrier of the load, and for the stores to have read the stage
//   local_bulk_kernel   8 a CTA, one lane    the same, in local memory
#include "tools/ep_bench/floor/floor_kernels.h"

#include <vector_types.h>

#include "base/device/bulk_copy.cuh"
#include "base/device/launch.h"

namespace epx::bench {
namespace {

using namespace cuda; // base/device

constexpr int kLanes = 32;
constexpr int kWireThreads = 512;
constexpr int kInFlight = 8; // a lane issues so many 16-byte loads before its first store

__device__ int lane() {
  return static_cast<int>(threadIdx.x) % kLanes;
}
__device__ int warp_of_block() {
  return static_cast<int>(threadIdx.x) / kLanes;
}
// Consecutive numbers are warps of different blocks, so that the last rows are distributed over all blocks.
__device__ int64_t global_warp() {
  return static_cast<int64_t>(warp_of_block()) * gridDim.x + blockIdx.x;
}
__device__ int64_t num_warps() {
  return static_cast<int64_t>(blockDim.x) / kLanes * gridDim.x;
}

// ---- Loads and stores ----

__global__ void __launch_bounds__(kWireThreads) wire_kernel(const __grid_constant__ WireParams params) {
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

// A LocalUnit reads at most one row and writes at most one.
struct LocalUnit {
  const std::byte* from; // NULL: none
  std::byte* to;
};
__device__ int64_t num_units(const LocalParams& params) {
  return params.is_mixed ? max(params.reads, params.writes) : params.writes + params.reads;
}
// Returns whether some units write without reading; they write words that an earlier load left in registers or in a stage.
__device__ bool writes_unread(const LocalParams& params) {
  return !params.is_mixed || params.reads < params.writes;
}
__device__ LocalUnit local_unit(const LocalParams& params, int64_t unit) {
  int64_t read, write; // -1: none
  if (params.is_mixed) {
    const auto row_of = [&](int64_t rows) { // rows are distributed evenly over the units
      const int64_t before = unit * rows / num_units(params);
      return (unit + 1) * rows / num_units(params) > before ? before : int64_t{-1};
    };
    read = row_of(params.reads);
    write = row_of(params.writes);
  } else {
    read = unit < params.writes ? int64_t{-1} : unit - params.writes;
    write = unit < params.writes ? unit : int64_t{-1};
  }
  return {read >= 0 ? params.source + read * params.row_bytes : nullptr,
          write >= 0 ? params.target + write * params.row_bytes : nullptr};
}

__global__ void __launch_bounds__(kMaxLocalFloorThreads) local_kernel(const __grid_constant__ LocalParams params) {
  const int64_t words = params.row_bytes / static_cast<int64_t>(sizeof(uint4));
  uint4 in_flight[kInFlight] = {};
  for (int i = 0; i < kInFlight && writes_unread(params); ++i) // the verification takes zeros for unwritten words
    if (lane() + i * kLanes < words) in_flight[i] = reinterpret_cast<const uint4*>(params.source)[lane() + i * kLanes];
  for (int64_t unit = global_warp(); unit < num_units(params); unit += num_warps()) {
    const LocalUnit rows = local_unit(params, unit);
    const auto* const from = reinterpret_cast<const uint4*>(rows.from);
    auto* const to = reinterpret_cast<uint4*>(rows.to);
    for (int64_t begin = lane(); begin < words; begin += kLanes * kInFlight) {
      if (from != nullptr)
        for (int i = 0; i < kInFlight; ++i)
          if (begin + i * kLanes < words) in_flight[i] = from[begin + i * kLanes];
      if (to != nullptr) {
        for (int i = 0; i < kInFlight; ++i)
          if (begin + i * kLanes < words) to[begin + i * kLanes] = in_flight[i];
        continue;
      }
      // This store hardly ever happens, but without it the compiler would drop the loads.
      unsigned sum = 0;
      for (int i = 0; i < kInFlight; ++i)
        sum += in_flight[i].x + in_flight[i].y + in_flight[i].z + in_flight[i].w;
      if (sum == 0x600df00d) reinterpret_cast<uint4*>(params.target)[0] = in_flight[0];
    }
  }
}

// ---- Bulk copies ----

constexpr int kBulkWarps = 8;
constexpr int kStages = 3;               // pipeline stages of a warp
constexpr int64_t kMaxStageBytes = 8192; // all stages take 192 KiB of an SM's 227
constexpr size_t kBulkSharedBytes = size_t{kBulkWarps} * kStages * kMaxStageBytes;

// RowSplits enumerates the splits of the rows that one warp takes, in order. Rows are split evenly; a split fits a pipeline
// stage.
class RowSplits {
public:
  __device__ RowSplits(int64_t rows, int64_t row_bytes)
      : per_row_((row_bytes + kMaxStageBytes - 1) / kMaxStageBytes),
        bytes_((row_bytes / kFloorRowUnit + per_row_ - 1) / per_row_ * kFloorRowUnit), row_bytes_(row_bytes), rows_(rows) {}

  __device__ bool has(int64_t split) const { return row(split) < rows_; }
  __device__ int64_t row(int64_t split) const { return global_warp() + split / per_row_ * num_warps(); }
  __device__ int64_t offset(int64_t split) const { return split % per_row_ * bytes_; } // bytes, in its row
  __device__ uint32_t bytes(int64_t split) const { return static_cast<uint32_t>(min(bytes_, row_bytes_ - offset(split))); }

private:
  int64_t per_row_, bytes_, row_bytes_, rows_;
};

// TMA bulk copies of one lane of each warp move the splits of `rows` rows through the pipeline stages in shared memory.
// from_of(row) returns the row's source; where it is NULL, the present contents of the stage are stored. for_each_target(row,
// store) calls store(to) for each place of the row. The stages are first loaded from `primer`, unless that is NULL.
template <typename FromOf, typename ForEachTarget>
__device__ void move_in_bulk(int64_t rows, int64_t row_bytes, const std::byte* primer, const FromOf& from_of,
                             const ForEachTarget& for_each_target) {
  __shared__ LoadBarrier barriers[kBulkWarps][kStages];
  if (lane() != 0) return;
  LoadBarrier* const loaded = barriers[warp_of_block()];
  std::byte* const stages = dynamic_shared_memory<std::byte>() + warp_of_block() * kStages * kMaxStageBytes;
  for (int stage = 0; stage < kStages; ++stage)
    init_barrier(&loaded[stage]);
  fence_shared_before_bulk_copies();

  const RowSplits splits(rows, row_bytes);
  unsigned parities = 0; // phase parity of each stage's next load, one bit each
  const auto wait = [&](int64_t stage) {
    wait_for_load(&loaded[stage], parities >> stage & 1);
    parities ^= 1u << stage;
  };
  const auto load_stage = [&](int64_t split) {
    const int64_t stage = split % kStages;
    if (const std::byte* const from = from_of(splits.row(split)))
      begin_load(stages + stage * kMaxStageBytes, from + splits.offset(split), splits.bytes(split), &loaded[stage]);
  };
  if (primer != nullptr) {
    for (int64_t stage = 0; stage < kStages; ++stage)
      begin_load(stages + stage * kMaxStageBytes, primer, splits.bytes(0), &loaded[stage]);
    for (int64_t stage = 0; stage < kStages; ++stage)
      wait(stage);
  }
  for (int64_t split = 0; split < kStages && splits.has(split); ++split)
    load_stage(split);
  for (int64_t split = 0; splits.has(split); ++split) {
    const int64_t stage = split % kStages, row = splits.row(split);
    if (from_of(row) != nullptr) wait(stage);
    for_each_target(row, [&](std::byte* to) {
      begin_store(to + splits.offset(split), stages + stage * kMaxStageBytes, splits.bytes(split));
    });
    end_store_group();
    // cp.async.bulk.wait_group.read 1 waits until the stores of the previous split have read its stage, which is then loaded
    // again; this split's stores are still in flight.
    const int64_t next = split - 1 + kStages;
    if (split > 0 && splits.has(next)) {
      wait_for_store_reads<1>();
      load_stage(next);
    }
  }
  wait_for_stores();
}

__global__ void __launch_bounds__(kBulkWarps* kLanes) wire_bulk_kernel(const __grid_constant__ WireParams params) {
  move_in_bulk(
      params.rows, params.row_bytes, nullptr, [&](int64_t row) { return params.source + row * params.row_bytes; },
      [&](int64_t row, const auto& store) {
        for (int32_t place = params.first[row]; place < params.first[row + 1]; ++place) {
          const RowPlace to = params.places[place];
          store(params.targets[to.rank] + to.row * params.row_bytes);
        }
      });
}

__global__ void __launch_bounds__(kBulkWarps* kLanes) local_bulk_kernel(const __grid_constant__ LocalParams params) {
  move_in_bulk(
      num_units(params), params.row_bytes, writes_unread(params) ? params.source : nullptr,
      [&](int64_t unit) { return local_unit(params, unit).from; },
      [&](int64_t unit, const auto& store) {
        if (std::byte* const to = local_unit(params, unit).to) store(to);
      });
}

} // namespace

cudaError_t launch_wire_floor(const WireParams& params, int blocks, cudaStream_t stream) {
  return launch(&wire_kernel, {blocks, kWireThreads}, stream, params);
}

cudaError_t launch_wire_floor_bulk(const WireParams& params, int blocks, cudaStream_t stream) {
  return launch(&wire_bulk_kernel, {blocks, kBulkWarps * kLanes, kBulkSharedBytes}, stream, params);
}

cudaError_t launch_local_floor(const LocalParams& params, int blocks, int threads, cudaStream_t stream) {
  return launch(&local_kernel, {blocks, threads}, stream, params);
}

cudaError_t launch_local_floor_bulk(const LocalParams& params, int blocks, cudaStream_t stream) {
  return launch(&local_bulk_kernel, {blocks, kBulkWarps * kLanes, kBulkSharedBytes}, stream, params);
}

cudaError_t load_floor_kernels() {
  for (cudaError_t error : {load(&wire_kernel), load(&local_kernel), load(&wire_bulk_kernel, kBulkSharedBytes),
                            load(&local_bulk_kernel, kBulkSharedBytes)})
    if (error != cudaSuccess) return error;
  return cudaSuccess;
}

} // namespace epx::bench
