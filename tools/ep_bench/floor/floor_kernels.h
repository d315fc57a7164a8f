// SPDX-License-Identifier: Apache-2.0
// The kernels of the speed-of-light bound move rows and do nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "tools/ep_bench/floor/floor_plan.h"
#include "tools/ep_bench/gpu/start_kernels.h"

namespace epx::bench {

inline constexpr int64_t kFloorRowUnit = 16; // bytes; the rows of these kernels are multiples of it

// WireParams is a WirePlan on the device.
struct WireParams {
  const std::byte* source; // [rows, row_bytes]
  const int32_t* first;    // [rows + 1]
  const RowPlace* places;
  int32_t rows;
  int64_t row_bytes;
  std::byte* targets[kMaxRanksOnGpus]; // by rank, [rows_of_places, row_bytes]
};

// A warp takes a row, reads it once, and stores it to all its places. All stores have been made when the kernel ends.
cudaError_t launch_wire_floor(const WireParams& params, int blocks, cudaStream_t stream);      // by loads and stores
cudaError_t launch_wire_floor_bulk(const WireParams& params, int blocks, cudaStream_t stream); // by TMA bulk copies

// The local kernels read and write so many rows, each once, by the same two means.
struct LocalParams {
  const std::byte* source; // [reads, row_bytes], at least one row
  std::byte* target;       // [writes, row_bytes]
  int64_t reads, writes;   // rows
  int64_t row_bytes;
  bool is_mixed; // true: reads and writes are interleaved evenly; false: all writes come first, then all reads
};
inline constexpr int kMaxLocalFloorThreads = 1024;
cudaError_t launch_local_floor(const LocalParams& params, int blocks, int threads, cudaStream_t stream);
cudaError_t launch_local_floor_bulk(const LocalParams& params, int blocks, cudaStream_t stream);

cudaError_t load_floor_kernels();

} // namespace epx::bench
