// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/native.h"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nvtx3/nvtx3.hpp>

#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/native/gpu_all_to_all.h"
#include "tools/ep_bench/native/native_rows.h"
#include "tools/ep_bench/native/ragged_rows.h"
#include "tools/ep_bench/workload/set_verifier.h"

namespace epx::bench {
namespace {

// What the native calls read and write, of each input set in turn.
class NativeCalls {
public:
  // `measured` and `sets` must outlive this. Collective. Throws AgreedError.
  NativeCalls(MeasuredGroup& measured, std::span<const InputSet> sets, const Options& options, const Peers& peers, Gpu& gpu)
      : options_(options), has_slices_(measured.info().ranks_per_node == measured.info().num_ranks) {
    const std::vector<int32_t> first_experts = peers.gather(measured.info().first_local_expert);
    auto all_to_all = std::make_unique<GpuAllToAll>(peers, gpu, options.experts, measured.rows());
    peers.together([&] {
      native_.emplace(options, peers.rank(), first_experts, measured.rows(), gpu, std::move(all_to_all));
      for (const InputSet& set : sets)
        inputs_.push_back(measured.tensors_of(set.by_token));
      expert_rows_ = Buffer::plain(gpu, static_cast<size_t>(measured.rows() * row_bytes(options)));
      out_ = Buffer::plain(gpu, static_cast<size_t>(options.tokens * row_bytes(options)));
      if (has_slices_) ragged_.emplace(options, measured.group(), measured.rows(), sets.size(), gpu);
    });
  }

  // Whether the call can be made: slices do not travel between nodes.
  bool has(NativeCall call) const { return call != NativeCall::Ragged || has_slices_; }

  // The calls but dispatch take the plan of the last one, which must have been of the same set.
  void make(NativeCall call, size_t set) {
    const TokenTensors& inputs = inputs_[set];
    const int64_t T = options_.tokens, K = options_.top_k, H = options_.hidden;
    const ConstTensor tokens(inputs.tokens.data(), options_.dtype, {T, H});
    switch (call) {
    case NativeCall::Dispatch:
      return native_->dispatch({inputs.topk_idx.data(), EPX_INT64, {T, K}}, tokens, expert_rows_);
    case NativeCall::DispatchRows:
      return native_->dispatch_rows(tokens, expert_rows_);
    case NativeCall::Combine:
      return native_->combine(expert_rows_, {inputs.topk_weights.data(), EPX_FLOAT32, {T, K}},
                              {out_.data(), options_.dtype, {T, H}});
    case NativeCall::Exchange:
      return native_->exchange_rows();
    case NativeCall::Ragged:
      return ragged_->exchange(native_->sorted_rows(), set);
    }
  }
  // After the first dispatch of a set.
  void plan_slices(size_t set) {
    if (has_slices_) ragged_->plan(*native_, set);
  }
  // What is left to do after a call that leaves rows as they arrive.
  void finish(NativeCall call) {
    if (call == NativeCall::Exchange) native_->sort_arrived(native_->arrived_rows(), expert_rows_);
    if (call == NativeCall::Ragged) native_->sort_arrived(ragged_->arrived(), expert_rows_);
  }

  size_t num_sets() const { return inputs_.size(); }
  const Buffer& expert_rows() const { return expert_rows_; } // [N, H]
  const Buffer& out() const { return out_; }                 // [T, H]
  void keep_workspace() { native_->keep_workspace(); }

private:
  const Options& options_;
  bool has_slices_;
  std::optional<NativeRows> native_;
  std::optional<RaggedRows> ragged_;
  std::vector<TokenTensors> inputs_; // by set
  Buffer expert_rows_, out_;
};

// The expert-major order has no pads, and each sum one rounding: those of the library with alignment 1 and precision exact.
class NativeVerifier : SetVerifier {
public:
  NativeVerifier(MeasuredGroup& measured, const Workload& workload, const Options& options, const Peers& peers, Gpu& gpu,
                 NativeCalls& native, size_t set)
      : SetVerifier(measured, workload, options, peers, static_cast<int>(set)), gpu_(gpu), native_(native), set_(set),
        plan_(reference::prepare(native_problem(), all_.routing)) {}

  // Counts this rank's wrong elements. Collective.
  NativeWrongCounts run() {
    auto expert_rows = scribbled_matrices(peers_.num_ranks(), options_.dtype, measured_.rows(), options_.hidden);
    auto weights = scribbled_vectors<float>(peers_.num_ranks(), measured_.rows());
    reference::dispatch(plan_, {.tokens = all_.tokens,
                                .sidecars = {},
                                .topk_weights = all_.topk_weights,
                                .recv_tokens = expert_rows,
                                .recv_sidecars = {},
                                .recv_weights = weights});
    auto out = scribbled_matrices(peers_.num_ranks(), options_.dtype, options_.tokens, options_.hidden);
    reference::combine(plan_, {.expert_out = all_.expert_out, .recv_weights = weights, .out = out});

    const auto wrong_after = [&](NativeCall call, const std::vector<Matrix>& expected, const Buffer& actual) {
      peers_.together([&] {
        actual.fill(kScribble);
        native_.make(call, set_);
        native_.finish(call);
        gpu_.finish();
      });
      return wrong_elements(expected, actual, call == NativeCall::Combine);
    };
    const int64_t dispatched = wrong_after(NativeCall::Dispatch, expert_rows, native_.expert_rows());
    const int64_t rows_dispatched = wrong_after(NativeCall::DispatchRows, expert_rows, native_.expert_rows());
    const int64_t exchanged = wrong_after(NativeCall::Exchange, expert_rows, native_.expert_rows());
    const int64_t ragged =
        native_.has(NativeCall::Ragged) ? wrong_after(NativeCall::Ragged, expert_rows, native_.expert_rows()) : 0;
    native_.expert_rows().write(mine_.by_row.expert_out);
    return {dispatched, rows_dispatched, wrong_after(NativeCall::Combine, out, native_.out()), exchanged, ragged};
  }

private:
  reference::Problem native_problem() const {
    reference::Problem native = problem();
    native.alignment = 1;
    native.zone_stride = 0;
    native.precision = EPX_COMBINE_EXACT;
    return native;
  }

  Gpu& gpu_;
  NativeCalls& native_;
  size_t set_;
  reference::Plan plan_;
};

class NativeRun {
public:
  NativeRun(NativeCalls& native, const Options& options, const Peers& peers, Gpu& gpu, StreamBlocker& blocker)
      : native_(native), options_(options), peers_(peers), gpu_(gpu), blocker_(blocker) {}

  // NCCL connects two ranks in their first exchange, which may differ by set.
  void warm_up() {
    peers_.together([&] {
      for (size_t set = 0; set < native_.num_sets(); ++set)
        for (const NativeCall call : kNativeCalls) {
          if (!native_.has(call)) continue;
          native_.make(call, set);
          gpu_.finish();
          if (call == NativeCall::Dispatch) native_.plan_slices(set);
        }
      native_.keep_workspace();
    });
  }

  std::array<std::vector<Series>, kNativeCalls.size()> measure() {
    std::array<std::vector<int64_t>, kNativeCalls.size()> times;
    for (int iteration = 0; iteration < options_.warmup + options_.iterations; ++iteration)
      for (size_t call = 0; call < kNativeCalls.size(); ++call) {
        if (!native_.has(kNativeCalls[call])) continue;
        const int64_t elapsed_ns = time(kNativeCalls[call], iteration);
        if (iteration >= options_.warmup) times[call].push_back(elapsed_ns);
      }
    std::array<std::vector<Series>, kNativeCalls.size()> series;
    for (size_t call = 0; call < kNativeCalls.size(); ++call)
      if (native_.has(kNativeCalls[call])) series[call] = gather_durations(times[call], peers_);
    return series;
  }

private:
  int64_t time(NativeCall call, int iteration) {
    const bool is_blocked = call != NativeCall::Dispatch; // which waits on the host
    int64_t elapsed_ns = 0;
    if (is_blocked) blocker_.block();
    blocker_.rank_barrier();
    Failure failure = attempt([&] {
      const nvtx3::scoped_range range(fmt::format("native {} {}", name_of(call), iteration));
      watch_.start(gpu_.cuda_stream());
      native_.make(call, static_cast<size_t>(iteration) % native_.num_sets());
      watch_.stop(gpu_.cuda_stream());
    });
    if (is_blocked) blocker_.unblock();
    if (failure.exit_code == 0)
      failure = attempt([&] {
        gpu_.finish();
        blocker_.check();
        elapsed_ns = watch_.elapsed_ns();
      });
    peers_.agree(failure);
    return elapsed_ns;
  }

  NativeCalls& native_;
  const Options& options_;
  const Peers& peers_;
  Gpu& gpu_;
  StreamBlocker& blocker_;
  Stopwatch watch_;
};

} // namespace

NativeMeasurements measure_native(MeasuredGroup& measured, std::span<const InputSet> sets, const Workload& workload,
                                  const Options& options, const Peers& peers, Gpu& gpu, StreamBlocker& blocker) {
  NativeCalls native(measured, sets, options, peers, gpu);
  NativeRun run(native, options, peers, gpu, blocker);
  run.warm_up();
  NativeMeasurements measurements;
  if (options.verify) {
    measurements.wrong.emplace();
    for (size_t set = 0; set < kVerifiedSets; ++set)
      for (const NativeWrongCounts& of_rank :
           peers.gather(NativeVerifier(measured, workload, options, peers, gpu, native, set).run()))
        for (size_t call = 0; call < of_rank.size(); ++call)
          (*measurements.wrong)[call] += of_rank[call];
  }
  measurements.calls = run.measure();
  return measurements;
}

} // namespace epx::bench
