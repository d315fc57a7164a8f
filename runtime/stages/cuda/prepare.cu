// prepare in one kernel. Ranks exchange only their counts; each computes its own slots by a stable counting sort.
//
//   count    each block counts the routes of its own run of tokens, by expert                      -> block_counts
//   publish  the last block to have counted adds the blocks' counts up and stores the sums into every peer's window; its post
//            follows them
//   assign   once all ranks have arrived, each block knows where its routes of each expert begin: the zone, then the ranks
//            before this one, then the blocks before this one. It walks its tokens tile by tile, gives every route its slot,
//            and stores where the slot comes from into the window of the slot's rank.
//   deliver  once all ranks have sent, blocks copy what came to the handle memory and write the outputs
#include <algorithm>

#include "runtime/stages/cuda/kernels.h"

#include "runtime/base/device/launch.h"
#include "runtime/stages/cuda/call.cuh"
#include "runtime/stages/cuda/kernel_list.h"
#include "runtime/stages/cuda/rows.cuh"
#include "runtime/stages/slots.h"

namespace epx::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLeastBlocks = 16;

struct Params {
  DeviceGroup group;
  PrepareCall call;
  HandleLayout layout;
};

// Dynamic shared memory: int32 next[E] | int32 zone[E] | int32 demand[E] | int32 warp_base[kWarps, E].
__host__ __device__ constexpr size_t shared_bytes(int num_experts) {
  return sizeof(int32_t) * static_cast<size_t>(num_experts) * (3 + kWarps);
}

class Prepare {
public:
  __device__ Prepare(const Params& params, int32_t* shared)
      : group_(params.group), args_(params.call), call_(params.group, EPX_OP_PREPARE),
        shape_(params.group.context.shape), experts_{shape_.num_experts, shape_.num_ranks},
        plan_(params.call.handle_mem, params.layout), next_(shared), zone_(shared + shape_.num_experts),
        demand_(shared + 2 * shape_.num_experts), warp_base_(shared + 3 * shape_.num_experts),
        usable_(usable_slots(shape_.max_recv_tokens, params.call.alignment)) {
    const int64_t tokens_per_block = (args_.num_tokens + gridDim.x - 1) / gridDim.x;
    begin_ = min(tokens_per_block * static_cast<int64_t>(blockIdx.x), args_.num_tokens);
    end_ = min(begin_ + tokens_per_block, args_.num_tokens);
  }

  __device__ void run() {
    const bool is_last = count();
    if (is_last) publish();
    CallPost offer{};
    offer.top_k = args_.top_k;
    offer.alignment = args_.alignment;
    offer.num_tokens = args_.num_tokens;
    if (!call_.arrive(offer, is_last)) return;
    find_bases();
    assign();
    call_.sent();
    if (!call_.wait(EPX_PHASE_COMPLETE)) return;
    deliver();
    call_.end();
  }

private:
  __device__ int num_experts() const { return shape_.num_experts; }

  __device__ int64_t index_at(int64_t route) const {
    return args_.topk_idx_is_64 ? static_cast<const int64_t*>(args_.topk_idx)[route]
                                : static_cast<const int32_t*>(args_.topk_idx)[route];
  }
  // The expert of a route; -1 when it has none.
  __device__ int expert_of(int64_t route) const {
    const int64_t index = index_at(route);
    return index >= 0 && index < num_experts() ? static_cast<int>(index) : -1;
  }

  // Two matrices by parity of the call: a peer that is already in call n + 1 writes the other one.
  __device__ int64_t counts_offset(int source) const {
    const int64_t row = static_cast<int64_t>(call_.sequence() & 1) * shape_.num_ranks + source;
    return group_.context.layout.counts.offset + row * num_experts() * static_cast<int64_t>(sizeof(int32_t));
  }
  __device__ int32_t count_of(int source, int expert) const {
    return group_.window().local<int32_t>(counts_offset(source))[expert];
  }

  // sums[e] += the routes to e that the first `blocks` blocks have counted. sums in shared memory; all threads.
  __device__ void add_block_counts(unsigned blocks, int32_t* sums) const {
    const int total = static_cast<int>(blocks) * num_experts();
#pragma unroll 8
    for (int i = threadIdx.x; i < total; i += kThreads)
      if (const int32_t count = group_.block_counts[i]; count != 0) atomicAdd(&sums[i % num_experts()], count);
  }

  // True in the last block to have counted; it sees what the others have.
  __device__ bool count() {
    __shared__ bool is_last;
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      next_[e] = 0;
    __syncthreads();
    for (int64_t route = begin_ * args_.top_k + threadIdx.x; route < end_ * args_.top_k; route += kThreads) {
      const int expert = expert_of(route);
      if (expert >= 0) {
        atomicAdd(&next_[expert], 1);
      } else if (index_at(route) != -1) {
        atomicAdd(&group_.state->bad_indices, 1ull);
        atomicMax(&group_.state->first_bad_inverted, ~static_cast<unsigned long long>(route));
      }
    }
    __syncthreads();
    int32_t* const mine = group_.block_counts + static_cast<int64_t>(blockIdx.x) * num_experts();
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      mine[e] = next_[e];
    __syncthreads();
    if (threadIdx.x == 0) {
      fence_acq_rel_gpu();
      is_last = atomicAdd(&group_.state->blocks_counted, 1u) == gridDim.x - 1;
      if (is_last) group_.state->blocks_counted = 0;
      fence_acq_rel_gpu();
    }
    __syncthreads();
    return is_last;
  }

  __device__ void publish() {
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      demand_[e] = 0;
    __syncthreads();
    add_block_counts(gridDim.x, demand_);
    __syncthreads();
    for (int i = threadIdx.x; i < shape_.num_ranks * num_experts(); i += kThreads)
      group_.window().at<int32_t>(i / num_experts(), counts_offset(call_.rank()))[i % num_experts()] =
          demand_[i % num_experts()];
    if (threadIdx.x == 0 && group_.state->bad_indices > 0) {
      const auto first = static_cast<int64_t>(~group_.state->first_bad_inverted);
      call_.record_event(EPX_EVENT_BAD_INDEX, static_cast<int64_t>(group_.state->bad_indices), index_at(first),
                         first / args_.top_k, first % args_.top_k);
    }
  }

  // demand_[e]: routes of all ranks. zone_[e]: first slot of the expert's zone on its rank. next_[e]: the next slot for a route
  // of this block.
  __device__ void find_bases() {
    for (int e = threadIdx.x; e < num_experts(); e += kThreads) {
      int32_t demand = 0;
      for (int source = 0; source < shape_.num_ranks; ++source) {
        if (source == call_.rank()) next_[e] = demand;
        demand += count_of(source, e);
      }
      demand_[e] = demand;
      zone_[e] = static_cast<int32_t>(zone_rows(demand, args_.alignment));
    }
    __syncthreads();
    add_block_counts(blockIdx.x, next_);
    const int warp = threadIdx.x / kWarp;
    for (int rank = warp; rank < shape_.num_ranks; rank += kWarps) { // an exclusive sum over each rank's experts
      int32_t before = 0;
      for (int first = experts_.first_expert(rank); first < experts_.first_expert(rank + 1); first += kWarp) {
        const int e = first + lane();
        const int32_t mine = e < experts_.first_expert(rank + 1) ? zone_[e] : 0;
        int32_t sum = mine;
        for (int distance = 1; distance < kWarp; distance *= 2) {
          const int32_t left = __shfl_up_sync(~0u, sum, distance);
          if (lane() >= distance) sum += left;
        }
        if (e < experts_.first_expert(rank + 1)) zone_[e] = before + sum - mine;
        before += __shfl_sync(~0u, sum, kWarp - 1);
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      next_[e] += zone_[e];
    __syncthreads();
  }

  __device__ void assign() {
    const int64_t tile_tokens = kThreads / args_.top_k;
    for (int64_t token = begin_; token < end_; token += tile_tokens)
      assign_tile(token, min(token + tile_tokens, end_));
  }

  // A thread is one route; a token's routes lie in neighbouring threads.
  __device__ void assign_tile(int64_t first_token, int64_t end_token) {
    __shared__ int32_t slots[kThreads]; // -1: masked or dropped
    __shared__ int32_t ranks[kThreads];
    const int thread = threadIdx.x;
    const int warp = thread / kWarp;
    const int64_t route = first_token * args_.top_k + thread;
    const bool is_route = route < end_token * args_.top_k;
    const int expert = is_route ? expert_of(route) : -1;

    // Stable rank among the tile's routes to the same expert: those in warps before, then those in lanes before.
    for (int i = thread; i < num_experts() * kWarps; i += kThreads)
      warp_base_[i] = 0;
    __syncthreads();
    const unsigned same = __match_any_sync(~0u, expert);
    const unsigned before = same & ((1u << lane()) - 1);
    if (expert >= 0 && before == 0) warp_base_[warp * num_experts() + expert] = __popc(same);
    __syncthreads();
    for (int e = thread; e < num_experts(); e += kThreads) {
      int32_t next = next_[e];
      for (int w = 0; w < kWarps; ++w) {
        const int32_t count = warp_base_[w * num_experts() + e];
        warp_base_[w * num_experts() + e] = next;
        next += count;
      }
      next_[e] = next;
    }
    __syncthreads();
    int64_t slot = -1;
    if (expert >= 0) {
      slot = warp_base_[warp * num_experts() + expert] + __popc(before);
      if (slot >= usable_) {
        atomicAdd(&group_.state->dropped_of_mine, 1ull);
        slot = -1;
      }
    }
    slots[thread] = static_cast<int32_t>(slot);
    ranks[thread] = slot >= 0 ? experts_.rank_of(expert) : -1;
    __syncthreads();
    if (is_route) write_route(route, slots, ranks);
    write_heads(first_token, static_cast<int>(end_token - first_token), slots, ranks);
    __syncthreads();
  }

  __device__ void write_route(int64_t route, const int32_t* slots, const int32_t* ranks) const {
    const int thread = threadIdx.x;
    const int k = thread % args_.top_k;
    const int first = thread - k; // of the token
    const int32_t slot = slots[thread];
    const int32_t rank = ranks[thread];
    if (args_.slot != nullptr) args_.slot[route] = slot;
    if (slot < 0) {
      plan_.routes[route] = {-1, -1, 0};
      return;
    }
    uint64_t lower_ranks = 0; // that the token goes to, a bit each
    int32_t next_slot = -1;
    bool is_first = true;
    for (int other = args_.top_k - 1; other >= 0; --other) {
      const int32_t other_rank = ranks[first + other];
      if (other_rank < 0) continue;
      if (other_rank < rank) lower_ranks |= uint64_t{1} << other_rank;
      if (other_rank != rank) continue;
      if (other > k) next_slot = slots[first + other];
      if (other < k) is_first = false;
    }
    const int order = __popcll(lower_ranks);
    plan_.routes[route] = {slot, rank, order};
    const SlotPost post{{static_cast<int32_t>(route / args_.top_k), next_slot, static_cast<uint16_t>(call_.rank()),
                         static_cast<uint8_t>(k), static_cast<uint8_t>(is_first ? 1 : 0),
                         static_cast<uint8_t>(order & 0x7f)}};
    *reinterpret_cast<uint4*>(group_.window().at<SlotPost>(rank, group_.context.layout.slot_posts.offset) + slot) =
        *reinterpret_cast<const uint4*>(&post);
  }

  // Tells every rank the first slot there of each token of the tile; -1 where there is none. Neighbouring threads, neighbouring
  // tokens.
  __device__ void write_heads(int64_t first_token, int num_tokens, const int32_t* slots, const int32_t* ranks) const {
    for (int i = threadIdx.x; i < num_tokens * shape_.num_ranks; i += kThreads) {
      const int rank = i / num_tokens;
      const int token = i % num_tokens;
      int32_t head = -1;
      for (int k = args_.top_k - 1; k >= 0; --k)
        if (const int route = token * args_.top_k + k; ranks[route] == rank) head = slots[route];
      group_.window().at<int32_t>(rank, group_.context.layout.heads.offset)[head_index(call_.rank(), first_token + token)] =
          head;
    }
  }
  __device__ int64_t head_index(int source, int64_t token) const {
    return source * static_cast<int64_t>(shape_.max_tokens_per_rank) + token;
  }

  __device__ void store_count(void* tensor, int64_t index, int64_t value) const {
    if (args_.counts_are_64)
      static_cast<int64_t*>(tensor)[index] = value;
    else
      static_cast<int32_t*>(tensor)[index] = static_cast<int32_t>(value);
  }

  // Slots that a zone of this rank's experts really has.
  struct Zone {
    int64_t begin, kept, end;
  };
  __device__ Zone zone_of(int local_expert) const {
    const int expert = experts_.first_expert(call_.rank()) + local_expert;
    const int64_t begin = zone_[expert];
    const int64_t demand = demand_[expert];
    const int64_t kept = max(int64_t{0}, min(usable_ - begin, demand));
    return {min(begin, usable_), kept, min(begin + zone_rows(demand, args_.alignment), usable_)};
  }

  __device__ void deliver() {
    const int local_experts = experts_.num_local_experts(call_.rank());
    const int first_expert = experts_.first_expert(call_.rank());
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    const auto* posts = group_.window().local<SlotPost>(group_.context.layout.slot_posts.offset);
    for (int64_t e = thread; e < local_experts; e += threads) {
      const Zone zone = zone_of(static_cast<int>(e));
      plan_.zone_begin[e] = static_cast<int32_t>(zone.begin);
      plan_.zone_rows[e] = static_cast<int32_t>(zone.kept);
      store_count(args_.counts, e, zone.kept);
      store_count(args_.offsets, e, zone.begin);
    }
    const int last_expert = first_expert + local_experts - 1;
    const int64_t rows_needed =
        local_experts == 0 ? 0 : zone_[last_expert] + zone_rows(demand_[last_expert], args_.alignment);
    const int64_t rows_in_use = min(rows_needed, usable_);
    for (int64_t slot = thread; slot < rows_in_use; slot += threads) {
      const int expert = expert_at(slot);
      const bool is_pad = slot - zone_[expert] >= demand_[expert];
      const SlotRecord record = is_pad ? kPadRecord : posts[slot].record;
      plan_.slot_records[slot] = record;
      if (args_.slot_origin != nullptr)
        write_origin(slot, is_pad ? -1 : record.source, record.token, is_pad ? -1 : record.k);
    }
    const auto* heads = group_.window().local<int32_t>(group_.context.layout.heads.offset);
    for (int source = 0; source < shape_.num_ranks; ++source)
      for (int64_t token = thread; token < shape_.max_tokens_per_rank; token += threads)
        plan_.heads[head_index(source, token)] =
            token < call_.offer_of(source).num_tokens ? heads[head_index(source, token)] : -1;
    if (args_.slot_origin != nullptr)
      for (int64_t slot = rows_in_use + thread; slot < shape_.max_recv_tokens; slot += threads)
        write_origin(slot, -1, -1, -1);
    if (args_.global_counts != nullptr)
      for (int64_t i = thread; i < static_cast<int64_t>(shape_.num_ranks) * num_experts(); i += threads)
        store_count(args_.global_counts, i,
                    count_of(static_cast<int>(i / num_experts()), static_cast<int>(i % num_experts())));
    if (thread == 0) {
      plan_.zone_begin[local_experts] = static_cast<int32_t>(rows_in_use);
      store_count(args_.offsets, local_experts, rows_in_use);
      write_header(rows_in_use);
    }
    if (thread < kWarp) report(local_experts, rows_needed);
    if (thread == 0) {
      group_.state->bad_indices = 0; // all blocks have sent: none counts any more
      group_.state->first_bad_inverted = 0;
      group_.state->dropped_of_mine = 0;
    }
  }

  __device__ void write_origin(int64_t slot, int32_t source, int32_t token, int32_t k) const {
    int32_t* const origin = args_.slot_origin + 3 * slot;
    origin[0] = source;
    origin[1] = token;
    origin[2] = k;
  }

  __device__ void write_header(int64_t rows_in_use) {
    HandleHeader header{};
    header.magic = kHandleMagic;
    header.group_id = group_.context.group_id;
    header.plan_id = call_.sequence();
    header.num_tokens = args_.num_tokens;
    header.rows_in_use = rows_in_use;
    header.top_k = args_.top_k;
    header.alignment = args_.alignment;
    header.rank = call_.rank();
    header.checksum = header_checksum(header);
    *plan_.header = header;
  }

  // The local expert's zone that a slot in use lies in, by its number among all experts.
  __device__ int expert_at(int64_t slot) const {
    int low = experts_.first_expert(call_.rank()); // its zone begins at or before the slot
    int high = experts_.first_expert(call_.rank() + 1);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (zone_[middle] <= slot ? low : high) = middle;
    }
    return low;
  }

  // One warp.
  __device__ void report(int local_experts, int64_t rows_needed) const {
    int64_t demand = 0;
    int64_t kept = 0;
    for (int e = lane(); e < local_experts; e += kWarp) {
      demand += demand_[experts_.first_expert(call_.rank()) + e];
      kept += zone_of(e).kept;
    }
    for (int distance = 1; distance < kWarp; distance *= 2) {
      demand += __shfl_xor_sync(~0u, demand, distance);
      kept += __shfl_xor_sync(~0u, kept, distance);
    }
    if (lane() != 0) return;
    if (args_.info != nullptr) {
      args_.info[0] = demand;
      args_.info[1] = kept;
      args_.info[2] = demand - kept;
      args_.info[3] = static_cast<int64_t>(group_.state->dropped_of_mine);
      args_.info[4] = rows_needed;
    }
    if (group_.context.overflow == EPX_OVERFLOW_ERROR && demand > kept)
      call_.record_event(EPX_EVENT_OVERFLOW, demand, demand - kept, rows_needed);
  }

  const DeviceGroup& group_;
  const PrepareCall& args_;
  Call call_;
  const GroupShape& shape_;
  ExpertBlocks experts_;
  HandleWriter plan_;
  int32_t* next_;      // [E]
  int32_t* zone_;      // [E]
  int32_t* demand_;    // [E]
  int32_t* warp_base_; // [kWarps, E]
  int64_t usable_;
  int64_t begin_, end_; // tokens of this block
};

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Params params) {
  Prepare(params, dynamic_shared_memory<int32_t>()).run();
}

} // namespace

const void* prepare_kernel_address() {
  return reinterpret_cast<const void*>(&prepare_kernel);
}
int prepare_threads() {
  return kThreads;
}
size_t prepare_shared_bytes(int num_experts) {
  return shared_bytes(num_experts);
}

cudaError_t launch_prepare(const DeviceGroup& group, const LaunchShape& shape, const PrepareCall& call,
                           cudaStream_t stream) {
  Params params{group, call, make_handle_layout(group.context.shape, call.top_k)};
  // A tile for each block, but enough blocks to write the outputs.
  const int64_t tiles = (call.num_tokens * call.top_k + kThreads - 1) / kThreads;
  const int blocks =
      static_cast<int>(std::clamp<int64_t>(tiles, std::min(kLeastBlocks, shape.prepare_blocks), shape.prepare_blocks));
  return launch_cooperative(&prepare_kernel, {blocks, kThreads, shape.prepare_shared_bytes}, stream, params);
}

} // namespace epx::cuda
