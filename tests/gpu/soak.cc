// soak [--iterations N] [--seed S] [--max-delay-ns D]
// Back-to-back iterations of several layers, with other tokens and routing each time, eager calls, some of them with each
// movement made twice, and replays mixed, delays on every rank, staging poisoned after use, on all multiprocessors and on
// one. The first pass over the inputs is compared with the oracle on the host, all later ones with the first pass on the
// device: not one bit may differ.
#include <cstdlib>
#include <iterator>
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

constexpr int kInputs = 12;            // of a layer
constexpr int kInputsOfLongRows = 3;   // the oracle takes its time
constexpr uint64_t kLookEvery = 1'000; // iterations
constexpr int kLongRow = 3104;         // elements, which gather moves in parts

// A layer, its graph, and what it holds with each of its inputs.
struct Subject {
  std::unique_ptr<ResidentLayer> layer;
  std::unique_ptr<Graph> graph;
  std::vector<ResidentLayer::SnapshotOwner> inputs;

  // Each movement of the forward so often: nothing else comes between calls that use the same staging.
  void call(int times = 1) const {
    layer->prepare();
    for (int i = 0; i < times; ++i)
      layer->dispatch();
    for (int i = 0; i < times; ++i)
      layer->combine();
    layer->backward();
  }
};

Subject make_subject(const RankContext& context, GroupRun& group, const LayerCase& layer_case, bool in_place, int inputs,
                     uint64_t seed) {
  Subject subject;
  subject.layer = std::make_unique<ResidentLayer>(group, layer_case, in_place);
  subject.graph = std::make_unique<Graph>(stream_of(context), [&] { subject.call(); });
  Rng rng(seed);
  for (int i = 0; i < inputs; ++i) {
    LayerCase routed = layer_case;
    routed.routing = rng.pick(
        {RoutingStyle::uniform, RoutingStyle::distinct, RoutingStyle::hot, RoutingStyle::skewed, RoutingStyle::repeated});
    const Workload work = make_workload(group.shape(), routed, seed + static_cast<uint64_t>(i));
    subject.layer->write(work);
    subject.call();
    context.device->finish();
    subject.layer->check_forward(work);
    subject.layer->check_backward(work);
    subject.inputs.push_back(subject.layer->snapshot());
  }
  return subject;
}

void soak(const RankContext& context, uint64_t iterations, uint64_t seed) {
  struct Kind {
    epx_combine_precision precision;
    int num_comm_sms; // few make each warp do much
  };
  constexpr Kind kKinds[] = {{EPX_COMBINE_WIRE, 0}, {EPX_COMBINE_EXACT, 0}, {EPX_COMBINE_WIRE, 1}, {EPX_COMBINE_EXACT, 1}};
  for (const Kind& kind : kKinds) {
    GroupCase group_case = small_group(context, kind.precision);
    group_case.num_comm_sms = kind.num_comm_sms;
    group_case.hidden_dim = kLongRow;
    GroupRun group(context, group_case);
    std::vector<Subject> subjects;
    subjects.push_back(make_subject(context, group, small_layer(3, 16, RoutingStyle::uniform), true, kInputs, seed));
    subjects.push_back(make_subject(context, group, small_layer(4, 1, RoutingStyle::uniform), false, kInputs, seed + 1000));
    subjects.push_back(make_subject(context, group, small_layer(1, 8, RoutingStyle::uniform), true, kInputs, seed + 2000));
    LayerCase with_long_rows = small_layer(4, 8, RoutingStyle::uniform);
    with_long_rows.hidden = with_long_rows.combine_hidden = kLongRow;
    subjects.push_back(make_subject(context, group, with_long_rows, true, kInputsOfLongRows, seed + 3000));
    LayerCase with_ragged_rows = small_layer(2, 1, RoutingStyle::uniform);
    with_ragged_rows.hidden = with_ragged_rows.combine_hidden = kLongRow - 3;
    subjects.push_back(make_subject(context, group, with_ragged_rows, false, kInputsOfLongRows, seed + 4000));

    std::byte* const memory = context.device->allocate(sizeof(unsigned long long));
    auto* const wrong_bytes = reinterpret_cast<unsigned long long*>(memory);
    unsigned long long wrong = 0;
    context.device->write(wrong_bytes, &wrong, sizeof(wrong));
    Rng rng(seed); // the same on all ranks
    for (uint64_t iteration = 0; iteration < iterations / std::size(kKinds); ++iteration) {
      const Subject& subject = subjects[rng.below(subjects.size())];
      const ResidentLayer::Snapshot& input = *subject.inputs[rng.below(subject.inputs.size())];
      const bool replays = rng.chance(50);
      const int times = rng.chance(50) ? 2 : 1;
      subject.layer->restore_inputs(input);
      if (replays)
        subject.graph->launch();
      else
        subject.call(times);
      subject.layer->count_wrong(input, wrong_bytes);
      if (iteration % kLookEvery != 0) continue;
      context.device->read(&wrong, wrong_bytes, sizeof(wrong));
      check(wrong == 0, "{} bytes are wrong within the first {} iterations", wrong, iteration + 1);
    }
    context.device->read(&wrong, wrong_bytes, sizeof(wrong));
    context.device->free(memory);
    check(wrong == 0, "{} bytes are wrong", wrong);
    const epx_group_report report = read_status(group.handle());
    check(report.status == EPX_SUCCESS, "the group has failed: {}", report.message);
  }
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  const auto iterations = static_cast<uint64_t>(option(argc, argv, "--iterations", 2'000));
  const auto seed = static_cast<uint64_t>(option(argc, argv, "--seed", 1));
  const long max_delay_ns = option(argc, argv, "--max-delay-ns", 20'000);
  setenv("EPX_TEST_MAX_DELAY_NS", std::to_string(max_delay_ns).c_str(), 1);
  setenv("EPX_TEST_POISONS_STAGING", "1", 1);
  setenv("EPX_TEST_ALTERNATES_WAYS", "1", 1);
  return run_suite({[&](const RankContext& context) { soak(context, iterations, seed); }});
}
