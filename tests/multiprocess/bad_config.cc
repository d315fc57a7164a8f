// SPDX-License-Identifier: Apache-2.0
// These groups must not be created, and this memory must not be given: one rank's config is wrong, configs differ between
// ranks, the bootstrap fails, or there is less memory than a call asks for.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <fmt/ranges.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include "epx/epx.hpp"
#include "tests/multiprocess/layer_round.h"
#include "tests/multiprocess/sentences.h"
#include "tests/multiprocess/with_group.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"

namespace epx::test {
namespace {

using Config = epx_group_config;

constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
const epx_group kUntouched = reinterpret_cast<epx_group>(0x5a5a5a50);

void check_words(const std::vector<std::string>& words, const std::string& name) {
  check_tells(epx_last_error(), words, name);
}

// Creates a group from good configs, and runs a round on it.
void check_good_group(LocalRendezvous& rendezvous, int rank) {
  const Group group(rendezvous.bootstrap(rank), round_config());
  LayerRound(group.get(), rank).run_all();
}

// Checks that no group comes of these, and that the sentence has the words.
void check_not_created(const epx_bootstrap& bootstrap, const Config& config, epx_status status,
                       const std::vector<std::string>& words) {
  epx_group group = kUntouched;
  check_status(epx_group_create(&bootstrap, &config, &group), status, "epx_group_create");
  check_words(words, "epx_group_create");
  check(group == kUntouched || group == nullptr, "a failed call made a group");
}

struct BadConfig {
  std::string name;
  std::function<void(Config&)> spoil;
  std::vector<std::string> words;
  epx_status status;
  bool for_plan; // epx_group_memory_plan refuses it, too
};

std::vector<BadConfig> bad_configs() {
  std::vector<BadConfig> table;
  const auto add = [&](const char* name, std::function<void(Config&)> spoil, std::vector<std::string> words,
                       epx_status status = EPX_ERROR_INVALID_ARGUMENT, bool for_plan = true) {
    table.push_back({name, std::move(spoil), std::move(words), status, for_plan});
  };
  const std::string size = std::to_string(sizeof(Config));
  add("struct_size 0", [](Config& c) { c.struct_size = 0; }, {"struct_size", "0", size});
  add("struct_size too large", [](Config& c) { c.struct_size += 16; },
      {"struct_size", std::to_string(sizeof(Config) + 16)});
  add("num_experts unset", [](Config& c) { c.num_experts = 0; }, {"num_experts", "0"});
  add("num_experts negative", [](Config& c) { c.num_experts = -4; }, {"num_experts", "-4"});
  add("max_tokens_per_rank unset", [](Config& c) { c.max_tokens_per_rank = 0; }, {"max_tokens_per_rank", "0"});
  add("max_tokens_per_rank negative", [](Config& c) { c.max_tokens_per_rank = -1; }, {"max_tokens_per_rank", "-1"});
  add("hidden_dim unset", [](Config& c) { c.hidden_dim = 0; }, {"hidden_dim", "0"});
  add("hidden_dim negative", [](Config& c) { c.hidden_dim = -16; }, {"hidden_dim", "-16"});
  add("max_top_k unset", [](Config& c) { c.max_top_k = 0; }, {"max_top_k", "0"});
  add("max_top_k 65", [](Config& c) { c.max_top_k = 65; }, {"max_top_k", "65", "64"});
  add("max_alignment negative", [](Config& c) { c.max_alignment = -128; }, {"max_alignment", "-128"});
  add("max_token_dtype unset", [](Config& c) { c.max_token_dtype = EPX_DTYPE_UNSET; }, {"max_token_dtype", "unset"});
  add("max_token_dtype of scales", [](Config& c) { c.max_token_dtype = EPX_FLOAT8_E8M0; },
      {"max_token_dtype", "float8_e8m0"});
  add("max_token_dtype int32", [](Config& c) { c.max_token_dtype = EPX_INT32; }, {"max_token_dtype", "int32"});
  add("max_token_dtype none", [](Config& c) { c.max_token_dtype = static_cast<epx_dtype>(42); }, {"max_token_dtype", "42"});
  add("R negative", [](Config& c) { c.max_recv_tokens_per_rank = -6; }, {"max_recv_tokens_per_rank", "-6"});
  add("R beyond int32", [](Config& c) { c.max_recv_tokens_per_rank = int64_t{1} << 40; },
      {"max_recv_tokens_per_rank", "1099511627776"});
  add("max_sidecar_bytes negative", [](Config& c) { c.max_sidecar_bytes = -1; }, {"max_sidecar_bytes", "-1"});
  add("combine_precision", [](Config& c) { c.combine_precision = static_cast<epx_combine_precision>(7); },
      {"combine_precision is 7", "wire (0), exact (1), node (2)"});
  add("overflow", [](Config& c) { c.overflow = static_cast<epx_overflow>(8); }, {"overflow is 8", "error (0), drop (1)"});
  add("transport", [](Config& c) { c.transport = static_cast<epx_transport>(9); },
      {"transport is 9", "auto (0), host (1), nccl (2)"});
  add("num_comm_sms negative", [](Config& c) { c.num_comm_sms = -2; }, {"num_comm_sms", "-2"});
  add("with a reserved field set", [](Config& c) { c.reserved[4] = 1; }, {"epx_group_config", "reserved"});
  add("ranks_per_node negative", [](Config& c) { c.ranks_per_node = -1; }, {"ranks_per_node", "-1"});
  add("fixed_rail_tokens negative", [](Config& c) { c.fixed_rail_tokens = -1; }, {"fixed_rail_tokens", "-1"});
  add("fixed_rail_tokens above max_tokens_per_rank", [](Config& c) { c.fixed_rail_tokens = c.max_tokens_per_rank + 1; },
      {"fixed_rail_tokens"});
  add(
      "timeout_ms 0", [](Config& c) { c.timeout_ms = 0; }, {"timeout_ms", "0"}, EPX_ERROR_INVALID_ARGUMENT, false);
  add(
      "timeout_ms negative", [](Config& c) { c.timeout_ms = -20; }, {"timeout_ms", "-20"}, EPX_ERROR_INVALID_ARGUMENT,
      false);
#if !defined(EPX_WITH_CUDA)
  add(
      "transport nccl", [](Config& c) { c.transport = EPX_TRANSPORT_NCCL; }, {"nccl"}, EPX_ERROR_UNSUPPORTED);
#endif
  return table;
}

void check_bad_config(const BadConfig& bad) {
  Config config = round_config();
  bad.spoil(config);
  if (bad.for_plan) {
    epx_memory_plan plan{};
    plan.struct_size = sizeof(plan);
    check_status(epx_group_memory_plan(&config, kRanks, &plan), bad.status, "epx_group_memory_plan");
    check_words(bad.words, "epx_group_memory_plan");
  }
  LocalRendezvous rendezvous(kRanks);
  run_threads(kRanks, [&](int rank) {
    check_not_created(rendezvous.bootstrap(rank), rank == 1 ? config : round_config(), bad.status, bad.words);
    if (rank == 0) check_words({"rank 1"}, "epx_group_create");
  });
  run_threads(kRanks, [&](int rank) { check_good_group(rendezvous, rank); });
}

TEST_CASE("a bad config of one rank fails there with the reason, on its peer with rank and reason, and both may retry") {
  for (const BadConfig& bad : bad_configs()) {
    CAPTURE(bad.name);
    CHECK_NOTHROW(check_bad_config(bad));
  }
}

#if defined(EPX_WITH_CUDA)
TEST_CASE(
    "transport nccl is refused on all ranks without a GPU each, with the reason, and `auto` takes the host transport") {
  LocalRendezvous rendezvous(kRanks);
  run_threads(kRanks, [&](int rank) { // no rank calls cudaSetDevice, so all have the same device, or none
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    Config config = round_config();
    config.transport = EPX_TRANSPORT_NCCL;
    check_not_created(bootstrap, config, EPX_ERROR_UNSUPPORTED, {"nccl", "GPU", "rank"});
    config.transport = EPX_TRANSPORT_AUTO;
    const int transport = Group(bootstrap, config).query().transport;
    check_equal(transport, static_cast<int>(EPX_TRANSPORT_HOST), "info.transport");
  });
}
#endif

struct Difference {
  std::string field;
  std::function<void(Config&)> change;
  std::vector<std::string> values;
};

void check_difference(const Difference& difference, int odd, int num_ranks) {
  LocalRendezvous rendezvous(num_ranks);
  run_threads(num_ranks, [&](int rank) {
    Config config = round_config();
    if (rank == odd) difference.change(config);
    check_not_created(rendezvous.bootstrap(rank), config, EPX_ERROR_MISMATCH,
                      {difference.field, "rank " + std::to_string(odd)});
    check_words(difference.values, "epx_group_create");
  });
}

TEST_CASE("when configs differ between ranks, every rank's message has the field, the ranks and the values") {
  const std::vector<Difference> table = {
      {"num_experts", [](Config& c) { c.num_experts = 7; }, {" 5", " 7"}},
      {"max_tokens_per_rank", [](Config& c) { c.max_tokens_per_rank = 71; }, {" 6", " 71"}},
      {"hidden_dim", [](Config& c) { c.hidden_dim = 32; }, {" 16", " 32"}},
      {"max_top_k", [](Config& c) { c.max_top_k = 9; }, {" 4", " 9"}},
      {"max_alignment", [](Config& c) { c.max_alignment = 13; }, {" 8", " 13"}},
      {"max_token_dtype", [](Config& c) { c.max_token_dtype = EPX_FLOAT32; }, {"has bfloat16", "has float32"}},
      {"max_recv_tokens_per_rank", [](Config& c) { c.max_recv_tokens_per_rank = 999; }, {" 0", " 999"}},
      {"max_sidecar_bytes", [](Config& c) { c.max_sidecar_bytes = 24; }, {" 16", " 24"}},
      {"combine_precision", [](Config& c) { c.combine_precision = EPX_COMBINE_EXACT; }, {"has wire", "has exact"}},
      {"overflow", [](Config& c) { c.overflow = EPX_OVERFLOW_DROP; }, {"has error", "has drop"}},
      {"transport", [](Config& c) { c.transport = EPX_TRANSPORT_AUTO; }, {"has auto", "has host"}},
      {"ranks_per_node", [](Config& c) { c.ranks_per_node = 1; }, {" 0", " 1"}},
      {"fixed_rail_tokens", [](Config& c) { c.fixed_rail_tokens = 1; }, {" 0", " 1"}},
  };
  constexpr int kThreeRanks = 3;
  for (const Difference& difference : table) {
    for (int odd = 0; odd < kThreeRanks; ++odd) {
      CAPTURE(difference.field);
      CAPTURE(odd);
      CHECK_NOTHROW(check_difference(difference, odd, kThreeRanks));
    }
  }
}

TEST_CASE("color, key, num_comm_sms and timeout_ms may differ") {
  LocalRendezvous rendezvous(kRanks);
  run_threads(kRanks, [&](int rank) {
    const epx_bootstrap bootstrap = rendezvous.bootstrap(rank);
    Config config = round_config();
    config.key = -rank; // reverses the order
    config.num_comm_sms = rank;
    config.timeout_ms += rank;
    {
      const Group group(bootstrap, config);
      LayerRound(group.get(), kRanks - 1 - rank).run_all();
    }
    config.color = rank;
    const epx_group_info info = Group(bootstrap, config).query();
    check(info.num_ranks == 1 && info.rank == 0, "two colors made a group of {}", info.num_ranks);
  });
}

TEST_CASE("bad arguments of epx_group_create and epx_group_memory_plan") {
  LocalRendezvous rendezvous(1);
  const epx_bootstrap good = rendezvous.bootstrap(0);
  const Config config = round_config();
  epx_group group = kUntouched;

  const auto check_create = [&](const std::string& name, const epx_bootstrap* bootstrap, const Config* with, epx_group* out,
                                const std::vector<std::string>& words) {
    CAPTURE(name);
    CHECK_NOTHROW(check_status(epx_group_create(bootstrap, with, out), EPX_ERROR_INVALID_ARGUMENT, name));
    CHECK_NOTHROW(check_words(words, name));
    CHECK((group == kUntouched || group == nullptr));
  };
  check_create("bootstrap NULL", nullptr, &config, &group, {"bootstrap", "NULL"});
  check_create("config NULL", &good, nullptr, &group, {"config", "NULL"});
  check_create("group NULL", &good, &config, nullptr, {"group", "NULL"});

  struct BadBootstrap {
    std::string name;
    std::function<void(epx_bootstrap&)> spoil;
    std::vector<std::string> words;
  };
  const std::vector<BadBootstrap> table = {
      {"zeroed", [](epx_bootstrap& b) { b = {}; }, {"struct_size", "0"}},
      {"struct_size", [](epx_bootstrap& b) { b.struct_size += 8; }, {"struct_size", std::to_string(sizeof(good) + 8)}},
      {"num_ranks 0", [](epx_bootstrap& b) { b.num_ranks = 0; }, {"num_ranks", "0"}},
      {"num_ranks negative", [](epx_bootstrap& b) { b.num_ranks = -3; }, {"num_ranks", "-3"}},
      {"rank negative", [](epx_bootstrap& b) { b.rank = -1; }, {"rank", "-1"}},
      {"rank beyond num_ranks",
       [](epx_bootstrap& b) {
         b.num_ranks = 2;
         b.rank = 2;
       },
       {"rank", "2"}},
      {"without all_gather", [](epx_bootstrap& b) { b.all_gather = nullptr; }, {"all_gather", "NULL"}},
      {"with a reserved field set", [](epx_bootstrap& b) { b.reserved[2] = &b; }, {"epx_bootstrap", "reserved"}},
  };
  for (const BadBootstrap& bad : table) {
    epx_bootstrap bootstrap = good;
    bad.spoil(bootstrap);
    check_create(bad.name, &bootstrap, &config, &group, bad.words);
  }

  epx_memory_plan plan{};
  plan.struct_size = sizeof(plan);
  const auto check_plan = [&](const std::string& name, const Config* with, int num_ranks, epx_memory_plan* out,
                              const std::vector<std::string>& words) {
    CAPTURE(name);
    CHECK_NOTHROW(check_status(epx_group_memory_plan(with, num_ranks, out), EPX_ERROR_INVALID_ARGUMENT, name));
    CHECK_NOTHROW(check_words(words, name));
    CHECK(plan.window_bytes == 0);
  };
  check_plan("config NULL", nullptr, 2, &plan, {"config", "NULL"});
  check_plan("plan NULL", &config, 2, nullptr, {"plan", "NULL"});
  check_plan("num_ranks 0", &config, 0, &plan, {"num_ranks", "0"});
  check_plan("num_ranks negative", &config, -2, &plan, {"num_ranks", "-2"});
  // Each field is within its limits, but their product is too large; only P shows that.
  Config huge = config;
  huge.max_tokens_per_rank = kMaxInt;
  check_plan("more routes than int32 counts", &huge, 2, &plan, {"max_tokens_per_rank", std::to_string(kMaxInt)});
  check_create("more routes than int32 counts", &good, &huge, &group, {"max_tokens_per_rank", std::to_string(kMaxInt)});
  plan.struct_size = 4;
  check_plan("struct_size", &config, 2, &plan, {"struct_size", "4"});
  CHECK(epx_group_config_init(nullptr) == EPX_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("group creation returns the status and the message of a bootstrap that fails") {
  epx_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.num_ranks = 2;
  bootstrap.all_gather = [](void*, const void*, void*, size_t, int64_t, char* message, size_t bytes) {
    const std::string words = "the cable is out";
    message[words.copy(message, bytes - 1)] = '\0';
    return EPX_ERROR_SYSTEM;
  };
  const Config config = round_config();
  epx_group group = nullptr;
  CHECK(epx_group_create(&bootstrap, &config, &group) == EPX_ERROR_SYSTEM);
  CHECK(contains(epx_last_error(), "the cable is out"));
  // This bootstrap leaves no message, and its status is no enumerator.
  bootstrap.all_gather = [](void*, const void*, void*, size_t, int64_t, char*, size_t) {
    return static_cast<epx_status>(77);
  };
  CHECK(epx_group_create(&bootstrap, &config, &group) != EPX_SUCCESS);
  CHECK(std::string(epx_last_error()).size() > 0);
  CHECK(group == nullptr);
}

TEST_CASE("a rank that does not come to epx_group_create is named") {
  LocalRendezvous rendezvous(3);
  run_threads(2, [&](int rank) {
    Config config = round_config();
    config.timeout_ms = 500;
    check_not_created(rendezvous.bootstrap(rank), config, EPX_ERROR_TIMEOUT, {"2"});
  });
}

TEST_CASE("a rank whose config is refused is told why, though no peer comes") {
  LocalRendezvous rendezvous(2);
  Config config = round_config();
  config.timeout_ms = 50;
  config.hidden_dim = -16;
  check_not_created(rendezvous.bootstrap(0), config, EPX_ERROR_INVALID_ARGUMENT, {"hidden_dim", "-16"});
}

TEST_CASE("a rank whose timeout_ms is refused waits for its peers as long as ranks do by default") {
  int64_t limit_ms = 0;
  epx_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.num_ranks = 2;
  bootstrap.context = &limit_ms;
  bootstrap.all_gather = [](void* context, const void*, void*, size_t, int64_t timeout_ms, char*, size_t) {
    *static_cast<int64_t*>(context) = timeout_ms;
    return EPX_ERROR_TIMEOUT;
  };
  Config config = round_config();
  config.timeout_ms = -20;
  check_not_created(bootstrap, config, EPX_ERROR_INVALID_ARGUMENT, {"timeout_ms", "-20"});
  CHECK(limit_ms == GroupConfig().timeout_ms);
}

// The environment is read once, so each value needs a process of its own; later test cases run these in such processes.
TEST_CASE("EPX_TIMEOUT_MS is refused" * doctest::skip()) {
  Config config;
  CHECK(epx_group_config_init(&config) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(contains(epx_last_error(), "EPX_TIMEOUT_MS"));
  CHECK(contains(epx_last_error(), std::getenv("EPX_TIMEOUT_MS")));
}

TEST_CASE("a rendezvous of more ranks than a group can have is refused") {
  for (const int32_t num_ranks : {0, 65536, kMaxInt}) {
    epx_bootstrap bootstrap{};
    check_status(epx_bootstrap_file("/nowhere", "job", 0, num_ranks, 1, &bootstrap), EPX_ERROR_INVALID_ARGUMENT,
                 "epx_bootstrap_file");
    check_words({fmt::format("num_ranks is {}; it must be 1..65535", num_ranks)}, "epx_bootstrap_file");
  }
}

TEST_CASE("EPX_LOG is refused" * doctest::skip()) {
  LocalRendezvous rendezvous(1);
  check_not_created(rendezvous.bootstrap(0), round_config(), EPX_ERROR_INVALID_ARGUMENT,
                    {"EPX_LOG", std::getenv("EPX_LOG"), "off, error, warn, info, debug"});
}

TEST_CASE("EPX_TUNING is refused" * doctest::skip()) {
  LocalRendezvous rendezvous(1);
  const epx_bootstrap bootstrap = rendezvous.bootstrap(0);
  const Config config = round_config();
  epx_group group = kUntouched;
  CHECK(epx_group_create(&bootstrap, &config, &group) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(group == kUntouched);
  check_words({"EPX_TUNING", std::getenv("EPX_TUNING")}, "epx_group_create");
}

// Runs a test case in a process that has this environment variable.
void check_in_child(const char* variable, const char* value, const char* test_case) {
  CAPTURE(value);
  const pid_t child = fork();
  if (child == 0) {
    setenv(variable, value, 1);
    execl("/proc/self/exe", "bad_config", "--no-skip", "--minimal", fmt::format("--test-case={}", test_case).c_str(),
          nullptr);
    _exit(127);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("EPX_TIMEOUT_MS has to be a positive number") {
  for (const char* value : {"soon", "0", "-5", "12x", "99999999999999999999"})
    check_in_child("EPX_TIMEOUT_MS", value, "EPX_TIMEOUT_MS is refused");
}

TEST_CASE("EPX_LOG has to be a level") {
  for (const char* value : {"verbose", "", "WARN", "3"})
    check_in_child("EPX_LOG", value, "EPX_LOG is refused");
}

TEST_CASE("EPX_TUNING has to name entries") {
  for (const char* value : {"batch_grids=3", "batch_grid=-1"})
    check_in_child("EPX_TUNING", value, "EPX_TUNING is refused");
}

// ---- More memory than there is ----

// Returns the bytes of the machine's memory. A container may have less.
int64_t total_memory() {
  struct sysinfo info {};
  check(sysinfo(&info) == 0, "sysinfo failed");
  return static_cast<int64_t>(info.totalram) * static_cast<int64_t>(info.mem_unit);
}

void check_nothing_left(const SharedMemoryWatch& watch) {
  const std::set<std::string> left = watch.leftovers();
  check(left.empty(), "left in /dev/shm: {}", fmt::join(left, ", "));
}

// The number of free bytes is not compared, since other processes change it meanwhile.
void check_says_free(const std::string& sentence, int64_t wanted) {
  check_says(sentence, std::to_string(wanted));
  check_says(sentence, "free");
}

TEST_CASE("a group that does not fit into memory") {
  const int64_t total = total_memory();
  constexpr int kThreeRanks = 3;
  constexpr int64_t kRowBytes = int64_t{4} << 16;
  Config config = round_config();
  config.hidden_dim = 1 << 16;
  config.max_token_dtype = EPX_FLOAT32;
  // The windows take more than the machine has in all: they are refused at once, before a page is touched.
  const int64_t rows = 2 * total / kRowBytes + 1;
  config.max_tokens_per_rank = static_cast<int32_t>(rows);
  config.max_recv_tokens_per_rank = rows;
  const int64_t window_bytes = memory_plan(config, kThreeRanks).window_bytes;
  REQUIRE(window_bytes > total);

  const SharedMemoryWatch watch;
  LocalRendezvous rendezvous(kThreeRanks);
  run_threads(kThreeRanks, [&](int rank) {
    check_not_created(rendezvous.bootstrap(rank), config, EPX_ERROR_OUT_OF_MEMORY, {});
    check_says_free(epx_last_error(), window_bytes);
  });
  CHECK_NOTHROW(check_nothing_left(watch));
  LocalRendezvous next(kRanks);
  run_threads(kRanks, [&](int rank) { check_good_group(next, rank); });
}

TEST_CASE("epx_mem_alloc of more than there is fails with out of memory on all ranks, and the group lives on") {
  const int64_t total = total_memory();
  const SharedMemoryWatch watch;
  with_group(round_config(), [&](epx_group group, int rank) {
    LayerRound round(group, rank);
    const auto wanted = static_cast<size_t>(2 * total + 4096);
    for (int i = 0; i < 2; ++i) {
      void* ptr = nullptr;
      check_status(epx_mem_alloc(group, wanted, &ptr), EPX_ERROR_OUT_OF_MEMORY, "epx_mem_alloc");
      check_says_free(epx_last_error(), static_cast<int64_t>(wanted));
      check(ptr == nullptr, "a failed call returned memory");
      round.run_all();
    }
    // No file can have so many bytes.
    void* ptr = nullptr;
    check(epx_mem_alloc(group, std::numeric_limits<size_t>::max(), &ptr) != EPX_SUCCESS, "2^64 - 1 bytes were allocated");
    check(ptr == nullptr, "a failed call returned memory");
    round.run_all();
  });
  CHECK_NOTHROW(check_nothing_left(watch));
}

TEST_CASE("epx_mem_alloc of different bytes fails with both values on all ranks, and the group lives on") {
  with_group(round_config(), [&](epx_group group, int rank) {
    LayerRound round(group, rank);
    void* ptr = nullptr;
    check_status(epx_mem_alloc(group, rank == 0 ? 4096 : 12288, &ptr), EPX_ERROR_MISMATCH, "epx_mem_alloc");
    check_words({"4096", "12288"}, "epx_mem_alloc");
    check(ptr == nullptr, "a failed call returned memory");
    round.run_all();

    // A pointer that is not the start of an allocation is refused, and the allocation can still be freed.
    check_ok(epx_mem_alloc(group, 4096, &ptr), "epx_mem_alloc");
    check_status(epx_mem_free(group, static_cast<std::byte*>(ptr) + 256), EPX_ERROR_INVALID_ARGUMENT, "inside");
    check_ok(epx_mem_free(group, ptr), "epx_mem_free");
    check_status(epx_mem_free(group, ptr), EPX_ERROR_INVALID_ARGUMENT, "twice");
    round.run_all();
  });
}

TEST_CASE("epx_mem_free after an abort reports it, and frees all the same") {
  with_group(round_config(), [](epx_group group, int) {
    void* ptr = nullptr;
    check_ok(epx_mem_alloc(group, 4096, &ptr), "epx_mem_alloc");
    check_ok(epx_group_abort(group), "epx_group_abort");
    check_status(epx_mem_free(group, ptr), EPX_ERROR_ABORTED, "epx_mem_free");
    check_status(epx_mem_free(group, ptr), EPX_ERROR_INVALID_ARGUMENT, "a second epx_mem_free");
  });
}

} // namespace
} // namespace epx::test
