// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/floor/floor.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/floor/floor_kernels.h"
#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/row_format.h"
#include "tools/ep_bench/stats.h"
#include "tools/ep_bench/workload/random.h"

namespace epx::bench {
namespace {

constexpr int kWarmupRuns = 4;
constexpr int kRuns = 24;

// The wire bound is tried with these grids and with one of all SMs: more blocks are not always faster. Each block has an SM of
// its own.
constexpr int kWireGrids[] = {16, 32, 64, 96, 128};

constexpr int kLocalThreads[] = {512, kMaxLocalFloorThreads};

int64_t rounded_up(int64_t bytes) {
  return (bytes + kFloorRowUnit - 1) / kFloorRowUnit * kFloorRowUnit;
}

// LocalRows are what the local kernels read and write. A kernel has rows of one size.
struct LocalRows {
  int64_t reads = 0;
  int64_t writes = 0;
  int64_t row_bytes = 0;
};

struct PlanOnDevice {
  Buffer first, places;
  int32_t rows = 0;
};

template <typename T>
Buffer upload(Gpu& gpu, const std::vector<T>& values) {
  return Buffer::input(gpu, std::as_bytes(std::span(values)));
}

// Returns the block of random words that a rank's source buffer repeats.
std::vector<uint64_t> source_block(int rank) {
  constexpr size_t kBytes = size_t{8} << 20;
  std::vector<uint64_t> block(kBytes / sizeof(uint64_t));
  const RandomStream random{0x666c6f6f72, static_cast<uint64_t>(rank)};
  for (size_t i = 0; i < block.size(); ++i)
    block[i] = random.at(i);
  return block;
}

class FloorRun {
public:
  FloorRun(std::span<const RoutingOfAll> sets, const Options& options, const Peers& peers, Gpu& gpu, StreamBlocker& blocker)
      : sets_(sets), lines_(lines_of(options)), exact_(options.combine_precision == EPX_COMBINE_EXACT),
        num_comm_sms_(std::min(options.num_comm_sms, gpu.num_sms())), peers_(peers), gpu_(gpu), blocker_(blocker),
        options_(options), target_rows_(std::max<int64_t>(rows_of_places(sets[0], exact_), 1)),
        targets_(static_cast<size_t>(target_rows_ * max_wire_bytes()), peers) {
    peers.together([&] {
      check_cuda(load_floor_kernels(), "cudaFuncGetAttributes");
      int64_t source_bytes = max_wire_bytes(), bytes_written = max_wire_bytes();
      for (const RoutingOfAll& set : sets_) {
        scatter_.push_back(prepare(scatter_plan(set, peers_.rank())));
        gather_.push_back(prepare(gather_plan(set, peers_.rank(), exact_)));
        source_bytes = std::max(source_bytes, std::max(scatter_.back().rows, gather_.back().rows) * max_wire_bytes());
        for (const Line& line : moving_lines()) {
          const LocalRows rows = local_rows(set, line);
          source_bytes = std::max({source_bytes, rows.row_bytes, rows.reads * rows.row_bytes});
          bytes_written = std::max(bytes_written, rows.writes * rows.row_bytes);
        }
      }
      source_ = Buffer::plain(gpu_, static_cast<size_t>(source_bytes));
      local_target_ = Buffer::plain(gpu_, static_cast<size_t>(bytes_written));
      fill_source();
    });
  }

  // Measures the wire bound of all lines of each direction and size of rows at once. The call is collective.
  void measure_wire() {
    for (const Line& line : moving_lines()) {
      const int64_t bytes = bytes_of(line).wire;
      std::map<int64_t, FloorFigures>& floors = scatters(line) ? scatter_floors_ : gather_floors_;
      if (!floors.contains(bytes)) floors[bytes] = wire(scatters(line) ? scatter_ : gather_, bytes);
    }
  }

  FloorFigures of(const Line& line) const {
    FloorFigures figures = (scatters(line) ? scatter_floors_ : gather_floors_).at(bytes_of(line).wire);
    measure_local(line, figures);
    return figures;
  }

  // Verifies that the kernels move every row. The call is collective.
  void verify() const {
    std::set<std::pair<bool, int64_t>> verified; // by direction and bytes of a row
    for (const Line& line : moving_lines()) {
      const int64_t bytes = bytes_of(line).wire;
      if (!verified.insert({scatters(line), bytes}).second) continue;
      const PlanOnDevice& plan = scatters(line) ? scatter_[0] : gather_[0];
      const auto plan_of = [&](int rank) {
        return scatters(line) ? scatter_plan(sets_[0], rank) : gather_plan(sets_[0], rank, exact_);
      };
      for (auto* launch : {launch_wire_floor, launch_wire_floor_bulk})
        verify_wire(plan, bytes, plan_of, launch);
    }
    for (const Line& line : moving_lines())
      verify_local(line);
  }

  void release() { targets_.release(peers_); }

private:
  static bool scatters(const Line& line) {
    return line.operation == EPX_OP_DISPATCH || line.operation == EPX_OP_COMBINE_BWD;
  }

  std::vector<Line> moving_lines() const {
    std::vector<Line> lines;
    std::ranges::copy_if(lines_, std::back_inserter(lines), &Line::moves_rows);
    return lines;
  }

  // Returns the bytes of rows in the kernels.
  RowBytes bytes_of(const Line& line) const {
    const RowBytes bytes = row_bytes_of(options_, line.operation);
    return {rounded_up(bytes.input), rounded_up(bytes.wire), rounded_up(bytes.received)};
  }

  int64_t max_wire_bytes() const {
    int64_t most = 0;
    for (const Line& line : moving_lines())
      most = std::max(most, bytes_of(line).wire);
    return most;
  }

  // Rows in other forms than the received one are so many bytes of rows in that form.
  LocalRows local_rows(const RoutingOfAll& set, const Line& line) const {
    const RowBytes row = bytes_of(line);
    const LocalBytes bytes = local_bytes(set, peers_.rank(), line, exact_, row);
    const auto rows = [&](int64_t of_bytes) { return (of_bytes + row.received - 1) / row.received; };
    return {rows(bytes.reads), rows(bytes.writes), row.received};
  }

  PlanOnDevice prepare(const WirePlan& plan) { return {upload(gpu_, plan.first), upload(gpu_, plan.places), plan.rows()}; }

  // Fills the source with copies of one block of bits as random as those of tokens, since the power that links and memory draw
  // depends on them.
  void fill_source() {
    const std::vector<uint64_t> block = source_block(peers_.rank());
    const std::span<const std::byte> bytes = std::as_bytes(std::span(block));
    for (size_t done = 0; done < source_.size(); done += bytes.size())
      gpu_.write(source_.data() + done, bytes.first(std::min(bytes.size(), source_.size() - done)));
  }

  // Returns the median over runs of the slowest rank's time of launch(set), in microseconds.
  template <typename Launch>
  double median_us(Launch&& launch) const {
    std::vector<Stopwatch> watches(kWarmupRuns + kRuns);
    std::vector<int64_t> times;
    peers_.together([&] { // one launch precedes block(): a first launch may wait for the stream
      check_cuda(launch(size_t{0}), "launch of a floor's kernel");
      gpu_.finish();
    });
    blocker_.block();
    Failure failure = attempt([&] {
      for (int run = 0; run < kWarmupRuns + kRuns; ++run) {
        blocker_.rank_barrier();
        watches[run].start(gpu_.cuda_stream());
        check_cuda(launch(run % sets_.size()), "launch of a floor's kernel");
        watches[run].stop(gpu_.cuda_stream());
      }
    });
    blocker_.unblock();
    if (failure.exit_code == 0)
      failure = attempt([&] {
        gpu_.finish();
        blocker_.check();
        for (int run = kWarmupRuns; run < kWarmupRuns + kRuns; ++run)
          times.push_back(watches[run].elapsed_ns());
      });
    peers_.agree(failure);
    return median(slowest_us(gather_durations(times, peers_)));
  }

  WireParams wire_params(const PlanOnDevice& plan, int64_t row_bytes) const {
    WireParams params{.source = source_.data(),
                      .first = reinterpret_cast<const int32_t*>(plan.first.data()),
                      .places = reinterpret_cast<const RowPlace*>(plan.places.data()),
                      .rows = plan.rows,
                      .row_bytes = row_bytes,
                      .targets = {}};
    std::ranges::copy(targets_.all(), params.targets);
    return params;
  }

  // Runs `launch` on a plan of the first set, and throws where a row has not come.
  template <typename Launch>
  void verify_wire(const PlanOnDevice& plan, int64_t row_bytes, const std::function<WirePlan(int)>& plan_of,
                   Launch&& launch) const {
    const std::span<std::byte> mine(targets_.of(peers_.rank()), static_cast<size_t>(target_rows_ * row_bytes));
    peers_.together([&] { gpu_.fill(mine, std::byte{0}); });
    peers_.together([&] {
      check_cuda(launch(wire_params(plan, row_bytes), gpu_.num_sms(), gpu_.cuda_stream()), "launch of a floor's kernel");
      gpu_.finish();
    });
    peers_.together([&] {
      std::vector<std::byte> rows(mine.size());
      gpu_.read(rows, mine.data());
      for (int source = 0; source < peers_.num_ranks(); ++source)
        check_rows(rows, source, plan_of(source), row_bytes);
    });
  }

  void check_rows(std::span<const std::byte> rows, int source, const WirePlan& plan, int64_t row_bytes) const {
    const std::vector<uint64_t> block = source_block(source);
    const std::span<const std::byte> sent = std::as_bytes(std::span(block));
    for (int64_t row = 0; row < plan.rows(); ++row)
      for (int32_t place = plan.first[row]; place < plan.first[row + 1]; ++place) {
        if (plan.places[place].rank != peers_.rank()) continue;
        const std::byte* const received = &rows[plan.places[place].row * row_bytes];
        for (int64_t i = 0; i < row_bytes; ++i)
          if (received[i] != sent[(row * row_bytes + i) % sent.size()])
            throw RuntimeError(fmt::format("the floor's row {} of rank {} did not come", row, source));
      }
  }

  FloorFigures wire(const std::vector<PlanOnDevice>& plans, int64_t row_bytes) const {
    FloorFigures best;
    const auto try_variant = [&](const char* kind, int blocks, auto&& launch) {
      const double us =
          median_us([&](size_t set) { return launch(wire_params(plans[set], row_bytes), blocks, gpu_.cuda_stream()); });
      const std::string variant = fmt::format("{} stores, {} blocks", kind, blocks);
      best.wire_us_of_variants[variant] = us;
      if (blocks <= num_comm_sms_) best.wire_us_on_sms = lower(best.wire_us_on_sms, us);
      if (!best.wire_variant.empty() && us >= best.wire_us) return;
      best.wire_us = us;
      best.wire_variant = variant;
    };
    const auto try_both_variants = [&](int blocks) {
      try_variant("plain", blocks, launch_wire_floor);
      try_variant("bulk", blocks, launch_wire_floor_bulk);
    };
    std::set<int> grids(std::begin(kWireGrids), std::end(kWireGrids));
    grids.insert({gpu_.num_sms(), num_comm_sms_});
    for (int blocks : grids)
      if (blocks > 0 && blocks <= gpu_.num_sms()) try_both_variants(blocks);
    return best;
  }

  static double lower(double us, double other) { return us == 0 ? other : std::min(us, other); }

  // A LocalVariant is one kernel configuration that reads and writes rows locally.
  struct LocalVariant {
    std::string name;
    bool is_mixed;
    std::function<cudaError_t(const LocalParams&)> launch;
  };
  std::vector<LocalVariant> local_variants(int blocks) const {
    std::vector<LocalVariant> variants;
    for (bool is_mixed : {true, false}) {
      const char* const order = is_mixed ? "mixed" : "reads last";
      for (int threads : kLocalThreads)
        variants.push_back({fmt::format("plain stores, {} blocks of {} threads, {}", blocks, threads, order), is_mixed,
                            [=, this](const LocalParams& params) {
                              return launch_local_floor(params, blocks, threads, gpu_.cuda_stream());
                            }});
      variants.push_back(
          {fmt::format("bulk stores, {} blocks, {}", blocks, order), is_mixed,
           [=, this](const LocalParams& params) { return launch_local_floor_bulk(params, blocks, gpu_.cuda_stream()); }});
    }
    return variants;
  }

  LocalParams local_params(const LocalRows& rows, bool is_mixed) const {
    return {.source = source_.data(),
            .target = local_target_.data(),
            .reads = rows.reads,
            .writes = rows.writes,
            .row_bytes = rows.row_bytes,
            .is_mixed = is_mixed};
  }

  void measure_local(const Line& line, FloorFigures& figures) const {
    std::vector<LocalRows> rows;
    for (const RoutingOfAll& set : sets_)
      rows.push_back(local_rows(set, line));
    for (int blocks : std::set<int>{gpu_.num_sms(), num_comm_sms_}) {
      if (blocks == 0) continue;
      for (const LocalVariant& variant : local_variants(blocks)) {
        const double us = median_us([&](size_t set) { return variant.launch(local_params(rows[set], variant.is_mixed)); });
        if (blocks <= num_comm_sms_) figures.hbm_us_on_sms = lower(figures.hbm_us_on_sms, us);
        if (!figures.hbm_variant.empty() && us >= figures.hbm_us) continue;
        figures.hbm_us = us;
        figures.hbm_variant = variant.name;
      }
    }
  }

  // Throws where a variant leaves words unwritten: the words that it writes, like those that it reads, are random, and not
  // zero.
  void verify_local(const Line& line) const {
    const LocalRows rows = local_rows(sets_[0], line);
    const std::span<std::byte> written(local_target_.data(), static_cast<size_t>(rows.writes * rows.row_bytes));
    for (const LocalVariant& variant : local_variants(gpu_.num_sms()))
      peers_.together([&] {
        gpu_.fill(written, std::byte{0});
        check_cuda(variant.launch(local_params(rows, variant.is_mixed)), "launch of a floor's kernel");
        gpu_.finish();
        std::vector<uint64_t> words(written.size() / sizeof(uint64_t));
        gpu_.read(std::as_writable_bytes(std::span(words)), written.data());
        const auto missing = std::ranges::find(words, uint64_t{0});
        if (missing != words.end())
          throw RuntimeError(
              fmt::format("the local floor ({}) left row {} of {} unwritten", variant.name,
                          (missing - words.begin()) * static_cast<int64_t>(sizeof(uint64_t)) / rows.row_bytes, line.name));
      });
  }

  std::span<const RoutingOfAll> sets_;
  std::span<const Line> lines_;
  bool exact_;
  int num_comm_sms_; // SMs; 0: all
  const Peers& peers_;
  Gpu& gpu_;
  StreamBlocker& blocker_;
  const Options& options_;
  int64_t target_rows_;
  PeerMemory targets_;
  Buffer source_, local_target_;
  std::vector<PlanOnDevice> scatter_, gather_;                     // [set]
  std::map<int64_t, FloorFigures> scatter_floors_, gather_floors_; // by bytes of a row; the wire bounds only
};

} // namespace

Floors measure_floors(std::span<const RoutingOfAll> sets, const Options& options, const Peers& peers, Gpu& gpu,
                      StreamBlocker& blocker) {
  FloorRun run(sets, options, peers, gpu, blocker);
  if (options.verify) run.verify();
  run.measure_wire();
  Floors floors;
  std::optional<FloorFigures> of_gather; // combine and dispatch_bwd move the same rows
  for (const Line& line : lines_of(options)) {
    const bool gathers = line.operation == EPX_OP_COMBINE || line.operation == EPX_OP_DISPATCH_BWD;
    if (gathers && !of_gather) of_gather = run.of(line);
    floors.push_back(gathers ? of_gather : line.moves_rows() ? std::optional(run.of(line)) : std::nullopt);
  }
  run.release();
  return floors;
}

} // namespace epx::bench
