// SPDX-License-Identifier: Apache-2.0
// The kernel of ragged_all_to_all. No block has a role of its own: each tells a part of what this rank knows of its slices, reads
// what all peers have told, and then copies its share of the rows to every peer, tile by tile.
//
//   tell       Threads store the integers of this rank's slices in the windows of the peers, as LL packets.
//   enter      The entry barrier.
//   decide     Each block reads the packets of all slices, and knows which move (runtime/layout/slices.h).
//   send       Rows go into the output where peers can reach it, else into the half of the receiver's staging that is the
//              round's image of the output.
//   signal     The last block to end a round stores a ready flag, by receiver and round.
//   receive    Where this rank's output is out of reach, its blocks copy the image of the round before into it. The last one
//              tells the senders, which may then store the image after the next one into that half.
//
//   warps           what they do                     what they wait for
//   all             tell, enter, decide, send        entry barrier; LL packets; from round 2 on, that receivers have copied
//   all             receive                          ready flags of all peers for the round
//   block 0, one    waits for rows in place          ready flags of all peers
//
// A round's send waits for the receive before the last, and a receive for the send of its own round: each waits for what comes
// earlier in every rank's order, so no ring of waits closes.
#include "runtime/stages/cuda/kernels.h"

#include <algorithm>

#include "base/device/launch.h"
#include "base/device/warp.cuh"
#include "runtime/layout/slices.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/movement.cuh"

namespace epx::cuda {
namespace {

constexpr int kTileBytes = 4096; // that a warp copies at a time: 8 vectors of each lane

struct RaggedParams {
  DeviceGroup group;
  RaggedAllToAllCall call;
  CallDescriptor descriptor;
};

// In dynamic shared memory, by slice: i of this rank, and i of its peers (by peer, then by the peer's slice to this rank).
struct SliceTables {
  MovingSlice own[EPX_MAX_SLICES];
  MovingSlice peers[EPX_MAX_SLICES];
  int32_t end_tiles[EPX_MAX_SLICES]; // of the part that is copied next: the tiles of slices 0 to i
};

// ---- Copies of a warp ----

template <typename Unit>
__device__ void copy_units(std::byte* to, const std::byte* from, int units) {
  constexpr int kInFlight = 8;
  auto* const target = reinterpret_cast<Unit*>(to);
  const auto* const source = reinterpret_cast<const Unit*>(from);
  for (int first = lane(); first < units; first += kWarp * kInFlight) {
    Unit loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kWarp < units) loaded[i] = source[first + i * kWarp];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (first + i * kWarp < units) target[first + i * kWarp] = loaded[i];
  }
}

// Copies units that are aligned on both sides, and what is before and behind them by bytes.
template <typename Unit>
__device__ void copy_aligned(std::byte* to, const std::byte* from, int bytes) {
  constexpr int kUnit = sizeof(Unit);
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(from) % kUnit);
  const int head = min(misaligned == 0 ? 0 : kUnit - misaligned, bytes);
  const int units = (bytes - head) / kUnit;
  const int end = head + units * kUnit;
  if (lane() < head) to[lane()] = from[lane()];
  copy_units<Unit>(to + head, from + head, units);
  if (lane() < bytes - end) to[end + lane()] = from[end + lane()];
}

__device__ void copy_tile(std::byte* to, const std::byte* from, int bytes) {
  const uintptr_t differ = reinterpret_cast<uintptr_t>(to) ^ reinterpret_cast<uintptr_t>(from);
  if (differ % sizeof(uint4) == 0)
    copy_aligned<uint4>(to, from, bytes);
  else if (differ % sizeof(uint32_t) == 0)
    copy_aligned<uint32_t>(to, from, bytes);
  else
    copy_units<std::byte>(to, from, bytes);
}

// ---- The call ----

class RaggedAllToAll {
public:
  __device__ RaggedAllToAll(const RaggedParams& params, const CallSession& call)
      : params_(params), call_(call), slices_per_rank_(params.call.num_slices / call.num_ranks()),
        image_bytes_(slice_image_bytes(params.group.context.layout)), tables_(*dynamic_shared_memory<SliceTables>()) {}

  __device__ void run() {
    if (!call_.begin()) return;
    tell();
    if (!call_.enter_begun(params_.descriptor) || !decide()) return;
    int64_t send_rounds = 1;
    for (int rank = 0; rank < call_.num_ranks(); ++rank)
      if (rank != call_.rank()) send_rounds = max(send_rounds, rounds_of(rank));
    const bool is_out_of_reach = is_staged(call_.rank()) && call_.num_ranks() > 1;
    const int64_t receive_rounds = is_out_of_reach ? rounds_of(call_.rank()) : 0;
    for (int64_t round = 0; round < send_rounds || round <= receive_rounds; ++round) {
      if (round < send_rounds && !send(round)) return;
      if (round == send_rounds - 1 && threadIdx.x == 0) call_.sent(gridDim.x);
      if (round > 0 && round <= receive_rounds && !receive(round - 1)) return;
    }
    if (!is_out_of_reach && blockIdx.x == 0) wait_for_peers(Flags::stored, 0);
  }

private:
  enum class Flags : int { stored, copied }; // of a peer: that it has stored a round here, and copied one of this rank's

  __device__ int peer_of(int slice) const { return slice / slices_per_rank_; }
  __device__ bool is_staged(int rank) const { return !has_registered_rows(call_, rank); }
  // In how many rounds the peers of a rank send it rows.
  __device__ int64_t rounds_of(int rank) const {
    return is_staged(rank) ? slice_rounds(call_.descriptors().recv_rows[rank] * params_.call.row_bytes, image_bytes_) : 1;
  }
  __device__ LlPacket8* packet_at(int owner, int peer, SliceField field, int slice) const {
    const int64_t offset = slice_record_offset(params_.group.context.layout, call_.num_ranks(), peer, field,
                                               slice % slices_per_rank_, sizeof(LlPacket8), call_.parity());
    return params_.group.window().at<LlPacket8>(owner, offset);
  }
  __device__ Epoch* flag_of(int owner, Flags flags, int peer, int64_t round) const {
    return params_.group.window().at<Epoch>(owner, params_.group.context.layout.slice_flags.offset) +
           (static_cast<int>(flags) * call_.num_ranks() + peer) * int64_t{kMaxSliceRounds} + round;
  }

  __device__ void tell() const {
    for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<unsigned>(params_.call.num_slices);
         i += gridDim.x * blockDim.x) {
      const int slice = static_cast<int>(i);
      const SliceRecord mine = told_record(params_.call, slice);
      const auto store = [&](SliceField field, int32_t value) {
        store_packet_relaxed_sys(packet_at(peer_of(slice), call_.rank(), field, slice), LlPacket8{value, call_.epoch()});
      };
      store(SliceField::size, mine.size);
      store(SliceField::input_offset, mine.input_offset);
      store(SliceField::output_offset, mine.output_offset);
      store(SliceField::recv_size, mine.recv_size);
    }
  }

  // A slice as this rank and its peer know it: first this rank's own, then the peer's.
  struct SlicePair {
    SliceRecord own, theirs;
    SliceFault fault, their_fault;
  };
  // Waits for what the peer has told. Returns false when the group has failed.
  __device__ bool read_pair(int i, SlicePair& pair) const {
    const int peer = peer_of(i);
    const auto read = [&](SliceField field, int32_t& value) {
      LlPacket8 packet{};
      const bool ok = call_.wait_for_packet(packet_at(call_.rank(), peer, field, i), packet, peer);
      value = packet.value;
      return ok;
    };
    pair.own = told_record(params_.call, i);
    pair.theirs.recv_size = pair.own.recv_size;
    if (!read(SliceField::size, pair.theirs.size) || !read(SliceField::input_offset, pair.theirs.input_offset) ||
        !read(SliceField::output_offset, pair.theirs.output_offset) || !read(SliceField::recv_size, pair.own.recv_size))
      return false;
    const RaggedAllToAllCall& call = params_.call;
    const PeerDescriptors& descriptors = call_.descriptors();
    pair.fault = fault_of(pair.own, call.is_transposed ? descriptors.num_tokens[peer] : descriptors.recv_rows[peer]);
    pair.their_fault = fault_of(pair.theirs, call.is_transposed ? call.operand_rows : call.output_rows);
    return true;
  }

  // Fills in the tables; block 0 also reports what does not move. The result is the same in all threads of the block.
  __device__ bool decide() const {
    __shared__ int bad;
    __shared__ unsigned first_bad; // 2 i for an own slice, 2 i + 1 for a peer's
    if (threadIdx.x == 0) bad = 0, first_bad = ~0u;
    __syncthreads();
    bool ok = true;
    for (int i = static_cast<int>(threadIdx.x); i < params_.call.num_slices && ok; i += static_cast<int>(blockDim.x)) {
      SlicePair pair{};
      ok = read_pair(i, pair);
      if (!ok) break;
      tables_.own[i] = moving_slice(pair.own, pair.fault, params_.call.is_transposed);
      tables_.peers[i] = moving_slice(pair.theirs, pair.their_fault, params_.call.is_transposed);
      const bool own_is_bad = pair.fault != SliceFault::none;
      const bool theirs_is_bad = pair.their_fault != SliceFault::none && peer_of(i) != call_.rank();
      if (own_is_bad || theirs_is_bad) {
        atomicAdd(&bad, (own_is_bad ? 1 : 0) + (theirs_is_bad ? 1 : 0));
        atomicMin(&first_bad, 2 * static_cast<unsigned>(i) + (own_is_bad ? 0 : 1));
      }
    }
    if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
    if (blockIdx.x == 0 && threadIdx.x == 0 && bad > 0) report(bad, first_bad);
    return true;
  }
  __device__ void report(int bad, unsigned first) const {
    const int i = static_cast<int>(first / 2);
    const bool is_own = first % 2 == 0;
    SlicePair pair{};
    if (!read_pair(i, pair)) return;
    const SliceRecord& record = is_own ? pair.own : pair.theirs;
    const auto fault = static_cast<int64_t>(is_own ? pair.fault : pair.their_fault);
    record_event(call_.context(), EPX_EVENT_BAD_SLICE, bad, bad, first, fault + int64_t{slices_per_rank_} * 256,
                 int64_t{record.size} * (int64_t{1} << 32) + static_cast<uint32_t>(record.recv_size), record.output_offset);
  }

  // Forward a rank sends its own slices, transposed those of its peers.
  __device__ const MovingSlice* sent() const { return params_.call.is_transposed ? tables_.peers : tables_.own; }
  __device__ const MovingSlice* received() const { return params_.call.is_transposed ? tables_.own : tables_.peers; }

  // Which part of a rank's output this rank stores in a round. Its own rows it stores in round 0.
  __device__ SliceImage image_for(int rank, int64_t round) const {
    if (rank != call_.rank() && is_staged(rank)) return slice_image(image_bytes_, round);
    return round == 0 ? kWholeOutput : SliceImage{0, 0};
  }
  __device__ SliceImage image_of_here(int peer, int64_t round) const {
    return peer == call_.rank() ? SliceImage{0, 0} : slice_image(image_bytes_, round);
  }
  // The address of byte 0 of a rank's output in that image; it is not accessed outside of the image.
  __device__ std::byte* base_for(int rank, int64_t round) const {
    if (rank == call_.rank()) return params_.call.output;
    return is_staged(rank) ? staging_of(rank, round) : registered_rows(params_.group, call_, rank);
  }
  __device__ std::byte* staging_of(int rank, int64_t round) const {
    return params_.group.window().at<std::byte>(rank, params_.group.context.layout.scatter_rows.offset) +
           (round % 2 - round) * image_bytes_;
  }

  // All threads of the block count the tiles of each slice's bytes in the image of its peer, image_of(peer).
  template <typename ImageOf>
  __device__ void count_tiles(const MovingSlice* slices, const ImageOf& image_of) const {
    __shared__ int32_t warp_sums[kMovementThreads / kWarp];
    const int num_slices = params_.call.num_slices;
    const int per_thread = (num_slices + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
    const int first = static_cast<int>(threadIdx.x) * per_thread;
    const int end = min(first + per_thread, num_slices);
    int32_t sum = 0;
    __syncthreads(); // the tiles before have been copied
    for (int i = first; i < end; ++i) {
      const int64_t bytes = bytes_in(slices[i], params_.call.row_bytes, image_of(peer_of(i))).bytes;
      sum += static_cast<int32_t>((bytes + kTileBytes - 1) / kTileBytes);
      tables_.end_tiles[i] = sum;
    }
    int32_t before = sum; // of the threads before this one, in its warp
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t other = __shfl_up_sync(~0u, before, distance);
      if (lane() >= distance) before += other;
    }
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    if (lane() == kWarp - 1) warp_sums[warp] = before;
    before -= sum;
    __syncthreads();
    for (int other = 0; other < warp; ++other)
      before += warp_sums[other];
    for (int i = first; i < end; ++i)
      tables_.end_tiles[i] += before;
    __syncthreads();
  }

  // Warps of the grid copy the tiles of the slices between this rank and `peer`. `first_warp` is another one for each of them; few
  // tiles of several peers go to different warps.
  template <typename CopyPart>
  __device__ void copy_tiles(const MovingSlice* slices, int peer, const SliceImage& image, int64_t first_warp,
                             const CopyPart& copy_part) const {
    const int begin = peer * slices_per_rank_, end = begin + slices_per_rank_;
    const int32_t first_tile = begin == 0 ? 0 : tables_.end_tiles[begin - 1];
    const int32_t last_tile = tables_.end_tiles[end - 1];
    const int64_t warps = int64_t{gridDim.x} * (blockDim.x / kWarp);
    for (int64_t tile = first_tile + first_warp % warps; tile < last_tile; tile += warps) {
      int low = begin, high = end - 1; // the first slice that ends behind the tile
      while (low < high) {
        const int middle = (low + high) / 2;
        if (tables_.end_tiles[middle] > tile)
          high = middle;
        else
          low = middle + 1;
      }
      const int64_t in_slice = tile - (low == 0 ? 0 : tables_.end_tiles[low - 1]);
      const SliceBytes part = bytes_in(slices[low], params_.call.row_bytes, image);
      const int64_t done = in_slice * kTileBytes;
      copy_part(part.from + done, part.to + done, static_cast<int>(min(part.bytes - done, int64_t{kTileBytes})));
    }
  }
  // Neighbouring numbers are those of warps in different blocks.
  __device__ int64_t number_of_warp() const { return static_cast<int64_t>(threadIdx.x / kWarp) * gridDim.x + blockIdx.x; }

  __device__ bool send(int64_t round) const {
    if (round >= 2 && !wait_for_peers(Flags::copied, round - 2)) return false;
    count_tiles(sent(), [&](int peer) { return image_for(peer, round); });
    const int64_t warp = number_of_warp();
    const int num_ranks = call_.num_ranks();
    for (int step = 0; step < num_ranks; ++step) { // warps begin with different peers
      const int peer = static_cast<int>((call_.rank() + 1 + step + warp) % num_ranks);
      std::byte* const base = base_for(peer, round);
      copy_tiles(sent(), peer, image_for(peer, round), warp + peer,
                 [&](int64_t from, int64_t to, int bytes) { copy_tile(base + to, params_.call.operand + from, bytes); });
    }
    signal_round(call_.state().slice_blocks_stored[round % 2], Flags::stored, round);
    return true;
  }

  __device__ bool receive(int64_t round) const {
    if (!wait_for_peers(Flags::stored, round)) return false;
    count_tiles(received(), [&](int peer) { return image_of_here(peer, round); });
    const std::byte* const base = staging_of(call_.rank(), round);
    for (int peer = 0; peer < call_.num_ranks(); ++peer)
      copy_tiles(received(), peer, image_of_here(peer, round), number_of_warp() + peer,
                 [&](int64_t, int64_t to, int bytes) { copy_tile(params_.call.output + to, base + to, bytes); });
    signal_round(call_.state().slice_blocks_copied[round % 2], Flags::copied, round);
    return true;
  }

  // The last block of the grid to call this for a round tells the peers. While it counts one round, no block has ended the round
  // after the next: that one waits for a peer, which waits for this signal.
  __device__ void signal_round(uint32_t& blocks, Flags flags, int64_t round) const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_acq_rel_sys(); // this block's stores come before its count, ...
    if (atomicInc(&blocks, gridDim.x - 1) != gridDim.x - 1) return;
    fence_acq_rel_sys(); // ... and the counts of all blocks before the flags
    for (int peer = 0; peer < call_.num_ranks(); ++peer) {
      const int receiver = flags == Flags::stored ? peer : call_.rank();
      if (peer != call_.rank() && round < rounds_of(receiver)) call_.signal(flag_of(peer, flags, call_.rank(), round));
    }
  }

  // All threads of the block wait until every peer has signaled the round; where it has stored it, the rounds are those of this
  // rank, else the peer's own. Returns false, the same in all threads, when the group has failed.
  __device__ bool wait_for_peers(Flags flags, int64_t round) const {
    bool ok = true;
    const int peer = static_cast<int>(threadIdx.x);
    if (peer < call_.num_ranks() && peer != call_.rank()) {
      const bool is_signaled = flags == Flags::stored || (is_staged(peer) && round + 2 < rounds_of(peer));
      ok = !is_signaled || call_.wait_ready(flag_of(call_.rank(), flags, peer, round), peer);
    }
    return __syncthreads_and(ok ? 1 : 0) != 0;
  }

  const RaggedParams& params_;
  const CallSession& call_;
  int slices_per_rank_;
  int64_t image_bytes_;
  SliceTables& tables_;
};

__global__ void __launch_bounds__(kMovementThreads, kMovementBlocksPerSm)
    ragged_all_to_all_kernel(const __grid_constant__ RaggedParams params) {
  pdl_wait(params);
  const CallSession call(params.group, EPX_OP_RAGGED_ALL_TO_ALL);
  if (blockIdx.x == 0) call.post(params.descriptor, 0);
  RaggedAllToAll(params, call).run();
  leave(params.group);
}

} // namespace

const void* ragged_all_to_all_kernel_address() {
  return reinterpret_cast<const void*>(&ragged_all_to_all_kernel);
}
size_t ragged_shared_bytes() {
  return sizeof(SliceTables);
}

cudaError_t launch_ragged_all_to_all(const Launcher& launcher, const RaggedAllToAllCall& call) {
  const RaggedParams params{launcher.group, call, describe(call, launcher.place_of_output(call))};
  const int64_t tiles = (std::max(call.operand_rows, call.output_rows) * call.row_bytes + kTileBytes - 1) / kTileBytes;
  return launch_cooperative(&ragged_all_to_all_kernel, launcher.plan.next_slices(tiles, launcher.stream), launcher.stream,
                            params);
}

} // namespace epx::cuda
