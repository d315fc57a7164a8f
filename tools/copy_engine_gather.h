// SPDX-License-Identifier: Apache-2.0
// All-gathers that take no SM of a GPU: NCCL moves the parts by copy engines ("zero CTA"). A kernel that is made for the whole GPU,
// as grouped products are, is not slowed down beside them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>

namespace epx {

class CopyEngineGather {
public:
  virtual ~CopyEngineGather() = default;

  // Returns memory for `bytes` of all ranks together, as long as this lives. Collective. Throws std::runtime_error.
  virtual std::byte* allocate(size_t bytes) = 0;

  // Enqueues on a cudaStream_t: all[r * part_bytes, ...] becomes that of rank r. `all` is what allocate() has returned, where each
  // rank has written its own part. Collective. Throws std::runtime_error.
  virtual void gather(std::byte* all, size_t part_bytes, void* stream) = 0;
};

// Makes the bytes of rank 0 those of all ranks.
using ShareBytes = std::function<void(std::span<std::byte>)>;

// For the calling thread's device; NULL where that has none. Collective. Throws std::runtime_error.
std::unique_ptr<CopyEngineGather> make_copy_engine_gather(int rank, int num_ranks, const ShareBytes& share);

} // namespace epx
