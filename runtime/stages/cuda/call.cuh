// How the ranks' kernels make one call together; the protocol of runtime/stages/host/call_protocol.h on GPUs.
//
//   arrive    one block tells every peer what this rank offers; every block waits until all peers have. A peer that has
//             arrived at call n has ended call n - 1, so its staging may be written, and its offer tells where else.
//   ...       blocks, or some of their warps, store into the peers' windows; a movement tells of each token as it goes
//             (tell_arrival), and other warps take it up at once (wait_for_arrival)
//   sent      the last sender to get here tells every peer that all of this rank's data is in place
//   wait(COMPLETE)  prepare: every block waits until all peers have said so
//   end       the last block to get here advances the sequence number
//
// Grids are launched cooperatively: all blocks of a grid run at the same time, so a block may wait for a peer whose progress
// needs another block of this grid. Posts lie by parity of the call, because a slow block may still read the posts of call n
// while a peer is in call n + 1; no peer is in n + 2 before this grid has ended. Every wait is bounded, and ends early when a
// poison record or the host's abort is seen; then the grid runs out without touching anything more.
#pragma once

#include <cstdint>

#include "runtime/base/device/memory_order.cuh"
#include "runtime/stages/cuda/device_group.h"

namespace epx::cuda {

class Call {
public:
  // Every thread of the block.
  __device__ Call(const DeviceGroup& group, epx_operation operation)
      : group_(group), operation_(operation), sequence_(group.state->sequence + 1) {}

  __device__ uint64_t sequence() const { return sequence_; }
  __device__ int num_ranks() const { return group_.context.shape.num_ranks; }
  __device__ int rank() const { return group_.context.rank; }

  // What a rank offers in this call. After arrive.
  __device__ const CallPost& offer_of(int peer) const { return *post_at(rank(), peer); }

  // False: the group has failed; the block returns at once, as do the other blocks. The same in all threads of the block,
  // here and in what follows. One block posts the offer; what it stored before, or has seen stored, comes first.
  __device__ bool arrive(CallPost offer, bool posts) const {
    const bool has_failed = threadIdx.x == 0 && peers_gave_up(); // a rank that comes late finds out here
    if (__syncthreads_or(has_failed ? 1 : 0) != 0) return false;
    dawdle();
    if (posts) {
      offer.operation = operation_;
      for (int peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
        CallPost* const post = post_at(peer, rank());
        const auto* from = reinterpret_cast<const uint64_t*>(&offer);
        auto* to = reinterpret_cast<uint64_t*>(post);
        for (size_t word = 0; word < offsetof(CallPost, sequence) / sizeof(uint64_t); ++word)
          to[word] = from[word];
        fence_acq_rel_sys(); // the block's stores before the barrier come with the post
        store_release_sys(&post->sequence, sequence_);
      }
    }
    return wait(EPX_PHASE_ARRIVE) && same_terms() && !stalls();
  }

  // Every block, once, after its last store to a peer.
  __device__ void sent() const {
    __shared__ bool is_last;
    __syncthreads();
    if (threadIdx.x == 0) {
      fence_acq_rel_sys();
      is_last = atomicAdd(&group_.state->blocks_sent, 1u) == gridDim.x - 1;
      if (is_last) group_.state->blocks_sent = 0;
      fence_acq_rel_sys();
    }
    __syncthreads();
    if (!is_last) return;
    for (int peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x)
      store_release_sys(&flag_at(peer, group_.context.layout.complete, rank())->value, sequence_);
  }

  // The same for senders that are warps; `num_warps` of the grid.
  __device__ void sent_by_warp(unsigned num_warps) const {
    const unsigned lane = threadIdx.x % 32;
    unsigned is_last = 0;
    __syncwarp();
    if (lane == 0) {
      fence_acq_rel_sys();
      is_last = atomicAdd(&group_.state->senders_done, 1u) == num_warps - 1 ? 1 : 0;
      if (is_last != 0) group_.state->senders_done = 0;
      fence_acq_rel_sys();
    }
    if (__shfl_sync(~0u, is_last, 0) == 0) return;
    for (int peer = static_cast<int>(lane); peer < num_ranks(); peer += 32)
      store_release_sys(&flag_at(peer, group_.context.layout.complete, rank())->value, sequence_);
  }

  __device__ bool wait(epx_phase phase) const {
    bool ok = true;
    for (int peer = threadIdx.x; peer < num_ranks() && ok; peer += blockDim.x)
      ok = wait_until([&] { return progress_told(rank(), peer, phase, sequence_) >= sequence_; }, peer, phase);
    return __syncthreads_and(ok ? 1 : 0) != 0;
  }

  // For one thread: until `peer` has told by *arrival, in this rank's window, that what goes with it has come in this call.
  // False: the group has failed.
  __device__ bool wait_for_arrival(const uint64_t* arrival, int peer) const {
    dawdle();
    return wait_until( // an acquire load takes the cache with it, so that one is made only when there is something to see
        [&] { return load_relaxed_sys(arrival) >= sequence_ && load_acquire_sys(arrival) >= sequence_; }, peer,
        EPX_PHASE_COMPLETE);
  }
  // Tells the window's owner so. What this thread stored, or has seen stored through a barrier, comes first.
  __device__ void tell_arrival(uint64_t* arrival) const {
    dawdle();
    store_release_sys(arrival, sequence_);
  }

  // Every block, last.
  __device__ void end() const {
    __syncthreads();
    if (threadIdx.x != 0) return;
    fence_acq_rel_gpu();
    if (atomicAdd(&group_.state->blocks_ended, 1u) != gridDim.x - 1) return;
    group_.state->blocks_ended = 0;
    group_.state->sequence = sequence_;
  }

  // One thread of the grid. values and header as EventRecord says.
  __device__ void record_event(epx_event_kind kind, int64_t v0, int64_t v1 = 0, int64_t v2 = 0, int64_t v3 = 0,
                               int64_t v4 = 0, const HandleHeader* header = nullptr) const {
    const uint64_t number = group_.state->num_events++;
    EventRecord& event = group_.record->events[number % StatusRecord::kEvents];
    event.kind = kind;
    event.operation = operation_;
    event.sequence = sequence_;
    const int64_t values[5] = {v0, v1, v2, v3, v4};
    for (int i = 0; i < 5; ++i)
      event.values[i] = values[i];
    if (header != nullptr) event.header = *header;
    store_release_sys(&group_.record->num_events, number + 1);
  }

  // Tests: whether what lies in staging is to be overwritten once it has been used.
  __device__ bool poisons_staging() const { return kTestHooks && group_.hooks.poisons_staging; }

private:
  // Tests: takes its time, now and then.
  __device__ void dawdle() const {
    if (!kTestHooks || group_.hooks.max_delay_ns == 0) return;
    const uint64_t begin = nanoseconds();
    uint64_t random = (begin ^ sequence_ << 20 ^ blockIdx.x << 10 ^ threadIdx.x) * 0x9e3779b97f4a7c15u;
    random ^= random >> 29;
    if (random % 8 != 0) return;
    while (nanoseconds() - begin < random / 8 % group_.hooks.max_delay_ns) {
    }
  }
  // Tests: true after a stay that only the group's failure ends.
  __device__ bool stalls() const {
    if (!kTestHooks || group_.hooks.stalls_in != operation_) return false;
    if (threadIdx.x == 0)
      while (!ends_early()) {
      }
    __syncthreads();
    return true;
  }

  static constexpr uint64_t kSlowNs = 1'000'000; // a wait longer than this tells peers about itself
  static constexpr uint32_t kSpinsPerLook = 256; // a look at the host's memory takes as long as several spins

  __device__ CallPost* post_at(int owner, int source) const {
    const int64_t index = static_cast<int64_t>(sequence_ & 1) * num_ranks() + source;
    return group_.window().at<CallPost>(owner, group_.context.layout.posts.offset) + index;
  }
  __device__ Flag* flag_at(int owner, const Region& region, int source) const {
    return group_.window().at<Flag>(owner, region.offset) + source;
  }

  // The last call that `peer` has reached in this phase, as it has told `owner`.
  __device__ uint64_t progress_told(int owner, int peer, epx_phase phase, uint64_t sequence) const {
    if (phase == EPX_PHASE_COMPLETE) return load_acquire_sys(&flag_at(owner, group_.context.layout.complete, peer)->value);
    const int64_t index = static_cast<int64_t>(sequence & 1) * num_ranks() + peer;
    const CallPost* post = group_.window().at<CallPost>(owner, group_.context.layout.posts.offset) + index;
    return load_acquire_sys(&post->sequence);
  }

  __device__ uint64_t last_arrival_told(int peer) const {
    const uint64_t even = progress_told(rank(), peer, EPX_PHASE_ARRIVE, 0);
    const uint64_t odd = progress_told(rank(), peer, EPX_PHASE_ARRIVE, 1);
    return even > odd ? even : odd;
  }

  template <typename Done>
  __device__ bool wait_until(const Done& is_done, int peer, epx_phase phase) const {
    uint64_t begin = 0;
    bool told = false;
    for (uint32_t spin = 1; !is_done(); ++spin) {
      if (spin % kSpinsPerLook != 0) continue;
      if (ends_early()) return false;
      const uint64_t now = nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin > kSlowNs) { // again and again: another warp that waits no more has taken the word back
        store_release_sys(&flag_at(rank(), group_.context.layout.waiting, 0)->value, pack(Waiting{sequence_, phase, peer}));
        told = true;
      }
      if (now - begin > group_.timeout_ns && !is_done()) {
        time_out(peer, phase);
        return false;
      }
    }
    if (told) store_release_sys(&flag_at(rank(), group_.context.layout.waiting, 0)->value, 0);
    return true;
  }

  // Whether another block, a peer or the host has ended the group; reports it if nobody has.
  __device__ __noinline__ bool ends_early() const {
    if (peers_gave_up()) return true;
    if (load_relaxed_sys(&group_.record->aborted) == 0) return false;
    report_poison(poison_all(Poison{EPX_ERROR_ABORTED, EPX_OP_NONE, rank(), 0}));
    return true;
  }
  // The same without a look at the host's memory, which takes long.
  __device__ __noinline__ bool peers_gave_up() const {
    if (load_acquire_gpu(&group_.state->failed) != 0) return true;
    const uint64_t poison = load_acquire_sys(&flag_at(rank(), group_.context.layout.poison, 0)->value);
    if (poison == 0) return false;
    report_poison(poison);
    return true;
  }

  // `peer` has not come to `phase` in time; perhaps others neither.
  __device__ __noinline__ void time_out(int peer, epx_phase phase) const {
    if (ends_early()) return;
    uint64_t missing = uint64_t{1} << peer;
    for (int other = 0; other < num_ranks(); ++other)
      if (progress_told(rank(), other, phase, sequence_) < sequence_) missing |= uint64_t{1} << other;
    const int culprit = find_culprit(__ffsll(static_cast<long long>(missing)) - 1);
    const uint64_t verdict = poison_all(Poison{EPX_ERROR_TIMEOUT, operation_, culprit, sequence_});
    if (unpack_poison(verdict).culprit != culprit) {
      report_poison(verdict);
      return;
    }
    if (atomicExch(&group_.state->failed, 1u) != 0) return;
    FailureRecord& failure = group_.record->failure;
    failure.status = EPX_ERROR_TIMEOUT;
    failure.phase = phase;
    failure.culprit = culprit;
    failure.missing = missing;
    publish(failure, culprit);
  }

  // Follows who waits for whom from a rank that is missing to one that waits for nobody: the culprit, not a victim.
  __device__ int find_culprit(int missing) const {
    int culprit = missing;
    for (int step = 0; step < num_ranks(); ++step) {
      const uint64_t word = load_acquire_sys(&flag_at(culprit, group_.context.layout.waiting, 0)->value);
      if (word == 0) break;
      const Waiting waiting = unpack_waiting(word);
      if (waiting.peer == rank() ||
          progress_told(culprit, waiting.peer, waiting.phase, waiting.sequence) >= waiting.sequence)
        break;
      culprit = waiting.peer;
    }
    return culprit;
  }

  // Returns the record that stands: rank 0's window decides, so that all ranks name the same culprit.
  __device__ uint64_t poison_all(const Poison& poison) const {
    uint64_t verdict = pack(poison);
    for (int peer = 0; peer < num_ranks(); ++peer) {
      const uint64_t found = compare_and_swap_sys(&flag_at(peer, group_.context.layout.poison, 0)->value, 0, verdict);
      if (found != 0 && peer == 0) verdict = found;
    }
    return verdict;
  }

  __device__ void report_poison(uint64_t poison) const {
    if (atomicExch(&group_.state->failed, 1u) != 0) return;
    FailureRecord& failure = group_.record->failure;
    failure.status = unpack_poison(poison).status;
    failure.phase = EPX_PHASE_NONE;
    failure.culprit = unpack_poison(poison).culprit;
    failure.poison = poison;
    publish(failure, failure.culprit);
  }

  __device__ void publish(FailureRecord& failure, int culprit) const {
    failure.operation = operation_;
    failure.sequence = sequence_;
    failure.culprit_arrived_at = last_arrival_told(culprit);
    store_release_sys(&group_.record->failed, 1);
  }

  // Whether all ranks offer what they must agree on. All of them see the same offers and fail alike.
  __device__ bool same_terms() const {
    bool same = true;
    const CallPost& first = offer_of(0);
    for (int peer = threadIdx.x; peer < num_ranks(); peer += blockDim.x) {
      const CallPost& other = offer_of(peer);
      same &= other.operation == first.operation && other.top_k == first.top_k && other.alignment == first.alignment &&
              other.hidden == first.hidden && other.dtype == first.dtype && other.weights == first.weights &&
              other.sidecar_bytes == first.sidecar_bytes;
    }
    if (__syncthreads_and(same ? 1 : 0) != 0) return true;
    if (threadIdx.x == 0 && atomicExch(&group_.state->failed, 1u) == 0) {
      FailureRecord& failure = group_.record->failure;
      failure.status = EPX_ERROR_MISMATCH; // or OUT_OF_SEQUENCE: the host looks at the offers
      failure.culprit = -1;
      for (int peer = 0; peer < num_ranks(); ++peer)
        failure.offers[peer] = offer_of(peer);
      publish(failure, 0);
    }
    return false;
  }

  const DeviceGroup& group_;
  epx_operation operation_;
  uint64_t sequence_;
};

} // namespace epx::cuda
