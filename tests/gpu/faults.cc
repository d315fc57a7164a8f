// Failures that a group on GPUs does not survive: who is named, and that the CUDA context does. Ranks are processes, started
// by epx_test_launch.
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "runtime/memory/window_layout.h"
#include "tests/gpu/suite.h"
#include "tests/support/check.h"

namespace epx::test {
namespace {

constexpr int kTopK = 2;
constexpr int kFewTokens = 8;
constexpr int kManyTokens = kMostFewRoutes / kTopK; // of two ranks or more, more than are few
constexpr int kExperts = 8;
constexpr int64_t kShortMs = 1'500; // of those who are to time out

// A group and the device memory of one prepare.
class Round {
public:
  Round(const RankContext& context, int64_t timeout_ms, int num_tokens = kFewTokens)
      : device_(*context.device), num_tokens_(num_tokens) {
    epx_group_config config;
    check_ok(epx_group_config_init(&config), "epx_group_config_init");
    config.num_experts = kExperts;
    config.max_tokens_per_rank = num_tokens_;
    config.hidden_dim = 16;
    config.max_top_k = kTopK;
    config.max_token_dtype = EPX_BFLOAT16;
    config.transport = EPX_TRANSPORT_NCCL;
    config.timeout_ms = timeout_ms;
    check_ok(epx_group_create(context.bootstrap, &config, &group_), "epx_group_create");
    check_ok(epx_handle_mem_size(group_, &layer_, &handle_bytes_), "epx_handle_mem_size");
    handle_ = device_.allocate(handle_bytes_);
    topk_idx_ = device_.allocate(num_tokens_ * kTopK * sizeof(int32_t));
    counts_ = device_.allocate(kExperts * sizeof(int32_t));
    offsets_ = device_.allocate((kExperts + 1) * sizeof(int32_t));
    const std::vector<int32_t> experts(num_tokens_ * kTopK, context.rank);
    device_.write(topk_idx_, experts.data(), experts.size() * sizeof(int32_t));
    epx_group_info info = {};
    info.struct_size = sizeof(info);
    check_ok(epx_group_query(group_, &info), "epx_group_query");
    num_local_experts_ = info.num_local_experts;
  }
  Round(const Round&) = delete;
  Round& operator=(const Round&) = delete;
  ~Round() {
    epx_group_destroy(group_);
    for (std::byte* memory : {handle_, topk_idx_, counts_, offsets_})
      device_.free(memory);
  }

  epx_group group() const { return group_; }

  epx_status prepare() {
    const epx_tensor topk_idx = epx_tensor_2d(topk_idx_, EPX_INT32, num_tokens_, kTopK);
    const epx_tensor counts = epx_tensor_1d(counts_, EPX_INT32, num_local_experts_);
    const epx_tensor offsets = epx_tensor_1d(offsets_, EPX_INT32, num_local_experts_ + 1);
    epx_prepare_args args = {};
    args.struct_size = sizeof(args);
    args.layer = layer_;
    args.handle_mem = handle_;
    args.handle_mem_bytes = handle_bytes_;
    args.stream = device_.stream();
    args.topk_idx = &topk_idx;
    args.counts = &counts;
    args.offsets = &offsets;
    return epx_prepare(group_, &args);
  }

  epx_group_report report() const {
    epx_group_report report = {};
    report.struct_size = sizeof(report);
    check_ok(epx_group_status(group_, &report), "epx_group_status");
    return report;
  }

  // Once the kernels have ended in order: the group has failed so, and `culprit` is to blame.
  epx_group_report check_failure(epx_status status, int culprit) {
    check_context();
    const epx_group_report report = this->report();
    check_equal(static_cast<int>(report.status), static_cast<int>(status), "report.status");
    check_equal(report.culprit, culprit, "report.culprit");
    return report;
  }

  // The kernels have ended in order: the stream and the memory still work.
  void check_context() {
    device_.finish();
    const std::vector<int32_t> sent = {1, 2, 3};
    std::vector<int32_t> back(sent.size());
    device_.write(counts_, sent.data(), sent.size() * sizeof(int32_t));
    device_.read(back.data(), counts_, back.size() * sizeof(int32_t));
    check(back == sent, "device memory does not keep what is written to it");
  }

private:
  Device& device_;
  int num_tokens_;
  epx_group group_ = nullptr;
  epx_layer layer_ = {kTopK, 1};
  size_t handle_bytes_ = 0;
  int num_local_experts_ = 0;
  std::byte* handle_ = nullptr;
  std::byte* topk_idx_ = nullptr;
  std::byte* counts_ = nullptr;
  std::byte* offsets_ = nullptr;
};

// The last rank does not make the second call: all others report it by its number, and it finds out when it comes.
void test_missing_rank(const RankContext& context) {
  Round round(context, kShortMs);
  check_ok(round.prepare(), "epx_prepare");
  context.device->finish();
  const int absent = context.num_ranks - 1;
  if (context.rank == absent) std::this_thread::sleep_for(std::chrono::milliseconds(3 * kShortMs));
  const epx_status called = round.prepare(); // asynchronous: it succeeds, unless the failure is known already
  check(called == EPX_SUCCESS || called == EPX_ERROR_TIMEOUT, "epx_prepare returned {}", epx_status_string(called));
  const epx_group_report report = round.check_failure(EPX_ERROR_TIMEOUT, absent);
  check(contains(report.message, std::to_string(absent)), "\"{}\" does not name rank {}", report.message, absent);
  if (context.rank != absent && report.num_missing > 0) check_equal(report.missing[0], absent, "report.missing[0]");
  check_status(round.prepare(), EPX_ERROR_TIMEOUT, "epx_prepare on the failed group");
  context.gather(0);
}

// The last rank's kernel stands still once all have arrived. Of many routes the others miss something at once; of few they have
// all they need, and miss the rank in their next call.
void test_stalled_rank(const RankContext& context) {
  for (const int num_tokens : {kManyTokens, kFewTokens}) {
    const int stalled = context.num_ranks - 1;
    if (context.rank == stalled) setenv("EPX_TEST_STALLS_IN", std::to_string(EPX_OP_PREPARE).c_str(), 1);
    Round round(context, kShortMs, num_tokens);
    unsetenv("EPX_TEST_STALLS_IN");
    check_ok(round.prepare(), "epx_prepare");
    if (num_tokens == kFewTokens && context.rank != stalled) {
      const epx_status called = round.prepare();
      check(called == EPX_SUCCESS || called == EPX_ERROR_TIMEOUT, "epx_prepare returned {}", epx_status_string(called));
    }
    const epx_group_report report = round.check_failure(EPX_ERROR_TIMEOUT, stalled);
    check(contains(report.message, std::to_string(stalled)), "\"{}\" does not name rank {}", report.message, stalled);
    context.gather(0);
  }
}

// The last rank aborts while the others wait for it.
void test_abort(const RankContext& context) {
  Round round(context, 60'000);
  const int aborting = context.num_ranks - 1;
  if (context.rank == aborting) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    check_ok(epx_group_abort(round.group()), "epx_group_abort");
  }
  check_status(round.prepare(), context.rank == aborting ? EPX_ERROR_ABORTED : EPX_SUCCESS, "epx_prepare");
  round.check_failure(EPX_ERROR_ABORTED, aborting);
  context.gather(0);
}

} // namespace
} // namespace epx::test

int main() {
  return epx::test::run_suite({epx::test::test_missing_rank, epx::test::test_stalled_rank, epx::test::test_abort});
}
