// SPDX-License-Identifier: Apache-2.0
// The state of a block of prepare, and what its two algorithms have in common. prepare.cu explains them.
#pragma once

#include "base/device/warp.cuh"
#include "runtime/layout/slots.h"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/protocol/call_session.cuh"
#include "runtime/stages/stages.h"

namespace epx::cuda {

struct PrepareParams {
  DeviceGroup group;
  PrepareCall call;
  HandleLayout layout;
  CallDescriptor descriptor;
};

class PrepareCta {
public:
  static constexpr int kThreads = 512;
  static constexpr int kWarps = kThreads / kWarp;

  // The dynamic shared memory is int32 next[E] | int32 zone[E] | int32 demand[E] | int32 warp_base[kWarps, E] |
  // int32 [kMaxPrepareBlocks] | int16 experts[kMaxGatheredRoutes]. CountExchange::publish() adds up fewer than E + blocks
  // counts in warp_base and the words behind it. RoutingAllGather uses `experts`; shared memory has no room for more experts
  // than an int16 can number.
  static constexpr size_t shared_bytes(int num_experts) {
    return sizeof(int32_t) * (static_cast<size_t>(num_experts) * (3 + kWarps) + kMaxPrepareBlocks) +
           sizeof(int16_t) * kMaxGatheredRoutes;
  }

  __device__ PrepareCta(const PrepareParams& params, int32_t* shared)
      : params_(params), group_(params.group), args_(params.call), call_(params.group, EPX_OP_PREPARE),
        shape_(params.group.context.shape), experts_{shape_.num_experts, shape_.num_ranks},
        plan_(params.call.handle_mem, params.layout), next_(shared), zone_(shared + shape_.num_experts),
        demand_(shared + 2 * shape_.num_experts), warp_base_(shared + 3 * shape_.num_experts),
        usable_(usable_slots(shape_.max_recv_tokens, params.call.alignment)) {}

  // The kernel calls this before anything else.
  __device__ void post() const {
    if (blockIdx.x == 0) call_.post(params_.descriptor, 0);
  }
  // The block calls this before it stores anything but the descriptor in a peer's window. Returns false, the same in all
  // threads, when the group has failed.
  __device__ bool is_alone() const { return call_.is_alone(); }
  // Returns false, the same in all threads, when the group has failed.
  __device__ bool enter() const { return call_.enter(params_.descriptor); }

  // Returns whether the routes of a rank with so many tokens fit the routing all-gather.
  __device__ bool fits_all_gather(int64_t num_tokens) const {
    return num_tokens * args_.top_k <= group_.context.layout.gathered_routes_per_rank && !call_.takes_ht_path();
  }
  // Returns whether those of every rank do; after enter().
  __device__ bool all_fit_all_gather() const { return fits_all_gather(max_tokens()); }
  // Returns whether those of this rank do.
  __device__ bool fits_all_gather() const { return fits_all_gather(args_.num_tokens); }

protected:
  __device__ int num_experts() const { return shape_.num_experts; }
  // The number in a peer's descriptor may be anything, and it becomes an index, so it is clamped.
  __device__ int32_t tokens_of(int rank) const {
    return static_cast<int32_t>(min(static_cast<uint32_t>(call_.descriptors().num_tokens[rank]),
                                    static_cast<uint32_t>(shape_.max_tokens_per_rank)));
  }
  // Returns the number of tokens of the rank that has the most.
  __device__ int32_t max_tokens() const {
    int32_t tokens = 0;
#pragma unroll 1
    for (int rank = 0; rank < shape_.num_ranks; ++rank)
      tokens = max(tokens, tokens_of(rank));
    return tokens;
  }

  __device__ int64_t index_at(int64_t route) const {
    return args_.topk_idx_is_64 ? static_cast<const int64_t*>(args_.topk_idx)[route]
                                : static_cast<const int32_t*>(args_.topk_idx)[route];
  }
  // Returns the expert of a route, or -1 when the route is masked or its index is bad.
  __device__ int expert_of(int64_t route) const {
    const int64_t index = index_at(route);
    return index >= 0 && index < num_experts() ? static_cast<int>(index) : -1;
  }

  __device__ void store_packet(LlPacket8* place, int32_t value) const {
    store_packet_relaxed_sys(place, LlPacket8{value, call_.epoch()});
  }
  // One thread waits for the LL packet that `source` stores at `place`. Returns false when the group has failed.
  __device__ bool wait_for(const LlPacket8* place, int source, int32_t& value) const {
    LlPacket8 packet{};
    const bool ok = call_.wait_for_word(place, packet, source);
    value = packet.value;
    return ok;
  }

  // Partitions `num_tokens` tokens among the first `num_blocks` blocks, and sets this block's range.
  __device__ void partition(int64_t num_tokens, unsigned num_blocks) {
    const int64_t tokens_per_block = (num_tokens + num_blocks - 1) / num_blocks;
    begin_ = min(tokens_per_block * static_cast<int64_t>(blockIdx.x), num_tokens);
    end_ = min(begin_ + tokens_per_block, num_tokens);
  }

  // The number of bad indices, and the first of them as ~ of its route, so that atomicMax finds it.
  struct BadIndices {
    int32_t number;
    unsigned first_inverted;

    __device__ void add(int64_t route, int64_t index) {
      if (index == -1) return;
      atomicAdd(&number, 1);
      atomicMax(&first_inverted, ~static_cast<unsigned>(route));
    }
  };
  // Each block has one, in shared memory.
  __device__ static BadIndices& bad_indices() {
    __shared__ BadIndices bad;
    return bad;
  }
  __device__ static void clear_bad_indices() {
    if (threadIdx.x == 0) bad_indices() = {0, 0};
    __syncthreads();
  }

  // The function is not inlined, so it must be called on a copy; see CallContext.
  __device__ __noinline__ void report_bad_indices(int32_t number, unsigned first_inverted) const {
    if (number == 0) return;
    const auto first = static_cast<int64_t>(~first_inverted);
    record_event(call_.context(), EPX_EVENT_BAD_INDEX, number, number, index_at(first), first / args_.top_k,
                 first % args_.top_k);
  }

  __device__ static int32_t inclusive_sum(int32_t value) {
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t left = __shfl_up_sync(~0u, value, distance);
      if (lane() >= distance) value += left;
    }
    return value;
  }

  // Counts the dropped routes of this rank, in the shared memory of the leader CTA.
  __device__ static unsigned long long& dropped_routes() {
    __shared__ unsigned long long dropped;
    return dropped;
  }
  // This is zone_rows() in 32 bits: a 64-bit division takes long, and slots are int32.
  __device__ int32_t rows_of_zone(int32_t demand) const {
    const auto alignment = static_cast<uint32_t>(args_.alignment);
    return static_cast<int32_t>((static_cast<uint32_t>(demand) + alignment - 1) / alignment * alignment);
  }
  // Computes zone_[e], the first slot of the expert's zone on its rank. All threads of the block call this behind a barrier
  // that completes demand_; it ends with a barrier, behind which all may read zone_.
  __device__ void find_zones() {
    if (threadIdx.x == 0) dropped_routes() = 0;
#pragma unroll 1
    for (int rank = threadIdx.x / kWarp; rank < shape_.num_ranks; rank += kWarps) {
      int32_t before = 0;
#pragma unroll 1
      for (int first = experts_.first_expert(rank); first < experts_.first_expert(rank + 1); first += kWarp) {
        const int e = first + lane();
        const bool is_expert = e < experts_.first_expert(rank + 1);
        const auto rows = is_expert ? rows_of_zone(demand_[e]) : 0;
        const int32_t sum = inclusive_sum(rows);
        if (is_expert) zone_[e] = before + sum - rows;
        before += __shfl_sync(~0u, sum, kWarp - 1);
      }
    }
    __syncthreads();
  }
  // One thread calls this for an expert to which this rank has `routes` routes, the first of which would have the slot `first`.
  __device__ void count_dropped(int64_t first, int32_t routes) {
    const int64_t kept = max(int64_t{0}, min(usable_ - first, int64_t{routes}));
    if (kept < routes) atomicAdd(&dropped_routes(), static_cast<unsigned long long>(routes - kept));
  }

  // ---- Outputs ----

  __device__ void store_count(void* tensor, int64_t index, int64_t value) const {
    if (args_.counts_are_64)
      static_cast<int64_t*>(tensor)[index] = value;
    else
      static_cast<int32_t*>(tensor)[index] = static_cast<int32_t>(value);
  }

  __device__ void write_record(int64_t slot, SlotRecord record) const {
    plan_.slot_records[slot] = record;
    if (args_.slot_origin != nullptr) write_origin(slot, record);
  }

  __device__ void write_origin(int64_t slot, SlotRecord record) const {
    int32_t* const origin = args_.slot_origin + 3 * slot;
    origin[0] = record.is_pad() ? -1 : record.source;
    origin[1] = record.token;
    origin[2] = record.is_pad() ? -1 : record.k;
  }

  // Returns the expert, among all experts, in whose local zone a slot in use lies.
  __device__ int expert_at(int32_t slot) const {
    int low = experts_.first_expert(call_.rank()); // its zone begins at or before the slot
    int high = experts_.first_expert(call_.rank() + 1);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (zone_[middle] <= slot ? low : high) = middle;
    }
    return low;
  }

  const PrepareParams& params_;
  const DeviceGroup& group_;
  const PrepareCall& args_;
  CallSession call_;
  const GroupShape& shape_;
  ExpertBlocks experts_;
  HandleWriter plan_;
  int32_t* next_;      // [E]: the next slot for a route of this block
  int32_t* zone_;      // [E]: the first slot of the expert's zone on its rank
  int32_t* demand_;    // [E]: the routes of all ranks
  int32_t* warp_base_; // [kWarps, E]
  int64_t usable_;
  int64_t begin_ = 0, end_ = 0; // this block's range of tokens; see partition()
};

} // namespace epx::cuda
