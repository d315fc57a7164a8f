// SPDX-License-Identifier: Apache-2.0
// coexistence [--rounds N] [--seed S] [--num-comm-sms N] [--nccl-ctas N]
// Runs epx beside kernels of others that wait for peers too, and tests the guarantee of docs/api.md, "Beside other kernels". In
// each round every rank enqueues the same work on several streams, in an order of its own. Inside the guarantee each round ends
// soon, with right results; outside it every rank reports the cause soon after timeout_ms. CUDA_DEVICE_MAX_CONNECTIONS comes
// from the environment.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/foreign_work.h"
#include "tests/gpu/resident_layer.h"
#include "tests/gpu/small_cases.h"
#include "tests/gpu/suite.h"
#include "tests/support/check.h"
#include "tests/support/rng.h"

namespace epx::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kMaxRoundMs = 50;
constexpr int64_t kShortMs = 2'000; // timeout_ms of groups whose waits are to time out
constexpr double kGraceMs = 2'000;  // time after it in which every rank must report

double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

struct Options {
  long rounds;
  uint64_t seed;
  int num_comm_sms; // num_comm_sms of the group beside communicators; 0: the default
  int nccl_ctas;    // maxCTAs of each communicator; 0: NCCL's default
};

// Returns whether each stream has a hardware queue of its own, as far as the environment says.
bool has_queues() {
  const char* const connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return connections == nullptr || std::atoi(connections) >= 4;
}

// Owns a group with a layer on a stream of its own.
class Layer {
public:
  Layer(const RankContext& context, int num_comm_sms, int64_t timeout_ms = 20'000) : device_(*context.device) {
    RankContext own = context;
    own.device = &device_;
    GroupCase group_case = small_group(context, EPX_COMBINE_WIRE);
    group_case.max_tokens = 600; // more than the low-latency path takes
    group_case.max_recv_rows = 2400;
    group_case.hidden_dim = 1024;
    group_case.num_comm_sms = num_comm_sms;
    group_case.timeout_ms = timeout_ms;
    group_ = std::make_unique<GroupRun>(own, group_case);
    LayerCase layer_case = small_layer(4, 16, RoutingStyle::uniform);
    layer_case.hidden = layer_case.combine_hidden = 1024;
    layer_ = std::make_unique<ResidentLayer>(*group_, layer_case, true);
    const Workload work = make_workload(group_case, layer_case, 1);
    layer_->write(work);
    enqueue();
    device_.finish();
    layer_->check_results(work);
    expected_ = layer_->snapshot();
    wrong_ = device_.allocate(sizeof(unsigned long long));
    check_cuda(cudaMemset(wrong_, 0, sizeof(unsigned long long)), "cudaMemset");
    enqueue_checked();
    device_.finish();
  }
  Layer(const Layer&) = delete;
  Layer& operator=(const Layer&) = delete;
  ~Layer() { device_.free(wrong_); }

  const Stream& stream() const { return device_.own_stream(); }
  epx_group group() const { return group_->handle(); }
  int num_comm_sms() const { return group_->info().num_comm_sms; }

  void enqueue() const {
    layer_->forward();
    layer_->backward();
  }
  void enqueue_checked() const {
    layer_->restore_inputs(*expected_);
    enqueue();
    layer_->count_wrong(*expected_, reinterpret_cast<unsigned long long*>(wrong_));
  }
  void check_right() {
    unsigned long long wrong = 0;
    device_.read(&wrong, wrong_, sizeof(wrong));
    check(wrong == 0, "{} bytes are wrong", wrong);
    const epx_group_report report = GroupView(group()).status();
    check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
  }
  void dispatch() const { layer_->dispatch(); }

private:
  DeviceOnStream device_;
  std::unique_ptr<GroupRun> group_;
  std::unique_ptr<ResidentLayer> layer_;
  ResidentLayer::SnapshotOwner expected_;
  std::byte* wrong_ = nullptr;
};

// Every rank enqueues this work on one of its streams in a round.
struct Work {
  std::function<void()> enqueue;
  const Stream* stream;
};

// Each rank enqueues each round in an order of its own; if `same_order`, in the same order as the others.
void run_rounds(const RankContext& context, const char* name, const std::vector<Work>& works, const Options& options,
                bool same_order) {
  for (const Work& work : works) { // first launches load modules, which may wait for the GPU: run them one by one
    work.enqueue();
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  context.gather(0);
  Rng rng(options.seed + (same_order ? 0 : 7919 * static_cast<uint64_t>(context.rank)));
  std::vector<double> times;
  for (long round = 0; round < options.rounds; ++round) {
    std::vector<size_t> order(works.size());
    std::iota(order.begin(), order.end(), size_t{0});
    for (size_t i = order.size() - 1; i > 0; --i)
      std::swap(order[i], order[rng.below(i + 1)]);
    context.gather(0);
    const Clock::time_point begin = Clock::now();
    for (const size_t i : order)
      works[i].enqueue();
    while (!std::all_of(works.begin(), works.end(), [](const Work& work) { return work.stream->is_done(); }))
      std::this_thread::yield();
    times.push_back(ms_since(begin));
  }
  std::sort(times.begin(), times.end());
  if (context.rank == 0)
    std::printf("%s: %zu rounds, ms a round: median %.2f, most %.2f\n", name, times.size(), times[times.size() / 2],
                times.back());
  check(times.back() <= kMaxRoundMs, "{}: a round took {:.1f} ms; {} are allowed", name, times.back(), kMaxRoundMs);
}

// A group runs beside two communicators and matrix products.
void test_communicators(const RankContext& context, const Options& options) {
  Layer layer(context, options.num_comm_sms);
  const Communicator first(context, options.nccl_ctas), second(context, options.nccl_ctas);
  const MatrixProducts products(*context.device);
  const std::vector<Work> works = {{[&] { layer.enqueue_checked(); }, &layer.stream()},
                                   {[&] { first.enqueue(); }, &first.stream()},
                                   {[&] { second.enqueue(); }, &second.stream()},
                                   {[&] { products.enqueue(); }, &products.stream()}};
  run_rounds(context, "two communicators and matrix products", works, options, !has_queues());
  layer.check_right();
  context.gather(0);
}

// Two groups run whose SMs fit on the GPU together.
void test_two_groups(const RankContext& context, const Options& options) {
  const int sms = Layer(context, 0).num_comm_sms() / 2;
  Layer first(context, sms), second(context, sms);
  const MatrixProducts products(*context.device);
  const std::vector<Work> works = {{[&] { first.enqueue_checked(); }, &first.stream()},
                                   {[&] { second.enqueue_checked(); }, &second.stream()},
                                   {[&] { products.enqueue(); }, &products.stream()}};
  run_rounds(context, "two groups and matrix products", works, options, !has_queues());
  first.check_right();
  second.check_right();
  context.gather(0);
}

// Outside the guarantee: two groups take all SMs each, and odd ranks call them in the other order. Each rank's kernel of
// one group waits for peers, whose kernels of that group never begin.
void test_groups_that_do_not_fit(const RankContext& context) {
  constexpr int kAllSms = 1 << 20;
  Layer first(context, kAllSms, kShortMs), second(context, kAllSms, kShortMs);
  context.gather(0);
  const Clock::time_point begin = Clock::now();
  const Layer& one = context.rank % 2 == 0 ? first : second;
  const Layer& other = context.rank % 2 == 0 ? second : first;
  one.dispatch();
  // The kernel before must hold the SMs when the next is launched: a grid that finds no room is never put beside another.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  other.dispatch();
  std::vector<bool> reported(2, false);
  std::string messages;
  while (!(reported[0] || reported[1]) && ms_since(begin) < kShortMs + kGraceMs) {
    int index = 0;
    for (const Layer* layer : {&first, &second}) {
      const epx_group_report report = GroupView(layer->group()).status();
      if (report.status != EPX_SUCCESS && !reported[static_cast<size_t>(index)]) {
        reported[static_cast<size_t>(index)] = true;
        messages += std::string(report.message) + "\n";
      }
      ++index;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const double ms = ms_since(begin);
  if (reported[0] || reported[1]) std::printf("rank %d after %.0f ms: %s", context.rank, ms, messages.c_str());
  std::fflush(stdout);
  check(reported[0] || reported[1], "nothing was reported within {:.0f} ms", ms);
  check_says(messages, "Beside other kernels");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); // every kernel ends
  check(ms_since(begin) < 2 * kShortMs + kGraceMs, "kernels ended only after {:.0f} ms", ms_since(begin));
  context.gather(0);
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  const Options options = {option(argc, argv, "--rounds", 50), static_cast<uint64_t>(option(argc, argv, "--seed", 1)),
                           static_cast<int>(option(argc, argv, "--num-comm-sms", 0)),
                           static_cast<int>(option(argc, argv, "--nccl-ctas", 0))};
  return run_suite({[&](const RankContext& context) { test_communicators(context, options); },
                    [&](const RankContext& context) { test_two_groups(context, options); },
                    [&](const RankContext& context) { test_groups_that_do_not_fit(context); }});
}
