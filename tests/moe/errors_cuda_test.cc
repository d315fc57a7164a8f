// SPDX-License-Identifier: Apache-2.0
// Bad data that only the device sees: it is reported, and nothing is written out of bounds.
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/permute_run.h"
#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

void check_report(epx_moe_op op, epx_moe_error_kind kind, int64_t num_errors, std::vector<int64_t> values,
                  const char* words) {
  const Report report = take_report();
  CHECK(report.num_errors == num_errors);
  CHECK(report.first.op == op);
  CHECK(report.first.kind == kind);
  CHECK(std::vector<int64_t>{report.first.i, report.first.j, report.first.value, report.first.limit} == values);
  CHECK_MESSAGE(std::string(report.first.message).find(words) != std::string::npos, report.first.message);
}

TEST_CASE("bad selections and counts are reported, and their tokens count as masked") {
  Rng rng(73);
  epx_moe_router_config config = router_config(5, 3);
  config.aux_loss_coeff = 0.5;
  const auto logits = random_tensor<float>({4, 5}, rng);
  const auto weights = random_tensor<float>({4, 3}, rng);
  const Tensor<int64_t> good({4, 3}, {0, 1, 2, -1, -1, -1, 4, 3, 2, 1, 0, 4});
  Tensor<int32_t> counts({2, 5}, 2);
  const auto expected = run_router_bwd<float>(config, logits, good, {&weights, &counts, 1});
  const double expected_loss = aux_loss(config, logits, good, counts);
  struct Case {
    std::vector<int64_t> row;
    epx_moe_error_kind kind;
    std::vector<int64_t> values;
    const char* words;
  };
  const int64_t huge = std::numeric_limits<int64_t>::min();
  for (const Case& bad :
       {Case{{0, 5, 1}, EPX_MOE_ERROR_EXPERT, {1, 1, 5, 5}, "topk_idx[1, 1] is 5"},
        Case{{0, 3, huge}, EPX_MOE_ERROR_EXPERT, {1, 2, huge, 5}, "topk_idx[1, 2] is -9223372036854775808"},
        Case{{4, -1, 1}, EPX_MOE_ERROR_EXPERT, {1, 1, -1, 5}, "topk_idx[1, 1] is -1"},
        Case{{-1, -1, 2}, EPX_MOE_ERROR_EXPERT, {1, 2, 2, 5}, "topk_idx[1, 2] is 2"},
        Case{{4, 2, 4}, EPX_MOE_ERROR_DUPLICATE_EXPERT, {1, 2, 4, 0}, "topk_idx[1, 2] is 4"},
        Case{{3, 3, 0}, EPX_MOE_ERROR_DUPLICATE_EXPERT, {1, 1, 3, 0}, "topk_idx[1, 1] is 3"}}) {
    auto topk_idx = good;
    for (int64_t k = 0; k < 3; ++k)
      topk_idx(1, k) = bad.row[static_cast<size_t>(k)];
    auto grad_logits = scribbled<float>({4, 5});
    epx_moe_router_bwd_args args = {sizeof(args), nullptr, logits.get(),     topk_idx.get(), weights.get(),
                                    counts.get(), 1,       grad_logits.get()};
    args.cuda = place_of_call(epx_moe_router_bwd_workspace, &config, &args);
    require_ok(epx_moe_router_bwd(&config, &args), "epx_moe_router_bwd");
    check_report(EPX_MOE_OP_ROUTER_BWD, bad.kind, 1, bad.values, bad.words);
    CHECK(difference(grad_logits, expected) == "");

    auto loss = scribbled<double>({1});
    epx_moe_aux_loss_args aux = {sizeof(aux), nullptr, logits.get(), topk_idx.get(), counts.get(), loss.get()};
    aux.cuda = place_of_call(epx_moe_aux_loss_workspace, &config, &aux);
    require_ok(epx_moe_aux_loss(&config, &aux), "epx_moe_aux_loss");
    check_report(EPX_MOE_OP_AUX_LOSS, bad.kind, 1, bad.values, bad.words);
    CHECK(loss[0] == expected_loss);
  }

  counts(1, 3) = -7;
  Tensor<float> bias({5});
  epx_moe_bias_update_args update = {sizeof(update), place_of_call(), counts.get(), 0.5, bias.get()};
  require_ok(epx_moe_bias_update(&update), "epx_moe_bias_update");
  check_report(EPX_MOE_OP_BIAS_UPDATE, EPX_MOE_ERROR_COUNT, 1, {1, 3, -7, 0}, "global_counts[1, 3] is -7");
  CHECK(difference(bias, Tensor<float>({5}, {-0.5f, -0.5f, -0.5f, 0.5f, -0.5f})) == ""); // 4, 4, 4, 2, 4 of a mean of 3.6
}

TEST_CASE("bad indices of a row map are reported and taken for none") {
  Tensor<int64_t> topk_idx({3, 2}, {0, 3, 1, -1, 2, 0});
  auto expected = run_row_map(Tensor<int64_t>({3, 2}, {0, -1, 1, -1, -1, 0}), 3, 4);
  topk_idx[4] = -2;
  for (const bool with_errors : {true, false}) {
    RowMap<int64_t> map = {scribbled<int64_t>({3}), scribbled<int64_t>({4}), scribbled<int32_t>({3, 2})};
    epx_moe_row_map_args args = {sizeof(args),     nullptr,           topk_idx.get(),   4,
                                 map.counts.get(), map.offsets.get(), map.row_map.get()};
    epx_moe_cuda place = *place_of_call(epx_moe_row_map_workspace, &args);
    if (!with_errors) place.errors = nullptr;
    args.cuda = &place;
    require_ok(epx_moe_row_map(&args), "epx_moe_row_map");
    const Report report = take_report();
    CHECK(report.num_errors == (with_errors ? 2 : 0));
    CHECK(report.first.op == (with_errors ? EPX_MOE_OP_ROW_MAP : EPX_MOE_OP_NONE));
    CHECK(difference(map.counts, expected.counts) == "");
    CHECK(difference(map.offsets, expected.offsets) == "");
    CHECK(difference(map.row_map, expected.row_map) == "");
  }
}

TEST_CASE("more rows than an int32 can count are reported") {
  const Tensor<int32_t> topk_idx({3, 1}, {0, 1, 2});
  RowMap<int32_t> map = {scribbled<int32_t>({3}), scribbled<int32_t>({4}), scribbled<int32_t>({3, 1})};
  epx_moe_row_map_args args = {sizeof(args),     nullptr,           topk_idx.get(),   1 << 30,
                               map.counts.get(), map.offsets.get(), map.row_map.get()};
  args.cuda = place_of_call(epx_moe_row_map_workspace, &args);
  require_ok(epx_moe_row_map(&args), "epx_moe_row_map");
  check_report(EPX_MOE_OP_ROW_MAP, EPX_MOE_ERROR_ROWS_NEEDED, 1, {0, 0, int64_t{3} << 30, 0}, "3221225472 rows");
  CHECK(difference(map.counts, Tensor<int32_t>({3}, 1)) == "");
  CHECK(difference(map.offsets, Tensor<int32_t>({4}, {0, 1 << 30, 2147483647, 2147483647})) == "");
  CHECK(difference(map.row_map, Tensor<int32_t>({3, 1}, -1)) == "");
}

TEST_CASE("bad rows are reported and taken for none") {
  Rng rng(74);
  const auto tokens = random_tensor<float>({3, 40}, rng);
  const auto rows = random_tensor<float>({4, 40}, rng);
  const auto weights = random_tensor<float>({3, 2}, rng);
  const auto row_weights = random_tensor<float>({4}, rng);
  const Tensor<int32_t> good({3, 2}, {1, -1, -1, 3, 0, -1});
  struct Case {
    int64_t route;
    int32_t row;
    epx_moe_error_kind kind;
    std::vector<int64_t> values;
    const char* words;
  };
  const int32_t lowest = std::numeric_limits<int32_t>::min();
  const int32_t highest = std::numeric_limits<int32_t>::max();
  for (const Case& bad : {Case{2, 4, EPX_MOE_ERROR_ROW, {1, 0, 4, 4}, "row_map[1, 0] is 4"},
                          Case{5, lowest, EPX_MOE_ERROR_ROW, {2, 1, lowest, 4}, "row_map[2, 1] is -2147483648"},
                          Case{1, highest, EPX_MOE_ERROR_ROW, {0, 1, highest, 4}, "row_map[0, 1] is 2147483647"},
                          Case{5, 3, EPX_MOE_ERROR_DUPLICATE_ROW, {2, 1, 3, 0}, "row_map[2, 1] is 3"}}) {
    CAPTURE(bad.words);
    auto row_map = good;
    row_map[bad.route] = bad.row;
    const auto expected = run_permute(good, tokens, 4, &weights);
    Permuted<float, float> permuted = {scribbled<float>({4, 40}), scribbled<float>({4})};
    epx_moe_permute_args args = {
        sizeof(args), nullptr, row_map.get(), tokens.get(), weights.get(), permuted.rows.get(), permuted.row_weights.get(),
        EPX_PADS_ZERO};
    args.cuda = place_of_call(epx_moe_permute_workspace, &args);
    require_ok(epx_moe_permute(&args), "epx_moe_permute");
    check_report(EPX_MOE_OP_PERMUTE, bad.kind, 1, bad.values, bad.words);
    CHECK(difference(permuted.rows, expected.rows) == "");
    CHECK(difference(permuted.row_weights, expected.row_weights) == "");

    const auto expected_grads = run_unpermute_bwd(good, tokens, rows, &weights, true);
    Gradients<float> grads = {scribbled<float>({4, 40}), scribbled<float>({3, 2})};
    epx_moe_unpermute_bwd_args bwd = {sizeof(bwd), nullptr,       row_map.get(),       tokens.get(),
                                      rows.get(),  weights.get(), grads.of_rows.get(), grads.of_topk_weights.get()};
    bwd.cuda = place_of_call(epx_moe_unpermute_bwd_workspace, &bwd);
    require_ok(epx_moe_unpermute_bwd(&bwd), "epx_moe_unpermute_bwd");
    check_report(EPX_MOE_OP_UNPERMUTE_BWD, bad.kind, 1, bad.values, bad.words);
    CHECK(difference(grads.of_rows, expected_grads.of_rows) == "");
    CHECK(difference(grads.of_topk_weights, expected_grads.of_topk_weights) == "");

    if (bad.kind == EPX_MOE_ERROR_DUPLICATE_ROW) continue; // which those that read rows do not see
    auto sums = scribbled<float>({3, 40});
    const epx_moe_unpermute_args back = {sizeof(back), place_of_call(), row_map.get(),
                                         rows.get(),   weights.get(),   sums.get()};
    require_ok(epx_moe_unpermute(&back), "epx_moe_unpermute");
    check_report(EPX_MOE_OP_UNPERMUTE, bad.kind, 1, bad.values, bad.words);
    CHECK(difference(sums, run_unpermute(good, rows, &weights)) == "");

    auto gathered = scribbled<float>({3, 2});
    const epx_moe_permute_bwd_args gather = {sizeof(gather),    place_of_call(), row_map.get(), rows.get(),
                                             row_weights.get(), sums.get(),      gathered.get()};
    require_ok(epx_moe_permute_bwd(&gather), "epx_moe_permute_bwd");
    check_report(EPX_MOE_OP_PERMUTE_BWD, bad.kind, 1, bad.values, bad.words);
    CHECK(difference(sums, run_unpermute(good, rows)) == "");
    CHECK(gathered[bad.route] == 0);
  }
}

TEST_CASE("data of any bits writes nothing out of bounds") { // main() looks at the guard zones
  Rng rng(75);
  for (int i = 0; i < 20; ++i) {
    Tensor<int32_t> noise({40, 5});
    for (int64_t n = 0; n < noise.count(); ++n)
      noise[n] = static_cast<int32_t>(rng.chance(50) ? rng.next() : static_cast<uint64_t>(rng.below(60)));
    const auto tokens = random_tensor<float>({40, 33}, rng);
    auto rows = scribbled<float>({50, 33});
    epx_moe_permute_args args = {sizeof(args), nullptr,    noise.get(), tokens.get(),
                                 nullptr,      rows.get(), nullptr,     EPX_PADS_ZERO};
    args.cuda = place_of_call(epx_moe_permute_workspace, &args);
    require_ok(epx_moe_permute(&args), "epx_moe_permute");
    CHECK(take_report().num_errors > 0);
    Tensor<float> expected({50, 33});
    for (int64_t route = noise.count() - 1; route >= 0; --route) // of several routes to a row the first one counts
      for (int64_t h = 0; h < 33 && noise[route] >= 0 && noise[route] < 50; ++h)
        expected(noise[route], h) = tokens(route / 5, h);
    CHECK(difference(rows, expected) == "");
    auto sums = scribbled<float>({40, 33});
    const epx_moe_unpermute_args back = {sizeof(back), place_of_call(), noise.get(), rows.get(), nullptr, sums.get()};
    require_ok(epx_moe_unpermute(&back), "epx_moe_unpermute");
    CHECK(take_report().num_errors > 0);

    RowMap<int32_t> map = {scribbled<int32_t>({30}), scribbled<int32_t>({31}), scribbled<int32_t>({40, 5})};
    epx_moe_row_map_args sort = {sizeof(sort),     nullptr,           noise.get(),      8,
                                 map.counts.get(), map.offsets.get(), map.row_map.get()};
    sort.cuda = place_of_call(epx_moe_row_map_workspace, &sort);
    require_ok(epx_moe_row_map(&sort), "epx_moe_row_map");
    CHECK(take_report().num_errors > 0);

    auto config = router_config(30, 5, EPX_MOE_SIGMOID);
    auto grad_logits = scribbled<float>({40, 30});
    const auto logits = random_tensor<float>({40, 30}, rng);
    const Tensor<float> weights({40, 5}, 1.0f);
    const epx_moe_router_bwd_args bwd = {sizeof(bwd), place_of_call(),  logits.get(), noise.get(), weights.get(), nullptr,
                                         0,           grad_logits.get()};
    require_ok(epx_moe_router_bwd(&config, &bwd), "epx_moe_router_bwd");
    CHECK(take_report().num_errors > 0);
  }
}

TEST_CASE("epx_moe_errors: arguments") {
  CHECK(not_refused(epx_moe_errors_create(nullptr), {"errors", "NULL"}) == "");
  epx_moe_errors_destroy(nullptr);
  epx_moe_errors errors = nullptr;
  require_ok(epx_moe_errors_create(&errors), "epx_moe_errors_create");
  epx_moe_errors_report report = {};
  CHECK(not_refused(epx_moe_errors_read(nullptr, &report), {"errors", "NULL"}) == "");
  CHECK(not_refused(epx_moe_errors_read(errors, nullptr), {"report", "NULL"}) == "");
  CHECK(not_refused(epx_moe_errors_read(errors, &report), {"report.struct_size", "0"}) == "");
  std::memset(&report, 0xA5, sizeof(report));
  report.struct_size = sizeof(report);
  require_ok(epx_moe_errors_read(errors, &report), "epx_moe_errors_read");
  CHECK(report.num_errors == 0);
  CHECK(report.kind == EPX_MOE_ERROR_NONE);
  CHECK(report.message[0] == 0);
  epx_moe_errors_destroy(errors);
}

} // namespace
} // namespace epx::test
