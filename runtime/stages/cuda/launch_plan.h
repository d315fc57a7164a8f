// How many blocks each kernel of a group gets, which of their warps do what, and when a kernel may be launched as the
// programmatic successor of the one before it.
//
// Every kernel of the stages is a cooperative grid whose blocks wait for peers. While it waits, it holds its SMs; so a group
// takes no more SMs than num_comm_sms, and by default leaves kSmsLeftToOthers to kernels of others that wait as well
// (epx.h, "Beside other kernels").
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "base/device/grid.h"
#include "runtime/config.h"

namespace epx::cuda {

// Which warps of a movement's grid do what. The first warps of the first blocks send, and the last ones of these blocks
// signal. When these are all blocks, their other warps receive; else all other blocks do.
struct WarpRoleCounts {
  int sender_blocks;
  int sender_warps; // of each of these blocks
  int signal_warps; // likewise: 1; or 0, when senders tell
};
constexpr int kMaxSendersPerSignalWarp = 15; // warps; with it they are a block

// A movement's grid, and the role_counts of its warps.
struct MovementGrid {
  Grid grid;
  WarpRoleCounts role_counts;
};

class LaunchPlan {
public:
  // Loads all kernels, and chooses grids of blocks that all run at the same time on at most num_comm_sms SMs (0: the
  // default). Throws.
  LaunchPlan(const GroupShape& shape, int num_comm_sms);

  int num_sms() const { return num_sms_; } // that the group takes
  int max_prepare_blocks() const { return prepare_blocks_; }

  // The grid of the group's next kernel, which is launched on `stream`. `routes`: of this rank. `tokens`, `row_bytes`: of
  // this rank's call. Not for two threads at a time.
  Grid next_prepare(int64_t routes, cudaStream_t stream);
  MovementGrid next_scatter(int64_t tokens, int64_t row_bytes, int alignment, cudaStream_t stream);
  MovementGrid next_gather(int64_t tokens, int64_t row_bytes, cudaStream_t stream);

  // The next kernel is no programmatic successor.
  void forget_last() { last_blocks_ = 0; }

private:
  Grid next(int blocks, int threads, size_t shared_bytes, cudaStream_t stream);
  // Blocks that a programmatic successor of the last kernel may have; 0: it can have none.
  int room_beside_last(cudaStream_t stream) const;
  int movement_blocks(int64_t tokens, int64_t row_bytes, int max_blocks) const;

  int num_ranks_;
  int64_t max_ll_tokens_; // of a rank, on the low-latency path
  int num_sms_;
  int prepare_blocks_;
  size_t prepare_shared_bytes_;
  int scatter_blocks_, gather_blocks_;
  // The group's kernel before the next one.
  cudaStream_t last_stream_ = nullptr;
  int last_blocks_ = 0; // 0: there was none
};

} // namespace epx::cuda
