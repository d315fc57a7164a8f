// SPDX-License-Identifier: Apache-2.0
// Weights in MX and NV: the codes and scales of the oracle of row formats, for the rows of both orientations. Bad arguments
// are refused.
#include <string>

#include <doctest/doctest.h>

#include "tests/moe/quantise_run.h"
#include "tests/moe/refusals.h"

namespace epx::test {
namespace {

struct WeightRowsFormat {
  epx_scaling scaling;
  epx_dtype codes;
  epx_scale_layout layout;

  bool is_nv() const { return scaling == EPX_SCALING_NV; }
  int64_t block() const { return is_nv() ? 16 : 32; }
  epx_dtype scales() const { return is_nv() ? EPX_FLOAT8_E4M3 : EPX_FLOAT8_E8M0; }

  epx_row_format get() const {
    epx_row_format format = format_of(scaling);
    format.dtype = codes;
    format.scale_layout = layout;
    return format;
  }
};

WeightRowsFormat random_weight_rows_format(Rng& rng) {
  const auto layout = rng.pick({EPX_SCALES_ROWS, EPX_SCALES_TILES});
  if (rng.chance(50)) return {EPX_SCALING_NV, EPX_FLOAT4_E2M1, layout};
  return {EPX_SCALING_MX, rng.pick({EPX_FLOAT8_E4M3, EPX_FLOAT8_E5M2}), layout};
}

// What is made of the rows of [e, r, c] weights, in bytes.
struct QuantisedWeightRows {
  int64_t e, r, c;
  Tensor<uint8_t> codes, scales;
  Tensor<float> row_scales;

  QuantisedWeightRows(const WeightRowsFormat& format, int64_t matrices, int64_t rows, int64_t columns)
      : e(matrices), r(rows), c(columns), codes(scribbled<uint8_t>({e * r * c / (format.is_nv() ? 2 : 1)})),
        scales(scribbled<uint8_t>({e * r * c / format.block()})), row_scales(scribbled<float>({e * r})) {}

  epx_tensor codes_view(const WeightRowsFormat& format) const { return view_as(codes, format.codes, {e, r, c}); }
  epx_tensor scales_view(const WeightRowsFormat& format) const {
    const int64_t count = c / format.block();
    if (format.layout == EPX_SCALES_TILES) return view_as(scales, format.scales(), {e, r / 128, count / 4, 512});
    return view_as(scales, format.scales(), {e, r, count});
  }
  epx_tensor row_scales_view() const { return view_as(row_scales, EPX_FLOAT32, {e, r}); }

  std::string difference_to(const QuantisedWeightRows& expected) const {
    return difference(codes, expected.codes) + difference(scales, expected.scales) +
           difference(row_scales, expected.row_scales);
  }
};

struct BothWeightRows {
  QuantisedWeightRows given, transposed;
};

template <typename T>
BothWeightRows run_quantise_weight_rows(const WeightRowsFormat& how, const Tensor<T>& weights, Orientation orientation,
                                        int num_sms) {
  const int64_t e = weights.size(0), r = weights.size(1), c = weights.size(2);
  BothWeightRows made = {{how, e, r, c}, {how, e, c, r}};
  const epx_row_format format = how.get();
  const epx_tensor codes = made.given.codes_view(how), scales = made.given.scales_view(how),
                   row_scales = made.given.row_scales_view(), transposed_codes = made.transposed.codes_view(how),
                   transposed_scales = made.transposed.scales_view(how),
                   transposed_row_scales = made.transposed.row_scales_view();
  epx_moe_quantise_weights_args args = {};
  args.struct_size = sizeof(args);
  args.cuda = place_of_call();
  epx_moe_cuda place = {};
  if (args.cuda != nullptr) {
    place = *args.cuda;
    place.num_sms = num_sms;
    args.cuda = &place;
  }
  args.format = &format;
  args.weights = weights.get();
  if (orientation != Orientation::transposed) {
    args.codes = &codes, args.scales = &scales;
    if (how.is_nv()) args.row_scales = &row_scales;
  }
  if (orientation != Orientation::given) {
    args.transposed_codes = &transposed_codes, args.transposed_scales = &transposed_scales;
    if (how.is_nv()) args.transposed_row_scales = &transposed_row_scales;
  }
  require_ok(epx_moe_quantise_weights(&args), "epx_moe_quantise_weights");
  finish_call();
  return made;
}

// Where a tile has the scale of a row, as the format of Blackwell's tensor cores is described.
int64_t place_in_tiles(int64_t row, int64_t scale, int64_t scales_of_row) {
  const int64_t tile = row / 128 * (scales_of_row / 4) + scale / 4, m = row % 128;
  return tile * 512 + m % 32 * 16 + m / 32 * 4 + scale % 4;
}

// `rows`: [e * r, c].
template <typename T>
void expect_rows(const WeightRowsFormat& how, const Tensor<T>& rows, QuantisedWeightRows& expected) {
  const reference::Format format = {how.scaling, how.codes, how.scales(), 0};
  const reference::QuantisedRows quantised =
      reference::quantise(format, matrix_of(rows, kDtype<T>, rows.size(0), rows.size(1)));
  for (int64_t i = 0; i < expected.codes.count(); ++i)
    expected.codes[i] = byte_of(quantised.elements, i);
  const int64_t count = rows.size(1) / how.block();
  for (int64_t row = 0; row < rows.size(0); ++row)
    for (int64_t s = 0; s < count; ++s)
      expected.scales[how.layout == EPX_SCALES_TILES ? place_in_tiles(row, s, count) : row * count + s] =
          byte_of(quantised.scales, row * count + s);
  for (int64_t row = 0; row < rows.size(0) && how.is_nv(); ++row)
    expected.row_scales[row] = quantised.row_scales.at(static_cast<size_t>(row));
}

template <typename T>
BothWeightRows expected_weight_rows(const WeightRowsFormat& how, const Tensor<T>& weights, Orientation orientation) {
  const int64_t e = weights.size(0), r = weights.size(1), c = weights.size(2);
  BothWeightRows expected = {{how, e, r, c}, {how, e, c, r}};
  Tensor<T> rows({e * r, c}), columns({e * c, r});
  for (int64_t i = 0; i < weights.count(); ++i) {
    rows[i] = weights[i];
    columns[(i / (r * c) * c + i % c) * r + i / c % r] = weights[i];
  }
  if (orientation != Orientation::transposed) expect_rows(how, rows, expected.given);
  if (orientation != Orientation::given) expect_rows(how, columns, expected.transposed);
  return expected;
}

template <typename T>
void check_random_weights(Rng& rng) {
  const WeightRowsFormat how = random_weight_rows_format(rng);
  const auto e = rng.pick<int64_t>({0, 1, 1, 3}), r = rng.pick<int64_t>({128, 256, 640}), c = rng.pick<int64_t>({128, 384});
  const auto orientation = rng.pick({Orientation::given, Orientation::transposed, Orientation::both});
  const auto weights = random_rows<T>({e, r, c}, rng.pick<int64_t>({8, c}), rng);
  const BothWeightRows made = run_quantise_weight_rows(how, weights, orientation, rng.pick({0, 1, 3}));
  const BothWeightRows expected = expected_weight_rows(how, weights, orientation);
  CHECK(made.given.difference_to(expected.given) == "");
  CHECK(made.transposed.difference_to(expected.transposed) == "");
}

TEST_CASE("random weights that are quantised to MX and NV are quantised as rows are, in both orientations") {
  for (uint64_t seed = 0; seed < num_cases(60); ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x31c7));
    if (seed % 3 == 0)
      check_random_weights<float>(rng);
    else if (seed % 3 == 1)
      check_random_weights<Float16>(rng);
    else
      check_random_weights<Bfloat16>(rng);
  }
}

struct Bytes : Argument<uint8_t> {
  Bytes(epx_dtype of, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> bytes)
      : Argument(scribbled<uint8_t>(bytes)) {
    dtype = of;
    ndim = static_cast<int32_t>(shape.size());
    std::copy(shape.begin(), shape.end(), sizes);
  }
};

// A call with E_l = 2, R = 128, C = 256 that is good.
struct WeightRowsCall {
  epx_row_format format;
  Argument<float> weights = Tensor<float>({2, 128, 256}, 1.0f);
  Bytes codes, scales, transposed_codes, transposed_scales;
  Argument<float> row_scales = scribbled<float>({2, 128}), transposed_row_scales = scribbled<float>({2, 256});
  epx_moe_quantise_weights_args args = {};

  explicit WeightRowsCall(const WeightRowsFormat& how)
      : format(how.get()), codes(how.codes, {2, 128, 256}, {2 * 128 * 256 / (how.is_nv() ? 2 : 1)}),
        scales(how.scales(), {2, 128, 256 / how.block()}, {2 * 128 * 256 / how.block()}),
        transposed_codes(how.codes, {2, 256, 128}, {2 * 128 * 256 / (how.is_nv() ? 2 : 1)}),
        transposed_scales(how.scales(), {2, 256, 128 / how.block()}, {2 * 128 * 256 / how.block()}) {
    args.struct_size = sizeof(args);
    args.cuda = place_of_call();
    args.format = &format;
    args.weights = &weights;
    args.codes = &codes, args.scales = &scales;
    args.transposed_codes = &transposed_codes, args.transposed_scales = &transposed_scales;
    if (how.is_nv()) args.row_scales = &row_scales, args.transposed_row_scales = &transposed_row_scales;
  }
  WeightRowsCall(const WeightRowsCall&) = delete;
  WeightRowsCall& operator=(const WeightRowsCall&) = delete;

  std::string changed_output() const {
    const bool is_written = codes.is_written() || scales.is_written() || transposed_codes.is_written() ||
                            transposed_scales.is_written() || row_scales.is_written() || transposed_row_scales.is_written();
    return is_written ? "an output was written" : "";
  }
  static epx_status run(WeightRowsCall& call) { return epx_moe_quantise_weights(&call.args); }
};
struct Mx : WeightRowsCall {
  Mx() : WeightRowsCall({EPX_SCALING_MX, EPX_FLOAT8_E4M3, EPX_SCALES_ROWS}) {}
  static epx_status run(Mx& call) { return WeightRowsCall::run(call); }
};
struct Nv : WeightRowsCall {
  Nv() : WeightRowsCall({EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_SCALES_ROWS}) {}
  static epx_status run(Nv& call) { return WeightRowsCall::run(call); }
};

TEST_CASE("bad arguments of epx_moe_quantise_weights with MX and NV are refused") {
  Mx mx;
  Nv nv;
  require_ok(Mx::run(mx), "the call");
  require_ok(Nv::run(nv), "the call");
  finish_call();
  check_refused<Mx>({
      {Mx::run, [](Mx& c) { c.format.scale_layout = EPX_SCALES_COLUMNS; }, {"format.scale_layout is 1", "TILES (3)"}},
      {Mx::run, [](Mx& c) { c.format.scale_layout = EPX_SCALES_PACKED; }, {"format.scale_layout is 2", "TILES (3)"}},
      {Mx::run,
       [](Mx& c) { c.format.scale_layout = EPX_SCALES_TILES; },
       {"scales", "E_l = 2, R / 128 = 1, C / 128 = 2, 512"}},
      {Mx::run, [](Mx& c) { c.format.dtype = EPX_FLOAT4_E2M1; }, {"format", "float4_e2m1", "mx"}},
      {Mx::run, [](Mx& c) { c.format.amax_floor = 1; }, {"format.amax_floor is 1", "mx"}},
      {Mx::run, [](Mx& c) { c.weights.sizes[1] = 96; }, {"weights has R = 96", "multiple of 128"}},
      {Mx::run, [](Mx& c) { c.format.dtype = EPX_FLOAT8_E5M2; }, {"codes", "float8_e4m3", "float8_e5m2"}},
      {Mx::run, [](Mx& c) { c.scales.dtype = EPX_FLOAT32; }, {"scales", "float32", "float8_e8m0"}},
      {Mx::run, [](Mx& c) { c.scales.sizes[2] = 2; }, {"scales", "2", "C / 32 = 8"}},
      {Mx::run, [](Mx& c) { c.transposed_scales.sizes[2] = 8; }, {"transposed_scales", "8", "R / 32 = 4"}},
      {Mx::run, [](Mx& c) { c.args.scales = nullptr; }, {"codes is given", "scales is NULL"}},
      {Mx::run, [](Mx& c) { c.args.row_scales = &c.row_scales; }, {"row_scales is given", "mx", "NULL"}},
      {Mx::run,
       [](Mx& c) { c.args.transposed_row_scales = &c.transposed_row_scales; },
       {"transposed_row_scales is given", "mx", "NULL"}},
      {Mx::run, [](Mx& c) { c.format = format_of(EPX_SCALING_BLOCK128); }, {"scales", "float8_e8m0", "float32"}},
  });
  check_refused<Nv>({
      {Nv::run, [](Nv& c) { c.format.dtype = EPX_FLOAT8_E4M3; }, {"format", "float8_e4m3", "nv"}},
      {Nv::run, [](Nv& c) { c.codes.dtype = EPX_FLOAT8_E4M3; }, {"codes", "float8_e4m3", "float4_e2m1"}},
      {Nv::run, [](Nv& c) { c.scales.dtype = EPX_FLOAT8_E8M0; }, {"scales", "float8_e8m0", "float8_e4m3"}},
      {Nv::run, [](Nv& c) { c.format.scale_layout = EPX_SCALES_TILES; }, {"scales", "C / 64 = 4, 512"}},
      {Nv::run, [](Nv& c) { c.args.row_scales = nullptr; }, {"codes is given", "row_scales is NULL"}},
      {Nv::run, [](Nv& c) { c.args.codes = c.args.scales = nullptr; }, {"row_scales is given", "codes is NULL"}},
      {Nv::run, [](Nv& c) { c.args.transposed_row_scales = nullptr; }, {"transposed_row_scales is NULL"}},
      {Nv::run, [](Nv& c) { c.row_scales.sizes[1] = 256; }, {"row_scales", "256", "R = 128"}},
      {Nv::run, [](Nv& c) { c.transposed_row_scales.dtype = EPX_FLOAT64; }, {"transposed_row_scales", "float64"}},
  });
}

} // namespace
} // namespace epx::test
