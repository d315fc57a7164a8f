// SPDX-License-Identifier: Apache-2.0
// Tests of the emulation's rails, and of streams that fork and join while they are captured. Ranks are threads.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include "base/error.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"
#include "transport/bootstrap/bootstrap_exchange.h"
#include "transport/nccl/nccl_transport.h"
#include "transport/node_exchange.h"
#include "transport/rails_exchange.h"

namespace epx {
namespace {

using namespace std::chrono_literals;
using test::check;

constexpr int64_t kTimeoutMs = 30'000;
constexpr int kMaxTransfers = 4; // with each node, in one exchange

struct RankOfNodes {
  int rank, num_ranks, ranks_per_node;
  Exchange& exchange; // of all ranks, by the bootstrap
  MultiNodeTransport transport;
  cudaStream_t stream;

  int num_nodes() const { return num_ranks / ranks_per_node; }
  int own_node() const { return rank / ranks_per_node; }
  int rail_peer(int node) const { return node * ranks_per_node + rank % ranks_per_node; }
};

void each_rank(int num_nodes, int ranks_per_node, const std::function<void(RankOfNodes&)>& body) {
  const int num_ranks = num_nodes * ranks_per_node;
  test::LocalRendezvous rendezvous(num_ranks);
  test::run_threads(num_ranks, [&](int rank) {
    cudaSetDevice(rank);
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    BootstrapExchange exchange(bootstrap, kTimeoutMs);
    RankOfNodes self{rank,
                     num_ranks,
                     ranks_per_node,
                     exchange,
                     make_nccl_multi_node_transport(rank, num_ranks, ranks_per_node, 1, kTimeoutMs, exchange),
                     nullptr};
    cudaStreamCreateWithFlags(&self.stream, cudaStreamNonBlocking);
    body(self);
    cudaStreamDestroy(self.stream);
  });
}

uint64_t mix(uint64_t value) {
  value = (value ^ value >> 30) * 0xbf58476d1ce4e5b9u;
  value = (value ^ value >> 27) * 0x94d049bb133111ebu;
  return value ^ value >> 31;
}

// What `from` sends to `to` as the i-th transfer of a round: none, a few bytes, or more than a mailbox holds.
uint64_t seed_of(int round, int from, int to, int i) {
  return mix(static_cast<uint64_t>(round) << 24 | static_cast<uint64_t>(from) << 16 | static_cast<uint64_t>(to) << 8 |
             static_cast<uint64_t>(i));
}
int64_t size_of(uint64_t seed) {
  constexpr int64_t kMaxSizes[] = {0, 3, 5'000, 200'000};
  return static_cast<int64_t>(mix(seed) % static_cast<uint64_t>(kMaxSizes[seed % 4] + 1));
}
void fill(std::vector<std::byte>& bytes, uint64_t seed) {
  for (size_t i = 0; i < bytes.size(); ++i)
    bytes[i] = static_cast<std::byte>(mix(seed + i / 8) >> (8 * (i % 8)));
}
std::vector<std::byte> content(uint64_t seed) {
  std::vector<std::byte> bytes(static_cast<size_t>(size_of(seed)));
  fill(bytes, seed);
  return bytes;
}

// The memory of an exchange of this rank with all rail peers.
struct Round {
  Round(const RankOfNodes& rank, int number) {
    for (int node = rank.num_nodes() - 1; node >= 0; --node) { // the order of nodes does not matter
      if (node == rank.own_node()) continue;
      const int peer = rank.rail_peer(node);
      for (int i = 0; i < kMaxTransfers; ++i) {
        sent.push_back(content(seed_of(number, rank.rank, peer, i)));
        expected.push_back(content(seed_of(number, peer, rank.rank, i)));
        received.emplace_back(expected.back().size());
        transfers.push_back({node, sent.back().data(), static_cast<int64_t>(sent.back().size()), received.back().data(),
                             static_cast<int64_t>(received.back().size())});
      }
    }
  }
  std::vector<std::vector<std::byte>> sent, expected, received;
  std::vector<RailTransfer> transfers;
};

} // namespace

TEST_CASE("rails: transfers of any size, several with each node") {
  for (const auto& [num_nodes, ranks_per_node] : {std::pair{2, 2}, {3, 1}, {2, 1}}) {
    each_rank(num_nodes, ranks_per_node, [](RankOfNodes& rank) {
      std::vector<std::unique_ptr<Round>> rounds;
      for (int number = 0; number < 20; ++number) {
        rounds.push_back(std::make_unique<Round>(rank, number));
        rank.transport.rails->exchange(rounds.back()->transfers, rank.stream);
      }
      cudaStreamSynchronize(rank.stream);
      for (size_t number = 0; number < rounds.size(); ++number)
        check(rounds[number]->received == rounds[number]->expected, "round {} brings other bytes", number);
    });
  }
}

TEST_CASE("rails: all ranks gather, in place too, between exchanges") {
  each_rank(2, 2, [](RankOfNodes& rank) {
    constexpr int64_t kBytes = 70'001;
    const auto count = static_cast<size_t>(rank.num_ranks);
    std::vector<std::byte> mine(kBytes), all(count * kBytes), in_place(count * kBytes);
    fill(mine, static_cast<uint64_t>(rank.rank));
    std::byte* const own = in_place.data() + rank.rank * kBytes;
    std::copy(mine.begin(), mine.end(), own);
    Round round(rank, 7);
    rank.transport.rails->all_gather(mine.data(), all.data(), kBytes, rank.stream);
    rank.transport.rails->exchange(round.transfers, rank.stream);
    rank.transport.rails->all_gather(own, in_place.data(), kBytes, rank.stream);
    cudaStreamSynchronize(rank.stream);
    std::vector<std::byte> expected;
    for (int peer = 0; peer < rank.num_ranks; ++peer) {
      fill(mine, static_cast<uint64_t>(peer));
      expected.insert(expected.end(), mine.begin(), mine.end());
    }
    check(all == expected && in_place == expected, "all_gather brings other bytes");
    check(round.received == round.expected, "the exchange brings other bytes");
  });
}

TEST_CASE("rails: a rank without work makes no transfer, and waits for nobody") {
  each_rank(2, 1, [](RankOfNodes& rank) {
    const RailTransfer nothing{1 - rank.own_node(), nullptr, 0, nullptr, 0};
    if (rank.rank == 0) rank.transport.rails->exchange({&nothing, 1}, rank.stream);
    check(cudaStreamSynchronize(rank.stream) == cudaSuccess, "the stream has failed");
  });
}

TEST_CASE("rails: an exchange that is captured on a second stream is right at every replay") {
  each_rank(2, 2, [](RankOfNodes& rank) {
    const size_t bytes = 50'000;
    const int peer = rank.rail_peer(1 - rank.own_node());
    std::vector<std::byte> input(bytes), sent(bytes), received(bytes), output(bytes), expected(bytes);
    const RailTransfer transfer{1 - rank.own_node(), sent.data(), static_cast<int64_t>(bytes), received.data(),
                                static_cast<int64_t>(bytes)};
    cudaStream_t rail = nullptr;
    cudaEvent_t fork = nullptr, join = nullptr;
    cudaStreamCreateWithFlags(&rail, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
    cudaEventCreateWithFlags(&join, cudaEventDisableTiming);
    const auto enqueue = [&] {
      cudaMemcpyAsync(sent.data(), input.data(), bytes, cudaMemcpyDeviceToDevice, rank.stream);
      cudaEventRecord(fork, rank.stream);
      cudaStreamWaitEvent(rail, fork, 0);
      rank.transport.rails->exchange({&transfer, 1}, rail);
      cudaEventRecord(join, rail);
      cudaStreamWaitEvent(rank.stream, join, 0);
      cudaMemcpyAsync(output.data(), received.data(), bytes, cudaMemcpyDeviceToDevice, rank.stream);
    };
    const auto check_round = [&](uint64_t number) {
      cudaStreamSynchronize(rank.stream);
      fill(expected, number << 8 | static_cast<uint64_t>(peer));
      check(output == expected, "round {} brings other bytes", number);
    };
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t exec = nullptr;
    cudaStreamBeginCapture(rank.stream, cudaStreamCaptureModeThreadLocal);
    enqueue();
    check(cudaStreamEndCapture(rank.stream, &graph) == cudaSuccess, "the capture has failed");
    cudaGraphInstantiate(&exec, graph, 0);
    for (uint64_t number = 1; number <= 6; ++number) {
      fill(input, number << 8 | static_cast<uint64_t>(rank.rank));
      if (number % 3 == 0) // eager calls between the replays
        enqueue();
      else
        cudaGraphLaunch(exec, rank.stream);
      check_round(number);
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(join);
    cudaEventDestroy(fork);
    cudaStreamDestroy(rail);
  });
}

TEST_CASE("streams: a capture ends well only when all its streams have been joined") {
  cudaStream_t one = nullptr, other = nullptr;
  cudaEvent_t fork = nullptr, join = nullptr;
  cudaStreamCreateWithFlags(&one, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&fork, cudaEventDisableTiming);
  cudaEventCreateWithFlags(&join, cudaEventDisableTiming);
  char memory = 0;
  for (const bool joins : {false, true}) {
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(one, cudaStreamCaptureModeThreadLocal);
    cudaEventRecord(fork, one);
    cudaStreamWaitEvent(other, fork, 0);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaStreamIsCapturing(other, &status);
    CHECK(status == cudaStreamCaptureStatusActive);
    if (!joins) cudaEventRecord(join, other); // too early
    cudaMemsetAsync(&memory, 1, 1, other);
    if (joins) cudaEventRecord(join, other);
    cudaStreamWaitEvent(one, join, 0);
    CHECK(cudaStreamEndCapture(one, &graph) == (joins ? cudaSuccess : cudaErrorStreamCaptureUnjoined));
    cudaStreamIsCapturing(other, &status);
    CHECK(status == cudaStreamCaptureStatusNone);
    CHECK(cudaStreamWaitEvent(one, join, 0) == cudaErrorCapturedEvent);
    if (graph != nullptr) cudaGraphDestroy(graph);
  }
  CHECK(memory == 0); // nothing has run
  cudaEventDestroy(join);
  cudaEventDestroy(fork);
  cudaStreamDestroy(other);
  cudaStreamDestroy(one);
}

TEST_CASE("rails: abort ends a transfer whose partner does not come, and all later ones") {
  each_rank(2, 2, [](RankOfNodes& rank) {
    if (rank.rank % 2 == 1) return; // ranks 0 and 2 are rail peers; rank 2 does not come
    Round round(rank, 7);
    if (rank.rank == 0) {
      rank.transport.rails->exchange(round.transfers, rank.stream);
      rank.transport.rails->exchange(round.transfers, rank.stream);
      std::this_thread::sleep_for(100ms);
      check(cudaStreamQuery(rank.stream) == cudaErrorNotReady, "the transfer has not waited");
      check(!rank.transport.rails->has_ended(), "the rails have ended by themselves");
      const auto begin = std::chrono::steady_clock::now();
      std::thread([&] { rank.transport.rails->abort(); }).join();
      cudaStreamSynchronize(rank.stream);
      check(std::chrono::steady_clock::now() - begin < 2s, "the transfer went on after abort");
      check(rank.transport.rails->has_ended(), "the rails go on");
      epx_status status = EPX_SUCCESS;
      try {
        rank.transport.rails->exchange(round.transfers, rank.stream);
      } catch (const StatusError& error) {
        status = error.status();
      }
      check(status == EPX_ERROR_ABORTED, "an exchange after abort has status {}", static_cast<int>(status));
    }
  });
}

TEST_CASE("exchanges: records of all ranks by rails, and of a node's ranks by an exchange of all") {
  each_rank(2, 2, [](RankOfNodes& rank) {
    RailsExchange all(*rank.transport.rails, rank.rank, rank.num_ranks, std::chrono::milliseconds(kTimeoutMs));
    NodeExchange of_node(all, rank.rank, rank.ranks_per_node);
    const auto first = static_cast<int>(rank.rank / 2 * 2);
    for (int round = 0; round < 3; ++round) {
      check(all.all_gather([&] { return rank.rank + round; }) == std::vector<int>{round, round + 1, round + 2, round + 3},
            "records of all ranks");
      check(of_node.all_gather([&] { return rank.rank; }) == std::vector<int>{first, first + 1}, "records of the node");
      check(of_node.all_of([&] { return true; }), "all of the ranks");
      check(!of_node.all_of([&] { return rank.rank != 3; }), "rank 3 refuses, on node 1, which node 0 has not seen");
    }
    std::string message;
    try {
      of_node.all_gather([&] {
        if (rank.rank == 3) fail(EPX_ERROR_OUT_OF_MEMORY, "no memory");
        return 0;
      });
    } catch (const StatusError& error) {
      message = error.message();
    }
    check(message == (rank.rank == 3 ? "no memory" : "rank 3: no memory"), "the failure is \"{}\"", message);
    // Windows of the node, and the exchange of its transport.
    const std::unique_ptr<Window> window = rank.transport.node->open_window(64, of_node);
    const PeerWindow view = window->view();
    check(view.num_ranks == 2 && view.rank == rank.rank % 2, "the window is of {} ranks", view.num_ranks);
    *view.at<int>(1 - view.rank, 0) = rank.rank;
    check(rank.transport.node->exchange()->all_gather([&] { return rank.rank; }) == std::vector<int>{first, first + 1},
          "records by the node's transport");
    check(*view.local<int>(0) == first + 1 - view.rank, "the peer's store");
  });
}

} // namespace epx
