// How the ranks' kernels make one call together; the protocol of runtime/stages/host/call_protocol.h on GPUs.
//
//   post      one block tells every peer what this rank offers
//   arrive    every block waits until all peers have. A peer that has arrived at call n has ended call n - 1, so its
//             staging may be written, and its offer tells where else.
//   ...       blocks, or some of their warps, store into the peers' windows. A movement tells of each row as it goes
//             (signal; SignalWarp), and other warps take it up at once (wait_ready). What prepare stores is in
//             words that tell of themselves (LlField and its kin; wait_for_word).
//             With few tokens nothing is worth waiting for other warps, and each arrives on its own (enter_warp).
//   sent      the last sender to get here says so to every peer; only who asks why nothing comes wants to know
//
// Grids are launched cooperatively: all blocks of a grid run at the same time, so a block may wait for a peer whose
// progress needs another block of this grid. Posts lie by parity of the call, because a slow block may still read the
// posts of call n while a peer is in call n + 1; no peer is in n + 2 before this grid has ended. Every wait is bounded,
// and ends early when a poison record is seen, here or in the host's memory; then the grid runs out without touching anything more.
//
// Two calls of a group that nothing orders may overlap on the device. That ends the group: a block does not begin while
// another launch makes the call that would be its own, or while blocks of the call before are still there (is_alone); and
// when two launches get past this at the same moment, their blocks are more than either has (begun).
#pragma once

#include <cstdint>
#include <limits>

#include "base/device/memory_order.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {

// What the ranks offer in the call in progress, as all threads of a block, or of a warp, see it.
struct PeerDescriptors {
  uint64_t plan_id[kMaxDeviceRanks];
  int64_t rows_offset[kMaxDeviceRanks];
  int32_t rows_allocation[kMaxDeviceRanks];
  int32_t num_tokens[kMaxDeviceRanks];
  int32_t recv_rows[kMaxDeviceRanks]; // no more than slots can be numbered
};

class CallSession {
public:
  // Every thread of the block.
  __device__ CallSession(const DeviceGroup& group, epx_operation operation)
      : group_(group), operation_(operation), descriptors_(&descriptors_of_cta()) {
    const CallsBegun begun = group.state->begun; // one sector, two loads under way together, in every thread
    const CallsSeen seen = group.state->seen;
    sequence_ = begun.sequence + 1;
    const bool is_taken = (owned_sequence(seen.owner) == owned_sequence(own_mark())) & (seen.owner != own_mark());
    is_alone_ = (seen.blocks_left >= begun.blocks) & !is_taken; // blocks of this grid may have left already
  }

  __device__ uint64_t sequence() const { return sequence_; }
  // Which half of what lies by parity of the call.
  __device__ int64_t parity() const { return parity_of(sequence_); }
  __device__ Epoch epoch() const { return static_cast<Epoch>(sequence_); }
  __device__ int num_ranks() const { return group_.context.shape.num_ranks; }
  __device__ int rank() const { return group_.context.rank; }

  // After arrive.
  __device__ const PeerDescriptors& descriptors() const { return *descriptors_; }

  // One block, first of all: tells every peer what this rank offers. `offer` is without the plan, which only the device
  // knows.
  __device__ void post(const CallDescriptor& descriptor, uint64_t plan_id) const {
    if (!is_alone_) return;
    if (threadIdx.x == 0) store_relaxed_sys(&group_.state->seen.owner, own_mark());
    inject_delay(); // no fence: what kernels before this one have read and stored is complete when this one begins
    const auto* const words = reinterpret_cast<const uint64_t*>(&descriptor);
    constexpr int kPlan = offsetof(CallDescriptor, plan_id) / sizeof(uint64_t);
    for (int i = threadIdx.x; i < num_ranks() * kNumDescriptorWords; i += blockDim.x) {
      const int word = i % kNumDescriptorWords;
      store_packet_relaxed_sys(&post_at(i / kNumDescriptorWords, rank(), sequence_)->words[word],
                               LlField{word == kPlan ? plan_id : words[word], sequence_});
    }
  }

  // All threads of a block that stores into a peer's window before it arrives. False: another call of this rank is in
  // progress, and the group has failed. The same in all threads.
  __device__ bool is_alone() const {
    if (__syncthreads_and(is_alone_ ? 1 : 0) != 0) return true;
    if (threadIdx.x == 0) copy().report_overlap();
    return false;
  }

  // Every block, with the same offer, once: until all ranks have posted theirs. False: the group has failed; the block
  // returns at once, as do the other blocks. The same in all threads of the block.
  __device__ bool enter(const CallDescriptor& descriptor) const {
    bool same = true;
    if (!is_alone_ && lane() == 0) copy().report_overlap();
    const bool ok =
        is_alone_ && take_in_share(descriptor, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), same);
    if (__syncthreads_and(ok && same ? 1 : 0) != 0) {
      begun();
      return !stalls();
    }
    if (__syncthreads_and(ok ? 1 : 0) != 0 && threadIdx.x == 0) copy().report_disagreement();
    return false;
  }

  // The same for each warp on its own, so that it waits for no other one; begin_ll() comes first. `offers` is the
  // warp's place in shared memory. The same in all lanes.
  __device__ bool enter_warp(const CallDescriptor& descriptor, PeerDescriptors& descriptors) {
    inject_delay();
    descriptors_ = &descriptors;
    bool same = true;
    const bool ok = take_in_share(descriptor, lane(), kWarp, same);
    __syncwarp(); // the lanes see each other's words of `offers`: a vote orders no memory
    if (__all_sync(~0u, ok && same ? 1 : 0) != 0) return !stalls();
    if (__all_sync(~0u, ok ? 1 : 0) != 0 && lane() == 0) copy().report_disagreement();
    return false;
  }
  // All threads of the block. False: as is_alone().
  __device__ bool begin_ll() const {
    inject_delay();
    if (threadIdx.x == 0) warps_sent() = 0;
    if (!is_alone()) return false;
    begun();
    return true;
  }
  // Each of the `warps` warps of the block that send, after its last store to a peer: sent() of the block.
  __device__ void sent_by_warp(int warps) const {
    inject_delay();
    if (lane() == 0 && atomicAdd(&warps_sent(), 1) == warps - 1) sent(gridDim.x);
  }

  // All lanes: the next of 0, 1, ..., claims - 1; no two warps of this rank's grid get the same. So many are there in all.
  __device__ int64_t next_send_tile(int64_t tiles) const { return take_tile(group_.state->send_tiles_taken, tiles); }
  __device__ int64_t next_receive_tile(int64_t tiles) const { return take_tile(group_.state->receive_tiles_taken, tiles); }

  // Every sender, or whoever tells for some, after its last store to a peer; there are `senders` in the grid. One thread of
  // each.
  __device__ void sent(unsigned senders) const {
    if (atomicInc(&group_.state->senders_done, senders - 1) != senders - 1) return;
    for (int peer = 0; peer < num_ranks(); ++peer)
      store_relaxed_sys(&flag_at(peer, group_.context.layout.complete, rank())->value, sequence_);
  }

  // For one thread: until *place, in this rank's window or in its own memory, is of this call. `peer` stores it. False:
  // the group has failed.
  template <typename Word>
  __device__ bool wait_for_word(const Word* place, Word& word, int peer) const {
#pragma unroll 1
    for (int spin = 0; spin < kShortSpins; ++spin) {
      word = load_packet_relaxed_sys(place);
      if (word.epoch == epoch()) return true;
    }
    if (!copy().wait_long(&place->epoch, peer, EPX_PHASE_COMPLETE)) return false;
    word = load_packet_relaxed_sys(place);
    return true;
  }

  // For one thread: until `peer` has told by *arrival, in this rank's window, that what goes with it has come in this call.
  // False: the group has failed.
  __device__ bool wait_ready(const Epoch* arrival, int peer) const {
    inject_delay();
    // Acquire: what the peer stored before it told is read after (PTX, Release and acquire patterns), and not from a line that
    // came into this multiprocessor's L1 cache with a neighbour. That takes the cache with it: a long wait makes none. No test
    // notices a relaxed one.
    while (load_acquire_sys(arrival) != epoch())
      if (!copy().wait_long(arrival, peer, EPX_PHASE_COMPLETE)) return false;
    return true;
  }
  // Tells the window's owner so. What this thread stored, or has seen stored through a barrier, comes first: the release
  // is cumulative (PTX, Causality order). A soak of many rows notices a relaxed one (--kinds 48 --busy-tokens 2048).
  __device__ void signal(Epoch* arrival) const {
    inject_delay();
    store_release_sys(arrival, epoch());
  }
  // The same for several: behind one fence_acq_rel_sys() of this thread.
  __device__ void signal_behind_fence(Epoch* arrival) const {
    inject_delay();
    store_relaxed_sys(arrival, epoch());
  }

  // For what is not inlined: an object whose address is known elsewhere has to lie in memory, and its user waits for that.
  __device__ CallSession copy() const {
    return *this;
  }

  // One thread of its warp, on a copy(). `count`: as epx_group_report.event_counts; values and header as EventRecord says.
  __device__ __noinline__ void record_event(epx_event_kind kind, int64_t count, int64_t v0, int64_t v1 = 0, int64_t v2 = 0,
                                            int64_t v3 = 0, int64_t v4 = 0, const HandleHeader* header = nullptr) const {
    DeviceState& state = *group_.state;
    while (atomicExch(&state.records_event, 1u) != 0) // prepare may have two kinds to report, from two blocks
      backoff(kBackoffNs);
    // Acquire pattern with the exchange: what the thread before has stored in `state` is seen (PTX, Release and acquire patterns).
    // No test notices that it or its other side is missing.
    fence_acq_rel_sys();
    const uint64_t total = state.event_counts[kind] += static_cast<unsigned long long>(count);
    if (has_place_for_event()) {
      EventRecord& event = group_.record->events[state.num_events % StatusRecord::kEvents];
      event.kind = kind;
      event.operation = operation_;
      event.sequence = sequence_;
      event.total = total;
      const int64_t values[5] = {v0, v1, v2, v3, v4};
      for (int i = 0; i < 5; ++i)
        event.values[i] = values[i];
      if (header != nullptr) event.header = *header;
      // Release: the host reads the event once it has acquired the number (PTX, Release and acquire patterns). Posted writes reach
      // an x86 host in order, so that no test there notices a relaxed one.
      store_release_sys(&group_.record->num_events, ++state.num_events);
    }
    store_release_sys(&group_.record->event_counts[kind], total); // after its record: who sees the count has the record
    fence_acq_rel_sys();                                          // release pattern with the next exchange, likewise
    atomicExch(&state.records_event, 0u);
  }

  // Tests: whether prepare takes few tokens and routes for many.
  __device__ bool takes_ht_path() const {
    return kTestHooks && group_.hooks.alternates_paths && (sequence_ * 0x9e3779b97f4a7c15u >> 40 & 1) != 0;
  }
  // Tests: whether what lies in staging is to be overwritten once it has been used.
  __device__ bool scribbles_staging() const {
    return kTestHooks && group_.hooks.scribbles_staging;
  }

private:
  // Tests: takes its time, now and then.
  __device__ void inject_delay() const {
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
    if (lane() == 0)
      while (!copy().ends_early(nanoseconds())) {
      }
    __syncwarp(); // the other lanes stand still too
    return true;
  }

  static constexpr uint64_t kSlowNs = 1'000'000;   // a wait longer than this tells peers about itself, and asks the host
  static constexpr uint64_t kAskEveryNs = 100'000; // the host
  static constexpr uint32_t kSpinsPerLook = 256;
  static constexpr int kShortSpins = 32; // when what is waited for is as good as there
  static constexpr unsigned kBackoffNs = 200;

  __device__ static PeerDescriptors& descriptors_of_cta() {
    __shared__ PeerDescriptors descriptors;
    return descriptors;
  }
  __device__ static int& warps_sent() {
    __shared__ int warps;
    return warps;
  }

  // The host keeps the first event since it last looked, so a record that it has not read is never overwritten.
  __device__ bool has_place_for_event() const {
    DeviceState& state = *group_.state;
    if (state.num_events - state.events_taken < StatusRecord::kEvents) return true;
    state.events_taken = load_acquire_sys(&group_.record->events_taken);
    return state.num_events - state.events_taken < StatusRecord::kEvents;
  }

  __device__ int64_t take_tile(unsigned long long& taken, int64_t tiles) const {
    inject_delay();
    int64_t number = 0;
    if (lane() == 0) {
      number = static_cast<int64_t>(atomicAdd(&taken, 1ull));
      if (number == tiles - 1) atomicExch(&taken, 0ull); // for the next call: nobody claims any more
    }
    return from_lane(number, 0);
  }

  __device__ static int64_t parity_of(uint64_t sequence) {
    return static_cast<int64_t>(sequence & 1);
  }
  __device__ LlCallDescriptor* post_at(int owner, int source, uint64_t sequence) const {
    const int64_t index = parity_of(sequence) * num_ranks() + source;
    return group_.window().at<LlCallDescriptor>(owner, group_.context.layout.posts.offset) + index;
  }

  __device__ bool wait_for_post(int peer, int word, uint64_t& value) const {
    const LlField* const place = &post_at(rank(), peer, sequence_)->words[word];
    LlField found{};
    // Acquire, though the word tells all: what is stored into the peer's memory from here on comes after what its kernels before
    // the post have read there, and a relaxed load orders nothing after it (PTX, Causality order). No test notices: hardware makes
    // no store before the branch that it hangs on.
#pragma unroll 1
    for (int spin = 0; spin < kShortSpins && found.sequence != sequence_; ++spin)
      found = load_packet_acquire_sys(place);
    if (found.sequence != sequence_) {
      if (!copy().wait_long(low_half(&place->sequence), peer, EPX_PHASE_ARRIVE)) return false;
      found = load_packet_acquire_sys(place);
    }
    value = found.value;
    return true;
  }
  __device__ static const Epoch* low_half(const uint64_t* word) {
    return reinterpret_cast<const Epoch*>(word);
  }

  // One of `count` threads that take in all peers' posts together. False: the group has failed.
  __device__ bool take_in_share(const CallDescriptor& descriptor, int index, int count, bool& same) const {
    bool ok = true;
    if (index == count - 1) ok = !may_have_ended() || !copy().peers_gave_up(); // a rank that comes late finds out here
    for (int i = index; i < num_ranks() * kNumDescriptorWords && ok; i += count)
      ok = take_in(descriptor, i / kNumDescriptorWords, i % kNumDescriptorWords, same);
    return ok;
  }
  // One thread, one word of a peer's post. `same` becomes false when it is a term that differs from this rank's.
  __device__ bool take_in(const CallDescriptor& mine, int peer, int word, bool& same) const {
    uint64_t value = 0;
    if (!wait_for_post(peer, word, value)) return false;
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
    default:
      same &= value == reinterpret_cast<const uint64_t*>(&mine)[word];
      return true;
    }
  }

  // Every block once all its threads know the call's number: the last one makes it the last call begun. Blocks of two grids
  // that make the same call are too many for either, and whoever finds that ends the group.
  __device__ void begun() const {
    if (threadIdx.x != blockDim.x - 1) return;
    DeviceState& state = *group_.state;
    const unsigned long long entered = atomicAdd(&state.entered, 1ull);
    const auto block = static_cast<uint32_t>(entered);
    if (static_cast<Epoch>(entered >> 32) != static_cast<Epoch>(sequence_ - 1) || block >= gridDim.x) {
      copy().report_overlap();
    } else if (block == gridDim.x - 1) {
      store_packet_relaxed_sys(&state.begun, CallsBegun{sequence_, state.begun.blocks + gridDim.x});
      atomicExch(&state.entered, static_cast<unsigned long long>(sequence_) << 32);
    }
  }
  __device__ uint64_t own_mark() const {
    return pack_owner(sequence_, group_.launch);
  }
  // Another call of this rank is in progress.
  __device__ __noinline__ void report_overlap() const {
    if (peers_gave_up()) return;
    report_abort(abort_all(AbortRecord{EPX_ERROR_OUT_OF_SEQUENCE, operation_, rank(), sequence_}));
  }

  __device__ Flag* flag_at(int owner, const Region& region, int source) const {
    return group_.window().at<Flag>(owner, region.offset) + source;
  }

  // The last call that `peer` has reached in this phase, as it has told `owner`. Relaxed, as are the words about who waits for
  // whom: each says all by itself, and nothing else is read because of it.
  __device__ uint64_t progress_signaled(int owner, int peer, epx_phase phase, uint64_t sequence) const {
    if (phase == EPX_PHASE_COMPLETE) return load_relaxed_sys(&flag_at(owner, group_.context.layout.complete, peer)->value);
    return load_relaxed_sys(&post_at(owner, peer, sequence)->words[0].sequence);
  }

  __device__ uint64_t last_entry_signaled(int peer) const {
    if (peer < 0 || peer >= num_ranks()) return 0; // a record that a host has stored may say anything
    const uint64_t even = progress_signaled(rank(), peer, EPX_PHASE_ARRIVE, 0);
    const uint64_t odd = progress_signaled(rank(), peer, EPX_PHASE_ARRIVE, 1);
    return even > odd ? even : odd;
  }

  // Until *place is the call's number, which `peer` stores; apart from where nobody has to wait.
  __device__ __noinline__ bool wait_long(const Epoch* place, int peer, epx_phase phase) const {
    uint64_t begin = 0;
    bool signaled = false;
    for (uint32_t spin = 1; load_relaxed_sys(place) != epoch(); ++spin) {
      backoff(kBackoffNs); // many warps wait at a time, beside others that work
      if (spin % kSpinsPerLook != 0) continue;
      if (peers_gave_up()) return false;
      const uint64_t now = nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin < kSlowNs) continue;
      // Again and again: another warp that waits no more has taken the word back.
      store_relaxed_sys(&flag_at(rank(), group_.context.layout.waiting, 0)->value, pack(Waiting{sequence_, phase, peer}));
      signaled = true;
      if (ends_early(now)) return false;
      if (now - begin > group_.timeout_ns && load_relaxed_sys(place) != epoch()) {
        time_out(peer, phase);
        return false;
      }
    }
    if (signaled) store_relaxed_sys(&flag_at(rank(), group_.context.layout.waiting, 0)->value, 0);
    return true;
  }

  // Whether another block, a peer or the host has ended the group; reports it if nobody has.
  __device__ __noinline__ bool ends_early(uint64_t now) const {
    if (peers_gave_up()) return true;
    const uint64_t record = host_abort_record(now);
    if (record == 0) return false;
    report_abort(abort_all(unpack_abort_record(record)));
    return true;
  }
  // One thread asks at a time, and not often: loads from the host's memory take long, and many of them hold up the stores
  // of the whole GPU.
  __device__ uint64_t host_abort_record(uint64_t now) const {
    const uint64_t asked = load_relaxed_sys(&group_.state->asked_host_at);
    if (now < asked + kAskEveryNs) return 0;
    if (compare_and_swap_sys(&group_.state->asked_host_at, asked, now) != asked) return 0;
    return load_relaxed_sys(group_.host_abort_record);
  }
  __device__ bool may_have_ended() const {
    const uint32_t failed = load_relaxed_sys(&group_.state->failed); // the two loads are under way together
    return load_relaxed_sys(&abort_record_here()->value) != 0 || failed != 0;
  }
  __device__ __noinline__ bool peers_gave_up() const {
    if (load_relaxed_sys(&group_.state->failed) != 0) return true;
    const uint64_t abort_record = load_relaxed_sys(&abort_record_here()->value);
    if (abort_record == 0) return false;
    report_abort(abort_record);
    return true;
  }
  __device__ Flag* abort_record_here() const {
    return flag_at(rank(), group_.context.layout.abort_record, 0);
  }

  // `peer` has not come to `phase` in time; perhaps others neither.
  __device__ __noinline__ void time_out(int peer, epx_phase phase) const {
    if (peers_gave_up()) return;
    uint64_t missing = uint64_t{1} << peer;
    for (int other = 0; other < num_ranks(); ++other)
      if (progress_signaled(rank(), other, phase, sequence_) < sequence_) missing |= uint64_t{1} << other;
    const int culprit = find_culprit(lowest_bit(missing));
    const uint64_t verdict = abort_all(AbortRecord{EPX_ERROR_TIMEOUT, operation_, culprit, sequence_, phase});
    if (unpack_abort_record(verdict).culprit != culprit) {
      report_abort(verdict);
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
      const uint64_t word = load_relaxed_sys(&flag_at(culprit, group_.context.layout.waiting, 0)->value);
      if (word == 0) break;
      const Waiting waiting = unpack_waiting(word);
      if (!is_sound(waiting, num_ranks()) || waiting.peer == rank() ||
          progress_signaled(culprit, waiting.peer, waiting.phase, waiting.sequence) >= waiting.sequence)
        break;
      culprit = waiting.peer;
    }
    return culprit;
  }

  // Returns the record that stands: rank 0's window decides, so that all ranks name the same culprit.
  __device__ uint64_t abort_all(const AbortRecord& abort_record) const {
    uint64_t verdict = pack(abort_record);
    for (int peer = 0; peer < num_ranks(); ++peer) {
      const uint64_t found = compare_and_swap_sys(&flag_at(peer, group_.context.layout.abort_record, 0)->value, 0, verdict);
      if (found != 0 && peer == 0 && is_sound(unpack_abort_record(found), num_ranks())) verdict = found;
    }
    return verdict;
  }

  __device__ void report_abort(uint64_t abort_record) const {
    if (atomicExch(&group_.state->failed, 1u) != 0) return;
    FailureRecord& failure = group_.record->failure;
    failure.status = unpack_abort_record(abort_record).status;
    failure.phase = EPX_PHASE_NONE;
    failure.abort_record = abort_record; // damaged or not: the host puts it into words
    failure.culprit =
        is_sound(unpack_abort_record(abort_record), num_ranks()) ? unpack_abort_record(abort_record).culprit : rank();
    publish(failure, failure.culprit);
  }

  __device__ void publish(FailureRecord& failure, int culprit) const {
    failure.operation = operation_;
    failure.sequence = sequence_;
    failure.culprit_arrived_at = last_entry_signaled(culprit);
    // Release: the host reads the record once it has acquired this; as in record_event.
    store_release_sys(&group_.record->failed, 1);
  }

  // The ranks' terms differ: all of them see the same offers and fail alike. One thread of each block.
  __device__ __noinline__ void report_disagreement() const {
    if (atomicExch(&group_.state->failed, 1u) != 0) return;
    FailureRecord& failure = group_.record->failure;
    failure.status = EPX_ERROR_MISMATCH; // or OUT_OF_SEQUENCE: the host looks at the offers
    failure.culprit = -1;
    for (int peer = 0; peer < num_ranks(); ++peer)
      for (int word = 0; word < kNumDescriptorWords; ++word)
        reinterpret_cast<uint64_t*>(&failure.descriptors[peer])[word] = post_at(rank(), peer, sequence_)->words[word].value;
    publish(failure, 0);
  }

  const DeviceGroup& group_;
  epx_operation operation_;
  uint64_t sequence_ = 0;
  PeerDescriptors* descriptors_;
  bool is_alone_; // as this thread has seen it
};

// All threads of the block, as the last thing in every kernel that makes a call.
__device__ inline void leave(const DeviceGroup& group) {
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&group.state->seen.blocks_left, 1ull);
}

} // namespace epx::cuda
