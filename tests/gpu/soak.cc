// SPDX-License-Identifier: Apache-2.0
// soak [--iterations N | --seconds T] [--seed S] [--max-delay-ns D] [--busy-tokens B] [--kinds M] [--inputs I]
// Runs back-to-back iterations of several layers, with other tokens and routing each time. Eager calls, some of them with each
// movement made twice, are mixed with replays; every rank injects delays and scribbles over staging after use; groups run on
// all multiprocessors and on one; a layer of B tokens keeps the wire busy; and rows of some layers travel quantised. The first
// pass over the inputs is compared with the oracle on the host, and all later ones with the first pass on the device: not one
// bit may differ. The soak ends after N iterations, or T seconds after it began. Of the kinds of groups in kinds_of(), those run
// whose bits are set in M; by default all do. A layer has I inputs, or a quarter of that where its rows are long, since the oracle
// is slow.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "tests/gpu/graph.h"
#include "tests/gpu/resident_layer.h"
#include "tests/gpu/small_cases.h"
#include "tests/gpu/suite.h"
#include "tests/support/check.h"
#include "tests/support/rng.h"

namespace epx::test {
namespace {

constexpr uint64_t kCheckEvery = 1'000;   // iterations
constexpr uint64_t kCheckTimeEvery = 100; // iterations
constexpr uint64_t kTellEvery = 10'000;   // iterations
constexpr int kLongRow = 3104;            // elements, which gather moves in two splits
constexpr int kLongestRow = 7504;         // elements, more than both halves of a TMA row pipeline hold
constexpr int kBusyRow = 3584;            // elements: two long h-tiles

constexpr FormatCase kBlock128{FormatWay::on_wire};
constexpr FormatCase kMx{FormatWay::on_wire, EPX_SCALING_MX, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0F};
constexpr FormatCase kNv{FormatWay::on_wire, EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_FLOAT8_E4M3, 0.0F};

// Owns a layer, its graph, and a snapshot of its memory for each of its inputs.
struct Subject {
  std::unique_ptr<ResidentLayer> layer;
  std::unique_ptr<Graph> graph, fused_graph; // with prepare and dispatch; with prepare_dispatch
  std::vector<ResidentLayer::SnapshotOwner> inputs;

  // Makes each movement of the forward `times` times: nothing else comes between calls that use the same staging. is_fused:
  // prepare_dispatch takes the place of prepare and dispatch.
  void call(bool is_fused, int times = 1) const {
    if (!is_fused) layer->prepare();
    for (int i = 0; i < times; ++i)
      is_fused ? layer->prepare_dispatch() : layer->dispatch();
    for (int i = 0; i < times; ++i)
      layer->combine();
    for (int i = 0; i < times; ++i)
      layer->rank_major();
    layer->backward();
  }
};

Subject make_subject(const RankContext& context, GroupRun& group, const LayerCase& layer_case, bool in_place, int inputs,
                     uint64_t seed) {
  Subject subject;
  subject.layer = std::make_unique<ResidentLayer>(group, layer_case, in_place);
  subject.graph = std::make_unique<Graph>(stream_of(context), [&] { subject.call(false); });
  subject.fused_graph = std::make_unique<Graph>(stream_of(context), [&] { subject.call(true); });
  Rng rng(seed);
  for (int i = 0; i < inputs; ++i) {
    LayerCase routed = layer_case;
    routed.routing = rng.pick(
        {RoutingStyle::uniform, RoutingStyle::distinct, RoutingStyle::hot, RoutingStyle::skewed, RoutingStyle::repeated});
    const Workload work = make_workload(group.shape(), routed, seed + static_cast<uint64_t>(i));
    subject.layer->write(work);
    subject.call(i % 2 == 0);
    context.device->finish();
    subject.layer->check_results(work);
    subject.layer->check_rank_major(work);
    subject.inputs.push_back(subject.layer->snapshot());
  }
  return subject;
}

struct Options {
  uint64_t iterations;
  std::chrono::seconds seconds; // 0: `iterations` decides
  uint64_t seed;
  int busy_tokens; // 0: no busy layer
  unsigned kinds;  // a bit for each kind of kinds_of()
  int inputs;      // of each layer of short rows

  int inputs_of_long_rows() const { return std::max(1, inputs / 4); }
};

struct Kind {
  epx_combine_precision precision;
  int num_comm_sms; // one SM makes each warp process many tiles
  bool is_busy = false;
};

std::vector<Kind> kinds_of(const Options& options) {
  std::vector<Kind> kinds{{EPX_COMBINE_WIRE, 0}, {EPX_COMBINE_EXACT, 0}, {EPX_COMBINE_WIRE, 1}, {EPX_COMBINE_EXACT, 1}};
  if (options.busy_tokens > 0) {
    kinds.push_back({EPX_COMBINE_WIRE, 0, true});
    kinds.push_back({EPX_COMBINE_EXACT, 0, true});
    kinds.push_back({EPX_COMBINE_WIRE, 4, true}); // so few SMs that gather takes batches of tokens
  }
  std::vector<Kind> chosen;
  for (size_t i = 0; i < kinds.size(); ++i)
    if ((options.kinds >> i & 1) != 0) chosen.push_back(kinds[i]);
  check(!chosen.empty(), "--kinds {} chooses none of {} kinds of groups", options.kinds, kinds.size());
  return chosen;
}

GroupCase group_of(const RankContext& context, const Kind& kind, const Options& options) {
  GroupCase group = small_group(context, kind.precision);
  group.num_comm_sms = kind.num_comm_sms;
  group.hidden_dim = kLongestRow;
  if (!kind.is_busy) return group;
  group.hidden_dim = kBusyRow;
  group.max_tokens = options.busy_tokens;
  group.max_recv_rows = 6 * static_cast<int64_t>(options.busy_tokens);
  return group;
}

std::vector<Subject> subjects_of(const RankContext& context, GroupRun& group, const Kind& kind, const Options& options) {
  const uint64_t seed = options.seed;
  const int few = options.inputs_of_long_rows();
  const auto layer_of = [](int top_k, int alignment, int hidden) {
    LayerCase layer = small_layer(top_k, alignment, RoutingStyle::uniform);
    layer.hidden = layer.combine_hidden = hidden;
    return layer;
  };
  const auto compact = [](LayerCase layer) {
    layer.rank_major_compact = true;
    return layer;
  };
  // Its rows travel quantised, and so do its sums where the precision and the scaling allow it.
  const auto quantised = [&](LayerCase layer, const FormatCase& format) {
    layer.format = layer.rank_major_format = layer.combine_bwd_format = layer.combine_rank_major_bwd_format = format;
    layer.expert_dtype = layer.dtype;
    if (kind.precision == EPX_COMBINE_WIRE && format.scaling != EPX_SCALING_NV) layer.sum_format = format;
    return layer;
  };
  const int short_row = small_layer(1, 1, RoutingStyle::uniform).hidden;
  std::vector<Subject> subjects;
  if (kind.is_busy) {
    subjects.push_back(make_subject(context, group, layer_of(4, 8, kBusyRow), false, few, seed + 6000));
    subjects.push_back(make_subject(context, group, compact(layer_of(4, 8, kBusyRow - 3)), true, few, seed + 7000));
    subjects.push_back(
        make_subject(context, group, quantised(layer_of(4, 8, kBusyRow), kBlock128), false, few, seed + 8000));
    return subjects;
  }
  subjects.push_back(make_subject(context, group, layer_of(3, 16, short_row), true, options.inputs, seed));
  subjects.push_back(make_subject(context, group, compact(layer_of(4, 1, short_row)), false, options.inputs, seed + 1000));
  subjects.push_back(make_subject(context, group, layer_of(1, 8, short_row), true, options.inputs, seed + 2000));
  subjects.push_back(make_subject(context, group, layer_of(4, 8, kLongRow), true, few, seed + 3000));
  subjects.push_back(make_subject(context, group, compact(layer_of(2, 1, kLongRow - 3)), false, few, seed + 4000));
  subjects.push_back(make_subject(context, group, layer_of(4, 8, kLongestRow), false, few, seed + 5000));
  subjects.push_back(
      make_subject(context, group, quantised(layer_of(3, 16, short_row), kMx), true, options.inputs, seed + 6000));
  subjects.push_back(
      make_subject(context, group, compact(quantised(layer_of(4, 1, kLongRow), kNv)), false, few, seed + 7000));
  subjects.push_back(
      make_subject(context, group, quantised(layer_of(4, 8, kLongestRow), kBlock128), true, few, seed + 8000));
  return subjects;
}

using Clock = std::chrono::steady_clock;

// Rank 0 prints how far it is, so that a run that is stopped from outside has said where it was. remove_fences.py does not take
// lines of progress for the report of a failure.
void tell_progress(const RankContext& context, const Kind& kind, uint64_t iterations, Clock::time_point begin) {
  if (context.rank != 0) return;
  const std::chrono::duration<double> passed = Clock::now() - begin;
  std::printf("progress: %s sums, num_comm_sms %d, %s layers: %llu iterations, %.1f s since the start\n",
              kind.precision == EPX_COMBINE_EXACT ? "exact" : "wire", kind.num_comm_sms, kind.is_busy ? "busy" : "small",
              static_cast<unsigned long long>(iterations), passed.count());
  std::fflush(stdout);
}

void soak(const RankContext& context, const Options& options) {
  const auto begin = Clock::now();
  const std::vector<Kind> kinds = kinds_of(options);
  for (size_t number = 0; number < kinds.size(); ++number) {
    const auto deadline = options.seconds * (number + 1) / static_cast<double>(kinds.size());
    // The clock of rank 0 decides for all.
    const auto time_is_up = [&] { return context.gather(Clock::now() - begin >= deadline ? 1 : 0).front() != 0; };
    GroupRun group(context, group_of(context, kinds[number], options));
    const std::vector<Subject> subjects = subjects_of(context, group, kinds[number], options);
    std::byte* const memory = context.device->allocate(sizeof(unsigned long long));
    auto* const wrong_bytes = reinterpret_cast<unsigned long long*>(memory);
    unsigned long long wrong = 0;
    context.device->write(wrong_bytes, &wrong, sizeof(wrong));
    Rng rng(options.seed); // the same on all ranks
    const bool is_timed = options.seconds.count() > 0;
    const uint64_t check_every = is_timed ? kCheckTimeEvery : kCheckEvery;
    uint64_t done = 0;
    while (is_timed || done < options.iterations / kinds.size()) {
      const Subject& subject = subjects[rng.below(subjects.size())];
      const ResidentLayer::Snapshot& input = *subject.inputs[rng.below(subject.inputs.size())];
      const bool replays = rng.chance(50), is_fused = rng.chance(50);
      const int times = rng.chance(50) ? 2 : 1;
      subject.layer->restore_inputs(input);
      if (replays)
        (is_fused ? subject.fused_graph : subject.graph)->launch();
      else
        subject.call(is_fused, times);
      subject.layer->count_wrong(input, wrong_bytes);
      if (done++ % check_every != 0) continue;
      context.device->read(&wrong, wrong_bytes, sizeof(wrong));
      check(wrong == 0, "{} bytes are wrong within the first {} iterations", wrong, done);
      if (done % kTellEvery == 1) tell_progress(context, kinds[number], done, begin);
      if (is_timed && time_is_up()) break;
    }
    context.device->read(&wrong, wrong_bytes, sizeof(wrong));
    tell_progress(context, kinds[number], done, begin);
    context.device->free(memory);
    check(wrong == 0, "{} bytes are wrong", wrong);
    const epx_group_report report = group.view().status();
    check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
  }
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  Options options{};
  options.iterations = static_cast<uint64_t>(option(argc, argv, "--iterations", 2'000));
  options.seconds = std::chrono::seconds(option(argc, argv, "--seconds", 0));
  options.seed = static_cast<uint64_t>(option(argc, argv, "--seed", 1));
  options.busy_tokens = static_cast<int>(option(argc, argv, "--busy-tokens", 300));
  options.kinds = static_cast<unsigned>(option(argc, argv, "--kinds", 127));
  options.inputs = static_cast<int>(option(argc, argv, "--inputs", 12));
  const long max_delay_ns = option(argc, argv, "--max-delay-ns", 20'000);
  setenv("EPX_TEST_MAX_DELAY_NS", std::to_string(max_delay_ns).c_str(), 1);
  setenv("EPX_TEST_SCRIBBLES_STAGING", "1", 1);
  setenv("EPX_TEST_ALTERNATES_PATHS", "1", 1);
  return run_suite({[&](const RankContext& context) { soak(context, options); }});
}
