// The call session: how the kernels of all ranks make one call together. It is the protocol of
// runtime/stages/host/call_protocol.h on GPUs.
//
//   post      One block stores this rank's call descriptor in the window of every peer.
//   enter     The entry barrier: every block waits until the descriptors of all peers are there. A peer that has posted call n
//             has ended call n - 1, so its staging may be written, and its descriptor says where else. On the low-latency (LL)
//             path each warp enters by itself (enter_warp), because waiting for the other warps would take too long.
//   ...       Blocks, or some of their warps, store into the windows of the peers. A movement signals a ready flag for each row
//             (signal; SignalWarp), and other warps wait for it (wait_ready). prepare stores LL packets (LlPacket8 and others),
//             which carry their flag with the data (wait_for_word).
//   sent      The last sender of the grid stores this in the window of every peer. Only a rank whose wait times out reads it,
//             to find the culprit.
//
// Grids are launched cooperatively: all blocks of a grid are resident at the same time, so a block may wait for a peer whose
// progress needs another block of this grid. Descriptors are double-buffered by the parity of the call, because a slow block
// may still read those of call n while a peer is in call n + 1; no peer is in n + 2 before this grid has ended. Every wait is
// bounded, and ends when an abort record is seen, in this rank's window or in host memory; then the kernel ends without
// touching anything more.
//
// Two calls of a group that nothing orders may overlap on the device, which ends the group. A block does not begin while
// another launch makes the call that would be its own, or while blocks of the call before are still there (is_alone); and when
// two launches get past this at the same moment, their blocks are more than either grid has (count_entered).
#pragma once

#include <cstdint>
#include <limits>

#include "base/device/memory_order.cuh"
#include "base/device/warp.cuh"
#include "runtime/stages/cuda/protocol/device_group.h"

namespace epx::cuda {

// The ranks' call descriptors in the call in progress, in shared memory: one copy per block, or per warp on the LL path.
struct PeerDescriptors {
  uint64_t plan_id[kMaxDeviceRanks];
  int64_t rows_offset[kMaxDeviceRanks];
  int32_t rows_allocation[kMaxDeviceRanks];
  int32_t num_tokens[kMaxDeviceRanks];
  int32_t recv_rows[kMaxDeviceRanks]; // clamped to 2^31 - 1, since slots are int32
};

class CallSession {
public:
  // Every thread of the block constructs one.
  __device__ CallSession(const DeviceGroup& group, epx_operation operation)
      : group_(group), operation_(operation), descriptors_(&descriptors_of_cta()) {
    const CallsBegun begun = group.state->begun; // every thread has two loads of one sector in flight together
    const CallsSeen seen = group.state->seen;
    sequence_ = begun.sequence + 1;
    const bool is_taken = (owned_sequence(seen.owner) == owned_sequence(owner_word())) & (seen.owner != owner_word());
    is_alone_ = (seen.blocks_left >= begun.blocks) & !is_taken; // >=, because blocks of this grid may have left already
  }

  __device__ uint64_t sequence() const { return sequence_; }
  // Selects the half of what is double-buffered in the window.
  __device__ int64_t parity() const { return parity_of(sequence_); }
  __device__ Epoch epoch() const { return static_cast<Epoch>(sequence_); }
  __device__ int num_ranks() const { return group_.context.shape.num_ranks; }
  __device__ int rank() const { return group_.context.rank; }

  // The descriptors are valid after enter() or enter_warp().
  __device__ const PeerDescriptors& descriptors() const { return *descriptors_; }

  // One block calls this before anything else: it stores the descriptor in the window of every peer. plan_id comes separately,
  // since only the device knows it.
  __device__ void post(const CallDescriptor& descriptor, uint64_t plan_id) const {
    if (!is_alone_) return;
    if (threadIdx.x == 0) store_relaxed_sys(&group_.state->seen.owner, owner_word());
    inject_delay(); // no fence is needed: the loads and stores of the kernels before this one are complete when it begins
    const auto* const words = reinterpret_cast<const uint64_t*>(&descriptor);
    constexpr int kPlan = offsetof(CallDescriptor, plan_id) / sizeof(uint64_t);
    for (int i = threadIdx.x; i < num_ranks() * kNumDescriptorWords; i += blockDim.x) {
      const int word = i % kNumDescriptorWords;
      store_packet_relaxed_sys(&descriptor_at(i / kNumDescriptorWords, rank(), sequence_)->words[word],
                               LlField{word == kPlan ? plan_id : words[word], sequence_});
    }
  }

  // All threads of a block call this if the block stores into a peer's window before enter(). Returns false, the same in all
  // threads, when another call of this rank is in progress; the group has then failed.
  __device__ bool is_alone() const {
    if (__syncthreads_and(is_alone_ ? 1 : 0) != 0) return true;
    if (threadIdx.x == 0) copy().report_overlap();
    return false;
  }

  // The entry barrier: every block calls this once, with the descriptor that was posted, and waits until all ranks have posted
  // theirs. Returns false, the same in all threads, when the group has failed; every block of the grid then returns at once.
  __device__ bool enter(const CallDescriptor& descriptor) const {
    bool same = true;
    if (!is_alone_ && lane() == 0) copy().report_overlap();
    const bool ok =
        is_alone_ && read_descriptors(descriptor, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), same);
    if (__syncthreads_and(ok && same ? 1 : 0) != 0) {
      count_entered();
      return !stalls();
    }
    if (__syncthreads_and(ok ? 1 : 0) != 0 && threadIdx.x == 0) copy().report_disagreement();
    return false;
  }

  // The entry barrier of one warp, so that it waits for no other warp; begin_ll() comes first. `descriptors` lies in shared
  // memory and belongs to the warp. The result is the same in all lanes.
  __device__ bool enter_warp(const CallDescriptor& descriptor, PeerDescriptors& descriptors) {
    inject_delay();
    descriptors_ = &descriptors;
    bool same = true;
    const bool ok = read_descriptors(descriptor, lane(), kWarp, same);
    __syncwarp(); // makes each lane's stores to `descriptors` visible to the others: a vote orders no memory
    if (__all_sync(~0u, ok && same ? 1 : 0) != 0) return !stalls();
    if (__all_sync(~0u, ok ? 1 : 0) != 0 && lane() == 0) copy().report_disagreement();
    return false;
  }
  // All threads of the block call this before enter_warp(). Returns false as is_alone() does.
  __device__ bool begin_ll() const {
    inject_delay();
    if (threadIdx.x == 0) warps_sent() = 0;
    if (!is_alone()) return false;
    count_entered();
    return true;
  }
  // Each of the block's `warps` sender warps calls this after its last store to a peer; the last one calls sent() for the
  // block.
  __device__ void sent_by_warp(int warps) const {
    inject_delay();
    if (lane() == 0 && atomicAdd(&warps_sent(), 1) == warps - 1) sent(gridDim.x);
  }

  // Dynamic tile scheduler: all lanes get the next of 0, 1, ..., tiles - 1, and no two warps of the grid get the same. The grid
  // calls this exactly `tiles` times.
  __device__ int64_t next_send_tile(int64_t tiles) const { return take_tile(group_.state->send_tiles_taken, tiles); }
  __device__ int64_t next_receive_tile(int64_t tiles) const { return take_tile(group_.state->receive_tiles_taken, tiles); }

  // One thread of each sender, or of the signal warp that signals for several, calls this after the last store to a peer; there
  // are `senders` such calls in the grid.
  __device__ void sent(unsigned senders) const {
    if (atomicInc(&group_.state->senders_done, senders - 1) != senders - 1) return;
    for (int peer = 0; peer < num_ranks(); ++peer)
      store_relaxed_sys(&flag_at(peer, group_.context.layout.complete, rank())->value, sequence_);
  }

  // One thread waits until the LL packet at `place`, in this rank's window or in its own memory, carries the epoch of this
  // call; `peer` stores it. Returns false when the group has failed.
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

  // One thread waits until `peer` has signaled the ready flag, in this rank's window, in this call. Returns false when the
  // group has failed.
  __device__ bool wait_ready(const Epoch* ready_flag, int peer) const {
    inject_delay();
    // ld.acquire: what the peer stored before it signaled is read after this load (PTX, Release and acquire patterns), and not
    // from a line that came into this SM's L1 cache with a neighbour. The acquire invalidates that cache, so the polling loop
    // of a long wait makes none. No test notices a relaxed load.
    while (load_acquire_sys(ready_flag) != epoch())
      if (!copy().wait_long(ready_flag, peer, EPX_PHASE_COMPLETE)) return false;
    return true;
  }
  // st.release: signals the ready flag in a peer's window. What this thread stored, or has seen stored through a barrier, comes
  // first: the release is cumulative (PTX, Causality order). A soak of many rows notices a
  // relaxed store (--kinds 48 --busy-tokens 2048).
  __device__ void signal(Epoch* ready_flag) const {
    inject_delay();
    store_release_sys(ready_flag, epoch());
  }
  // Signals one of several ready flags behind one fence_acq_rel_sys() of this thread.
  __device__ void signal_behind_fence(Epoch* ready_flag) const {
    inject_delay();
    store_relaxed_sys(ready_flag, epoch());
  }

  // Functions that are not inlined are called on a copy: an object whose address escapes has to lie in local memory, and its
  // user would wait for those loads.
  __device__ CallSession copy() const {
    return *this;
  }

  // One thread of its warp calls this on a copy(). `count` has the unit of epx_group_report.event_counts; EventRecord explains
  // the values and the header.
  __device__ __noinline__ void record_event(epx_event_kind kind, int64_t count, int64_t v0, int64_t v1 = 0, int64_t v2 = 0,
                                            int64_t v3 = 0, int64_t v4 = 0, const HandleHeader* header = nullptr) const {
    DeviceState& state = *group_.state;
    while (atomicExch(&state.records_event, 1u) != 0) // a lock, since two blocks of prepare may report an event each
      backoff(kBackoffNs);
    // The fence makes an acquire pattern with the exchange: this thread sees what the one before it has stored in `state` (PTX,
    // Release and acquire patterns). No test notices that this fence or the release below is missing.
    fence_acq_rel_sys();
    const uint64_t total = state.event_counts[kind] += static_cast<unsigned long long>(count);
    if (has_free_record()) {
      EventRecord& event = group_.record->events[state.num_events % StatusRecord::kEvents];
      event.kind = kind;
      event.operation = operation_;
      event.sequence = sequence_;
      event.total = total;
      const int64_t values[5] = {v0, v1, v2, v3, v4};
      for (int i = 0; i < 5; ++i)
        event.values[i] = values[i];
      if (header != nullptr) event.header = *header;
      // st.release: the host reads the event once it has acquired num_events (PTX, Release and acquire patterns). Posted writes
      // reach an x86 host in order, so no test there notices a relaxed store.
      store_release_sys(&group_.record->num_events, ++state.num_events);
    }
    store_release_sys(&group_.record->event_counts[kind],
                      total); // after the record: a host that sees the count has the record
    fence_acq_rel_sys();      // makes a release pattern with the exchange that unlocks
    atomicExch(&state.records_event, 0u);
  }

  // A test hook: returns whether prepare takes the high-throughput path whatever the number of tokens is.
  __device__ bool takes_ht_path() const {
    return kTestHooks && group_.hooks.alternates_paths && (sequence_ * 0x9e3779b97f4a7c15u >> 40 & 1) != 0;
  }
  // A test hook: returns whether staging is to be overwritten once it has been used.
  __device__ bool scribbles_staging() const {
    return kTestHooks && group_.hooks.scribbles_staging;
  }

private:
  // A test hook: waits at random times.
  __device__ void inject_delay() const {
    if (!kTestHooks || group_.hooks.max_delay_ns == 0) return;
    const uint64_t begin = nanoseconds();
    uint64_t random = (begin ^ sequence_ << 20 ^ blockIdx.x << 10 ^ threadIdx.x) * 0x9e3779b97f4a7c15u;
    random ^= random >> 29;
    if (random % 8 != 0) return;
    while (nanoseconds() - begin < random / 8 % group_.hooks.max_delay_ns) {
    }
  }
  // A test hook: returns true after a stall that only the group's failure ends.
  __device__ bool stalls() const {
    if (!kTestHooks || group_.hooks.stalls_in != operation_) return false;
    if (lane() == 0)
      while (!copy().is_aborted(nanoseconds())) {
      }
    __syncwarp(); // stalls the other lanes too
    return true;
  }

  static constexpr uint64_t kSlowNs = 1'000'000;   // a longer wait publishes whom it waits for, and polls the host's memory
  static constexpr uint64_t kPollHostNs = 100'000; // between two polls of the host's memory
  static constexpr uint32_t kSpinsPerCheck = 256;  // between two looks for abort records and at the clock
  static constexpr int kShortSpins = 32;           // without backoff, for data that is about to be there
  static constexpr unsigned kBackoffNs = 200;

  __device__ static PeerDescriptors& descriptors_of_cta() {
    __shared__ PeerDescriptors descriptors;
    return descriptors;
  }
  __device__ static int& warps_sent() {
    __shared__ int warps;
    return warps;
  }

  // A record that the host has not read is never overwritten, because the host reports the first event since it last read.
  __device__ bool has_free_record() const {
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
      if (number == tiles - 1) atomicExch(&taken, 0ull); // for the next call; no warp takes a tile after the last one
    }
    return from_lane(number, 0);
  }

  __device__ static int64_t parity_of(uint64_t sequence) {
    return static_cast<int64_t>(sequence & 1);
  }
  __device__ LlCallDescriptor* descriptor_at(int owner, int source, uint64_t sequence) const {
    const int64_t index = parity_of(sequence) * num_ranks() + source;
    return group_.window().at<LlCallDescriptor>(owner, group_.context.layout.posts.offset) + index;
  }

  __device__ bool wait_for_field(int peer, int word, uint64_t& value) const {
    const LlField* const place = &descriptor_at(rank(), peer, sequence_)->words[word];
    LlField found{};
    // ld.acquire, although the flag is in the data: what this rank stores into the peer's memory from here on must come after
    // what the peer's earlier kernels have read there, and a relaxed load orders nothing after it (PTX, Causality order). No
    // test notices a relaxed load: hardware makes no store before the branch that it depends on.
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

  // Thread `index` of `count` threads that read the descriptors of all ranks together. Returns false when the group has failed.
  __device__ bool read_descriptors(const CallDescriptor& descriptor, int index, int count, bool& same) const {
    bool ok = true;
    if (index == count - 1)
      ok = !may_have_ended() || !copy().peers_gave_up(); // a rank that is late sees the abort record here
    for (int i = index; i < num_ranks() * kNumDescriptorWords && ok; i += count)
      ok = read_field(descriptor, i / kNumDescriptorWords, i % kNumDescriptorWords, same);
    return ok;
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
    default:
      same &= value == reinterpret_cast<const uint64_t*>(&mine)[word];
      return true;
    }
  }

  // Every block calls this once all its threads have read the call's sequence number; the last block makes the call the last
  // one begun. Blocks of two grids that make the same call are too many for either grid, and a block that finds that ends the
  // group.
  __device__ void count_entered() const {
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
  __device__ uint64_t owner_word() const {
    return pack_owner(sequence_, group_.launch);
  }
  // Ends the group because another call of this rank is in progress.
  __device__ __noinline__ void report_overlap() const {
    if (peers_gave_up()) return;
    report_abort(abort_all(AbortRecord{EPX_ERROR_OUT_OF_SEQUENCE, operation_, rank(), sequence_}));
  }

  __device__ Flag* flag_at(int owner, const Region& region, int source) const {
    return group_.window().at<Flag>(owner, region.offset) + source;
  }

  // Returns the last call for which `peer` has signaled this phase to `owner`. A relaxed load suffices, here and for the
  // `waiting` words: each word is complete by itself, and orders no other load.
  __device__ uint64_t progress_signaled(int owner, int peer, epx_phase phase, uint64_t sequence) const {
    if (phase == EPX_PHASE_COMPLETE) return load_relaxed_sys(&flag_at(owner, group_.context.layout.complete, peer)->value);
    return load_relaxed_sys(&descriptor_at(owner, peer, sequence)->words[0].sequence);
  }

  __device__ uint64_t last_entry_signaled(int peer) const {
    if (peer < 0 || peer >= num_ranks()) return 0; // the culprit of a record that a host has stored may be anything
    const uint64_t even = progress_signaled(rank(), peer, EPX_PHASE_ARRIVE, 0);
    const uint64_t odd = progress_signaled(rank(), peer, EPX_PHASE_ARRIVE, 1);
    return even > odd ? even : odd;
  }

  // Waits until *place is the epoch of the call, which `peer` stores. It is out of line, so that the code of short waits stays
  // small.
  __device__ __noinline__ bool wait_long(const Epoch* place, int peer, epx_phase phase) const {
    uint64_t begin = 0;
    bool signaled = false;
    for (uint32_t spin = 1; load_relaxed_sys(place) != epoch(); ++spin) {
      backoff(kBackoffNs); // many warps wait at the same time, beside others that work
      if (spin % kSpinsPerCheck != 0) continue;
      if (peers_gave_up()) return false;
      const uint64_t now = nanoseconds();
      if (begin == 0) begin = now;
      if (now - begin < kSlowNs) continue;
      // The word is stored again at every check, because another warp clears it when its own wait ends.
      store_relaxed_sys(&flag_at(rank(), group_.context.layout.waiting, 0)->value, pack(Waiting{sequence_, phase, peer}));
      signaled = true;
      if (is_aborted(now)) return false;
      if (now - begin > group_.timeout_ns && load_relaxed_sys(place) != epoch()) {
        time_out(peer, phase);
        return false;
      }
    }
    if (signaled) store_relaxed_sys(&flag_at(rank(), group_.context.layout.waiting, 0)->value, 0);
    return true;
  }

  // Returns whether another block, a peer or the host has ended the group, and reports that if no block has.
  __device__ __noinline__ bool is_aborted(uint64_t now) const {
    if (peers_gave_up()) return true;
    const uint64_t record = host_abort_record(now);
    if (record == 0) return false;
    report_abort(abort_all(unpack_abort_record(record)));
    return true;
  }
  // One thread of the GPU at a time polls the host's memory, and not often: such loads take long, and many of them delay the
  // stores of the whole GPU.
  __device__ uint64_t host_abort_record(uint64_t now) const {
    const uint64_t asked = load_relaxed_sys(&group_.state->asked_host_at);
    if (now < asked + kPollHostNs) return 0;
    if (compare_and_swap_sys(&group_.state->asked_host_at, asked, now) != asked) return 0;
    return load_relaxed_sys(group_.host_abort_record);
  }
  __device__ bool may_have_ended() const {
    const uint32_t failed = load_relaxed_sys(&group_.state->failed); // the two loads are in flight together
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

  // Ends the group because `peer`, and perhaps other peers, have not reached `phase` in time.
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

  // Follows the `waiting` words from a missing rank to one that waits for nobody: that is the culprit, and not a victim.
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

  // Stores the abort record in the window of every rank that has none. Returns the record that counts: the one in rank 0's
  // window, so that all ranks name the same culprit.
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
    failure.abort_record = abort_record; // even if it is damaged; the host formats it
    failure.culprit =
        is_sound(unpack_abort_record(abort_record), num_ranks()) ? unpack_abort_record(abort_record).culprit : rank();
    publish(failure, failure.culprit);
  }

  __device__ void publish(FailureRecord& failure, int culprit) const {
    failure.operation = operation_;
    failure.sequence = sequence_;
    failure.culprit_arrived_at = last_entry_signaled(culprit);
    // st.release: the host reads the record once it has acquired `failed`, as in record_event.
    store_release_sys(&group_.record->failed, 1);
  }

  // One thread of each block reports that the agreed fields of the ranks differ; all ranks see the same descriptors, and fail
  // alike.
  __device__ __noinline__ void report_disagreement() const {
    if (atomicExch(&group_.state->failed, 1u) != 0) return;
    FailureRecord& failure = group_.record->failure;
    failure.status = EPX_ERROR_MISMATCH; // the host may make it OUT_OF_SEQUENCE when it compares the descriptors
    failure.culprit = -1;
    for (int peer = 0; peer < num_ranks(); ++peer)
      for (int word = 0; word < kNumDescriptorWords; ++word)
        reinterpret_cast<uint64_t*>(&failure.descriptors[peer])[word] =
            descriptor_at(rank(), peer, sequence_)->words[word].value;
    publish(failure, 0);
  }

  const DeviceGroup& group_;
  epx_operation operation_;
  uint64_t sequence_ = 0;
  PeerDescriptors* descriptors_;
  bool is_alone_; // in this thread's view
};

// All threads of the block call this at the end of every kernel that makes a call.
__device__ inline void leave(const DeviceGroup& group) {
  __syncthreads();
  if (threadIdx.x == 0) atomicAdd(&group.state->seen.blocks_left, 1ull);
}

} // namespace epx::cuda
