// SPDX-License-Identifier: Apache-2.0
// Bad input to the operations. What is refused on the host changes nothing, on the rank that passed it and on its
// peer, and takes no sequence number: a good round follows each. Recoverable errors are reported with a sentence, and the group
// continues. Sticky errors end the group on all ranks alike.
#include <doctest/doctest.h>

#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "epx/epx.hpp"
#include "tests/multiprocess/bytes_0_1.h"
#include "tests/multiprocess/layer_round.h"
#include "tests/multiprocess/refusals.h"
#include "tests/multiprocess/sentences.h"
#include "tests/multiprocess/with_group.h"
#include "tests/support/check.h"
#include "tests/support/local_bootstrap.h"
#include "tests/support/run_ranks.h"

namespace epx::test {
namespace {

void check_refused(LayerRound& round, const Refusal& refusal) {
  const auto calls = round.calls();
  refusal.spoil(*calls);
  round.scribble_outputs();
  const std::vector<std::byte> before = round.memory();
  check_status(call(refusal.op, *calls), refusal.status, refusal.name);
  check_tells(epx_last_error(), refusal.words, refusal.name);
  check(round.memory() == before, "{}: memory has changed", refusal.name);
}

TEST_CASE("a refused call changes nothing and takes no sequence number") {
  int num_cases = 0;
  with_group(round_config(), [&](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    // Both ranks walk the same table, and spoil their call alternately.
    const auto table =
        refusals(round.num_tokens(), GroupView(group).query().num_local_experts, round.num_rows(), round.handle_bytes());
    std::string wrong;
    for (size_t i = 0; i < table.size(); ++i) {
      if (static_cast<int>(i % kRanks) == rank) {
        try {
          check_refused(round, table[i]);
        } catch (const CheckFailure& failure) {
          wrong += std::string("\n  ") + failure.what();
        }
      }
      round.run_all();
      if (table[i].op == Op::prepare_dispatch) round.run_fused();
      if (table[i].op >= Op::dispatch_rank_major) round.run_rank_major();
    }
    check(wrong.empty(), "{}", wrong);
    if (rank == 0) num_cases = static_cast<int>(table.size());
  });
  MESSAGE(num_cases << " refused calls");
  CHECK(num_cases >= 260);
}

// The rest of the calls on a group, which are local.
TEST_CASE("the calls around the operations refuse bad arguments") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    const epx_layer good_layer = {kTopK, kAlignment};
    const epx_layer wide_layer = {kMaxTopK + 1, kAlignment};
    const epx_layer coarse_layer = {kTopK, kMaxAlignment + 1};
    size_t bytes = 12345;
    epx_group_info group_info{};
    epx_group_report report{};
    void* memory = &bytes;
    void* const before = memory;
    char not_epx_memory = 0;
    char record[512] = {};

    struct Case {
      const char* name;
      std::function<epx_status()> call;
      std::vector<std::string> words;
    };
    const std::vector<Case> table = {
        {"handle_mem_size: group NULL",
         [&] { return epx_handle_mem_size(nullptr, &good_layer, &bytes); },
         {"group", "NULL"}},
        {"handle_mem_size: layer NULL", [&] { return epx_handle_mem_size(group, nullptr, &bytes); }, {"layer", "NULL"}},
        {"handle_mem_size: bytes NULL",
         [&] { return epx_handle_mem_size(group, &good_layer, nullptr); },
         {"bytes", "NULL"}},
        {"handle_mem_size: top_k", [&] { return epx_handle_mem_size(group, &wide_layer, &bytes); }, {"top_k", "5", "4"}},
        {"handle_mem_size: alignment",
         [&] { return epx_handle_mem_size(group, &coarse_layer, &bytes); },
         {"alignment", "9", "8"}},
        {"query: group NULL", [&] { return epx_group_query(nullptr, &group_info); }, {"group", "NULL"}},
        {"query: info NULL", [&] { return epx_group_query(group, nullptr); }, {"info", "NULL"}},
        {"query: struct_size",
         [&] {
           group_info.struct_size = kBytes01<epx_group_info> - 8;
           return epx_group_query(group, &group_info);
         },
         {"struct_size", std::to_string(kBytes01<epx_group_info> - 8), std::to_string(kBytes01<epx_group_info>)}},
        {"query: odd struct_size",
         [&] {
           group_info.struct_size = kBytes01<epx_group_info> + 4;
           return epx_group_query(group, &group_info);
         },
         {"struct_size", std::to_string(kBytes01<epx_group_info> + 4), "multiple"}},
        {"status: group NULL", [&] { return epx_group_status(nullptr, &report); }, {"group", "NULL"}},
        {"status: report NULL", [&] { return epx_group_status(group, nullptr); }, {"report", "NULL"}},
        {"status: struct_size",
         [&] {
           report.struct_size = kBytes01<epx_group_report> - 8;
           return epx_group_status(group, &report);
         },
         {"struct_size", std::to_string(kBytes01<epx_group_report> - 8), std::to_string(kBytes01<epx_group_report>)}},
        {"abort: group NULL", [] { return epx_group_abort(nullptr); }, {"group", "NULL"}},
        {"mem_alloc: group NULL", [&] { return epx_mem_alloc(nullptr, 64, &memory); }, {"group", "NULL"}},
        {"mem_alloc: no bytes", [&] { return epx_mem_alloc(group, 0, &memory); }, {"bytes", "0"}},
        {"mem_alloc: ptr NULL", [&] { return epx_mem_alloc(group, 64, nullptr); }, {"ptr", "NULL"}},
        {"mem_register: group NULL", [&] { return epx_mem_register(nullptr, before, 64); }, {"group", "NULL"}},
        {"mem_register: ptr NULL", [&] { return epx_mem_register(group, nullptr, 64); }, {"ptr", "NULL"}},
        {"mem_register: no bytes", [&] { return epx_mem_register(group, before, 0); }, {"bytes", "0"}},
        {"mem_free: group NULL", [&] { return epx_mem_free(nullptr, before); }, {"group", "NULL"}},
        {"mem_free: ptr NULL", [&] { return epx_mem_free(group, nullptr); }, {"NULL"}},
        {"all_gather: group NULL", [&] { return epx_group_all_gather(nullptr, record, record, 8); }, {"group", "NULL"}},
        {"all_gather: send NULL", [&] { return epx_group_all_gather(group, nullptr, record, 8); }, {"send", "NULL"}},
        {"all_gather: recv NULL", [&] { return epx_group_all_gather(group, record, nullptr, 8); }, {"recv", "NULL"}},
        {"all_gather: no bytes",
         [&] { return epx_group_all_gather(group, record, record, 0); },
         {"bytes_per_rank", "0", "1..256"}},
        {"all_gather: too many bytes",
         [&] { return epx_group_all_gather(group, record, record, 257); },
         {"bytes_per_rank", "257", "1..256"}},
        {"mem_free: not such memory", [&] { return epx_mem_free(group, &not_epx_memory); }, {"epx_mem_alloc"}},
    };
    std::string wrong;
    for (size_t i = 0; i < table.size(); ++i) {
      if (static_cast<int>(i % kRanks) == rank) {
        try {
          check_status(table[i].call(), EPX_ERROR_INVALID_ARGUMENT, table[i].name);
          check_tells(epx_last_error(), table[i].words, table[i].name);
          check(bytes == 12345 && memory == before, "{}: an output has changed", table[i].name);
        } catch (const CheckFailure& failure) {
          wrong += std::string("\n  ") + failure.what();
        }
      }
      round.run_all();
    }
    check(wrong.empty(), "{}", wrong);
  });
  epx_group_destroy(nullptr);
}

TEST_CASE("rank-major sums are refused in a group of precision exact, the copies are not") {
  epx_group_config config = round_config();
  config.combine_precision = EPX_COMBINE_EXACT;
  with_group(config, [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run(Op::dispatch_rank_major);
    for (const Op op : {Op::combine_rank_major, Op::dispatch_rank_major_bwd}) {
      check_status(call(op, *round.calls()), EPX_ERROR_INVALID_ARGUMENT, "a sum");
      check_tells(epx_last_error(), {"rank_major", "exact"}, "a sum");
    }
    round.run(Op::combine_rank_major_bwd);
    round.run_all();
  });
}

TEST_CASE("rank-major calls whose staging R has no room for are refused with the numbers") {
  epx_group_config config = round_config();
  config.max_recv_tokens_per_rank = kRanks * (kMaxTokens - 1) * kTopK;
  with_group(config, [](epx_group group, int rank) {
    LayerRound round(group, rank);
    for (const Op op :
         {Op::dispatch_rank_major, Op::combine_rank_major, Op::combine_rank_major_bwd, Op::dispatch_rank_major_bwd}) {
      check_status(call(op, *round.calls()), EPX_ERROR_INVALID_ARGUMENT, "a rank-major call");
      check_tells(epx_last_error(), {"M is 7", "2 * 6 * 2", "max_recv_tokens_per_rank", "20"}, "a rank-major call");
    }
  });
}

TEST_CASE("rank-major: too few rows and bad indices are reported with their numbers") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_rank_major();
    const auto calls = round.calls();
    for (epx_tensor* tensor : {&calls->recv_rows, &calls->recv_row_idx, &calls->recv_row_weights})
      tensor->sizes[1] = 2;
    check_ok(call(Op::dispatch_rank_major, *calls), "dispatch_rank_major with M = 2");
    epx_group_report report = GroupView(group).status();
    // Of rank 0's tokens three have experts on rank 0 (0 1; 1 2; 2 3), and two on rank 1; of rank 1's three (1 2; 2 3; 3 4) two
    // and two.
    check_equal<uint64_t>(report.event_counts[EPX_EVENT_TOO_FEW_ROWS], rank == 0 ? 1 : 0, "dropped routes");
    if (rank == 0) {
      check(report.first_event_operation == EPX_OP_DISPATCH_RANK_MAJOR, "another operation: {}", report.message);
      check_tells(report.message, {"dispatch_rank_major", "M = 2", "3 tokens", "1 routes"}, "too few rows");
    }
    if (rank == 1) round.mask(2, 1, kExperts);
    check_ok(call(Op::dispatch_rank_major, *round.calls()), "dispatch_rank_major with a bad index");
    report = GroupView(group).status();
    check_equal<uint64_t>(report.event_counts[EPX_EVENT_BAD_INDEX], rank == 1 ? 1 : 0, "bad indices");
    if (rank == 1) check_tells(report.message, {"dispatch_rank_major", "is 5", "token 2", "k 1"}, "a bad index");
    round.unmask();
    round.run_rank_major();
  });
}

TEST_CASE("a bad index is reported with its value and treated as masked") {
  struct Case {
    int64_t index;
    const char* words;
  };
  constexpr int64_t kInt64Min = std::numeric_limits<int64_t>::min();
  constexpr int64_t kTwoTo32 = int64_t{1} << 32;
  const std::vector<Case> table = {{kExperts, "is 5"},
                                   {-2, "-2"},
                                   {100, "100"},
                                   {kTwoTo32 + 1, "4294967297"}, // expert 1 if it were cut to 32 bits
                                   {-kTwoTo32 + 1, "-4294967295"},
                                   {kInt64Min, "-9223372036854775808"},
                                   {std::numeric_limits<int64_t>::max(), "9223372036854775807"}};
  with_group(round_config(), [&](epx_group group, int rank) {
    LayerRound round(group, rank);
    for (size_t i = 0; i < table.size(); ++i) {
      const bool mine = static_cast<int>(i % kRanks) == rank;
      if (mine) round.mask(1, static_cast<int>(i) % kTopK, table[i].index);
      round.scribble_outputs();
      for (const Op op : {Op::prepare, Op::dispatch, Op::combine, Op::combine_bwd, Op::dispatch_bwd})
        round.run(op);
      round.check_results();
      const epx_group_report report = GroupView(group).status();
      check_equal<uint64_t>(report.event_counts[EPX_EVENT_BAD_INDEX], mine ? 1 : 0, "the number of bad indices");
      if (mine) {
        check_tells(report.message, {table[i].words, "prepare", "0..4"}, "bad index");
        check(report.status == EPX_SUCCESS && report.first_event == EPX_EVENT_BAD_INDEX &&
                  report.first_event_operation == EPX_OP_PREPARE,
              "the report names another event: {}", report.message);
      }
      round.unmask();
      round.run_all();
    }
    // An index of -1 masks a route and is no event.
    round.mask(0, 0, -1);
    round.run_all();
  });
}

TEST_CASE("overflow is reported with its sizes, or is silent, and the group lives on") {
  for (const epx_overflow policy : {EPX_OVERFLOW_ERROR, EPX_OVERFLOW_DROP}) {
    epx_group_config config = round_config();
    config.max_recv_tokens_per_rank = 5; // one alignment of 4 fits, and one row that is never used
    config.overflow = policy;
    with_group(config, [&](epx_group group, int rank) {
      LayerRound round(group, rank);
      for (int i = 0; i < 2; ++i) {
        round.scribble_outputs();
        for (const Op op : {Op::prepare, Op::dispatch, Op::combine, Op::combine_bwd, Op::dispatch_bwd})
          round.run(op);
        const epx_group_report report = GroupView(group).status();
        if (policy == EPX_OVERFLOW_DROP) {
          check(report.message[0] == '\0', "policy drop reports: {}", report.message);
          continue;
        }
        check(report.event_counts[EPX_EVENT_OVERFLOW] > 0 && report.first_event == EPX_EVENT_OVERFLOW,
              "no overflow reported");
        check_tells(report.message, {"5", std::to_string(report.event_counts[EPX_EVENT_OVERFLOW])}, "overflow");
      }
    });
  }
}

TEST_CASE("too few receive rows are reported with their number, and the group lives on") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    const auto calls = round.calls();
    if (rank == 0) calls->recv_tokens.sizes[0] = calls->recv_weights.sizes[0] = 3;
    check_ok(call(Op::dispatch, *calls), "dispatch with 3 rows");
    const epx_group_report report = GroupView(group).status();
    if (rank == 0) {
      check(report.event_counts[EPX_EVENT_TOO_FEW_ROWS] > 0 && report.first_event == EPX_EVENT_TOO_FEW_ROWS &&
                report.first_event_operation == EPX_OP_DISPATCH,
            "too few rows are not reported: {}", report.message);
      check_tells(report.message, {"3", "dispatch"}, "too few rows");
    } else {
      check(report.message[0] == '\0', "rank 1 reports: {}", report.message);
    }
    round.run_all();
  });
}

// Rank 0 passes handle memory that `spoil` has replaced; rank 1 passes its own.
void check_unusable_handle(epx_group group, LayerRound& round, int rank, const std::string& name,
                           const std::function<void(std::byte* handle)>& spoil) {
  round.run_all();
  const auto calls = round.calls();
  if (rank == 0) {
    // All outputs but the handle are scribbled over.
    std::vector<std::byte> handle(round.handle(), round.handle() + round.handle_bytes());
    round.scribble_outputs();
    std::memcpy(round.handle(), handle.data(), handle.size());
    spoil(round.handle());
    const std::vector<std::byte> before = round.memory();
    check_ok(call(Op::dispatch, *calls), name);
    check(round.memory() == before, "{}: an output has changed", name);
    const epx_group_report report = GroupView(group).status();
    check(report.event_counts[EPX_EVENT_HANDLE_MISMATCH] == 1 && report.first_event == EPX_EVENT_HANDLE_MISMATCH &&
              report.first_event_operation == EPX_OP_DISPATCH && report.status == EPX_SUCCESS,
          "{}: it is not reported: {}", name, report.message);
    check_tells(report.message, {"dispatch", "handle"}, name);
  } else {
    check_ok(call(Op::dispatch, *calls), name);
    round.check_received(/*without=*/0);
    GroupView(group).status(); // clears what rank 1 may say of rank 0
  }
  round.run_all();
}

TEST_CASE("unusable handle memory is reported, and its rank takes part without routes") {
  LocalRendezvous other_rendezvous(kRanks);
  with_group(round_config(), [&](epx_group group, int rank) {
    const Group other_group(other_rendezvous.bootstrap(rank), round_config());
    LayerRound round(group, rank);
    LayerRound other_round(other_group.get(), rank);
    other_round.run_all();
    const size_t bytes = round.handle_bytes();

    check_unusable_handle(group, round, rank, "never prepared", [&](std::byte* handle) { std::memset(handle, 0, bytes); });
    check_unusable_handle(group, round, rank, "of another group",
                          [&](std::byte* handle) { std::memcpy(handle, other_round.handle(), bytes); });
    // Each byte of the header is damaged in turn, since each matters.
    for (size_t i = 0; i < 64; ++i) {
      check_unusable_handle(group, round, rank, "byte " + std::to_string(i) + " damaged",
                            [=](std::byte* handle) { handle[i] ^= std::byte{0x10}; });
    }

    // This handle memory belongs to another layer: it was prepared in this group with another alignment.
    const auto other_layer = round.calls();
    std::vector<std::byte> other_handle(bytes);
    other_layer->prepare.layer.alignment = 1;
    check_ok(call(Op::prepare, *other_layer), "prepare of another layer");
    std::memcpy(other_handle.data(), round.handle(), bytes);
    check_unusable_handle(group, round, rank, "of another layer",
                          [&](std::byte* handle) { std::memcpy(handle, other_handle.data(), bytes); });
  });
}

TEST_CASE("with handle memory of different prepares neither rank's routes travel, and both report it") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    const std::vector<std::byte> old(round.handle(), round.handle() + round.handle_bytes());
    round.run_all();
    if (rank == 0) std::memcpy(round.handle(), old.data(), old.size());
    round.run(Op::dispatch);
    const epx_group_report report = GroupView(group).status();
    check(report.event_counts[EPX_EVENT_HANDLE_MISMATCH] == 1, "rank {} does not report: {}", rank, report.message);
    round.run_all();
  });
}

TEST_CASE("another T than the handle's is reported") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    const auto calls = round.calls();
    if (rank == 0) calls->tokens.sizes[0] = calls->topk_weights.sizes[0] = 2;
    check_ok(call(Op::dispatch, *calls), "dispatch of 2 tokens");
    const epx_group_report report = GroupView(group).status();
    if (rank == 0) {
      check(report.event_counts[EPX_EVENT_HANDLE_MISMATCH] == 1, "it is not reported: {}", report.message);
      check_tells(report.message, {"2", "4"}, "another T");
    }
    round.run_all();
  });
}

// Rank 1 makes another call than rank 0.
struct Disagreement {
  std::string name;
  Op op;
  std::function<void(Calls&)> spoil;
  epx_status status;
  std::vector<std::string> words;
  Op other_op;
};

void check_disagreement(const Disagreement& disagreement) {
  with_group(round_config(), [&](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    const auto calls = round.calls();
    if (rank == 1) disagreement.spoil(*calls);
    const Op op = rank == 1 ? disagreement.other_op : disagreement.op;
    const std::string name = disagreement.name + ", rank " + std::to_string(rank);
    check_status(call(op, *calls), disagreement.status, name);
    check_tells(epx_last_error(), disagreement.words, name);

    // From here on every call returns the same status at once, and so does the report.
    for (const Op later : {Op::prepare, Op::dispatch, Op::combine, Op::combine_bwd, Op::dispatch_bwd}) {
      check_status(call(later, *round.calls()), disagreement.status, name + ", later");
    }
    void* memory = nullptr;
    check_status(epx_mem_alloc(group, 64, &memory), disagreement.status, name + ", later epx_mem_alloc");
    for (int i = 0; i < 2; ++i) {
      const epx_group_report report = GroupView(group).status();
      check(report.status == disagreement.status, "{}: the report says {}", name, epx_status_string(report.status));
      check(report.message[0] != '\0', "{}: the report has no words", name);
    }
  });
}

TEST_CASE("ranks that make different calls are told what differs") {
  const auto nothing = [](Calls&) {};
  const std::vector<Disagreement> table = {
      {"operation", Op::dispatch, nothing, EPX_ERROR_OUT_OF_SEQUENCE, {"dispatch", "combine"}, Op::combine},
      {"operation, backward", Op::combine_bwd, nothing, EPX_ERROR_OUT_OF_SEQUENCE, {"combine_bwd", "prepare"}, Op::prepare},
      {"alignment of prepare",
       Op::prepare,
       [](Calls& c) { c.prepare.layer.alignment = 8; },
       EPX_ERROR_MISMATCH,
       {"alignment", "4", "8"},
       Op::prepare},
      {"top_k of prepare",
       Op::prepare,
       [](Calls& c) { c.prepare.layer.top_k = 1, c.topk_idx.sizes[1] = c.slot.sizes[1] = 1; },
       EPX_ERROR_MISMATCH,
       {"top_k", "2", "1"},
       Op::prepare},
      {"H of dispatch",
       Op::dispatch,
       [](Calls& c) { c.tokens.sizes[1] = c.recv_tokens.sizes[1] = 6; },
       EPX_ERROR_MISMATCH,
       {"8", "6"},
       Op::dispatch},
      {"dtype of dispatch",
       Op::dispatch,
       [](Calls& c) { c.tokens.dtype = c.recv_tokens.dtype = EPX_FLOAT16; },
       EPX_ERROR_MISMATCH,
       {"dtype", "3|bfloat16", "2|float16"},
       Op::dispatch},
      {"sidecar bytes of dispatch",
       Op::dispatch,
       [](Calls& c) { c.tokens.sidecar_row_bytes = c.recv_tokens.sidecar_row_bytes = 4; },
       EPX_ERROR_MISMATCH,
       {"sidecar", "8", "4"},
       Op::dispatch},
      {"weights of dispatch",
       Op::dispatch,
       [](Calls& c) { c.dispatch.topk_weights = c.dispatch.recv_weights = nullptr; },
       EPX_ERROR_MISMATCH,
       {"weights"},
       Op::dispatch},
      {"H of combine",
       Op::combine,
       [](Calls& c) { c.expert_out.sizes[1] = c.out.sizes[1] = 5; },
       EPX_ERROR_MISMATCH,
       {"8", "5"},
       Op::combine},
      {"weights of combine",
       Op::combine,
       [](Calls& c) { c.combine.recv_weights = nullptr; },
       EPX_ERROR_MISMATCH,
       {"weights"},
       Op::combine},
      {"weight gradients of combine_bwd",
       Op::combine_bwd,
       [](Calls& c) { c.combine_bwd.expert_out = c.combine_bwd.grad_recv_weights = nullptr; },
       EPX_ERROR_MISMATCH,
       {"weight"},
       Op::combine_bwd},
      {"dtype of dispatch_bwd",
       Op::dispatch_bwd,
       [](Calls& c) { c.grad_recv.dtype = c.grad_tokens.dtype = EPX_FLOAT16; },
       EPX_ERROR_MISMATCH,
       {"dtype", "3|bfloat16", "2|float16"},
       Op::dispatch_bwd},
      {"operation, rank-major",
       Op::dispatch_rank_major,
       nothing,
       EPX_ERROR_OUT_OF_SEQUENCE,
       {"dispatch_rank_major", "prepare"},
       Op::prepare},
      {"M of dispatch_rank_major",
       Op::dispatch_rank_major,
       [](Calls& c) { c.recv_rows.sizes[1] = c.recv_row_idx.sizes[1] = c.recv_row_weights.sizes[1] = 4; },
       EPX_ERROR_MISMATCH,
       {"M", "rank 0 passes 7", "rank 1 passes 4"},
       Op::dispatch_rank_major},
      {"M of combine_rank_major",
       Op::combine_rank_major,
       [](Calls& c) { c.row_expert_out.sizes[1] = 0; },
       EPX_ERROR_MISMATCH,
       {"M", "rank 0 passes 7", "rank 1 passes 0"},
       Op::combine_rank_major},
      {"weights of dispatch_rank_major_bwd",
       Op::dispatch_rank_major_bwd,
       [](Calls& c) {
         c.dispatch_rank_major_bwd.grad_recv_weights = c.dispatch_rank_major_bwd.grad_topk_weights = nullptr;
       },
       EPX_ERROR_MISMATCH,
       {"weights"},
       Op::dispatch_rank_major_bwd},
  };
  for (const Disagreement& disagreement : table) {
    CAPTURE(disagreement.name);
    CHECK_NOTHROW(check_disagreement(disagreement));
  }
}

TEST_CASE("a rank that does not come is named, with its sequence number") {
  epx_group_config config = round_config();
  config.timeout_ms = 2000;
  with_group(config, [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all(); // five calls
    if (rank == 1) return;
    check_status(call(Op::prepare, *round.calls()), EPX_ERROR_TIMEOUT, "prepare without rank 1");
    check_tells(epx_last_error(), {"rank 1", "prepare", "2000", "6", "5"}, "timeout");
    const epx_group_report report = GroupView(group).status();
    check(report.status == EPX_ERROR_TIMEOUT && report.operation == EPX_OP_PREPARE && report.culprit == 1 &&
              report.sequence == 6 && report.expected == 6 && report.seen == 5 && report.num_missing == 1 &&
              report.missing[0] == 1 && report.phase == EPX_PHASE_ARRIVE,
          "the report says: {}", report.message);
    check_status(call(Op::dispatch, *round.calls()), EPX_ERROR_TIMEOUT, "dispatch afterwards");
  });
}

TEST_CASE("an abort ends the group on all ranks, and says who") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    if (rank == 1) check_ok(epx_group_abort(group), "epx_group_abort");
    check_status(call(Op::prepare, *round.calls()), EPX_ERROR_ABORTED, "prepare after the abort");
    check_tells(epx_last_error(), {"prepare", rank == 1 ? "abort" : "rank 1"}, "abort");
    const epx_group_report report = GroupView(group).status();
    check(report.status == EPX_ERROR_ABORTED && report.culprit == 1, "the report says: {}", report.message);
  });
}

TEST_CASE("status strings and the last error") {
  CHECK(std::string(epx_status_string(EPX_SUCCESS)) == "EPX_SUCCESS");
  CHECK(std::string(epx_status_string(EPX_ERROR_INTERNAL)) == "EPX_ERROR_INTERNAL");
  CHECK(epx_status_string(static_cast<epx_status>(-1)) != nullptr);
  CHECK(epx_status_string(static_cast<epx_status>(4711)) != nullptr);
  epx_set_last_error("words");
  CHECK(std::string(epx_last_error()) == "words");
  run_threads(1, [](int) { check(epx_last_error()[0] == '\0', "another thread's sentence"); });
  epx_set_last_error(nullptr);
  CHECK(std::string(epx_last_error()).empty());
}

} // namespace
} // namespace epx::test
