// SPDX-License-Identifier: Apache-2.0
// Bad input to the operations. What is refused on the host changes nothing, on the rank that passed it and on its
// peer, and takes no sequence number: a good round follows each. Recoverable errors are reported with a sentence, and the group
// continues. Sticky errors, which end it, are in faults.cc.
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
      if (table[i].op >= Op::dispatch_rank_major && table[i].op != Op::ragged_all_to_all) round.run_rank_major();
      if (table[i].op == Op::ragged_all_to_all) round.run_ragged();
    }
    check(wrong.empty(), "{}", wrong);
    if (rank == 0) num_cases = static_cast<int>(table.size());
  });
  MESSAGE(num_cases << " refused calls");
  CHECK(num_cases >= 850);
}

// What the refusals of formats spoil is right before.
TEST_CASE("calls of each way, scaling and layout are taken") {
  with_group(round_config(), [&](epx_group group, int rank) {
    LayerRound round(group, rank);
    round.run_all();
    for (const FormatWay way : {FormatWay::given, FormatWay::at_source, FormatWay::on_wire}) {
      for (const FormatCase& right : right_formats(way)) {
        std::vector<Op> ops = {Op::dispatch, Op::prepare_dispatch, Op::combine_bwd, Op::dispatch_rank_major,
                               Op::combine_rank_major_bwd};
        if (way == FormatWay::on_wire && (right.scaling == EPX_SCALING_BLOCK128 || right.scaling == EPX_SCALING_MX))
          ops.insert(ops.end(), {Op::combine, Op::dispatch_bwd, Op::combine_rank_major, Op::dispatch_rank_major_bwd});
        for (const Op op : ops) {
          const auto calls = round.calls();
          give_format(*calls, op, right);
          set_prepare_dispatch(*calls);
          check_ok(call(op, *calls), "a call with a format");
        }
      }
    }
    round.run_all();
    round.run_rank_major();
  });
}

TEST_CASE("formats whose rows the group has no room for are refused with the sizes") {
  struct Group {
    epx_dtype max_dtype;
    int hidden_dim;
    epx_scaling scaling;
    std::vector<std::string> words;
  };
  // Staged rows take a multiple of 128 bytes.
  const std::vector<Group> table = {
      {EPX_FLOAT4_E2M1, 256, EPX_SCALING_BLOCK128, {"float8_e4m3", "block128", "float4_e2m1", "264", "256"}},
      {EPX_FLOAT4_E2M1, 256, EPX_SCALING_MX, {"float8_e4m3", "mx", "float4_e2m1", "264", "256"}}};
  for (const Group& refused : table) {
    epx_group_config config = round_config();
    config.max_token_dtype = refused.max_dtype;
    config.hidden_dim = refused.hidden_dim;
    with_group(config, [&](epx_group group, int rank) {
      LayerRound round(group, rank);
      const auto calls = round.calls();
      check_ok(call(Op::prepare, *calls), "prepare");
      give_format(*calls, Op::dispatch, {.way = FormatWay::on_wire, .scaling = refused.scaling, .amax_floor = 0.0F});
      check_status(call(Op::dispatch, *calls), EPX_ERROR_INVALID_ARGUMENT, "a row that does not fit");
      check_tells(epx_last_error(), refused.words, "a row that does not fit");
      calls->dispatch.format = nullptr;
      check_status(call(Op::dispatch, *calls), EPX_ERROR_INVALID_ARGUMENT, "a wide row");
      check_tells(epx_last_error(), {"tokens", "bfloat16", "max_token_dtype", "float4_e2m1"}, "a wide row");
    });
  }
}

TEST_CASE("sums travel quantised in precision wire alone") {
  for (const auto& [precision, name] : {std::pair{EPX_COMBINE_EXACT, "exact"}, std::pair{EPX_COMBINE_NODE, "node"}}) {
    epx_group_config config = round_config();
    config.combine_precision = precision;
    with_group(config, [name = name](epx_group group, int rank) {
      LayerRound round(group, rank);
      round.run_all();
      const auto calls = round.calls();
      give_format(*calls, Op::combine, {.way = FormatWay::on_wire, .amax_floor = 0.0F});
      for (const Op op : {Op::combine, Op::dispatch_bwd}) {
        check_status(call(op, *calls), EPX_ERROR_INVALID_ARGUMENT, "a sum with a format");
        check_tells(epx_last_error(), {"row format", "combine_precision", name, "wire"}, "a sum with a format");
      }
    });
  }
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

    // The ranks make these calls in turn.
    std::string wrong;
    int num_calls = 0;
    const auto refuse = [&](const char* name, const std::function<epx_status()>& call,
                            const std::vector<std::string>& words) {
      if (num_calls++ % kRanks == rank) {
        try {
          check_status(call(), EPX_ERROR_INVALID_ARGUMENT, name);
          check_tells(epx_last_error(), words, name);
          check(bytes == 12345 && memory == before, "{}: an output has changed", name);
        } catch (const CheckFailure& failure) {
          wrong += std::string("\n  ") + failure.what();
        }
      }
      round.run_all();
    };
    refuse("handle_mem_size: group NULL", [&] { return epx_handle_mem_size(nullptr, &good_layer, &bytes); },
           {"group", "NULL"});
    refuse("handle_mem_size: layer NULL", [&] { return epx_handle_mem_size(group, nullptr, &bytes); }, {"layer", "NULL"});
    refuse("handle_mem_size: bytes NULL", [&] { return epx_handle_mem_size(group, &good_layer, nullptr); },
           {"bytes", "NULL"});
    refuse("handle_mem_size: top_k", [&] { return epx_handle_mem_size(group, &wide_layer, &bytes); }, {"top_k", "5", "4"});
    refuse("handle_mem_size: alignment", [&] { return epx_handle_mem_size(group, &coarse_layer, &bytes); },
           {"alignment", "9", "8"});
    refuse("query: group NULL", [&] { return epx_group_query(nullptr, &group_info); }, {"group", "NULL"});
    refuse("query: info NULL", [&] { return epx_group_query(group, nullptr); }, {"info", "NULL"});
    refuse("query: struct_size",
           [&] {
             group_info.struct_size = kBytes01<epx_group_info> - 8;
             return epx_group_query(group, &group_info);
           },
           {"struct_size", std::to_string(kBytes01<epx_group_info> - 8), std::to_string(kBytes01<epx_group_info>)});
    refuse("query: odd struct_size",
           [&] {
             group_info.struct_size = kBytes01<epx_group_info> + 4;
             return epx_group_query(group, &group_info);
           },
           {"struct_size", std::to_string(kBytes01<epx_group_info> + 4), "multiple"});
    refuse("status: group NULL", [&] { return epx_group_status(nullptr, &report); }, {"group", "NULL"});
    refuse("status: report NULL", [&] { return epx_group_status(group, nullptr); }, {"report", "NULL"});
    refuse("status: struct_size",
           [&] {
             report.struct_size = kBytes01<epx_group_report> - 8;
             return epx_group_status(group, &report);
           },
           {"struct_size", std::to_string(kBytes01<epx_group_report> - 8), std::to_string(kBytes01<epx_group_report>)});
    refuse("abort: group NULL", [] { return epx_group_abort(nullptr); }, {"group", "NULL"});
    refuse("mem_alloc: group NULL", [&] { return epx_mem_alloc(nullptr, 64, &memory); }, {"group", "NULL"});
    refuse("mem_alloc: no bytes", [&] { return epx_mem_alloc(group, 0, &memory); }, {"bytes", "0"});
    refuse("mem_alloc: ptr NULL", [&] { return epx_mem_alloc(group, 64, nullptr); }, {"ptr", "NULL"});
    refuse("mem_register: group NULL", [&] { return epx_mem_register(nullptr, before, 64); }, {"group", "NULL"});
    refuse("mem_register: ptr NULL", [&] { return epx_mem_register(group, nullptr, 64); }, {"ptr", "NULL"});
    refuse("mem_register: no bytes", [&] { return epx_mem_register(group, before, 0); }, {"bytes", "0"});
    refuse("mem_free: group NULL", [&] { return epx_mem_free(nullptr, before); }, {"group", "NULL"});
    refuse("mem_free: ptr NULL", [&] { return epx_mem_free(group, nullptr); }, {"NULL"});
    refuse("all_gather: group NULL", [&] { return epx_group_all_gather(nullptr, record, record, 8); }, {"group", "NULL"});
    refuse("all_gather: send NULL", [&] { return epx_group_all_gather(group, nullptr, record, 8); }, {"send", "NULL"});
    refuse("all_gather: recv NULL", [&] { return epx_group_all_gather(group, record, nullptr, 8); }, {"recv", "NULL"});
    refuse("all_gather: no bytes", [&] { return epx_group_all_gather(group, record, record, 0); },
           {"bytes_per_rank", "0", "1..256"});
    refuse("all_gather: too many bytes", [&] { return epx_group_all_gather(group, record, record, 257); },
           {"bytes_per_rank", "257", "1..256"});
    epx_row_format format{};
    refuse("row_format_init: format NULL", [] { return epx_row_format_init(nullptr, EPX_SCALING_MX); }, {"format", "NULL"});
    refuse("row_format_init: no scaling", [&] { return epx_row_format_init(&format, EPX_SCALING_NONE); },
           {"epx_row_format_init", "scaling", "0"});
    refuse("mem_free: not such memory", [&] { return epx_mem_free(group, &not_epx_memory); }, {"epx_mem_alloc"});
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

TEST_CASE("a bad slice is reported to its two ranks, with its number and the other rank") {
  struct Integers { // of the slices of rank 0, of which slice 2 has two rows for rank 1
    std::vector<int32_t> send_sizes, input_offsets, output_offsets;
  };
  struct Case {
    const char* name;
    std::function<void(Integers&)> spoil;
    std::vector<std::string> words;
    int slice = 2;
  };
  const std::vector<Case> table = {
      {"another size than the peer's", [](Integers& all) { all.send_sizes[2] = 1; }, {"1 rows", "2 rows", "recv_sizes"}},
      {"a negative size", [](Integers& all) { all.send_sizes[2] = -7; }, {"send_sizes"}},
      {"a slice that leaves operand", [](Integers& all) { all.input_offsets[2] = kOperandRows - 1; }, {"leaves"}},
      {"a slice that leaves output", [](Integers& all) { all.output_offsets[2] = kOutputRows; }, {"leaves"}},
      {"a slice of the rank itself", [](Integers& all) { all.input_offsets[1] = -1; }, {"leaves"}, 1},
  };
  with_group(round_config(), [&](epx_group group, int rank) {
    LayerRound round(group, rank);
    for (const Case& bad : table) {
      const auto calls = round.calls();
      Integers integers;
      const auto copy = [&](epx_tensor& tensor, std::vector<int32_t>& values) {
        const auto* const good = static_cast<const int32_t*>(tensor.data);
        values.assign(good, good + kSlices);
        tensor.data = values.data();
      };
      copy(calls->send_sizes, integers.send_sizes);
      copy(calls->input_offsets, integers.input_offsets);
      copy(calls->output_offsets, integers.output_offsets);
      if (rank == 0) bad.spoil(integers);
      check_ok(call(Op::ragged_all_to_all, *calls), bad.name);
      const epx_group_report report = GroupView(group).status();
      const bool knows = rank == 0 || bad.slice / kSlicesPerRank == rank;
      check_equal<uint64_t>(report.event_counts[EPX_EVENT_BAD_SLICE], knows ? 1 : 0, bad.name);
      check(report.status == EPX_SUCCESS && (report.message[0] != '\0') == knows, "{}: \"{}\"", bad.name, report.message);
      if (knows) {
        const int other = bad.slice == 2 ? 1 - rank : rank;
        check(report.first_event == EPX_EVENT_BAD_SLICE && report.first_event_operation == EPX_OP_RAGGED_ALL_TO_ALL,
              "{}: another event: \"{}\"", bad.name, report.message);
        check_tells(report.message, bad.words, bad.name);
        check_tells(report.message,
                    {"ragged_all_to_all", "1 slice", "slice " + std::to_string(bad.slice), "rank " + std::to_string(other)},
                    bad.name);
      }
      round.run_ragged();
    }
    round.run_all();
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

// Handle memory of other groups and prepares, and damaged headers, are in conformance_handles.cc.
TEST_CASE("handle memory that is not the layer's is reported with a sentence") {
  with_group(round_config(), [](epx_group group, int rank) {
    LayerRound round(group, rank);
    const auto check_reported = [&](const char* name, const std::vector<std::string>& words) {
      round.run(Op::dispatch);
      const epx_group_report report = GroupView(group).status();
      if (rank == 0) check_tells(report.message, words, name);
      round.run_all();
    };
    round.run_all();
    if (rank == 0) std::memset(round.handle(), 0, round.handle_bytes());
    check_reported("never prepared", {"dispatch", "handle"});

    const auto other_layer = round.calls(); // of the same T and top_k
    other_layer->prepare.layer.alignment = 1;
    check_ok(call(Op::prepare, *other_layer), "prepare of another layer");
    check_reported("of another alignment", {"dispatch", "handle", "alignment", "1", "4"});
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
