// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/floor/rail_floor.h"

#include <algorithm>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/floor/rail_plan.h"
#include "tools/ep_bench/gpu/communicator.h"
#include "tools/ep_bench/measure.h"
#include "tools/ep_bench/row_format.h"
#include "tools/ep_bench/stats.h"
#include "tools/ep_bench/workload/random.h"

namespace epx::bench {
namespace {

constexpr int kWarmupRuns = 4;
constexpr int kRuns = 24;

// The bytes from one rank to another are as random as those of tokens.
std::vector<std::byte> bytes_between(int source, int peer, int64_t count) {
  constexpr int64_t kWordBytes = sizeof(uint64_t);
  const RandomStream random{0x7261696c, static_cast<uint64_t>(source), static_cast<uint64_t>(peer)};
  std::vector<uint64_t> words(static_cast<size_t>((count + kWordBytes - 1) / kWordBytes));
  for (size_t i = 0; i < words.size(); ++i)
    words[i] = random.at(i);
  const auto bytes = std::as_bytes(std::span(words)).first(static_cast<size_t>(count));
  return {bytes.begin(), bytes.end()};
}

class RailFloorRun {
public:
  RailFloorRun(std::span<const RoutingOfAll> sets, int ranks_per_node, const Options& options, const Peers& peers, Gpu& gpu,
               StreamBlocker& blocker)
      : peers_(peers), gpu_(gpu), blocker_(blocker), communicator_(make_communicator(peers, gpu)) {
    peers.together([&] {
      for (const Line& line : lines_of(options)) {
        if (!line.moves_rows()) continue;
        const Rows rows = rows_of(line, options);
        Plans& plans = plans_[rows];
        if (!plans.empty()) continue;
        for (const RoutingOfAll& set : sets) {
          plans.push_back(rail_peers(set, ranks_per_node, peers.rank(), line.operation, options.combine_precision));
          scale(plans.back(), rows.bytes);
        }
      }
      allocate();
    });
  }

  // The rows that a line moves. Lines with the same rows have the same bound.
  struct Rows {
    bool go_home;
    int64_t bytes; // of one

    auto operator<=>(const Rows&) const = default;
  };
  static Rows rows_of(const Line& line, const Options& options) {
    return {line.operation == EPX_OP_COMBINE || line.operation == EPX_OP_DISPATCH_BWD,
            row_bytes_of(options, line.operation).wire};
  }

  std::map<Rows, FloorFigures> measure() {
    std::map<Rows, FloorFigures> floors;
    for (const auto& [rows, plans] : plans_) {
      FloorFigures& figures = floors[rows];
      figures.wire_us = median_us(plans);
      figures.wire_variant = fmt::format("ncclSend and ncclRecv of up to {} bytes", most_bytes(plans));
    }
    return floors;
  }

  // Verifies that all bytes come. The call is collective.
  void verify() {
    for (const auto& [rows, plans] : plans_) {
      peers_.together([&] {
        for (const Part& part : parts_)
          part.receive.fill(std::byte{0});
      });
      peers_.together([&] {
        communicator_->exchange(transfers(plans[0]), gpu_.cuda_stream());
        gpu_.finish();
      });
      peers_.together([&] { check(plans[0]); });
    }
  }

private:
  using Plan = std::vector<PeerRows>; // here in bytes
  using Plans = std::vector<Plan>;    // [set]
  struct Part {                       // of a rail peer, as large as any run needs
    Buffer send, receive;
  };

  static void scale(Plan& plan, int64_t row_bytes) {
    for (PeerRows& rows : plan) {
      rows.sent *= row_bytes;
      rows.received *= row_bytes;
    }
  }

  void allocate() {
    if (plans_.empty()) return;
    const Plan& peers = plans_.begin()->second[0];
    for (size_t i = 0; i < peers.size(); ++i) {
      int64_t sent = 0, received = 0;
      for (const auto& [rows, plans] : plans_)
        for (const Plan& plan : plans) {
          sent = std::max(sent, plan[i].sent);
          received = std::max(received, plan[i].received);
        }
      parts_.push_back(
          {Buffer::plain(gpu_, static_cast<size_t>(sent)), Buffer::plain(gpu_, static_cast<size_t>(received))});
      parts_.back().send.write(bytes_between(peers_.rank(), peers[i].peer, sent));
    }
  }

  std::vector<Transfer> transfers(const Plan& plan) const {
    std::vector<Transfer> result;
    for (size_t i = 0; i < plan.size(); ++i)
      result.push_back({plan[i].peer, parts_[i].send.data(), plan[i].sent, parts_[i].receive.data(), plan[i].received});
    return result;
  }

  void check(const Plan& plan) const {
    for (size_t i = 0; i < plan.size(); ++i) {
      const std::vector<std::byte> received = parts_[i].receive.read<std::byte>();
      const std::vector<std::byte> sent = bytes_between(plan[i].peer, peers_.rank(), plan[i].received);
      const auto [wrong, expected] = std::ranges::mismatch(received, sent);
      if (expected != sent.end())
        throw RuntimeError(fmt::format("byte {} of the floor's {} bytes from rank {} did not come", expected - sent.begin(),
                                       sent.size(), plan[i].peer));
    }
  }

  // Returns the most bytes that a rank sends in a set. Collective.
  int64_t most_bytes(const Plans& plans) const {
    int64_t most = 0;
    for (const Plan& plan : plans) {
      int64_t sent = 0;
      for (const PeerRows& bytes : plan)
        sent += bytes.sent;
      most = std::max(most, sent);
    }
    return std::ranges::max(peers_.gather(most));
  }

  // Returns the median over runs of the slowest rank's time, in microseconds. Each run is queued while the stream is blocked,
  // alone: NCCL may wait for its earlier work when much of it is queued.
  double median_us(const Plans& plans) {
    std::vector<int64_t> times;
    Stopwatch watch;
    peers_.together([&] { // NCCL connects the ranks in their first exchange
      communicator_->exchange(transfers(plans[0]), gpu_.cuda_stream());
      gpu_.finish();
    });
    for (int run = 0; run < kWarmupRuns + kRuns; ++run) {
      blocker_.block();
      blocker_.rank_barrier();
      Failure failure = attempt([&] {
        watch.start(gpu_.cuda_stream());
        communicator_->exchange(transfers(plans[static_cast<size_t>(run) % plans.size()]), gpu_.cuda_stream());
        watch.stop(gpu_.cuda_stream());
      });
      blocker_.unblock();
      if (failure.exit_code == 0)
        failure = attempt([&] {
          gpu_.finish();
          blocker_.check();
          if (run >= kWarmupRuns) times.push_back(watch.elapsed_ns());
        });
      peers_.agree(failure);
    }
    return median(slowest_us(gather_durations(times, peers_)));
  }

  const Peers& peers_;
  Gpu& gpu_;
  StreamBlocker& blocker_;
  std::unique_ptr<Communicator> communicator_;
  std::map<Rows, Plans> plans_;
  std::vector<Part> parts_; // [rail peer]
};

} // namespace

Floors measure_rail_floors(std::span<const RoutingOfAll> sets, int ranks_per_node, const Options& options,
                           const Peers& peers, Gpu& gpu, StreamBlocker& blocker) {
  RailFloorRun run(sets, ranks_per_node, options, peers, gpu, blocker);
  if (options.verify) run.verify();
  const auto measured = run.measure();
  Floors floors;
  for (const Line& line : lines_of(options))
    floors.push_back(line.moves_rows() ? std::optional(measured.at(RailFloorRun::rows_of(line, options))) : std::nullopt);
  return floors;
}

} // namespace epx::bench
