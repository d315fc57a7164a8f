// SPDX-License-Identifier: Apache-2.0
// graphs [--replays N] [--overlaps N]
// Tests CUDA graphs, and calls that return while the stream is blocked. --replays: the number of replays that each report an
// event. --overlaps: the number of groups of each kind whose calls overlap.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "tests/gpu/graph.h"
#include "tests/gpu/resident_layer.h"
#include "tests/gpu/small_cases.h"
#include "tests/gpu/suite.h"
#include "tests/support/check.h"

namespace epx::test {
namespace {

// A graph is captured once and replayed with other routing and tokens, with eager calls in between: each time the results have
// the oracle's bits.
void test_replays(const RankContext& context, epx_combine_precision precision, bool in_place) {
  const GroupCase shape = small_group(context, precision);
  GroupRun group(context, shape);
  ResidentLayer layer(group, small_layer(3, 16, RoutingStyle::uniform), in_place);
  const auto all_calls = [&] {
    layer.forward();
    layer.rank_major();
    layer.backward();
  };
  const auto fused_calls = [&] {
    layer.prepare_dispatch();
    layer.combine();
    layer.backward();
    layer.rank_major();
  };
  const Graph graph(stream_of(context), all_calls), fused_graph(stream_of(context), fused_calls);
  const std::vector<RoutingStyle> routings = {RoutingStyle::uniform, RoutingStyle::hot, RoutingStyle::repeated,
                                              RoutingStyle::skewed};
  for (uint64_t round = 0; round < 12; ++round) {
    const Workload work = make_workload(shape, small_layer(3, 16, routings[round % routings.size()]), 100 + round);
    layer.write(work);
    const bool is_fused = round % 2 == 1;
    if (round % 3 == 1)
      is_fused ? fused_calls() : all_calls();
    else
      (is_fused ? fused_graph : graph).launch();
    context.device->finish();
    layer.check_results(work);
    layer.check_rank_major(work);
  }
  const epx_group_report report = group.view().status();
  check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
}

// F0 F1 B0 F2 B1 B2 of three layers run, captured and eager alternately, without a check in between.
void test_layers_in_flight(const RankContext& context) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  GroupRun group(context, shape);
  std::vector<LayerCase> cases;
  std::vector<std::unique_ptr<ResidentLayer>> layers;
  std::vector<std::unique_ptr<Graph>> forwards, backwards;
  for (int i = 0; i < 3; ++i) {
    cases.push_back(small_layer(2 + i, i == 1 ? 16 : 1, RoutingStyle::uniform));
    layers.push_back(std::make_unique<ResidentLayer>(group, cases.back(), i != 2));
    ResidentLayer& layer = *layers.back();
    forwards.push_back(std::make_unique<Graph>(stream_of(context), [&] { layer.forward(); }));
    backwards.push_back(std::make_unique<Graph>(stream_of(context), [&] { layer.backward(); }));
  }
  for (uint64_t round = 0; round < 3; ++round) {
    std::vector<Workload> works;
    for (size_t i = 0; i < layers.size(); ++i) {
      works.push_back(make_workload(shape, cases[i], 1000 + 10 * round + i));
      layers[i]->write(works.back());
    }
    const auto run = [&](char what, size_t layer, bool replay) {
      if (what == 'F')
        replay ? forwards[layer]->launch() : layers[layer]->forward();
      else
        replay ? backwards[layer]->launch() : layers[layer]->backward();
    };
    const std::pair<char, size_t> schedule[] = {{'F', 0}, {'F', 1}, {'B', 0}, {'F', 2}, {'B', 1}, {'B', 2}};
    for (size_t step = 0; step < std::size(schedule); ++step)
      run(schedule[step].first, schedule[step].second, (step + round) % 2 == 0);
    context.device->finish();
    for (size_t i = 0; i < layers.size(); ++i) {
      layers[i]->check_results(works[i]);
    }
  }
}

// Two groups of one process, of different shapes, are in one graph.
void test_groups(const RankContext& context) {
  const GroupCase wire_shape = small_group(context, EPX_COMBINE_WIRE);
  GroupCase exact_shape = small_group(context, EPX_COMBINE_EXACT);
  exact_shape.num_experts = 7;
  GroupRun wire_group(context, wire_shape), exact_group(context, exact_shape);
  const LayerCase layer_case = small_layer(4, 1, RoutingStyle::skewed);
  ResidentLayer wire(wire_group, layer_case, true), exact(exact_group, layer_case, true);
  const Graph graph(stream_of(context), [&] {
    wire.forward();
    exact.forward();
    wire.backward();
    exact.backward();
  });
  for (uint64_t round = 0; round < 3; ++round) {
    const Workload wire_work = make_workload(wire_shape, layer_case, 2000 + round);
    const Workload exact_work = make_workload(exact_shape, layer_case, 3000 + round);
    wire.write(wire_work);
    exact.write(exact_work);
    graph.launch();
    context.device->finish();
    wire.check_forward(wire_work);
    exact.check_forward(exact_work);
    wire.check_backward(wire_work);
    exact.check_backward(exact_work);
  }
}

// Graphs are replayed without a look at the status in between: every event is counted, and the first one is reported.
void test_event_counts(const RankContext& context, uint64_t replays) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  GroupRun group(context, shape);
  const LayerCase layer_case = small_layer(3, 16, RoutingStyle::uniform);
  ResidentLayer layer(group, layer_case, false);
  Workload work = make_workload(shape, layer_case, 5000);
  work.routing[static_cast<size_t>(context.rank)].topk_idx[4] = shape.num_experts + 7; // token 1, k 1
  layer.write(work);
  const Graph dispatch(stream_of(context), [&] { layer.dispatch(); }),
      prepare(stream_of(context), [&] { layer.prepare(); }), fused(stream_of(context), [&] { layer.prepare_dispatch(); });
  uint64_t calls = 0;
  const auto replay_and_check = [&](const Graph& graph, uint64_t times, epx_event_kind kind, epx_operation operation,
                                    const std::string& sentence) {
    for (uint64_t i = 0; i < times; ++i)
      graph.launch();
    context.device->finish();
    const epx_group_report report = group.view().status();
    check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
    for (int other = 0; other < EPX_MAX_EVENT_KINDS; ++other)
      check_equal(report.event_counts[other], other == kind ? times : 0, "events of kind " + std::to_string(other));
    check_equal(static_cast<int>(report.first_event), static_cast<int>(kind), "report.first_event");
    check_equal(static_cast<int>(report.first_event_operation), static_cast<int>(operation),
                "report.first_event_operation");
    check_equal(report.first_event_sequence, calls + 1, "report.first_event_sequence");
    check_says(report.message, sentence);
    calls += times;
  };
  const uint64_t some = std::min<uint64_t>(replays, 300); // more than the status record has entries for events
  const uint64_t few = std::min<uint64_t>(replays / 8, 300);
  replay_and_check(dispatch, few, EPX_EVENT_HANDLE_MISMATCH, EPX_OP_DISPATCH, "not filled in by epx_prepare");
  replay_and_check(prepare, replays, EPX_EVENT_BAD_INDEX, EPX_OP_PREPARE, "1 bad entries in topk_idx");
  replay_and_check(prepare, some, EPX_EVENT_BAD_INDEX, EPX_OP_PREPARE, "token 1, k 1");
  replay_and_check(fused, few, EPX_EVENT_BAD_INDEX, EPX_OP_PREPARE_DISPATCH, "token 1, k 1");
  const epx_group_report report = group.view().status();
  check_equal(report.event_counts[EPX_EVENT_BAD_INDEX], uint64_t{0}, "bad indices after the last look");
}

// One rank destroys its group behind its call, long before the peers make theirs: the call completes with its result.
void test_destroy_behind_a_call(const RankContext& context) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  auto group = std::make_unique<GroupRun>(context, shape);
  const LayerCase layer_case = small_layer(3, 16, RoutingStyle::uniform);
  ResidentLayer layer(*group, layer_case, false);
  const Workload work = make_workload(shape, layer_case, 8000);
  layer.write(work);
  layer.prepare();
  layer.dispatch();
  context.device->finish();
  context.gather(0);
  if (context.rank != 0) std::this_thread::sleep_for(std::chrono::milliseconds(300));
  layer.combine();
  group.reset();
  context.device->finish();
  layer.check_forward(work);
}

class Stream {
public:
  explicit Stream(unsigned flags = cudaStreamNonBlocking) {
    check_cuda(cudaStreamCreateWithFlags(&stream_, flags), "cudaStreamCreateWithFlags");
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }
  void finish() const { check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

private:
  cudaStream_t stream_ = nullptr;
};

// Eager calls, each on another stream than the one before it, are ordered by the library, not by the caller. Calls that are
// captured in between are not ordered with them, and the capture stays valid.
void test_eager_streams(const RankContext& context) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  GroupRun group(context, shape);
  const LayerCase layer_case = small_layer(3, 16, RoutingStyle::uniform);
  ResidentLayer layer(group, layer_case, true);
  const Stream streams[2];
  for (uint64_t round = 0; round < 6; ++round) {
    const Workload work = make_workload(shape, layer_case, 6000 + round);
    layer.write(work);
    size_t calls = round; // so that rounds begin on either stream
    const auto alternate = [&](void (ResidentLayer::*call)()) {
      layer.set_stream(streams[calls++ % 2].get());
      (layer.*call)();
    };
    alternate(&ResidentLayer::prepare);
    alternate(&ResidentLayer::dispatch);
    const Graph graph(streams[calls % 2].get(), [&] {
      layer.set_stream(streams[calls % 2].get());
      layer.dispatch();
      layer.set_stream(streams[(calls + 1) % 2].get());
      layer.dispatch(); // eager, beside a stream that is being captured
    });
    alternate(&ResidentLayer::combine);
    alternate(&ResidentLayer::combine_bwd);
    alternate(&ResidentLayer::dispatch_bwd);
    for (const Stream& stream : streams)
      stream.finish();
    graph.launch();
    for (const Stream& stream : streams)
      stream.finish();
    layer.check_results(work);
  }
  const epx_group_report report = group.view().status();
  check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
}

// A call is refused, on this rank's host alone, when a capture prevents it from being ordered behind the call before, or from
// using its stream. Made again after the capture has ended it succeeds, and the group lives.
void test_refused_beside_capture(const RankContext& context) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  GroupRun group(context, shape);
  const LayerCase layer_case = small_layer(3, 16, RoutingStyle::uniform);
  ResidentLayer layer(group, layer_case, false);
  const Workload work = make_workload(shape, layer_case, 9000);
  layer.write(work);
  const Stream streams[2];
  const Stream waits_for_null(cudaStreamDefault);
  const auto call_on = [&](cudaStream_t stream, void (ResidentLayer::*call)()) {
    layer.set_stream(stream);
    (layer.*call)();
  };
  const auto check_refused = [&](cudaStream_t stream, void (ResidentLayer::*call)()) {
    try {
      call_on(stream, call);
    } catch (const Error& refusal) {
      check_says(refusal.what(), "captured");
      return;
    }
    fail_check("a call beside a capture was not refused");
  };
  call_on(streams[0].get(), &ResidentLayer::prepare);
  const Graph beside_last(streams[0].get(), [&] { check_refused(streams[1].get(), &ResidentLayer::dispatch); });
  call_on(nullptr, &ResidentLayer::dispatch);
  const Graph beside_null(waits_for_null.get(), [&] {
    call_on(streams[1].get(), &ResidentLayer::dispatch); // ordered behind the call on the legacy default stream
    check_refused(nullptr, &ResidentLayer::combine);
  });
  call_on(nullptr, &ResidentLayer::combine);
  check_cuda(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  layer.check_forward(work);
  const epx_group_report report = group.view().status();
  check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
}

using LayerCall = void (ResidentLayer::*)();

// Two graphs are replayed on streams that nothing orders: as long as the group lives its rows are right, and when it fails it
// reports the overlap. All ranks but one order theirs, so that the ranks' calls cannot change places; with several ranks both
// graphs make the same calls. Where second_call is NULL, the second graph is the first one, instantiated once more.
void test_unordered_graphs(const RankContext& context, LayerCall first_call, LayerCall second_call) {
  constexpr int kCulprit = 0;
  constexpr int kCalls = 8; // per graph
  GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  if (num_nodes(shape) > 1) return; // whose calls are not found when they overlap: NCCL would serve two streams at a time
  shape.num_comm_sms = 2;           // so that both grids fit on the GPU
  GroupRun group(context, shape);
  const LayerCase layer_case = small_layer(3, 1, RoutingStyle::uniform);
  ResidentLayer first(group, layer_case, false), second(group, layer_case, false);
  const Stream streams[2];
  const auto graph_of = [&](ResidentLayer& layer, LayerCall call, cudaStream_t stream) {
    layer.set_stream(stream);
    return std::make_unique<Graph>(stream, [&] {
      for (int i = 0; i < kCalls; ++i)
        (layer.*call)();
    });
  };
  const Workload work = make_workload(shape, layer_case, 7000), other_work = make_workload(shape, layer_case, 7001);
  first.write(work);
  second.write(other_work);
  for (ResidentLayer* const layer : {&first, &second}) {
    layer->prepare_dispatch();
    layer->combine();
  }
  context.device->finish();
  const cudaStream_t second_stream = streams[context.rank == kCulprit ? 1 : 0].get();
  const auto first_graph = graph_of(first, first_call, streams[0].get());
  const auto second_graph = second_call != nullptr ? graph_of(second, second_call, second_stream)
                                                   : std::make_unique<Graph>(second_stream, *first_graph);
  context.gather(0);
  if (context.rank != kCulprit) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  for (int round = 0; round < 500; ++round) {
    first_graph->launch();
    second_graph->launch();
    for (const Stream& stream : streams)
      stream.finish();
    const epx_group_report report = group.view().status();
    if (report.status != EPX_SUCCESS) {
      check_equal(static_cast<int>(report.status), static_cast<int>(EPX_ERROR_OUT_OF_SEQUENCE), "report.status");
      check_equal(report.culprit, kCulprit, "report.culprit");
      check_says(report.message, "overlapped");
      context.gather(0);
      return;
    }
    first.check_forward(work);
    second.check_forward(other_work);
  }
  fail_check("none of the two graphs' calls overlapped, or nobody saw it");
}

// In a group of several nodes one rank captures a call that the others make at once, and launches the graph: each rank reports
// it.
void test_capture_on_one_rank(const RankContext& context) {
  const GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  if (num_nodes(shape) == 1) return; // where rows travel alike
  GroupRun group(context, shape);
  const LayerCase layer_case = small_layer(3, 1, RoutingStyle::uniform);
  ResidentLayer layer(group, layer_case, false);
  layer.write(make_workload(shape, layer_case, 8000));
  layer.prepare();
  context.device->finish();
  const auto dispatch = [&] { layer.dispatch(); };
  const int capturing = context.num_ranks - 1;
  std::unique_ptr<Graph> graph;
  if (context.rank == capturing) graph = std::make_unique<Graph>(stream_of(context), dispatch);
  context.gather(0);
  std::string sentence;
  if (graph != nullptr) {
    graph->launch();
  } else {
    try {
      dispatch();
    } catch (const std::exception& error) { // the host may learn of it within the call
      sentence = error.what();
    }
  }
  context.device->finish();
  epx_group_report report = group.view().status();
  for (int i = 0; i < 5'000 && report.status == EPX_SUCCESS; ++i) { // the graph's call ends before the verdict is there
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    report = group.view().status();
  }
  check_equal(static_cast<int>(report.status), static_cast<int>(EPX_ERROR_MISMATCH), "report.status");
  const bool knows = contains(report.message, "captures it in a CUDA graph");
  check(knows || contains(report.message, "has ended the group with"), "the message is \"{}\"", report.message);
  const std::vector<uint64_t> all = context.gather(knows ? 1 : 0);
  check(std::ranges::count(all, 1) > 0, "no rank says what differs; this one: {}", sentence);
}

// Blocks a stream until unblock().
class StreamBlocker {
public:
  explicit StreamBlocker(cudaStream_t stream) {
    check_cuda(cudaLaunchHostFunc(
                   stream, [](void* unblocked) { static_cast<std::atomic<bool>*>(unblocked)->wait(false); }, &unblocked_),
               "cudaLaunchHostFunc");
  }
  StreamBlocker(const StreamBlocker&) = delete;
  StreamBlocker& operator=(const StreamBlocker&) = delete;
  ~StreamBlocker() { unblock(); }
  void unblock() {
    unblocked_ = true;
    unblocked_.notify_all();
  }

private:
  std::atomic<bool> unblocked_ = false;
};

// All five calls return while nothing before them on the stream has run, and allocate no memory. A call that waits for the
// stream never returns here, and the test runs into its time limit.
void test_blocked_stream(const RankContext& context) {
  GroupCase shape = small_group(context, EPX_COMBINE_WIRE);
  if (num_nodes(shape) > 1) shape.fixed_rail_tokens = shape.max_tokens; // without which calls wait for their sizes
  GroupRun group(context, shape);
  const LayerCase layer_case = small_layer(3, 16, RoutingStyle::uniform);
  ResidentLayer layer(group, layer_case, true);
  const Workload work = make_workload(shape, layer_case, 4000);
  layer.write(work);
  size_t free_before = 0, free_after = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free_before, &total), "cudaMemGetInfo");
  {
    StreamBlocker blocker(stream_of(context));
    layer.forward();
    layer.backward();
    check(cudaStreamQuery(stream_of(context)) == cudaErrorNotReady, "the stream was to be blocked");
    blocker.unblock();
    context.device->finish();
  }
  check_cuda(cudaMemGetInfo(&free_after, &total), "cudaMemGetInfo");
  check_equal(free_after, free_before, "free memory after the five calls");
  layer.check_results(work);
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  const auto replays = static_cast<uint64_t>(option(argc, argv, "--replays", 1'000));
  const long overlaps = option(argc, argv, "--overlaps", 1);
  return run_suite({
      [](const RankContext& context) { test_blocked_stream(context); }, // first, since nothing has been called yet
      [](const RankContext& context) { test_replays(context, EPX_COMBINE_WIRE, true); },
      [](const RankContext& context) { test_replays(context, EPX_COMBINE_WIRE, false); },
      [](const RankContext& context) { test_replays(context, EPX_COMBINE_EXACT, true); },
      test_layers_in_flight,
      test_groups,
      test_destroy_behind_a_call,
      test_eager_streams,
      test_refused_beside_capture,
      [=](const RankContext& context) {
        for (long i = 0; i < overlaps; ++i) {
          test_unordered_graphs(context, &ResidentLayer::dispatch, &ResidentLayer::dispatch);
          test_unordered_graphs(context, &ResidentLayer::prepare_dispatch, &ResidentLayer::prepare_dispatch);
          test_unordered_graphs(context, &ResidentLayer::dispatch, nullptr);
          if (context.num_ranks > 1) continue;
          test_unordered_graphs(context, &ResidentLayer::prepare, &ResidentLayer::dispatch);
          test_unordered_graphs(context, &ResidentLayer::prepare_dispatch, &ResidentLayer::combine);
        }
      },
      test_capture_on_one_rank,
      [=](const RankContext& context) { test_event_counts(context, replays); },
  });
}
