// SPDX-License-Identifier: Apache-2.0
// The call session: how the kernels of all ranks make one call together. It is the protocol of
// runtime/stages/host/protocol/call_protocol.h on GPUs.
//
//   post      One block stores this rank's call descriptor in the window of every rank, its own included.
//   enter     The entry barrier: every block waits until the descriptors of all ranks are there. A peer that has posted call n
//             has ended call n - 1, so its staging may be written, and its descriptor says where else. On the low-latency (LL)
//             path each warp enters by itself (enter_warp), because waiting for the other warps would take too long.
//   ...       Blocks, or some of their warps, store into the windows of the peers. A movement signals a ready flag for each row
//             (signal; SignalWarp), and other warps wait for it (wait_ready). prepare and the LL path store LL packets
//             (LlPacket8 and others) and lines (ll_row.cuh), which carry their flag with the data (wait_for_packet).
//   sent      The last sender of the grid stores a complete flag in the window of every rank. Only a rank whose wait times out
//             reads these flags, to find the culprit.
//
// Grids are launched cooperatively: all blocks of a grid are resident at the same time, so a block may wait for a peer whose
// progress needs another block of this grid. Descriptors are double-buffered by the parity of the call, because a slow block
// may still read those of call n while a peer is in call n + 1; no peer is in n + 2 before this grid has ended. Every wait is
// bounded, and ends when an abort record is seen, in this rank's window or in host memory; then the kernel ends without
// touching anything more.
//
// prepare_dispatch of many tokens may take two kernels, which make one call: the first posts the descriptor and passes
// the entry barrier, behind which the second may store into staging too (kContinues).
//
// Two calls of a group that nothing orders may overlap on the device, which ends the group. A block does not begin while
// another launch makes the call that would be its own, or while blocks of the call before are still there; and each block that
// begins checks that those which have begun in this kernel are of its own grid (begin).
#pragma once

#include <cstdint>
#include <limits>

#include "base/device/memory_order.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/protocol/device_group.h"
#include "runtime/stages/cuda/protocol/events.cuh"
#include "runtime/stages/cuda/protocol/waits.cuh"

namespace epx::cuda {

// The ranks' call descriptors in the call in progress, in shared memory: one copy per block, or per warp on the LL path.
struct PeerDescriptors {
  uint64_t plan_id[kMaxDeviceRanks];
  int64_t rows_offset[kMaxDeviceRanks];
  int32_t rows_allocation[kMaxDeviceRanks];
  int32_t num_tokens[kMaxDeviceRanks];
  int32_t recv_rows[kMaxDeviceRanks]; // clamped to 2^31 - 1, since slots are int32
  bool stages_rows[kMaxDeviceRanks];
};

class CallSession {
public:
  // kContinues: an earlier kernel has begun the call. This one does the rest of it (the second kernel of prepare_dispatch), or
  // reads what it has left behind (forward_rows_kernel).
  enum Part : bool { kBegins, kContinues };

  // Every thread of the block constructs one.
  __device__ CallSession(const DeviceGroup& group, epx_operation operation, Part part = kBegins)
      : context_{group, operation, 0}, descriptors_(&descriptors_of_cta()) {
    const CallsBegun begun = group.state->begun; // every thread has two loads of one sector in flight together
    const CallsSeen seen = group.state->seen;
    context_.sequence = begun.sequence + (part == kBegins ? 1 : 0);
    blocks_before_ = begun.blocks;
    const bool is_taken = (owned_sequence(seen.owner) == owned_sequence(owner_word())) & (seen.owner != owner_word());
    is_alone_ = (seen.blocks_left >= begun.blocks) & !is_taken; // >=, because blocks of this grid may have left already
  }

  __device__ uint64_t sequence() const { return context_.sequence; }
  // Selects the half of what is double-buffered in the window.
  __device__ int64_t parity() const { return parity_of(context_.sequence); }
  __device__ Epoch epoch() const { return context_.epoch(); }
  __device__ int num_ranks() const { return context_.num_ranks(); }
  __device__ int rank() const { return context_.rank(); }
  __device__ DeviceState& state() const { return *context_.group.state; }

  // Returns a copy for the functions of failure.cuh, waits.cuh and events.cuh that are not inlined; see CallContext.
  __device__ CallContext context() const { return context_; }

  // The descriptors are valid after enter(), or those fields of them that enter_warp() has read.
  __device__ const PeerDescriptors& descriptors() const { return *descriptors_; }

  // One block calls this before anything else: it stores the descriptor in the window of every rank, its own included. plan_id
  // comes separately, since only the device knows it.
  __device__ void post(const CallDescriptor& descriptor, uint64_t plan_id) const {
    if (!is_alone_) return;
    if (threadIdx.x == 0) store_relaxed_sys(&context_.group.state->seen.owner, owner_word());
    inject_delay(context_);
    // No fence is needed: the loads and stores of the kernels before this one are complete when it begins.
    const auto* const words = reinterpret_cast<const uint64_t*>(&descriptor);
    constexpr int kPlan = offsetof(CallDescriptor, plan_id) / sizeof(uint64_t);
    for (int i = threadIdx.x; i < num_ranks() * kNumDescriptorWords; i += blockDim.x) {
      const int word = i % kNumDescriptorWords;
      store_packet_relaxed_sys(&descriptor_at(context_, i / kNumDescriptorWords, rank(), context_.sequence)->words[word],
                               LlField{word == kPlan ? plan_id : words[word], context_.sequence});
    }
  }

  // All threads of a block call this once, before the block stores anything but the call descriptor (post) into a window, or
  // waits for another block or a peer; enter() and begin_ll() do. Returns false, the same in all threads, when another call of
  // this rank is in progress; the group has then failed.
  __device__ bool begin() const {
    // When calls overlap, a thread that is late may read the sequence number behind that of its block, in which nobody posts.
    const bool agrees = has_sequence_of_block();
    if (__syncthreads_and(is_alone_ && agrees ? 1 : 0) != 0) {
      count_beginning();
      return true;
    }
    if (threadIdx.x == 0) report_overlap(context());
    return false;
  }

  // The entry barrier: every block calls this once, with the descriptor that was posted, and waits until all ranks have posted
  // theirs. Returns false, the same in all threads, when the group has failed; every block of the grid then returns at once.
  __device__ bool enter(const CallDescriptor& descriptor) const { return begin() && enter_begun(descriptor); }
  // The same for a block that has called begin().
  __device__ bool enter_begun(const CallDescriptor& descriptor) const {
    bool same = true;
    const bool ok = read_descriptors(descriptor, Fields::all, descriptor_reader(), static_cast<int>(blockDim.x), same);
    if (__syncthreads_and(ok && same ? 1 : 0) != 0) return !stalls();
    if (__syncthreads_and(ok ? 1 : 0) != 0 && threadIdx.x == 0) report_disagreement(context(), descriptor);
    return false;
  }

  // In a kernel that reads what a call has left behind (forward_rows_kernel), or where all warps of the block have entered by
  // themselves: reads the descriptors of all ranks once more, and begins no call. They lie in the window until this rank posts
  // its next call: from then on a peer may post the call after that, which takes the same half. All threads of the block call
  // this, with the descriptor that was posted. Returns false, the same in all threads, when the group has failed.
  __device__ bool enter_again(const CallDescriptor& descriptor) const {
    bool same = true;
    const bool agrees = has_sequence_of_block();
    if (!agrees) report_overlap(context());
    const bool ok =
        agrees && read_descriptors(descriptor, Fields::all, descriptor_reader(), static_cast<int>(blockDim.x), same);
    return __syncthreads_and(ok ? 1 : 0) != 0;
  }

  // The fields of the descriptors that a warp reads.
  enum class Fields {
    all,    // it also checks that the ranks agree
    ll_path // num_tokens, plan_id and recv_rows: so few that each lane reads one, where there are up to ten ranks
  };
  // The entry barrier of one warp, so that it waits for no other warp; begin_ll() comes first. At least one warp of the grid
  // reads all fields: hundreds of warps that poll the same words delay each other. `descriptors` lies in shared memory and
  // belongs to the warp. The result is the same in all lanes.
  __device__ bool enter_warp(const CallDescriptor& descriptor, Fields fields, PeerDescriptors& descriptors) {
    inject_delay(context_);
    descriptors_ = &descriptors;
    bool same = true;
    const bool ok = read_descriptors(descriptor, fields, lane(), kWarp, same);
    __syncwarp(); // makes each lane's stores to `descriptors` visible to the others: a vote orders no memory
    if (__all_sync(~0u, ok && same ? 1 : 0) != 0) return !stalls();
    if (__all_sync(~0u, ok ? 1 : 0) != 0 && lane() == 0) report_disagreement(context(), descriptor);
    return false;
  }
  // begin() of a block whose warps call enter_warp().
  __device__ bool begin_ll() const {
    inject_delay(context_);
    if (threadIdx.x == 0) warps_sent() = 0;
    return begin();
  }
  // Each of the block's `warps` sender warps calls this after its last store to a peer; the last one calls sent() for the
  // block.
  __device__ void sent_by_warp(int warps) const {
    inject_delay(context_);
    if (lane() == 0 && atomicAdd(&warps_sent(), 1) == warps - 1) sent(gridDim.x);
  }

  // Dynamic tile scheduler: all lanes get the next of 0, 1, ..., tiles - 1, and no two warps of the grid get the same. The grid
  // calls this exactly `tiles` times for each of the two counters `taken` in DeviceState.
  __device__ int64_t take_tile(unsigned long long& taken, int64_t tiles) const {
    inject_delay(context_);
    int64_t number = 0;
    if (lane() == 0) {
      number = static_cast<int64_t>(atomicAdd(&taken, 1ull));
      if (number == tiles - 1) atomicExch(&taken, 0ull); // for the next call; no warp takes a tile after the last one
    }
    return from_lane(number, 0);
  }

  // One thread of each sender, or of the signal warp that signals for several, calls this after the last store to a peer; there
  // are `senders` such calls in the grid.
  __device__ void sent(unsigned senders) const {
    if (atomicInc(&context_.group.state->senders_done, senders - 1) != senders - 1) return;
    for (int peer = 0; peer < num_ranks(); ++peer)
      store_relaxed_sys(&flag_at(context_, peer, context_.group.context.layout.complete, rank())->value, context_.sequence);
  }

  // One thread waits until the LL packet at `place`, in this rank's window or scratch memory, carries the epoch of this call;
  // `peer` stores it. Returns false when the group has failed.
  template <typename Packet>
  __device__ bool wait_for_packet(const Packet* place, Packet& packet, int peer) const {
#pragma unroll 1
    for (int spin = 0; spin < kShortSpins; ++spin) {
      packet = load_packet_relaxed_sys(place);
      if (packet.epoch == epoch()) return true;
    }
    do { // the load of a whole packet says whether its data is there, not the shorter load of its epoch before
      if (!wait_long(context(), &place->epoch, peer, EPX_PHASE_COMPLETE)) return false;
      packet = load_packet_relaxed_sys(place);
    } while (packet.epoch != epoch());
    return true;
  }

  // The same for the epoch alone; the packet is loaded behind it.
  __device__ bool wait_for_epoch(const Epoch* place, int peer) const {
#pragma unroll 1
    for (int spin = 0; spin < kShortSpins; ++spin)
      if (load_relaxed_sys(place) == epoch()) return true;
    return wait_long(context(), place, peer, EPX_PHASE_COMPLETE);
  }

  // The same for a packet that the thread has loaded once, beside others.
  template <typename Packet>
  __device__ bool wait_for_loaded_packet(const Packet* place, Packet& packet, int peer) const {
    return packet.epoch == epoch() || wait_for_packet(place, packet, peer);
  }

  // Returns whether a ready flag, in this rank's window, has been signaled in this call.
  __device__ bool is_ready(const Epoch* ready_flag) const {
    // ld.acquire: what the peer stored before it signaled is read after this load (PTX, Release and acquire patterns), and not
    // from a line that this SM's L1 cache already holds. An acquire invalidates that cache, so the polling loop of wait_long()
    // uses relaxed loads. A relaxed load here fails no test on H200.
    return load_acquire_sys(ready_flag) == epoch();
  }
  // One thread waits until `peer` has signaled the ready flag. Returns false when the group has failed.
  __device__ bool wait_ready(const Epoch* ready_flag, int peer) const {
    inject_delay(context_);
    while (!is_ready(ready_flag))
      if (!wait_long(context(), ready_flag, peer, EPX_PHASE_COMPLETE)) return false;
    return true;
  }
  // st.release: signals the ready flag in a peer's window. What this thread stored, or has seen stored through a barrier, comes
  // first: the release is cumulative (PTX, Causality order). The GPU soak notices a relaxed store
  // when it moves many rows (--kinds 48 --busy-tokens 2048).
  __device__ void signal(Epoch* ready_flag) const {
    inject_delay(context_);
    store_release_sys(ready_flag, epoch());
  }
  // Signals one of several ready flags behind one fence_acq_rel_sys() of this thread.
  __device__ void signal_behind_fence(Epoch* ready_flag) const {
    inject_delay(context_);
    store_relaxed_sys(ready_flag, epoch());
  }

  // A test hook: waits at random times.
  __device__ void delay() const {
    inject_delay(context_);
  }
  // Test hooks, always false in libepx. forces_ht_path: a call that makes a plan takes the high-throughput path whatever the
  // number of tokens is, and scatter's receivers take batches of tokens. forces_many_tokens: dispatch_rank_major's senders take
  // each other's tokens and its receivers full batches, and LlWorkPartition splits as for many tiles.
  __device__ bool forces_ht_path() const {
    return alternates(40);
  }
  __device__ bool forces_many_tokens() const {
    return alternates(41);
  }
  // A test hook: returns whether staging is to be overwritten once it has been used.
  __device__ bool scribbles_staging() const {
    return kTestHooks && context_.group.hooks.scribbles_staging;
  }

private:
  // A test hook: returns true in about half of the calls, in others for another bit; the same on all ranks.
  __device__ bool alternates(unsigned bit) const {
    return kTestHooks && context_.group.hooks.alternates_paths && (context_.sequence * 0x9e3779b97f4a7c15u >> bit & 1) != 0;
  }
  // A test hook: returns true after a stall that only the group's failure ends.
  __device__ bool stalls() const {
    if (!kTestHooks || context_.group.hooks.stalls_in != context_.operation) return false;
    if (lane() == 0)
      while (!is_aborted(context(), nanoseconds())) {
      }
    __syncwarp(); // stalls the other lanes too
    return true;
  }

  static constexpr int kShortSpins = 32; // without backoff, for data that is about to be there

  __device__ static PeerDescriptors& descriptors_of_cta() {
    __shared__ PeerDescriptors descriptors;
    return descriptors;
  }
  __device__ static int& warps_sent() {
    __shared__ int warps;
    return warps;
  }

  __device__ bool wait_for_field(int peer, int word, uint64_t& value) const {
    const LlField* const place = &descriptor_at(context_, rank(), peer, context_.sequence)->words[word];
    LlField found{};
    // ld.acquire, although the flag is in the data: what this rank stores into the peer's memory from here on must come after
    // what the peer's earlier kernels have read there, and a relaxed load orders nothing after it (PTX, Causality order). No
    // test notices a relaxed load: hardware makes no store before the branch that it depends on.
#pragma unroll 1
    for (int spin = 0; spin < kShortSpins && found.sequence != context_.sequence; ++spin)
      found = load_packet_acquire_sys(place);
    while (found.sequence != context_.sequence) { // the load of the whole field says whether its value is there
      const auto* const low_half = reinterpret_cast<const Epoch*>(&place->sequence);
      if (!wait_long(context(), low_half, peer, EPX_PHASE_ARRIVE)) return false;
      found = load_packet_acquire_sys(place);
    }
    value = found.value;
    return true;
  }

  // Returns whether this thread has read the sequence number that thread 0 has. All threads of the block call this.
  __device__ bool has_sequence_of_block() const {
    __shared__ uint64_t sequence;
    if (threadIdx.x == 0) sequence = context_.sequence;
    __syncthreads();
    return sequence == context_.sequence;
  }

  // Returns the number of a thread among those that read the descriptors: the first ones are in the last warps, since the first
  // warps often have more to do before the entry barrier, but not in the very last one, which waits for count_beginning().
  __device__ static int descriptor_reader() {
    const int index = static_cast<int>(blockDim.x) - 1 - kWarp - static_cast<int>(threadIdx.x);
    return index >= 0 ? index : index + static_cast<int>(blockDim.x);
  }
  // Thread `index` of `count` threads that read the descriptors of all ranks together. Returns false when the group has failed.
  __device__ bool read_descriptors(const CallDescriptor& descriptor, Fields fields, int index, int count,
                                   bool& same) const {
    // A rank that is late sees the abort record here. All lanes of a warp look, so that the loads of the fields need not wait.
    const bool seems_ended = index < kWarp && may_have_ended(context_);
    bool ok = true;
    const int first_word = fields == Fields::all ? 0 : kNumAgreedWords;
    const int words = fields == Fields::all ? kNumDescriptorWords : kNumLlPathWords;
    for (int i = index; i < num_ranks() * words && ok; i += count)
      ok = read_field(descriptor, i / words, first_word + i % words, same);
    return ok && (!seems_ended || index != 0 || !peers_gave_up(context()));
  }
  // One thread reads one field of a peer's descriptor. `same` becomes false when an agreed field differs from this rank's.
  __device__ bool read_field(const CallDescriptor& mine, int peer, int word, bool& same) const {
    uint64_t value = 0;
    if (!wait_for_field(peer, word, value)) return false;
    PeerDescriptors& descriptors = *descriptors_;
    switch (word * sizeof(uint64_t)) {
    case offsetof(CallDescriptor, num_tokens):
      descriptors.num_tokens[peer] = static_cast<int32_t>(value);
      return true;
    case offsetof(CallDescriptor, plan_id):
      descriptors.plan_id[peer] = value;
      return true;
    case offsetof(CallDescriptor, recv_rows):
      descriptors.recv_rows[peer] = static_cast<int32_t>(min(value, uint64_t{std::numeric_limits<int32_t>::max()}));
      return true;
    case offsetof(CallDescriptor, rows_allocation):
      descriptors.rows_allocation[peer] = static_cast<int32_t>(value);
      return true;
    case offsetof(CallDescriptor, rows_offset):
      descriptors.rows_offset[peer] = static_cast<int64_t>(value);
      return true;
    case offsetof(CallDescriptor, stages_rows):
      descriptors.stages_rows[peer] = value != 0;
      return true;
    default:
      same &= value == reinterpret_cast<const uint64_t*>(&mine)[word];
      return true;
    }
  }

  // Counts the block once all its threads have read `begun`, to which the last block of the grid adds the grid. A block ends
  // the group if those that have begun before it are not all of its grid, or if another kernel has begun since it read `begun`.
  __device__ void count_beginning() const {
    if (threadIdx.x != blockDim.x - 1) return;
    DeviceState& state = *context_.group.state;
    const uint32_t launch = context_.group.launch;
    const unsigned long long found = atomicAdd(&state.beginning, pack_beginning(1, blockIdx.x, 0, launch));
    const uint32_t blocks = blocks_beginning(found);
    const bool is_last = blocks == gridDim.x - 1;
    const uint32_t indices = is_last ? gridDim.x * (gridDim.x - 1) / 2 - blockIdx.x : indices_beginning(found);
    if (blocks >= gridDim.x || found != pack_beginning(blocks, indices, blocks_before_, blocks * launch)) {
      report_overlap(context());
    } else if (is_last) {
      const uint64_t all_blocks = blocks_before_ + gridDim.x;
      store_packet_relaxed_sys(&state.begun, CallsBegun{context_.sequence, all_blocks});
      atomicExch(&state.beginning, pack_beginning(0, 0, all_blocks, 0));
    }
  }
  __device__ uint64_t owner_word() const {
    return pack_owner(context_.sequence, context_.group.launch);
  }

  CallContext context_;
  PeerDescriptors* descriptors_;
  uint64_t blocks_before_; // begun.blocks, as this thread has read it
  bool is_alone_;          // in this thread's view
};

// All threads of the block call this at the end of every kernel that makes a call.
__device__ inline void leave(const DeviceGroup& group) {
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&group.state->seen.blocks_left, 1ull);
}

} // namespace epx::cuda
