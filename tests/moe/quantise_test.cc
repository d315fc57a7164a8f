// SPDX-License-Identifier: Apache-2.0
// The quantisers against the oracle of row formats, bit for bit, and that they write what epx_moe.h says and nothing else.
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_fp8_run.h"
#include "tests/moe/quantise_run.h"

namespace epx::test {
namespace {

// Returns what is wrong with a call on these rows. Rows that are in no zone are not to matter.
template <typename Rows>
std::string rows_fault(const QuantiseFormat& format, Rows& rows, const Zones* zones, Wanted wanted = Wanted::both) {
  return run_quantise_rows(format, rows, zones, wanted)
      .difference_to(expected_rows(format, input_of(rows).values, zones, wanted));
}

template <typename T>
Tensor<T> rows_of_zones(const Zones& zones, int64_t hidden, Rng& rng) {
  auto rows = random_rows<T>({zones.num_rows, hidden}, hidden, rng);
  fill_unused(zones, rows, T(std::nan("")));
  return rows;
}

TEST_CASE("random rows have the codes and scales of the oracle") {
  for (uint64_t seed = 0; seed < 2 * num_cases(50); ++seed) {
    Rng rng(mix(seed, 0xf8));
    const QuantiseFormat format = random_format(rng);
    const Zones zones = random_quantise_zones(rng);
    const auto hidden = rng.pick<int64_t>({128, 128, 256, 640});
    const auto wanted = rng.pick({Wanted::rows, Wanted::columns, Wanted::both, Wanted::both});
    std::string wrong;
    if (seed % 4 == 0) {
      auto rows = rows_of_zones<float>(zones, hidden, rng);
      wrong = rows_fault(format, rows, &zones, wanted);
    } else if (seed % 4 == 1) {
      auto rows = rows_of_zones<Bfloat16>(zones, hidden, rng);
      wrong = rows_fault(format, rows, &zones, wanted);
    } else if (seed % 4 == 2) {
      auto rows = rows_of_zones<Float16>(zones, hidden, rng);
      wrong = rows_fault(format, rows, &zones, wanted);
    } else {
      Fp8Rows rows = random_fp8_rows(zones.num_rows, hidden, rng);
      wrong = rows_fault(format, rows, &zones, wanted);
    }
    if (!wrong.empty()) FAIL_CHECK("seed " << seed << ": " << wrong);
  }
}

TEST_CASE("zones of 0, 1, 127, 128 and 129 rows, aligned and not, and a zone with all rows") {
  Rng rng(301);
  for (const int32_t alignment : {1, 16, 128, 256})
    for (const std::vector<int32_t>& counts :
         {std::vector<int32_t>{0, 1, 127, 0, 128, 129, 0}, {0, 0, 300}, {300, 0}, {0, 0}}) {
      CAPTURE(alignment);
      CAPTURE(counts.size());
      const Zones zones = make_zones(counts, alignment, 2);
      auto rows = rows_of_zones<Bfloat16>(zones, 128, rng);
      CHECK(rows_fault({}, rows, &zones) == "");
    }
}

TEST_CASE("rows of 7168 elements, and offsets of 64 bits") {
  Rng rng(302);
  const Zones zones = make_zones({3, 0, 9}, 4, 1);
  auto rows = rows_of_zones<Bfloat16>(zones, 7168, rng);
  const QuantiseFormat format = {EPX_SCALING_BLOCK128_POW2, 0, EPX_FLOAT8_E8M0, EPX_SCALES_PACKED};
  const QuantisedRows expected = expected_rows(format, input_of(rows).values, &zones);
  CHECK(run_quantise_rows(format, rows, &zones).difference_to(expected) == "");

  const auto counts = converted<int64_t>(zones.counts), offsets = converted<int64_t>(zones.offsets);
  const QuantisedRows outputs(format, zones.num_rows, 7168, 3);
  QuantiseRowsCall call(format, input_of(rows), &zones, outputs);
  call.args.counts = counts.get();
  call.args.offsets = offsets.get();
  require_ok(epx_moe_quantise_rows(&call.args), "epx_moe_quantise_rows");
  finish_call();
  CHECK(outputs.difference_to(expected) == "");
}

TEST_CASE("without zones all rows are one") {
  Rng rng(303);
  for (const int64_t num_rows : {0, 1, 128, 131}) {
    CAPTURE(num_rows);
    auto rows = random_rows<float>({num_rows, 256}, 256, rng);
    const QuantiseFormat format = random_format(rng);
    CHECK(rows_fault(format, rows, nullptr) == "");
    const Zones zones = make_zones({static_cast<int32_t>(num_rows)}, 1, 0);
    CHECK(rows_fault(format, rows, &zones) == "");
  }
}

TEST_CASE("no zones, and zones without rows, write nothing") {
  Rng rng(304);
  auto rows = random_rows<float>({5, 128}, 128, rng);
  const Zones none = {Tensor<int32_t>({0}), Tensor<int32_t>({1}), 5, {}};
  const QuantiseFormat format;
  CHECK(run_quantise_rows(format, rows, &none).difference_to(QuantisedRows(format, 5, 128, 0)) == "");
  const Zones empty = make_zones({0, 0, 0}, 1, 5);
  CHECK(run_quantise_rows(format, rows, &empty).difference_to(QuantisedRows(format, 5, 128, 3)) == "");
}

TEST_CASE("rows that belong to no zone do not matter") {
  Rng rng(305);
  const Zones zones = make_zones({130, 1}, 160, 7);
  auto rows = random_rows<float>({zones.num_rows, 128}, 128, rng);
  const QuantiseFormat format;
  fill_unused(zones, rows, 1e30f);
  const QuantisedRows finite = run_quantise_rows(format, rows, &zones);
  fill_unused(zones, rows, std::nanf(""));
  CHECK(run_quantise_rows(format, rows, &zones).difference_to(finite) == "");
  CHECK(finite.row_codes(130, 5) == 0); // a pad of the last block of zone 0, rows 128 to 159
  CHECK(finite.row_codes(159, 5) == 0);
  CHECK(finite.row_codes(161, 5) == 0); // zone 1 has one row, 160, and pads up to row 287
  CHECK(finite.row_codes(287, 5) == 0);
  CHECK(finite.row_codes(288, 5) == 0xA5); // further pads are not touched
  CHECK(finite.column_codes(5, 287) == 0);
  CHECK(finite.column_codes(5, 288) == 0xA5);
}

TEST_CASE("what is written of rows in a closed form") {
  const Zones zones = make_zones({2}, 4, 0);
  auto rows = Tensor<float>({4, 128});
  for (int64_t h = 0; h < 128; ++h) {
    rows(0, h) = h == 0 ? 448 : h == 1 ? std::nanf("") : 1;
    rows(1, h) = h == 0 ? -224 : 2;
  }
  const QuantiseFormat format = {EPX_SCALING_BLOCK128, 0, EPX_FLOAT32, EPX_SCALES_ROWS};
  const QuantisedRows outputs = run_quantise_rows(format, rows, &zones);
  CHECK(outputs.row_codes(0, 0) == 0x7e);    // 448 / 1
  CHECK(outputs.row_codes(0, 1) == 0x7f);    // NaN
  CHECK(outputs.row_codes(0, 2) == 0x38);    // 1 / 1
  CHECK(outputs.row_codes(1, 0) == 0xfe);    // -224 / 0.5
  CHECK(outputs.row_codes(1, 2) == 0x48);    // 2 / 0.5 = 4
  CHECK(outputs.column_codes(0, 0) == 0x7e); // 448 / 1
  CHECK(outputs.column_codes(0, 1) == 0xf6); // -224 / 1
  CHECK(outputs.column_codes(1, 0) == 0x7f);
  CHECK(outputs.column_codes(1, 1) == 0x7e); // the NaN takes no part in amax
  CHECK(outputs.column_codes(2, 0) == 0x76); // 1 of amax 2
  CHECK(outputs.column_codes(2, 1) == 0x7e);
  CHECK(outputs.column_scales(0, 0) == 1);
  CHECK(outputs.column_scales(0, 1) == 2.0f / 448);
}

// 257 codes of 8 bits times a scale: the products need more bits than bfloat16 has.
TEST_CASE("columns of rows in FP8 come from float32 values") {
  Rng rng(306);
  const Zones zones = make_zones({128}, 1, 0);
  int64_t num_different = 0;
  Fp8Rows rows(128, 128, EPX_SCALES_ROWS);
  auto rounded = Tensor<Bfloat16>({128, 128});
  for (int64_t row = 0; row < 128; ++row)
    rows.scale(row, 0) = static_cast<float>(uniform(rng, 0.5, 2));
  for (int64_t i = 0; i < rows.codes.count(); ++i)
    rows.codes[i] = static_cast<uint8_t>(rng.below(127));
  const RowsInput input = input_of(rows);
  for (int64_t i = 0; i < rounded.count(); ++i)
    rounded[i] = Bfloat16(reference::load(input.values, i / 128, i % 128));
  const QuantisedRows from_fp8 = run_quantise_rows({}, rows, &zones);
  CHECK(from_fp8.difference_to(expected_rows({}, input.values, &zones)) == "");
  const QuantisedRows from_bf16 = run_quantise_rows({}, rounded, &zones);
  for (int64_t i = 0; i < from_fp8.column_codes.count(); ++i)
    num_different += from_fp8.column_codes[i] != from_bf16.column_codes[i] ? 1 : 0;
  CHECK(num_different > 0); // so the test can tell one from the other
}

TEST_CASE("random weights have the codes and scales of the oracle, in both orientations") {
  for (uint64_t seed = 0; seed < num_cases(50); ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x3e1));
    QuantiseFormat format = random_format(rng);
    format.layout = EPX_SCALES_ROWS;
    const auto e = rng.pick<int64_t>({0, 1, 1, 3}), r = rng.pick<int64_t>({128, 256, 384}),
               c = rng.pick<int64_t>({128, 256});
    const auto orientation = rng.pick({Orientation::given, Orientation::transposed, Orientation::both});
    const auto check = [&](auto zero) {
      const auto weights = random_rows<decltype(zero)>({e, r, c}, c * 64, rng);
      CHECK(run_quantise_weights(format, weights, orientation)
                .difference_to(expected_weights(format, weights, orientation)) == "");
    };
    switch (rng.below(3)) {
    case 0:
      check(0.0f);
      break;
    case 1:
      check(Float16());
      break;
    default:
      check(Bfloat16());
    }
  }
}

TEST_CASE("one call quantises both weights of experts, into the tensors that are wanted") {
  for (uint64_t seed = 0; seed < num_cases(20); ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x9a7));
    QuantiseFormat how = random_format(rng);
    how.layout = EPX_SCALES_ROWS;
    const auto e = rng.pick<int64_t>({0, 1, 3}), hidden = rng.pick<int64_t>({128, 256}),
               ffn = rng.pick<int64_t>({128, 384});
    const auto orientation = rng.pick({Orientation::given, Orientation::transposed, Orientation::both});
    const auto gate_up = random_rows<float>({e, 2 * ffn, hidden}, hidden * 64, rng);
    const auto down = random_rows<Bfloat16>({e, hidden, ffn}, ffn * 64, rng);
    QuantisedWeights of_gate_up(e, 2 * ffn, hidden), of_down(e, hidden, ffn);
    const epx_tensor gate_up_codes = view_as(of_gate_up.codes, EPX_FLOAT8_E4M3, {e, 2 * ffn, hidden}),
                     gate_up_transposed = view_as(of_gate_up.transposed_codes, EPX_FLOAT8_E4M3, {e, hidden, 2 * ffn}),
                     down_codes = view_as(of_down.codes, EPX_FLOAT8_E4M3, {e, hidden, ffn}),
                     down_transposed = view_as(of_down.transposed_codes, EPX_FLOAT8_E4M3, {e, ffn, hidden});
    epx_moe_fp8_params made = {};
    made.struct_size = sizeof(made);
    if (orientation != Orientation::transposed) {
      made.gate_up_codes = &gate_up_codes, made.gate_up_scales = of_gate_up.scales.get();
      made.down_codes = &down_codes, made.down_scales = of_down.scales.get();
    }
    if (orientation != Orientation::given) {
      made.gate_up_transposed_codes = &gate_up_transposed;
      made.gate_up_transposed_scales = of_gate_up.transposed_scales.get();
      made.down_transposed_codes = &down_transposed;
      made.down_transposed_scales = of_down.transposed_scales.get();
    }
    const epx_row_format format = how.get();
    const epx_moe_quantise_params_args args = {sizeof(args), place_of_call(), &format, gate_up.get(), down.get(), &made};
    require_ok(epx_moe_quantise_params(&args), "epx_moe_quantise_params");
    finish_call();
    CHECK(of_gate_up.difference_to(expected_weights(how, gate_up, orientation)) == "");
    CHECK(of_down.difference_to(expected_weights(how, down, orientation)) == "");
  }
}

FfnShape random_shape_of_blocks(Rng& rng) {
  return {rng.pick<int32_t>({0, 1, 3}), rng.pick<int32_t>({128, 256, 640}), rng.pick<int32_t>({128, 384}), EPX_MOE_SWIGLU};
}

void transpose_params(const epx_moe_fp8_params& params) {
  const epx_moe_transpose_params_args args = {sizeof(args), place_of_call(), &params};
  require_ok(epx_moe_transpose_params(&args), "epx_moe_transpose_params");
  finish_call();
}

TEST_CASE("transposed codes and scales have the bits of quantised weights, and the other weight is not looked at") {
  for (uint64_t seed = 0; seed < num_cases(20); ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x7a5));
    const Fp8Params whole = quantised_params(random_params<float>(random_shape_of_blocks(rng), kStacked, rng));
    Fp8Params made = whole, expected = whole;
    made.scribble_transposes();
    epx_moe_fp8_params view = made.view();
    const auto only = rng.below(3); // 0: gate and up, 1: down, 2: both
    if (only == 0) {
      view.down_codes = view.down_transposed_codes = view.down_transposed_scales = nullptr;
      expected.down_transposed_codes.scribble();
      expected.down_transposed_scales.scribble();
    } else if (only == 1) {
      view.gate_up_scales = view.gate_up_transposed_codes = view.gate_up_transposed_scales = nullptr;
      expected.gate_up_transposed_codes.scribble();
      expected.gate_up_transposed_scales.scribble();
    }
    transpose_params(view);
    CHECK(made.difference_to(expected) == "");
  }
}

// Quantises shards of `weights`, rows of all experts in blocks of 128, and puts codes and scales one after the other.
void gather_quantised_shards(const Tensor<float>& weights, Rng& rng, Tensor<E4m3>& codes, Tensor<float>& scales) {
  const int64_t columns = weights.size(2), rows = weights.count() / columns;
  for (int64_t first = 0, shard_rows = 0; first < rows; first += shard_rows) {
    shard_rows = std::min(rows - first, 128 * rng.between(1, 3));
    Tensor<float> shard({1, shard_rows, columns});
    for (int64_t i = 0; i < shard.count(); ++i)
      shard[i] = weights[first * columns + i];
    const QuantisedWeights quantised = run_quantise_weights({}, shard, Orientation::given);
    for (int64_t i = 0; i < shard.count(); ++i)
      codes[first * columns + i] = E4m3{quantised.codes[i]};
    for (int64_t i = 0; i < quantised.scales.count(); ++i)
      scales[first / 128 * (columns / 128) + i] = quantised.scales[i];
  }
}

TEST_CASE("shards of weights that are quantised, gathered and transposed have the bits of the whole ones") {
  for (uint64_t seed = 0; seed < num_cases(6); ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x5a2d));
    const FfnParams<float> params = random_params<float>(random_shape_of_blocks(rng), kStacked, rng);
    const Fp8Params expected = quantised_params(params);
    Fp8Params made = expected;
    made.gate_up_codes.scribble();
    made.gate_up_scales.scribble();
    made.down_codes.scribble();
    made.down_scales.scribble();
    made.scribble_transposes();
    gather_quantised_shards(*params.gate_up_weight, rng, made.gate_up_codes, made.gate_up_scales);
    gather_quantised_shards(*params.down_weight, rng, made.down_codes, made.down_scales);
    transpose_params(made.view());
    CHECK(made.difference_to(expected) == "");
  }
}

TEST_CASE("the transposed weights are the others transposed, and zeros have scale 1 without a floor") {
  Rng rng(307);
  auto weights = random_rows<float>({2, 256, 128}, 128, rng);
  for (int64_t i = 0; i < kSquare; ++i)
    weights(1, i) = i % 2 == 0 ? 0.0f : -0.0f;
  const QuantisedWeights outputs = run_quantise_weights({EPX_SCALING_BLOCK128, 0, EPX_FLOAT32, EPX_SCALES_ROWS}, weights);
  for (int64_t e = 0; e < 2; ++e)
    for (int64_t i = 0; i < 2 * kSquare; ++i)
      if (outputs.codes(e, i) != outputs.transposed_codes(e, i % 128 * 256 + i / 128)) FAIL_CHECK("element " << i);
  CHECK(outputs.scales(1, 0) == 1);
  CHECK(outputs.transposed_scales(1, 0) == 1);
  CHECK(outputs.codes(1, 0) == 0x00);
  CHECK(outputs.codes(1, 1) == 0x80); // zeros keep their sign
}

} // namespace
} // namespace epx::test
