// SPDX-License-Identifier: Apache-2.0
// faults [--several-nodes 1]
// Tests failures that a group on GPUs does not survive: the culprit is named, and the CUDA context survives. Ranks are
// processes that epx_test_launch starts.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <unistd.h>

#include "runtime/layout/window_layout.h"
#include "tests/gpu/graph.h"
#include "tests/gpu/suite.h"
#include "tests/gpu/trap_kernel.h"
#include "tests/support/check.h"
#include "tests/support/layer_memory.h"

namespace epx::test {
namespace {

constexpr int kTopK = 2;
constexpr int kAllGatherTokens = 8;
constexpr int kCountExchangeTokens = kMaxGatheredRoutes / kTopK; // from two ranks on too many for the routing all-gather
constexpr int kExperts = 8;
constexpr int kHidden = 16;
constexpr int64_t kShortMs = 1'500; // timeout_ms of groups that are to time out
constexpr int64_t kLongMs = 60'000; // of groups that are to fail sooner

// Owns a group and the device memory of its calls: prepare, or dispatch_rank_major with M = T and the combine behind it.
class Round {
public:
  Round(const RankContext& context, int64_t timeout_ms, int num_tokens = kAllGatherTokens) : device_(*context.device) {
    GroupConfig config;
    config.num_experts = kExperts;
    config.max_tokens_per_rank = num_tokens;
    config.hidden_dim = kHidden;
    config.max_top_k = kTopK;
    config.max_token_dtype = EPX_BFLOAT16;
    config.transport = EPX_TRANSPORT_NCCL;
    config.timeout_ms = timeout_ms;
    group_ = Group(*context.bootstrap, config);
    layer_.layer = {kTopK, 1};
    layer_.stream = device_.stream();
    layer_.dtype = EPX_BFLOAT16;
    layer_.num_tokens = layer_.rows_per_source = num_tokens;
    layer_.hidden = kHidden;
    layer_.num_local_experts = group_.query().num_local_experts;
    layer_.num_ranks = context.num_ranks;
    const auto tokens = static_cast<size_t>(num_tokens), ranks = static_cast<size_t>(context.num_ranks);
    const size_t routes = tokens * kTopK, row_bytes = kHidden * sizeof(uint16_t);
    const size_t handle_bytes = group_.handle_mem_size(layer_.layer);
    layer_.handle_mem = {allocate(handle_bytes), handle_bytes};
    layer_.topk_idx = allocate(routes * sizeof(int32_t));
    layer_.counts = allocate(kExperts * sizeof(int32_t));
    layer_.offsets = allocate((kExperts + 1) * sizeof(int32_t));
    layer_.tokens = layer_.out = allocate(tokens * row_bytes);
    layer_.recv_tokens = layer_.expert_out = allocate(ranks * tokens * row_bytes);
    layer_.recv_topk_idx = allocate(ranks * routes * sizeof(int32_t));
    const std::vector<int32_t> experts(routes, context.rank);
    device_.write(layer_.topk_idx, experts.data(), experts.size() * sizeof(int32_t));
  }
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;
  ~Round() {
    destroy();
    for (std::byte* memory : memory_)
      device_.free(memory);
  }

  epx_group group() const { return group_.get(); }
  void destroy() { group_.reset(); }

  epx_status prepare() { return make(EPX_OP_PREPARE, layer_); }
  epx_status dispatch_rank_major() { return dispatch_rank_major(layer_.rows_per_source); }
  epx_status dispatch_rank_major(int64_t max_rows) { // M
    LayerMemory layer = layer_;
    layer.rows_per_source = max_rows;
    return make(EPX_OP_DISPATCH_RANK_MAJOR, layer);
  }
  epx_status combine_rank_major(int hidden) { // of rows of `hidden` elements
    LayerMemory layer = layer_;
    layer.hidden = hidden;
    return make(EPX_OP_COMBINE_RANK_MAJOR, layer);
  }

  // Captures prepare, which returns `expected`, in a graph that never runs.
  void capture_prepare(epx_status expected = EPX_SUCCESS) {
    const Graph graph(static_cast<cudaStream_t>(device_.stream()),
                      [&] { check_status(prepare(), expected, "epx_prepare, while captured"); });
  }

  epx_group_report report() const { return group_.status(); }

  // Waits until the kernels have ended in order, and checks that the group has failed with `status` and names `culprit`.
  epx_group_report check_failure(epx_status status, int culprit) {
    check_context();
    const epx_group_report report = this->report();
    check_equal(static_cast<int>(report.status), static_cast<int>(status), "report.status");
    check_equal(report.culprit, culprit, "report.culprit");
    return report;
  }

  // Waits until the kernels have ended in order, and checks that the stream and the memory still work.
  void check_context() {
    device_.finish();
    const std::vector<int32_t> sent = {1, 2, 3};
    std::vector<int32_t> back(sent.size());
    device_.write(layer_.counts, sent.data(), sent.size() * sizeof(int32_t));
    device_.read(back.data(), layer_.counts, back.size() * sizeof(int32_t));
    check(back == sent, "device memory does not keep what is written to it");
  }

private:
  epx_status make(epx_operation operation, const LayerMemory& layer) { return layer.try_call(group_, operation); }
  std::byte* allocate(size_t bytes) {
    memory_.push_back(device_.allocate(bytes));
    return memory_.back();
  }

  Device& device_;
  Group group_;
  LayerMemory layer_;
  std::vector<std::byte*> memory_;
};

// Runs `what` and checks that it took no less than `least` and no more than `most` milliseconds.
template <typename What>
void check_duration(int64_t least, int64_t most, const char* name, const What& what) {
  const auto begin = std::chrono::steady_clock::now();
  what();
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begin).count();
  check(took >= least && took <= most, "{} took {} ms, expected {} to {}", name, took, least, most);
}

// The last rank makes the second call too late: all others report it by its number, and it finds that the group has failed.
void miss_rank(const RankContext& context, epx_status (Round::*call)()) {
  Round round(context, kShortMs);
  check_ok(round.prepare(), "epx_prepare");
  context.device->finish();
  const int absent = context.num_ranks - 1;
  if (context.rank == absent) std::this_thread::sleep_for(std::chrono::milliseconds(3 * kShortMs));
  const epx_status called = (round.*call)(); // asynchronous: it succeeds, unless the failure has been seen already
  check(called == EPX_SUCCESS || called == EPX_ERROR_TIMEOUT, "the call returned {}", epx_status_string(called));
  const epx_group_report report = round.check_failure(EPX_ERROR_TIMEOUT, absent);
  check_says(report.message, std::to_string(absent));
  check(context.rank == absent || !contains(report.message, "never began"), "\"{}\" blames a kernel that was not launched",
        report.message);
  if (context.rank != absent && report.num_missing > 0) {
    check_equal(report.missing[0], absent, "report.missing[0]");
    check(report.phase == EPX_PHASE_ARRIVE, "\"{}\" is of another phase than that in which ranks arrive", report.message);
  }
  check_status(round.prepare(), EPX_ERROR_TIMEOUT, "epx_prepare on the failed group");
  context.gather(0);
}
void test_missing_rank(const RankContext& context) {
  miss_rank(context, &Round::prepare);
}
// Warps of this kernel wait for the ranks' counts, and do not enter.
void test_missing_rank_of_rank_major(const RankContext& context) {
  miss_rank(context, &Round::dispatch_rank_major);
}

// Of the kernels of the low-latency path, one warp of the grid checks that the ranks agree, and the others wait for data.
void test_disagreement(const RankContext& context) {
  const bool is_first = context.rank == 0;
  {
    Round round(context, kLongMs);
    check_ok(round.dispatch_rank_major(is_first ? kAllGatherTokens : kAllGatherTokens - 1), "epx_dispatch_rank_major");
    const epx_group_report report = round.check_failure(EPX_ERROR_MISMATCH, -1);
    check_says(report.message, "rank 0 passes 8");
    context.gather(0);
  }
  Round round(context, kLongMs);
  check_ok(round.dispatch_rank_major(), "epx_dispatch_rank_major");
  context.device->finish();
  check_ok(round.combine_rank_major(is_first ? kHidden : kHidden / 2), "epx_combine_rank_major");
  const epx_group_report report = round.check_failure(EPX_ERROR_MISMATCH, -1);
  check_says(report.message, "rank 0 passes 16");
  context.gather(0);
}

constexpr size_t kBytes = 4096; // of a piece of memory from epx_mem_alloc

// The last rank comes too late to a call that allocates memory, or frees it, in which no kernel takes part: it is named, and
// nothing waits any more.
void test_missing_rank_of_memory_call(const RankContext& context) {
  constexpr int64_t kAtOnceMs = kShortMs / 2;
  const int absent = context.num_ranks - 1;
  for (const epx_operation operation : {EPX_OP_MEM_ALLOC, EPX_OP_MEM_FREE}) {
    Round round(context, kShortMs);
    void* memory[2] = {};
    for (void*& piece : memory)
      check_ok(epx_mem_alloc(round.group(), kBytes, &piece), "epx_mem_alloc");
    context.gather(0);
    if (context.rank == absent) std::this_thread::sleep_for(std::chrono::milliseconds(3 * kShortMs));
    const auto call = [&] {
      void* more = nullptr;
      return operation == EPX_OP_MEM_ALLOC ? epx_mem_alloc(round.group(), kBytes, &more)
                                           : epx_mem_free(round.group(), memory[0]);
    };
    if (context.rank == absent) {
      check_duration(0, kAtOnceMs, "the call that comes too late",
                     [&] { check_status(call(), EPX_ERROR_TIMEOUT, "the call that comes too late"); });
    } else {
      check_duration(kShortMs / 2, 2 * kShortMs, "the call without the last rank",
                     [&] { check_status(call(), EPX_ERROR_TIMEOUT, "the call without the last rank"); });
    }
    const epx_group_report report = round.check_failure(EPX_ERROR_TIMEOUT, absent);
    check_equal(static_cast<int>(report.operation), static_cast<int>(operation), "report.operation");
    if (context.rank != absent) {
      check_says(report.message, fmt::format("rank {}", absent));
      check_equal(report.sequence, uint64_t{5}, "report.sequence"); // each epx_mem_alloc counts as two calls
    }
    check_duration(0, kAtOnceMs, "epx_group_abort and epx_mem_free after the failure", [&] {
      check_ok(epx_group_abort(round.group()), "epx_group_abort");
      check_ok(epx_mem_free(round.group(), memory[1]), "epx_mem_free");
    });
    round.check_context();
    context.gather(0);
  }
}

// Rank 0 has not read yet that the group has failed when it frees memory: the call frees it, reports the failure, and waits for
// nobody.
void test_free_before_status(const RankContext& context) {
  Round round(context, kShortMs);
  void* memory[2] = {};
  for (void*& piece : memory)
    check_ok(epx_mem_alloc(round.group(), kBytes, &piece), "epx_mem_alloc");
  const int absent = context.num_ranks - 1;
  if (context.rank != absent) check_ok(round.prepare(), "epx_prepare"); // its kernel waits, and the host does not
  context.device->finish();
  context.gather(0);
  if (context.rank != 0 && context.rank != absent) round.check_failure(EPX_ERROR_TIMEOUT, absent);
  if (context.rank != absent)
    check_duration(0, kShortMs / 2, "epx_mem_free", [&] {
      check_status(epx_mem_free(round.group(), memory[0]), context.rank == 0 ? EPX_ERROR_TIMEOUT : EPX_SUCCESS,
                   "the first epx_mem_free");
      check_ok(epx_mem_free(round.group(), memory[1]), "the second epx_mem_free");
      check_status(epx_mem_free(round.group(), memory[0]), EPX_ERROR_INVALID_ARGUMENT, "epx_mem_free of freed memory");
    });
  context.gather(0);
}

// The last rank makes another memory call than the others, or frees other memory: all report that, at once, and free what they
// were to free. A call that was captured before keeps the host from counting calls.
void test_different_memory_calls(const RankContext& context) {
  constexpr int64_t kAtOnceMs = 5'000; // of a timeout of 60'000
  const bool is_last = context.rank == context.num_ranks - 1;
  for (const bool frees : {true, false})
    for (const bool captures : {false, true}) {
      Round round(context, 60'000);
      void* memory[2] = {};
      for (void*& piece : memory)
        check_ok(epx_mem_alloc(round.group(), kBytes, &piece), "epx_mem_alloc");
      if (captures) round.capture_prepare();
      context.gather(0);
      check_duration(0, kAtOnceMs, "a call that differs", [&] {
        void* more = nullptr;
        check_status(is_last && !frees ? epx_mem_alloc(round.group(), kBytes, &more)
                                       : epx_mem_free(round.group(), memory[is_last ? 1 : 0]),
                     EPX_ERROR_OUT_OF_SEQUENCE, "a call that differs");
      });
      const epx_group_report report = round.check_failure(EPX_ERROR_OUT_OF_SEQUENCE, -1);
      check_equal(report.sequence, uint64_t{5}, "report.sequence"); // each epx_mem_alloc counts as two calls
      const std::string sentence =
          frees ? fmt::format("rank 0 frees its allocation number 0, rank {} number 1", context.num_ranks - 1)
                : fmt::format("call 5 is mem_free on rank 0 and mem_alloc on rank {}", context.num_ranks - 1);
      check_says(report.message, sentence);
      check_status(epx_mem_free(round.group(), memory[0]), is_last ? EPX_SUCCESS : EPX_ERROR_INVALID_ARGUMENT,
                   "epx_mem_free of number 0");
      context.gather(0);
    }
}

// Where ranks share no host memory, nobody knows which rank is missing; the group ends, and the GPU is idle, all the same.
void test_missing_rank_without_board(const RankContext& context) {
  setenv("EPX_TEST_WITHOUT_BOARD", "1", 1);
  Round round(context, kShortMs);
  unsetenv("EPX_TEST_WITHOUT_BOARD");
  void* memory = nullptr;
  check_ok(epx_mem_alloc(round.group(), kBytes, &memory), "epx_mem_alloc");
  context.gather(0);
  if (context.rank != context.num_ranks - 1) {
    void* more = nullptr;
    check_status(epx_mem_alloc(round.group(), kBytes, &more), EPX_ERROR_TIMEOUT, "epx_mem_alloc");
    const epx_group_report report = round.check_failure(EPX_ERROR_TIMEOUT, -1);
    check_says(report.message, "mem_alloc (call 3): not all ranks came");
    check_duration(0, kShortMs / 2, "epx_group_abort and epx_mem_free after the failure", [&] {
      check_ok(epx_group_abort(round.group()), "epx_group_abort");
      check_ok(epx_mem_free(round.group(), memory), "epx_mem_free");
    });
  }
  context.gather(0);
}

// All ranks but the last are in epx_mem_alloc when rank 0 aborts in another thread: all of them return at once.
void test_abort_of_memory_call(const RankContext& context) {
  constexpr int64_t kAtOnceMs = 10'000; // of a timeout of 60'000
  Round round(context, 60'000);
  context.gather(0);
  if (context.rank != context.num_ranks - 1) {
    std::jthread aborter;
    if (context.rank == 0)
      aborter = std::jthread([group = round.group()] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        epx_group_abort(group);
      });
    check_duration(0, kAtOnceMs, "epx_mem_alloc", [&] {
      void* memory = nullptr;
      check_status(epx_mem_alloc(round.group(), kBytes, &memory), EPX_ERROR_ABORTED, "epx_mem_alloc");
    });
  }
  context.gather(0);
  round.check_failure(EPX_ERROR_ABORTED, 0);
  context.gather(0);
}

// The last rank's kernel stalls after the entry barrier. In the count exchange the others wait for data of that rank in the
// same call; in the routing all-gather they have all they need, and wait for the rank in their next call.
void test_stalled_rank(const RankContext& context) {
  for (const int num_tokens : {kCountExchangeTokens, kAllGatherTokens}) {
    const int stalled = context.num_ranks - 1;
    if (context.rank == stalled) setenv("EPX_TEST_STALLS_IN", std::to_string(EPX_OP_PREPARE).c_str(), 1);
    Round round(context, kShortMs, num_tokens);
    unsetenv("EPX_TEST_STALLS_IN");
    check_ok(round.prepare(), "epx_prepare");
    if (num_tokens == kAllGatherTokens && context.rank != stalled) {
      const epx_status called = round.prepare();
      check(called == EPX_SUCCESS || called == EPX_ERROR_TIMEOUT, "epx_prepare returned {}", epx_status_string(called));
    }
    const epx_group_report report = round.check_failure(EPX_ERROR_TIMEOUT, stalled);
    check_says(report.message, std::to_string(stalled));
    context.gather(0);
  }
}

// The last rank's host launches its kernel in time, but the work before it on its stream does not end: the others report that
// the kernel never began.
void test_kernel_that_never_begins(const RankContext& context) {
  Round round(context, kShortMs);
  check_ok(round.prepare(), "epx_prepare");
  context.device->finish();
  const int late = context.num_ranks - 1;
  if (context.rank == late)
    check_equal(static_cast<int>(cudaLaunchHostFunc(
                    static_cast<cudaStream_t>(context.device->stream()),
                    [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2 * kShortMs)); }, nullptr)),
                static_cast<int>(cudaSuccess), "cudaLaunchHostFunc");
  context.gather(0);
  const epx_status called = round.prepare();
  check(called == EPX_SUCCESS || called == EPX_ERROR_TIMEOUT, "epx_prepare returned {}", epx_status_string(called));
  const epx_group_report report = round.check_failure(EPX_ERROR_TIMEOUT, late);
  const std::string sentence = report.num_missing > 0
                                   ? fmt::format("rank {} launched its kernel of prepare, but it never began", late)
                                   : "kernels of other libraries";
  check_says(report.message, sentence);
  context.gather(0);
}

// A rank that destroys its group behind a call waits for peers that do not make the call, but for no longer than timeout_ms.
void test_destroy_without_peers(const RankContext& context) {
  constexpr int64_t kTimeoutMs = 4'000; // NCCL takes about a second to abort a communicator
  Round round(context, kTimeoutMs);
  context.gather(0);
  if (context.rank == 0) {
    check_ok(round.prepare(), "epx_prepare");
    check_duration(context.num_ranks > 1 ? kTimeoutMs / 2 : 0, 2 * kTimeoutMs, "epx_group_destroy",
                   [&] { round.destroy(); });
  }
  context.gather(0);
  check_duration(0, kTimeoutMs / 2, "epx_group_destroy", [&] { round.destroy(); }); // no call is in progress
  context.gather(0);
}

// Work of the user that does not end keeps the device busy: neither a healthy group nor one that has failed waits long for it.
void test_destroy_beside_foreign_work(const RankContext& context) {
  constexpr int64_t kMaxMs = kShortMs + 4'000;
  for (const bool has_failed : {false, true}) {
    Round round(context, kShortMs);
    cudaStream_t stream = nullptr;
    std::atomic<bool> ends = false;
    check_equal(static_cast<int>(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)), static_cast<int>(cudaSuccess),
                "cudaStreamCreateWithFlags");
    if (has_failed) check_ok(epx_group_abort(round.group()), "epx_group_abort");
    context.gather(0);
    cudaLaunchHostFunc(
        stream,
        [](void* flag) {
          const auto end =
              std::chrono::steady_clock::now() + std::chrono::milliseconds(5 * kMaxMs); // so that the test ends
          while (!*static_cast<std::atomic<bool>*>(flag) && std::chrono::steady_clock::now() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        },
        &ends);
    const auto begin = std::chrono::steady_clock::now();
    round.destroy();
    const auto took = std::chrono::steady_clock::now() - begin;
    ends = true;
    cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    check(took < std::chrono::milliseconds(kMaxMs), "epx_group_destroy took more than {} ms beside foreign work", kMaxMs);
    context.gather(0);
  }
}

// Finds the boards of all ranks: the shared memory of epx that this process has mapped and that is one page long.
std::vector<uint64_t*> find_boards() {
  std::vector<uint64_t*> boards;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    void *begin = nullptr, *end = nullptr;
    if (std::sscanf(line.c_str(), "%p-%p", &begin, &end) == 2 &&
        static_cast<std::byte*>(end) - static_cast<std::byte*>(begin) == ::sysconf(_SC_PAGESIZE) &&
        contains(line, " rw-s ") && contains(line, "epx-window"))
      boards.push_back(static_cast<uint64_t*>(begin));
  }
  return boards;
}

// Something else has overwritten the word in which hosts publish who ended the group: each rank reports that, and no call
// succeeds that has not run.
void test_damaged_board(const RankContext& context) {
  for (const uint64_t word : {uint64_t{1}, ~uint64_t{0}, pack(AbortRecord{EPX_ERROR_TIMEOUT, EPX_OP_COMBINE, 35032, 3})}) {
    Round round(context, 60'000);
    check_ok(round.prepare(), "epx_prepare");
    context.device->finish();
    context.gather(0);
    uint64_t num_boards = 0;
    if (context.rank == 0)
      for (uint64_t* board : find_boards()) {
        std::atomic_ref(*board).store(word);
        ++num_boards;
      }
    check(context.gather(num_boards)[0] >= static_cast<uint64_t>(context.num_ranks), "the boards were not found");
    check_status(round.prepare(), EPX_ERROR_INTERNAL, "epx_prepare");
    const epx_group_report report = round.check_failure(EPX_ERROR_INTERNAL, context.rank);
    check_says(report.message, "damaged");
    context.gather(0);
  }
}

// Rank 0 has destroyed its group when the last rank aborts: the other ranks name the last rank as the culprit.
void test_abort_after_destroy(const RankContext& context) {
  Round round(context, 60'000);
  const int aborting = context.num_ranks - 1;
  context.gather(0);
  if (context.rank == 0) round.destroy();
  context.gather(0);
  if (context.rank == aborting) check_ok(epx_group_abort(round.group()), "epx_group_abort");
  context.gather(0);
  if (context.rank != 0) round.check_failure(EPX_ERROR_ABORTED, aborting);
  context.gather(0);
}

// The group fails since the last rank's kernel cannot be launched: the ranks that wait for it learn the culprit at once,
// through their kernels or, as rank 0 of more than two ranks, from the status alone.
void check_failed_launch(const RankContext& context, Round& round) {
  constexpr int64_t kAtOnceMs = 5'000; // of a timeout of 60'000
  const int failing = context.num_ranks - 1;
  const bool only_reads_status = context.rank == 0 && context.num_ranks > 2;
  context.gather(0);
  check_duration(0, kAtOnceMs, "learning of the launch that failed", [&] {
    if (context.rank == failing) {
      check_status(round.prepare(), EPX_ERROR_SYSTEM, "epx_prepare, whose launch fails");
    } else if (only_reads_status) {
      while (round.report().status == EPX_SUCCESS)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
      const epx_status called = round.prepare();
      check(called == EPX_SUCCESS || called == EPX_ERROR_SYSTEM, "epx_prepare returned {}", epx_status_string(called));
      context.device->finish();
    }
  });
  const epx_group_report report = round.report();
  check_equal(static_cast<int>(report.status), static_cast<int>(EPX_ERROR_SYSTEM), "report.status");
  check_equal(report.culprit, failing, "report.culprit");
  check(contains(report.message, std::to_string(failing)) || context.rank == failing, "\"{}\" does not name rank {}",
        report.message, failing);
  check_status(round.prepare(), EPX_ERROR_SYSTEM, "epx_prepare on the failed group");
  context.gather(0);
}

void test_failed_launch(const RankContext& context) {
  if (context.rank == context.num_ranks - 1) setenv("EPX_TEST_FAILS_TO_LAUNCH", std::to_string(EPX_OP_PREPARE).c_str(), 1);
  Round round(context, 60'000);
  unsetenv("EPX_TEST_FAILS_TO_LAUNCH");
  check_failed_launch(context, round);
}

// A kernel that cannot be launched while the stream is being captured has not run on any rank, so that the group lives on.
void test_failed_capture(const RankContext& context) {
  const int failing = context.num_ranks - 1;
  if (context.rank == failing) setenv("EPX_TEST_FAILS_TO_LAUNCH", std::to_string(EPX_OP_PREPARE).c_str(), 1);
  Round round(context, 60'000);
  unsetenv("EPX_TEST_FAILS_TO_LAUNCH");
  for (int i = 0; i < 2; ++i) {
    round.capture_prepare(context.rank == failing ? EPX_ERROR_SYSTEM : EPX_SUCCESS);
    context.gather(0);
    check_equal(static_cast<int>(round.report().status), static_cast<int>(EPX_SUCCESS), "report.status");
    void* memory = nullptr; // all ranks make this call, so none has heard of a failure
    check_ok(epx_mem_alloc(round.group(), 4096, &memory), "epx_mem_alloc");
    check_ok(epx_mem_free(round.group(), memory), "epx_mem_free");
  }
  context.gather(0);
}

// A kernel of the last rank's user has ended its CUDA context. This is the last test: nothing works on that rank any more.
void test_dead_context(const RankContext& context) {
  Round round(context, 60'000);
  check_ok(round.prepare(), "epx_prepare");
  context.device->finish();
  if (context.rank == context.num_ranks - 1) {
    launch_trap(static_cast<cudaStream_t>(context.device->stream()));
    check(cudaDeviceSynchronize() != cudaSuccess, "the CUDA context survives a trap");
  }
  check_failed_launch(context, round);
}

// The last rank aborts while the others wait for it.
void test_abort(const RankContext& context) {
  Round round(context, 60'000);
  const int aborting = context.num_ranks - 1;
  if (context.rank != aborting) check_ok(round.prepare(), "epx_prepare"); // its kernel waits, and the host does not
  context.gather(0);
  if (context.rank == aborting) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    check_ok(epx_group_abort(round.group()), "epx_group_abort");
    check_status(round.prepare(), EPX_ERROR_ABORTED, "epx_prepare");
  }
  round.check_failure(EPX_ERROR_ABORTED, aborting);
  context.gather(0);
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  // Groups of several nodes have control_faults for the rest.
  if (option(argc, argv, "--several-nodes", 0) != 0)
    return run_suite({test_failed_capture, test_destroy_beside_foreign_work});
  return run_suite({test_missing_rank, test_missing_rank_of_rank_major, test_disagreement, test_missing_rank_of_memory_call,
                    test_free_before_status, test_abort_of_memory_call, test_different_memory_calls,
                    test_missing_rank_without_board, test_stalled_rank, test_abort, test_kernel_that_never_begins,
                    test_destroy_without_peers, test_destroy_beside_foreign_work, test_abort_after_destroy,
                    test_damaged_board, test_failed_capture, test_failed_launch, test_dead_context});
}
