// SPDX-License-Identifier: Apache-2.0
// A user's all-gather may return anything: the group is refused with a sentence that has the rank and what is wrong.
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "base/error.h"
#include "epx/epx.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"
#include "transport/bootstrap/bootstrap_exchange.h"

namespace epx {
namespace {

using test::check;
using test::contains;
using test::LocalRendezvous;
using test::run_threads;

constexpr int kNumRanks = 3;
constexpr int64_t kTimeoutMs = 20'000;

using Spoil = std::function<void(std::vector<ExchangeRecord>& world)>;

// Gathers as the rendezvous does, and spoils what came from all-gather number `round` on.
class SpoiledBootstrap {
public:
  SpoiledBootstrap(LocalRendezvous& rendezvous, int rank, int round, Spoil spoil)
      : inner_(rendezvous.bootstrap(rank)), round_(round), spoil_(std::move(spoil)) {}

  epx_bootstrap get() {
    epx_bootstrap bootstrap = inner_;
    bootstrap.context = this;
    bootstrap.all_gather = [](void* context, const void* send, void* recv, size_t bytes, int64_t timeout_ms, char* message,
                              size_t message_bytes) {
      auto& self = *static_cast<SpoiledBootstrap*>(context);
      std::vector<ExchangeRecord> world(static_cast<size_t>(self.inner_.num_ranks));
      const epx_status status =
          self.inner_.all_gather(self.inner_.context, send, world.data(), bytes, timeout_ms, message, message_bytes);
      if (self.num_rounds_++ >= self.round_ && self.spoil_) self.spoil_(world);
      std::memcpy(recv, world.data(), world.size() * bytes);
      return status;
    };
    return bootstrap;
  }

private:
  epx_bootstrap inner_;
  int round_;
  int num_rounds_ = 0;
  Spoil spoil_;
};

struct Result {
  epx_status status = EPX_SUCCESS;
  std::string message;
};

// Creates a group on all ranks. What the all-gather returns is spoiled on those for which `is_spoiled` returns true.
std::vector<Result> create_groups(int round, const Spoil& spoil, const std::function<bool(int rank)>& is_spoiled) {
  LocalRendezvous rendezvous(kNumRanks);
  std::vector<Result> results(kNumRanks);
  run_threads(kNumRanks, [&](int rank) {
    SpoiledBootstrap spoiled(rendezvous, rank, round, is_spoiled(rank) ? spoil : nullptr);
    const epx_bootstrap bootstrap = spoiled.get();
    epx_group_config config{};
    epx_group_config_init(&config);
    config.num_experts = kNumRanks;
    config.max_tokens_per_rank = config.max_top_k = 1;
    config.hidden_dim = 4;
    config.max_token_dtype = EPX_FLOAT32;
    config.transport = EPX_TRANSPORT_HOST;
    config.timeout_ms = kTimeoutMs;
    epx_group group = nullptr;
    Result& result = results[static_cast<size_t>(rank)];
    result.status = epx_group_create(&bootstrap, &config, &group);
    if (result.status != EPX_SUCCESS) result.message = epx_last_error();
    epx_group_destroy(group);
  });
  return results;
}

bool is_printable(const std::string& text) {
  return text.find_first_not_of(
             " !\"#$%&'()*+,-./0123456789:;<=>?@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_`abcdefghijklmnopqrstuvwxyz"
             "{|}~") == std::string::npos;
}

std::byte* bytes_of(ExchangeRecord& record) {
  return reinterpret_cast<std::byte*>(&record);
}

} // namespace

TEST_CASE("what a user's all-gather returns is refused unless it is the ranks' records") {
  struct Nonsense {
    const char* name;
    Spoil spoil;
    std::vector<std::string> words;
    epx_status status = EPX_ERROR_INVALID_ARGUMENT;
  };
  const std::vector<Nonsense> table = {
      {"rank 0's record for all",
       [](auto& world) { world.assign(kNumRanks, ExchangeRecord(world[0])); },
       {"the record of rank 0", "in the place of rank 1", "rank order"}},
      {"the last rank first",
       [](auto& world) { std::swap(world[0], world[2]); },
       {"the record of rank 2", "in the place of rank 0", "rank order"}},
      {"nothing", [](auto& world) { world.assign(kNumRanks, ExchangeRecord{}); }, {"no record of rank 0", "bytes are 0"}},
      {"nothing of the last", [](auto& world) { world[2] = {}; }, {"no record of rank 2"}},
      {"one byte of noise in the message",
       [](auto& world) { world[1].message[7] = '\x1b'; },
       {"a damaged record of rank 1", "checksum"}},
      {"one bit of noise in the version", [](auto& world) { world[1].seal.version ^= 1; }, {"a damaged record of rank 1"}},
      {"noise",
       [](auto& world) { std::memset(bytes_of(world[1]), 0x9b, sizeof(world[1])); },
       {"something else than the record of rank 1", "9b 9b 9b"}},
      {"small numbers",
       [](auto& world) { std::memset(bytes_of(world[1]), 1, sizeof(world[1])); },
       {"something else than the record of rank 1"}},
      {"the first 300 bytes",
       [](auto& world) { std::memset(bytes_of(world[2]) + 300, 0, sizeof(world[2]) - 300); },
       {"a damaged record of rank 2", "after byte"}},
      {"the first 100 bytes",
       [](auto& world) { std::memset(bytes_of(world[2]) + 100, 0, sizeof(world[2]) - 100); },
       {"the record of rank 2"}},
      {"one byte too late",
       [](auto& world) { std::memmove(bytes_of(world[0]) + 1, bytes_of(world[0]), kNumRanks * sizeof(world[0]) - 1); },
       {"something else than the record of rank 0"}},
  };
  for (const Nonsense& nonsense : table) {
    CAPTURE(nonsense.name);
    for (const int round : {0, 1}) {
      CAPTURE(round);
      for (const Result& result : create_groups(round, nonsense.spoil, [](int) { return true; })) {
        CAPTURE(result.message);
        CHECK(result.status == nonsense.status);
        CHECK(contains(result.message, "epx_bootstrap.all_gather"));
        for (const std::string& word : nonsense.words)
          CHECK(contains(result.message, word));
        CHECK(is_printable(result.message));
      }
    }
  }
}

TEST_CASE("a rank that alone gets nonsense tells the others") {
  for (const int victim : {0, 2}) {
    CAPTURE(victim);
    const std::vector<Result> results = create_groups(
        1, [](auto& world) { std::swap(world[0], world[1]); }, [&](int rank) { return rank == victim; });
    for (int rank = 0; rank < kNumRanks; ++rank) {
      const Result& result = results[static_cast<size_t>(rank)];
      CAPTURE(result.message);
      CHECK(result.status == EPX_ERROR_INVALID_ARGUMENT);
      CHECK(contains(result.message, "in the place of rank 0"));
      if (rank != victim) CHECK(contains(result.message, "rank " + std::to_string(victim) + ":"));
    }
  }
}

TEST_CASE("a record of an earlier all-gather is refused") {
  std::mutex mutex;
  std::vector<ExchangeRecord> earlier;
  const auto repeat = [&](std::vector<ExchangeRecord>& world) {
    const std::scoped_lock lock(mutex);
    if (earlier.empty()) earlier = world;
    world[1] = earlier[1];
  };
  for (const Result& result : create_groups(0, repeat, [](int) { return true; })) {
    CAPTURE(result.message);
    CHECK(result.status == EPX_ERROR_INVALID_ARGUMENT);
    CHECK(contains(result.message, "the record of rank 1 from all-gather 0"));
    CHECK(contains(result.message, "this one is number 1"));
  }
}

TEST_CASE("ranks with another version of libepx are told so, those of 0.1 too, whose records have no seal") {
  const auto as_0_1 = [](std::vector<ExchangeRecord>& world) {
    const int32_t version = 100;
    std::memset(&world[1].seal, 0, sizeof(world[1].seal));
    std::memcpy(world[1].payload, &version, sizeof(version));
  };
  for (const Result& result : create_groups(0, as_0_1, [](int) { return true; })) {
    CAPTURE(result.message);
    CHECK(result.status == EPX_ERROR_MISMATCH);
    CHECK(contains(result.message, "the version of libepx differs between ranks"));
    CHECK(contains(result.message, "rank 1 has 100"));
  }
  // 0.1 reads status, rank, payload, and the message up to its first NUL; here is the sealed record as that version sees it.
  LocalRendezvous rendezvous(1);
  std::vector<ExchangeRecord> seen;
  SpoiledBootstrap watched(rendezvous, 0, 0, [&](auto& world) { seen = world; });
  const epx_bootstrap bootstrap = watched.get();
  BootstrapExchange exchange(bootstrap, kTimeoutMs);
  exchange.all_gather([] { return int32_t{4711}; });
  CHECK(seen[0].status == EPX_SUCCESS);
  int32_t payload = 0;
  std::memcpy(&payload, reinterpret_cast<std::byte*>(seen.data()) + 236, sizeof(payload));
  CHECK(payload == 4711);
  const std::string longest(1000, 'x');
  CHECK_THROWS_AS(exchange.all_gather([&]() -> int32_t { fail(EPX_ERROR_SYSTEM, "{}", longest); }), StatusError);
  CHECK(std::strlen(seen[0].message) == ExchangeRecord::kMaxMessage - 1);
}

TEST_CASE("bytes of a peer's message that are not printable are escaped") {
  LocalRendezvous rendezvous(2);
  run_threads(2, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    BootstrapExchange exchange(bootstrap, kTimeoutMs);
    try {
      exchange.all_gather([&]() -> int32_t {
        if (rank == 0) fail(EPX_ERROR_SYSTEM, "no file '\x1b[2J\n\xff'");
        return 0;
      });
      test::fail_check("the exchange succeeds");
    } catch (const StatusError& error) {
      if (rank == 1)
        check(error.message() == R"(rank 0: no file '\x1b[2J\x0a\xff')", "the message is \"{}\"", error.message());
    }
  });
}

// Each rank is a group, and makes as many exchanges in a step as its number.
void make_exchanges_of_step(BootstrapExchange& exchange, int rank) {
  exchange.set_members({rank});
  exchange.let_steps_differ();
  const int sum = exchange.step("a step that differs", [&] {
    int of_exchanges = 0;
    for (int i = 0; i < rank; ++i)
      of_exchanges += exchange.all_gather([&] { return int32_t{10 * rank + i}; }).front();
    return of_exchanges;
  });
  check(sum == 10 * rank * rank + rank * (rank - 1) / 2, "rank {} has gathered {}", rank, sum);
}

TEST_CASE("ranks that are done with a step stand by until all are") {
  LocalRendezvous rendezvous(kNumRanks);
  run_threads(kNumRanks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    BootstrapExchange exchange(bootstrap, kTimeoutMs);
    make_exchanges_of_step(exchange, rank);
    exchange.set_members({2, 1, 0});
    const std::vector<int32_t> ranks = exchange.all_gather([&] { return int32_t{rank}; });
    check(ranks == std::vector<int32_t>{2, 1, 0}, "the exchange behind the step has other records");
    check(!exchange.all_of([&] { return rank != 0; }), "rank 0 refuses");
    exchange.stand_by();
  });
}

TEST_CASE("a rank that fails in a step fails those that stand by") {
  LocalRendezvous rendezvous(kNumRanks);
  run_threads(kNumRanks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    BootstrapExchange exchange(bootstrap, kTimeoutMs);
    try {
      make_exchanges_of_step(exchange, rank);
      exchange.step("the next one", [&] {
        if (rank == 2) exchange.all_gather([]() -> int32_t { fail(EPX_ERROR_SYSTEM, "no memory"); });
        return 0;
      });
      test::fail_check("rank {}: the step succeeds", rank);
    } catch (const StatusError& error) {
      check(error.message() == (rank == 2 ? "no memory" : "rank 2: no memory"), "the message is \"{}\"", error.message());
    }
  });
}

TEST_CASE("an all-gather that returns no epx_status is refused") {
  LocalRendezvous rendezvous(1);
  epx_bootstrap bootstrap = rendezvous.bootstrap(0);
  bootstrap.all_gather = [](void*, const void*, void*, size_t, int64_t, char*, size_t) {
    return static_cast<epx_status>(77);
  };
  BootstrapExchange exchange(bootstrap, kTimeoutMs);
  try {
    exchange.all_gather([] { return 0; });
    FAIL("the exchange succeeds");
  } catch (const StatusError& error) {
    CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
    CHECK(contains(error.message(), "returned 77"));
  }
}

} // namespace epx
