// prepare in one kernel. All that blocks and ranks tell each other are words that tell of themselves (Call::wait_for_word), so that
// nobody fences or waits for all.
//
// Ranks exchange only their counts; each computes its own slots by a stable counting sort:
//   count    each block counts the routes of its own run of tokens, by expert                                -> block_counts
//   publish  each block takes some experts, adds their counts up over the blocks, stores the sums into every peer's window, and
//            tells each block how many routes the blocks before it have                                      -> routes_before
//   assign   each block now knows where its routes of each expert begin: the zone, then the ranks before this one, then the
//            blocks before this one. It walks its tokens tile by tile, gives every route its slot, and stores where the slot
//            comes from into the window of the slot's rank.
//   deliver  all blocks write the handle memory and the outputs from what has come.
//
// When all ranks have few routes they exchange those, and each computes everybody's slots, so that ranks wait for each other once
// and blocks not at all:
//   tell     every block stores some of this rank's routes into every peer's window
//   count    each block counts all routes of all ranks, and those before its own run of all ranks' tokens
//   assign   as above, but for the tokens of all ranks, and what concerns other ranks is left to them
//   deliver  what is left; a block that has no tokens, the clerk, has begun with it
//
// Such a kernel passes through its code once, and waits for instructions as others do for data. So loops stay loops.
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
constexpr int kLeastBlocks = 17; // for few routes: a tile for each, and the clerk

struct Params {
  DeviceGroup group;
  PrepareCall call;
  HandleLayout layout;
  CallPost offer;
};

// Dynamic shared memory: int32 next[E] | int32 zone[E] | int32 demand[E] | int32 warp_base[kWarps, E], or what publish() adds up:
// fewer than E + blocks | int16 experts[kMostFewRoutes]: of all ranks' routes, when they are few; there is no room for more experts.
constexpr size_t shared_bytes(int num_experts) {
  return sizeof(int32_t) * (static_cast<size_t>(num_experts) * (3 + kWarps) + kMostPrepareBlocks) +
         sizeof(int16_t) * kMostFewRoutes;
}

class Prepare {
public:
  __device__ Prepare(const Params& params, int32_t* shared, unsigned long long& dropped_of_mine, int32_t* first_token)
      : params_(params), group_(params.group), args_(params.call), call_(params.group, EPX_OP_PREPARE),
        shape_(params.group.context.shape), experts_{shape_.num_experts, shape_.num_ranks},
        plan_(params.call.handle_mem, params.layout), next_(shared), zone_(shared + shape_.num_experts),
        demand_(shared + 2 * shape_.num_experts), warp_base_(shared + 3 * shape_.num_experts),
        experts_told_(reinterpret_cast<int16_t*>(shared + (3 + kWarps) * shape_.num_experts + kMostPrepareBlocks)),
        dropped_of_mine_(dropped_of_mine), usable_(usable_slots(shape_.max_recv_tokens, params.call.alignment)),
        first_token_(first_token) {}

  __device__ void run() {
    if (blockIdx.x == 0) call_.post(params_.offer, 0);
    const bool mine_are_few = has_few_routes(args_.num_tokens);
    if (mine_are_few) {
      tell_routes();
      clear_counts();
    } else if (!count_and_publish()) {
      return;
    }
    if (!call_.arrive(params_.offer)) return;
    few_ = mine_are_few;
#pragma unroll 1
    for (int rank = 0; rank < shape_.num_ranks; ++rank) {
      few_ = few_ && has_few_routes(call_.offers().num_tokens[rank]);
      few_tokens_ = max(few_tokens_, call_.offers().num_tokens[rank]);
    }
    if (!few_ || few_tokens_ > group_.context.layout.few_tokens) few_tokens_ = 0;
    if (few_ ? !count_all() : (mine_are_few && !count_and_publish()) || !find_bases()) return;
    assign();
    if (threadIdx.x == kThreads - 1) call_.sent(gridDim.x);
    deliver();
  }

private:
  __device__ int num_experts() const {
    return shape_.num_experts;
  }

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
  __device__ TaggedCount* counts_of(int owner, int source) const {
    const int64_t row = static_cast<int64_t>(call_.sequence() & 1) * shape_.num_ranks + source;
    return group_.window().at<TaggedCount>(owner, group_.context.layout.counts.offset) + row * num_experts();
  }
  // Once it has come.
  __device__ int32_t count_of(int source, int expert) const {
    return load_whole_relaxed_sys(&counts_of(call_.rank(), source)[expert]).value;
  }
  __device__ void tell(TaggedCount* place, int32_t value) const {
    store_whole_relaxed_sys(place, TaggedCount{value, call_.tag()});
  }
  // For one thread. False: the group has failed.
  __device__ bool wait_for(const TaggedCount* place, int source, int32_t& value) const {
    TaggedCount word{};
    const bool ok = call_.wait_for_word(place, word, source);
    value = word.value;
    return ok;
  }

  // Two columns more than experts: how many bad indices the block has seen, and the first of them, ~ of the route.
  __device__ TaggedCount* block_counts(int block) const {
    return group_.prepare_scratch + static_cast<int64_t>(block) * (num_experts() + 2);
  }
  __device__ TaggedCount* routes_before(int block) const {
    return group_.prepare_scratch + static_cast<int64_t>(gridDim.x) * (num_experts() + 2) +
           static_cast<int64_t>(block) * num_experts();
  }

  // Whether a rank with so many tokens has few routes.
  __device__ bool has_few_routes(int64_t num_tokens) const {
    return num_tokens * args_.top_k <= group_.context.layout.few_routes_per_rank && !call_.takes_long_way();
  }
  // Experts; of a rank with few routes.
  __device__ TaggedCount* routes_of(int owner, int source) const {
    const int64_t row = static_cast<int64_t>(call_.sequence() & 1) * shape_.num_ranks + source;
    return group_.window().at<TaggedCount>(owner, group_.context.layout.few_routes.offset) +
           row * group_.context.layout.few_routes_per_rank;
  }

  // The block's run of all `num_tokens` tokens, which the first `num_blocks` blocks share.
  __device__ void share(int64_t num_tokens, unsigned num_blocks) {
    const int64_t tokens_per_block = (num_tokens + num_blocks - 1) / num_blocks;
    begin_ = min(tokens_per_block * static_cast<int64_t>(blockIdx.x), num_tokens);
    end_ = min(begin_ + tokens_per_block, num_tokens);
  }

  // How many indices are bad, and the first of them: ~ of its route, so that the largest is the first.
  struct BadIndices {
    int32_t number;
    unsigned first_inverted;

    __device__ void add(int64_t route, int64_t index) {
      if (index == -1) return;
      atomicAdd(&number, 1);
      atomicMax(&first_inverted, ~static_cast<unsigned>(route));
    }
  };
  // Of the block.
  __device__ static BadIndices& bad_indices() {
    __shared__ BadIndices bad;
    return bad;
  }
  __device__ static void clear_bad_indices() {
    if (threadIdx.x == 0) bad_indices() = {0, 0};
    __syncthreads();
  }

  // ---- Few routes ----

  __device__ void tell_routes() {
    const auto routes = static_cast<uint32_t>(args_.num_tokens * args_.top_k);
    const uint32_t words = routes * static_cast<uint32_t>(shape_.num_ranks);
#pragma unroll 1
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < words; i += gridDim.x * kThreads) {
      const uint32_t peer = i / routes;
      const uint32_t route = i - peer * routes;
      tell(routes_of(static_cast<int>(peer), call_.rank()) + route, expert_of(route));
    }
    if (blockIdx.x != gridDim.x - 1) return; // which reports them, if nobody has more
    clear_bad_indices();
#pragma unroll 1
    for (uint32_t route = threadIdx.x; route < routes; route += kThreads)
      if (expert_of(route) < 0) bad_indices().add(route, index_at(route));
  }

  // Of count_all(), while the ranks meet. The clerk counts this rank's routes [E], and those of the ranks before it [E].
  __device__ int32_t* mine() const {
    return warp_base_;
  }
  __device__ int32_t* before_mine() const {
    return warp_base_ + num_experts();
  }
  __device__ void clear_counts() const {
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      demand_[e] = next_[e] = mine()[e] = before_mine()[e] = 0;
  }
  // The block that writes what there is once. Few routes: one without tokens, if there are two.
  __device__ bool is_clerk() const {
    return blockIdx.x == (few_ ? gridDim.x - 1 : 0);
  }

  // demand_[e]: routes of all ranks. next_[e]: the next slot for a route of this block. False: the group has failed. The same in
  // all threads.
  __device__ bool count_all() {
    if (static_cast<int>(threadIdx.x) <= shape_.num_ranks) {
      int32_t tokens = 0;
#pragma unroll 1
      for (int rank = 0; rank < static_cast<int>(threadIdx.x); ++rank)
        tokens += call_.offers().num_tokens[rank];
      first_token_[threadIdx.x] = tokens;
    }
    __syncthreads();
    share(first_token_[shape_.num_ranks], max(gridDim.x - 1, 1u));
    const int begin = static_cast<int>(begin_) * args_.top_k;
    const auto take = [&](int source, int route, int expert) {
      experts_told_[route] = static_cast<int16_t>(expert);
      if (expert < 0) return;
      atomicAdd(&demand_[expert], 1);
      if (route < begin) atomicAdd(&next_[expert], 1);
      if (is_clerk() && source <= call_.rank()) atomicAdd(&(source < call_.rank() ? before_mine() : mine())[expert], 1);
    };
    if (__syncthreads_and(take_all_routes(take) ? 1 : 0) == 0) return false;
    find_zones();
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads) {
      next_[e] += zone_[e];
      if (is_clerk()) count_dropped(zone_[e] + before_mine()[e], mine()[e]);
    }
    __syncthreads();
    return true;
  }

  // What a rank has told of a route.
  struct Told {
    const TaggedCount* place;
    TaggedCount word;
    int source;
  };
  // take(source, route among those of all ranks, expert), for all routes of all ranks, by all threads of a block. False: the group has failed.
  template <typename Take>
  __device__ bool take_all_routes(const Take& take) const {
    constexpr int kBatch = 4; // loads under way together
    const int routes = first_token_[shape_.num_ranks] * args_.top_k;
    int source = 0;
    int first_of_source = 0; // route
#pragma unroll 1
    for (int first = threadIdx.x; first < routes; first += kBatch * kThreads) {
      Told told[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int route = first + i * kThreads;
        told[i] = {};
        if (route >= routes) continue;
#pragma unroll 1
        for (int end; (end = first_token_[source + 1] * args_.top_k) <= route; ++source)
          first_of_source = end;
        const TaggedCount* const place = routes_of(call_.rank(), source) + (route - first_of_source);
        told[i] = {place, load_whole_relaxed_sys(place), source};
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (told[i].place == nullptr) continue;
        int32_t expert = told[i].word.value;
        if (told[i].word.tag != call_.tag() && !wait_for(told[i].place, told[i].source, expert)) return false;
        take(told[i].source, first + i * kThreads, expert);
      }
    }
    return true;
  }

  // ---- Many routes ----

  // False: the group has failed. The same in all threads.
  __device__ bool count_and_publish() {
    count();
    return publish();
  }

  __device__ void count() {
    share(args_.num_tokens, gridDim.x);
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      next_[e] = 0;
    clear_bad_indices();
    BadIndices& bad = bad_indices();
#pragma unroll 1
    for (int64_t route = begin_ * args_.top_k + threadIdx.x; route < end_ * args_.top_k; route += kThreads) {
      if (const int expert = expert_of(route); expert >= 0)
        atomicAdd(&next_[expert], 1);
      else
        bad.add(route, index_at(route));
    }
    __syncthreads();
    TaggedCount* const mine = block_counts(blockIdx.x);
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads)
      tell(&mine[e], next_[e]);
    if (threadIdx.x == 0) {
      tell(&mine[num_experts()], bad.number);
      tell(&mine[num_experts() + 1], static_cast<int32_t>(bad.first_inverted));
    }
  }

  // False: the group has failed. The same in all threads.
  __device__ bool publish() {
    const int blocks = static_cast<int>(gridDim.x);
    const int per_block = (num_experts() + blocks - 1) / blocks;
    const int first = min(static_cast<int>(blockIdx.x) * per_block, num_experts());
    const int experts = min(per_block, num_experts() - first);
    int32_t* const counts = warp_base_; // [experts, blocks]
    bool ok = true;
#pragma unroll 1
    for (int i = threadIdx.x; i < experts * blocks && ok; i += kThreads) {
      const int block = i / experts;
      const int expert = i % experts;
      ok = wait_for(&block_counts(block)[first + expert], call_.rank(), counts[expert * blocks + block]);
    }
    if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
#pragma unroll 1
    for (int expert = threadIdx.x / kWarp; expert < experts; expert += kWarps) {
      int32_t total = 0;
#pragma unroll 1
      for (int begin = 0; begin < blocks; begin += kWarp) {
        const int block = begin + lane();
        const int32_t mine = block < blocks ? counts[expert * blocks + block] : 0;
        const int32_t sum = inclusive_sum(mine);
        if (block < blocks) tell(&routes_before(block)[first + expert], total + sum - mine);
        total += __shfl_sync(~0u, sum, kWarp - 1);
      }
#pragma unroll 1
      for (int peer = lane(); peer < shape_.num_ranks; peer += kWarp)
        tell(&counts_of(peer, call_.rank())[first + expert], total);
    }
    if (blockIdx.x == 0 && threadIdx.x / kWarp == kWarps - 1) Prepare(*this).sum_bad_indices();
    return true;
  }

  __device__ static int32_t inclusive_sum(int32_t value) {
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int32_t left = __shfl_up_sync(~0u, value, distance);
      if (lane() >= distance) value += left;
    }
    return value;
  }

  // One warp.
  __device__ __noinline__ void sum_bad_indices() const {
    int32_t number = 0;
    unsigned first_inverted = 0;
#pragma unroll 1
    for (int block = lane(); block < static_cast<int>(gridDim.x); block += kWarp) {
      int32_t of_block = 0;
      int32_t inverted = 0;
      if (!wait_for(&block_counts(block)[num_experts()], call_.rank(), of_block) ||
          !wait_for(&block_counts(block)[num_experts() + 1], call_.rank(), inverted))
        break;
      number += of_block;
      first_inverted = max(first_inverted, static_cast<unsigned>(inverted));
    }
    __syncwarp();
    for (int distance = 1; distance < kWarp; distance *= 2) {
      number += __shfl_xor_sync(~0u, number, distance);
      first_inverted = max(first_inverted, __shfl_xor_sync(~0u, first_inverted, distance));
    }
    if (lane() == 0) report_bad_indices(number, first_inverted);
  }
  __device__ __noinline__ void report_bad_indices(int32_t number, unsigned first_inverted) const {
    if (number == 0) return;
    const auto first = static_cast<int64_t>(~first_inverted);
    call_.copy().record_event(EPX_EVENT_BAD_INDEX, number, index_at(first), first / args_.top_k, first % args_.top_k);
  }

  // As count_all().
  __device__ bool find_bases() {
    bool ok = true;
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads) {
      demand_[e] = 0;
      if (ok) ok = wait_for(&routes_before(blockIdx.x)[e], call_.rank(), next_[e]);
    }
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < shape_.num_ranks * num_experts() && ok; i += kThreads) {
      const int source = i / num_experts();
      const int e = i % num_experts();
      int32_t routes = 0;
      ok = wait_for(&counts_of(call_.rank(), source)[e], source, routes);
      if (routes == 0) continue;
      atomicAdd(&demand_[e], routes);
      if (source < call_.rank()) atomicAdd(&next_[e], routes);
    }
    if (__syncthreads_and(ok ? 1 : 0) == 0) return false;
    find_zones();
#pragma unroll 1
    for (int e = threadIdx.x; e < num_experts(); e += kThreads) {
      next_[e] += zone_[e];
      if (blockIdx.x == 0) count_dropped(next_[e], count_of(call_.rank(), e)); // its routes are the first of this rank
    }
    __syncthreads();
    return true;
  }

  // ---- Either way ----

  // zone_rows() in fewer bits: a division of 64 takes long, and slots are numbered in 31.
  __device__ int32_t rows_of_zone(int32_t demand) const {
    const auto alignment = static_cast<uint32_t>(args_.alignment);
    return static_cast<int32_t>((static_cast<uint32_t>(demand) + alignment - 1) / alignment * alignment);
  }
  // zone_[e]: first slot of the expert's zone on its rank. All threads; before and after, others may use demand_ and zone_.
  __device__ void find_zones() {
    if (threadIdx.x == 0) dropped_of_mine_ = 0;
#pragma unroll 1
    for (int rank = threadIdx.x / kWarp; rank < shape_.num_ranks; rank += kWarps) {
      int32_t before = 0;
#pragma unroll 1
      for (int first = experts_.first_expert(rank); first < experts_.first_expert(rank + 1); first += kWarp) {
        const int e = first + lane();
        const bool is_expert = e < experts_.first_expert(rank + 1);
        const auto mine = is_expert ? rows_of_zone(demand_[e]) : 0;
        const int32_t sum = inclusive_sum(mine);
        if (is_expert) zone_[e] = before + sum - mine;
        before += __shfl_sync(~0u, sum, kWarp - 1);
      }
    }
    __syncthreads();
  }
  // One thread for an expert: this rank has `routes` to it, and the first would have the slot `first`.
  __device__ void count_dropped(int64_t first, int32_t routes) {
    const int64_t kept = max(int64_t{0}, min(usable_ - first, int64_t{routes}));
    if (kept < routes) atomicAdd(&dropped_of_mine_, static_cast<unsigned long long>(routes - kept));
  }

  __device__ void assign() {
    const int64_t tile_tokens = kThreads / args_.top_k;
#pragma unroll 1
    for (int64_t token = begin_; token < end_; token += tile_tokens)
      assign_tile(token, min(token + tile_tokens, end_));
  }

  // A token, and whose it is.
  struct Origin {
    int rank;
    int64_t token;
  };
  // Of a token by its number in what the blocks share.
  __device__ Origin origin_of(int64_t token) const {
    if (!few_) return {call_.rank(), token};
    int rank = 0;
    while (first_token_[rank + 1] <= token)
      ++rank;
    return {rank, token - first_token_[rank]};
  }
  // Of a token by its number in what the blocks share.
  __device__ int expert_of(int64_t token, int k) const {
    const int64_t route = token * args_.top_k + k;
    return few_ ? experts_told_[route] : expert_of(route);
  }

  // A thread is one route; a token's routes lie in neighbouring threads.
  __device__ void assign_tile(int64_t first_token, int64_t end_token) {
    __shared__ int32_t slots[kThreads]; // -1: masked or dropped
    __shared__ int32_t ranks[kThreads];
    const int thread = threadIdx.x;
    const int warp = thread / kWarp;
    const int k = thread % args_.top_k;
    const int64_t token = first_token + thread / args_.top_k;
    const bool is_route = token < end_token;
    const Origin origin = is_route ? origin_of(token) : Origin{};
    const int expert = is_route ? expert_of(token, k) : -1;

    // Stable rank among the tile's routes to the same expert: those in warps before, then those in lanes before.
#pragma unroll 1
    for (int i = thread; i < num_experts() * kWarps; i += kThreads)
      warp_base_[i] = 0;
    __syncthreads();
    const unsigned same = __match_any_sync(~0u, expert);
    const unsigned before = same & ((1u << lane()) - 1);
    if (expert >= 0 && before == 0) warp_base_[warp * num_experts() + expert] = __popc(same);
    __syncthreads();
#pragma unroll 1
    for (int e = thread; e < num_experts(); e += kThreads) {
      int32_t counts[kWarps];
#pragma unroll
      for (int w = 0; w < kWarps; ++w)
        counts[w] = warp_base_[w * num_experts() + e];
      int32_t next = next_[e];
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        warp_base_[w * num_experts() + e] = next;
        next += counts[w];
      }
      next_[e] = next;
    }
    __syncthreads();
    int64_t slot = -1;
    if (expert >= 0) {
      slot = warp_base_[warp * num_experts() + expert] + __popc(before);
      if (slot >= usable_) slot = -1;
    }
    slots[thread] = static_cast<int32_t>(slot);
    ranks[thread] = slot >= 0 ? experts_.rank_of(expert) : -1;
    __syncthreads();
    if (is_route) write_route(origin, k, slots, ranks);
    write_heads(first_token, static_cast<int>(end_token - first_token), slots, ranks);
    __syncthreads();
  }

  __device__ void write_route(const Origin& origin, int k, const int32_t* slots, const int32_t* ranks) const {
    const int thread = threadIdx.x;
    const int first = thread - k; // of the token
    const int64_t route = origin.token * args_.top_k + k;
    const bool is_mine = origin.rank == call_.rank();
    const int32_t slot = slots[thread];
    const int32_t rank = ranks[thread];
    if (is_mine && args_.slot != nullptr) args_.slot[route] = slot;
    if (few_tokens_ > 0)
      plan_.few_slots[origin.rank * group_.context.layout.few_tokens * args_.top_k + route] =
          rank == call_.rank() ? slot : -1;
    if (slot < 0) {
      if (is_mine) plan_.routes[route] = {-1, -1, 0};
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
    if (is_mine) plan_.routes[route] = {slot, rank, order};
    const SlotRecord record{static_cast<int32_t>(origin.token),     next_slot,
                            static_cast<uint16_t>(origin.rank),     static_cast<uint8_t>(k),
                            static_cast<uint8_t>(is_first ? 1 : 0), static_cast<uint8_t>(order & 0x7f)};
    if (!few_)
      store_whole_relaxed_sys(group_.window().at<SlotPost>(rank, group_.context.layout.slot_posts.offset) + slot,
                              SlotPost{record, call_.tag()});
    else if (rank == call_.rank())
      write_record(slot, record);
  }

  // The first slot of each token of the tile; -1: none. Neighbouring threads, neighbouring tokens. Few routes: its first slot here;
  // else every rank is told of its own.
  __device__ void write_heads(int64_t first_token, int num_tokens, const int32_t* slots, const int32_t* ranks) const {
    const int num_ranks = few_ ? 1 : shape_.num_ranks;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens * num_ranks; i += kThreads) {
      const int rank = few_ ? call_.rank() : i / num_tokens;
      const int token = i % num_tokens;
      int32_t head = -1;
      for (int k = args_.top_k - 1; k >= 0; --k)
        if (const int route = token * args_.top_k + k; ranks[route] == rank) head = slots[route];
      const Origin origin = origin_of(first_token + token);
      const int64_t index = head_index(origin.rank, origin.token);
      if (few_)
        plan_.heads[index] = head;
      else
        tell(group_.window().at<TaggedCount>(rank, group_.context.layout.heads.offset) + index, head);
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
    return {min(begin, usable_), kept, min(begin + rows_of_zone(static_cast<int32_t>(demand)), usable_)};
  }

  // What is left to write. All blocks.
  __device__ void deliver() {
    const int local_experts = experts_.num_local_experts(call_.rank());
    const int last_expert = experts_.first_expert(call_.rank()) + local_experts - 1;
    const int64_t rows_needed = local_experts == 0 ? 0 : zone_[last_expert] + rows_of_zone(demand_[last_expert]);
    const int64_t rows_in_use = min(rows_needed, usable_);
    const uint32_t thread = blockIdx.x * kThreads + threadIdx.x;
    const uint32_t threads = gridDim.x * kThreads;
    if (is_clerk()) deliver_totals(local_experts, rows_needed);
    if (!deliver_heads(thread, threads) || !deliver_records(thread, threads, static_cast<uint32_t>(rows_in_use))) return;
    if (args_.slot_origin != nullptr)
#pragma unroll 1
      for (int64_t slot = rows_in_use + thread; slot < shape_.max_recv_tokens; slot += threads)
        write_origin(slot, kPadRecord);
    if (args_.global_counts != nullptr) deliver_global_counts(thread, threads);
  }

  __device__ void deliver_totals(int local_experts, int64_t rows_needed) {
    const int64_t rows_in_use = min(rows_needed, usable_);
#pragma unroll 1
    for (int e = threadIdx.x; e < local_experts; e += kThreads) {
      const Zone zone = zone_of(e);
      plan_.zone_begin[e] = static_cast<int32_t>(zone.begin);
      plan_.zone_rows[e] = static_cast<int32_t>(zone.kept);
      store_count(args_.counts, e, zone.kept);
      store_count(args_.offsets, e, zone.begin);
    }
    if (threadIdx.x == kThreads - kWarp - 1) {
      plan_.zone_begin[local_experts] = static_cast<int32_t>(rows_in_use);
      store_count(args_.offsets, local_experts, rows_in_use);
      write_header(rows_in_use);
    }
    if (threadIdx.x / kWarp == kWarps - 1) Prepare(*this).report(local_experts, rows_needed);
  }

  // False: the group has failed.
  __device__ bool deliver_heads(uint32_t thread, uint32_t threads) const {
    const auto* const heads = group_.window().local<TaggedCount>(group_.context.layout.heads.offset);
    const auto max_tokens = static_cast<uint32_t>(shape_.max_tokens_per_rank);
    const uint32_t all = static_cast<uint32_t>(shape_.num_ranks) * max_tokens; // fewer than slots can be numbered
#pragma unroll 1
    for (uint32_t i = thread; i < all; i += threads) {
      const auto source = static_cast<int>(i / max_tokens);
      const bool is_token = static_cast<int32_t>(i % max_tokens) < call_.offers().num_tokens[source];
      if (few_ && is_token) continue; // written by assign
      int32_t head = -1;
      if (is_token && !wait_for(&heads[i], source, head)) return false;
      plan_.heads[i] = head;
    }
    return true;
  }

  // False: the group has failed.
  __device__ bool deliver_records(uint32_t thread, uint32_t threads, uint32_t rows_in_use) const {
    const auto* const posts = group_.window().local<SlotPost>(group_.context.layout.slot_posts.offset);
#pragma unroll 1
    for (uint32_t slot = thread; slot < rows_in_use; slot += threads) {
      const int expert = expert_at(slot);
      SlotPost post{kPadRecord, 0};
      if (static_cast<int32_t>(slot) - zone_[expert] < demand_[expert]) {
        if (few_) continue; // written by assign
        post = load_whole_relaxed_sys(&posts[slot]);
        if (post.tag != call_.tag() && !call_.wait_for_word(&posts[slot], post, Prepare(*this).source_of(slot)))
          return false;
      }
      write_record(slot, post.record);
    }
    return true;
  }

  __device__ void write_record(int64_t slot, SlotRecord record) const {
    plan_.slot_records[slot] = record;
    if (args_.slot_origin != nullptr) write_origin(slot, record);
  }

  __device__ void deliver_global_counts(uint32_t thread, uint32_t threads) const {
    if (!few_) {
#pragma unroll 1
      for (uint32_t i = thread; i < static_cast<uint32_t>(shape_.num_ranks * num_experts()); i += threads)
        store_count(args_.global_counts, i,
                    count_of(static_cast<int>(i / static_cast<uint32_t>(num_experts())),
                             static_cast<int>(i % static_cast<uint32_t>(num_experts()))));
      return;
    }
#pragma unroll 1
    for (int rank = static_cast<int>(blockIdx.x); rank < shape_.num_ranks; rank += static_cast<int>(gridDim.x)) {
      __syncthreads(); // next_ is no longer used
#pragma unroll 1
      for (int e = threadIdx.x; e < num_experts(); e += kThreads)
        next_[e] = 0;
      __syncthreads();
#pragma unroll 1
      for (int route = first_token_[rank] * args_.top_k + threadIdx.x; route < first_token_[rank + 1] * args_.top_k;
           route += kThreads)
        if (experts_told_[route] >= 0) atomicAdd(&next_[experts_told_[route]], 1);
      __syncthreads();
#pragma unroll 1
      for (int e = threadIdx.x; e < num_experts(); e += kThreads)
        store_count(args_.global_counts, static_cast<int64_t>(rank) * num_experts() + e, next_[e]);
    }
  }

  __device__ void write_origin(int64_t slot, SlotRecord record) const {
    int32_t* const origin = args_.slot_origin + 3 * slot;
    origin[0] = record.is_pad() ? -1 : record.source;
    origin[1] = record.token;
    origin[2] = record.is_pad() ? -1 : record.k;
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
    header.few_tokens = few_tokens_;
    header.checksum = header_checksum(header);
    *plan_.header = header;
  }

  // The local expert's zone that a slot in use lies in, by its number among all experts.
  __device__ int expert_at(int32_t slot) const {
    int low = experts_.first_expert(call_.rank()); // its zone begins at or before the slot
    int high = experts_.first_expert(call_.rank() + 1);
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (zone_[middle] <= slot ? low : high) = middle;
    }
    return low;
  }

  // The rank whose route has this slot.
  __device__ __noinline__ int source_of(int64_t slot) const {
    const int expert = expert_at(slot);
    int64_t before = zone_[expert];
    int source = 0;
#pragma unroll 1
    for (; source < shape_.num_ranks - 1; ++source) {
      before += count_of(source, expert);
      if (slot < before) break;
    }
    return source;
  }

  // One warp.
  __device__ __noinline__ void report(int local_experts, int64_t rows_needed) const {
    int64_t demand = 0;
    int64_t kept = 0;
#pragma unroll 1
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
      args_.info[3] = static_cast<int64_t>(dropped_of_mine_);
      args_.info[4] = rows_needed;
    }
    if (few_) report_bad_indices(bad_indices().number, bad_indices().first_inverted);
    if (group_.context.overflow == EPX_OVERFLOW_ERROR && demand > kept)
      call_.copy().record_event(EPX_EVENT_OVERFLOW, demand, demand - kept, rows_needed);
  }

  const Params& params_;
  const DeviceGroup& group_;
  const PrepareCall& args_;
  Call call_;
  const GroupShape& shape_;
  ExpertBlocks experts_;
  HandleWriter plan_;
  int32_t* next_;                       // [E]
  int32_t* zone_;                       // [E]
  int32_t* demand_;                     // [E]
  int32_t* warp_base_;                  // [kWarps, E]
  int16_t* experts_told_;               // of all ranks' routes, if few_
  unsigned long long& dropped_of_mine_; // of this rank's routes; in the first block
  int64_t usable_;
  int64_t begin_, end_;    // tokens of this block, of those that it shares with the others
  int32_t few_tokens_ = 0; // of the rank that has the most, if all have few tokens and few routes
  bool few_ = false;       // all ranks have few routes
  int32_t* first_token_;   // [P + 1]: of each rank's, among all ranks' tokens; if few_
};

__global__ void __launch_bounds__(kThreads) prepare_kernel(const __grid_constant__ Params params) {
  begin_early(params);
  __shared__ unsigned long long dropped_of_mine;
  __shared__ int32_t first_token[kMaxDeviceRanks + 1];
  Prepare(params, dynamic_shared_memory<int32_t>(), dropped_of_mine, first_token).run();
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
size_t prepare_scratch_words(int num_experts, int blocks) {
  return static_cast<size_t>(blocks) * (2 * static_cast<size_t>(num_experts) + 2); // block_counts and routes_before
}

cudaError_t launch_prepare(const DeviceGroup& group, const LaunchShape& shape, const PrepareCall& call,
                           cudaStream_t stream) {
  CallPost offer{};
  offer.operation = EPX_OP_PREPARE;
  offer.top_k = call.top_k;
  offer.alignment = call.alignment;
  offer.num_tokens = call.num_tokens;
  offer.rows_allocation = -1;
  const Params params{group, call, make_handle_layout(group.context.shape, call.top_k), offer};
  // A tile for each block, but enough blocks to write the outputs.
  const int64_t tiles = (call.num_tokens * call.top_k + kThreads - 1) / kThreads;
  const int blocks =
      static_cast<int>(std::clamp<int64_t>(tiles, std::min(kLeastBlocks, shape.prepare_blocks), shape.prepare_blocks));
  return launch_cooperative(&prepare_kernel, {blocks, kThreads, shape.prepare_shared_bytes, shape.early}, stream, params);
}

} // namespace epx::cuda
