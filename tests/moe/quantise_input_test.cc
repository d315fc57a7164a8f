// SPDX-License-Identifier: Apache-2.0
// Calls of the quantisers with bad input are refused with a sentence that has the names and values, and write nothing.
#include <string>

#include <doctest/doctest.h>

#include "tests/moe/quantise_run.h"
#include "tests/moe/refusals.h"

namespace epx::test {
namespace {

struct Bytes : Argument<uint8_t> {
  Bytes(epx_dtype of, Tensor<uint8_t> tensor) : Argument(std::move(tensor)) { dtype = of; }
};

struct WeightOutputs {
  WeightOutputs(int64_t e, int64_t r, int64_t c)
      : codes(EPX_FLOAT8_E4M3, scribbled<uint8_t>({e, r, c})), scales(scribbled<float>({e, r / 128, c / 128})),
        transposed_codes(EPX_FLOAT8_E4M3, scribbled<uint8_t>({e, c, r})),
        transposed_scales(scribbled<float>({e, c / 128, r / 128})) {}

  bool is_written() const {
    return codes.is_written() || scales.is_written() || transposed_codes.is_written() || transposed_scales.is_written();
  }

  Bytes codes;
  Argument<float> scales;
  Bytes transposed_codes;
  Argument<float> transposed_scales;
};

// These calls with N = 5, H = 256, F = 128, E_l = 2, R = 128, C = 256 are good. A case spoils one argument.
struct QuantiseCalls {
  epx_row_format format = format_of(EPX_SCALING_BLOCK128);
  Argument<float> rows = Tensor<float>({5, 256}, 1.0f);
  Bytes fp8_rows = {EPX_FLOAT8_E4M3, Tensor<uint8_t>({5, 256}, 1)};
  Argument<float> scales = Tensor<float>({5, 2}, 1.0f);
  Argument<int32_t> counts = Tensor<int32_t>({2}, {2, 1});
  Argument<int32_t> offsets = Tensor<int32_t>({3}, {0, 3, 5});
  Argument<float> matrices = Tensor<float>({2, 128, 256}, 1.0f);
  Bytes row_codes = {EPX_FLOAT8_E4M3, scribbled<uint8_t>({5, 256})};
  Argument<float> row_scales = scribbled<float>({5, 2});
  Bytes column_codes = {EPX_FLOAT8_E4M3, scribbled<uint8_t>({256, 5})};
  Argument<float> column_scales = scribbled<float>({2, 256});
  Bytes codes = {EPX_FLOAT8_E4M3, scribbled<uint8_t>({2, 128, 256})};
  Argument<float> block_scales = scribbled<float>({2, 1, 2});
  Bytes transposed_codes = {EPX_FLOAT8_E4M3, scribbled<uint8_t>({2, 256, 128})};
  Argument<float> transposed_scales = scribbled<float>({2, 2, 1});
  Argument<float> gate_up = Tensor<float>({2, 256, 256}, 1.0f), down = Tensor<float>({2, 256, 128}, 1.0f);
  WeightOutputs gate_up_made = {2, 256, 256}, down_made = {2, 256, 128};

  epx_moe_quantise_rows_args wide = {sizeof(wide), nullptr,  &format,    &rows,       nullptr,       EPX_SCALES_ROWS, 0,
                                     &counts,      &offsets, &row_codes, &row_scales, &column_codes, &column_scales};
  epx_moe_quantise_rows_args fp8 = {sizeof(fp8), nullptr,  &format,    &fp8_rows,   &scales,       EPX_SCALES_ROWS, 0,
                                    &counts,     &offsets, &row_codes, &row_scales, &column_codes, &column_scales};
  epx_moe_quantise_weights_args weights = {sizeof(weights), nullptr,       &format,           &matrices,
                                           &codes,          &block_scales, &transposed_codes, &transposed_scales,
                                           nullptr,         nullptr};
  epx_moe_fp8_params made = {sizeof(made),
                             &gate_up_made.codes,
                             &gate_up_made.scales,
                             &down_made.codes,
                             &down_made.scales,
                             &gate_up_made.transposed_codes,
                             &gate_up_made.transposed_scales,
                             &down_made.transposed_codes,
                             &down_made.transposed_scales};
  epx_moe_quantise_params_args params = {sizeof(params), nullptr, &format, &gate_up, &down, &made};
  Bytes gate_up_codes = {EPX_FLOAT8_E4M3, Tensor<uint8_t>({2, 256, 256}, 1)},
        down_codes = {EPX_FLOAT8_E4M3, Tensor<uint8_t>({2, 256, 128}, 1)};
  Argument<float> gate_up_scales = Tensor<float>({2, 2, 2}, 1.0f), down_scales = Tensor<float>({2, 2, 1}, 1.0f);
  epx_moe_fp8_params given = {sizeof(given),
                              &gate_up_codes,
                              &gate_up_scales,
                              &down_codes,
                              &down_scales,
                              &gate_up_made.transposed_codes,
                              &gate_up_made.transposed_scales,
                              &down_made.transposed_codes,
                              &down_made.transposed_scales};
  epx_moe_transpose_params_args transposed = {sizeof(transposed), nullptr, &given};

  QuantiseCalls() { set_cuda(place_of_call()); }
  QuantiseCalls(const QuantiseCalls&) = delete;
  QuantiseCalls& operator=(const QuantiseCalls&) = delete;

  void set_cuda(const epx_moe_cuda* cuda) { wide.cuda = fp8.cuda = weights.cuda = params.cuda = transposed.cuda = cuda; }

  std::string changed_output() const {
    if (row_codes.is_written()) return "row_codes were written";
    if (row_scales.is_written()) return "row_scales were written";
    if (column_codes.is_written()) return "column_codes were written";
    if (column_scales.is_written()) return "column_scales were written";
    if (codes.is_written()) return "codes were written";
    if (block_scales.is_written()) return "scales were written";
    if (transposed_codes.is_written()) return "transposed_codes were written";
    if (transposed_scales.is_written()) return "transposed_scales were written";
    if (gate_up_made.is_written() || down_made.is_written()) return "fp8_params were written";
    return "";
  }
};

using C = QuantiseCalls;

struct Op {
  static epx_status wide(C& calls) { return epx_moe_quantise_rows(&calls.wide); }
  static epx_status fp8(C& calls) { return epx_moe_quantise_rows(&calls.fp8); }
  static epx_status weights(C& calls) { return epx_moe_quantise_weights(&calls.weights); }
  static epx_status params(C& calls) { return epx_moe_quantise_params(&calls.params); }
  static epx_status transposed(C& calls) { return epx_moe_transpose_params(&calls.transposed); }
};

TEST_CASE("good calls of the quantisers are not refused") {
  QuantiseCalls calls;
  for (const auto op : {Op::wide, Op::fp8, Op::weights, Op::params, Op::transposed})
    require_ok(op(calls), "the call");
  finish_call();
}

TEST_CASE("with cuda, a quantiser needs a GPU and its memory") {
  if (on_cuda()) return; // the tensors are such memory; place_cuda_test.cc has others
  const epx_moe_cuda cuda = {sizeof(cuda), nullptr, nullptr, 0, nullptr, 0, 0};
  for (const auto op : {Op::wide, Op::fp8, Op::weights, Op::params, Op::transposed}) {
    QuantiseCalls calls;
    calls.set_cuda(&cuda);
    CHECK(not_refused_without_gpu(op(calls)) == "");
    CHECK(calls.changed_output() == "");
  }
}

TEST_CASE("a bad format of a quantiser is refused") {
  static const epx_tensor some = {};
  for (const auto op : {Op::wide, Op::weights, Op::params})
    check_refused<C>({
        {op, [](C& c) { c.wide.format = c.weights.format = c.params.format = nullptr; }, {"format", "NULL"}},
        {op, [](C& c) { c.format.struct_size = 5; }, {"struct_size", "5"}},
        {op, [](C& c) { c.format.scaling = EPX_SCALING_NONE; }, {"scaling", "none"}},
        {op, [](C& c) { c.format.dtype = EPX_FLOAT8_E5M2; }, {"format", "float8_e5m2", "float8_e4m3"}},
        {op, [](C& c) { c.format.amax_floor = -1; }, {"amax_floor", "-1"}},
        {op, [](C& c) { c.format.reserved[1] = 7; }, {"reserved"}},
        {op, [](C& c) { c.format.scales = &some; }, {"format.scales is given", "NULL"}},
        {op, [](C& c) { c.format.row_scales = &some; }, {"format.row_scales is given", "NULL"}},
        {op, [](C& c) { c.format.encode_scale = &some; }, {"format.encode_scale is given", "NULL"}},
        {op, [](C& c) { c.format.recv_scales = &some; }, {"format.recv_scales is given", "NULL"}},
        {op, [](C& c) { c.format.recv_row_scales = &some; }, {"format.recv_row_scales is given", "NULL"}},
    });
}

TEST_CASE("a quantiser for products in FP8 takes no format but those of blocks of 128") {
  for (const auto op : {Op::wide, Op::params})
    check_refused<C>({
        {op, [](C& c) { c.format = format_of(EPX_SCALING_MX); }, {"format.scaling is mx", "block128 or block128_pow2"}},
        {op, [](C& c) { c.format = format_of(EPX_SCALING_NV); }, {"format.scaling is nv", "block128 or block128_pow2"}},
    });
}

TEST_CASE("bad arguments of epx_moe_quantise_rows are refused") {
  check_refused<C>({
      {Op::wide, [](C& c) { c.wide.struct_size = 5; }, {"struct_size", "5"}},
      {Op::wide, [](C& c) { c.wide.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {Op::wide, [](C& c) { c.wide.reserved0 = 3; }, {"reserved0", "3"}},
      {Op::wide, [](C& c) { c.wide.rows = nullptr; }, {"rows", "NULL"}},
      {Op::wide, [](C& c) { c.rows.dtype = EPX_FLOAT64; }, {"rows", "float64", "float8_e4m3"}},
      {Op::wide, [](C& c) { c.rows.ndim = 1; }, {"rows", "1"}},
      {Op::wide, [](C& c) { c.rows.sizes[1] = 130; }, {"rows has H = 130", "multiple of 128"}},
      {Op::wide, [](C& c) { c.rows.sizes[1] = 0; }, {"rows has H = 0", "not 0"}},
      {Op::wide, [](C& c) { c.wide.scales = &c.scales; }, {"scales is given", "float32"}},
      {Op::wide, [](C& c) { c.wide.scale_layout = EPX_SCALES_COLUMNS; }, {"scale_layout is 1", "float32", "ROWS"}},
      {Op::wide, [](C& c) { c.wide.counts = nullptr; }, {"offsets is given", "counts is NULL"}},
      {Op::wide, [](C& c) { c.wide.offsets = nullptr; }, {"counts is given", "offsets is NULL"}},
      {Op::wide, [](C& c) { c.counts.dtype = EPX_FLOAT32; }, {"counts", "float32"}},
      {Op::wide, [](C& c) { c.counts.sizes[0] = int64_t{1} << 31; }, {"counts has 2147483648 zones"}},
      {Op::wide, [](C& c) { c.offsets.sizes[0] = 2; }, {"offsets", "2", "3"}},
      {Op::wide, [](C& c) { c.counts.dtype = EPX_INT64; }, {"offsets", "int32", "int64"}},
      {Op::wide,
       [](C& c) { c.wide.row_codes = c.wide.row_scales = c.wide.column_codes = c.wide.column_scales = nullptr; },
       {"row_codes and column_codes are NULL"}},
      {Op::wide, [](C& c) { c.wide.row_scales = nullptr; }, {"row_codes is given", "row_scales is NULL"}},
      {Op::wide, [](C& c) { c.wide.row_codes = nullptr; }, {"row_scales is given", "row_codes is NULL"}},
      {Op::wide, [](C& c) { c.wide.column_scales = nullptr; }, {"column_codes is given", "column_scales is NULL"}},
      {Op::wide, [](C& c) { c.wide.column_codes = nullptr; }, {"column_scales is given", "column_codes is NULL"}},
      {Op::wide, [](C& c) { c.row_codes.dtype = EPX_UINT8; }, {"row_codes", "uint8", "float8_e4m3"}},
      {Op::wide, [](C& c) { c.row_codes.sizes[0] = 4; }, {"row_codes", "4", "5"}},
      {Op::wide, [](C& c) { c.row_scales.sizes[1] = 3; }, {"row_scales", "3", "S = 2"}},
      {Op::wide, [](C& c) { c.row_scales.dtype = EPX_FLOAT8_E8M0; }, {"row_scales", "float8_e8m0", "must be float32"}},
      {Op::wide, [](C& c) { c.column_codes.dtype = EPX_UINT8; }, {"column_codes", "uint8", "float8_e4m3"}},
      {Op::wide, [](C& c) { c.column_codes.sizes[0] = 128; }, {"column_codes", "128", "H = 256"}},
      {Op::wide, [](C& c) { c.column_scales.sizes[0] = 1; }, {"column_scales", "1", "N / 128 + E_l = 2"}},
      {Op::wide, [](C& c) { c.column_scales.dtype = EPX_FLOAT64; }, {"column_scales", "float64", "float32"}},
  });
  CHECK(not_refused(epx_moe_quantise_rows(nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("bad layouts of row_scales are refused") {
  check_refused<C>({
      {Op::wide, [](C& c) { c.format.scale_layout = static_cast<epx_scale_layout>(9); }, {"format.scale_layout is 9"}},
      {Op::wide, [](C& c) { c.format.scale_layout = EPX_SCALES_PACKED; }, {"format.scale_layout is packed", "block128"}},
      {Op::wide, [](C& c) { c.format.scale_layout = EPX_SCALES_TILES; }, {"format.scale_layout is tiles", "float32"}},
      {Op::wide, [](C& c) { c.format.scale_layout = EPX_SCALES_COLUMNS; }, {"row_scales", "N rounded up to 4 = 8"}},
      {Op::wide,
       [](C& c) {
         c.format = format_of(EPX_SCALING_BLOCK128_POW2);
         c.format.scale_layout = EPX_SCALES_PACKED;
       },
       {"row_scales", "float32", "int32"}},
      {Op::wide,
       [](C& c) {
         c.format = format_of(EPX_SCALING_BLOCK128_POW2);
         c.format.scale_layout = EPX_SCALES_PACKED;
         c.row_scales.dtype = EPX_INT32;
       },
       {"row_scales", "ceil(S / 4) = 1", "N rounded up to 4 = 8"}},
      {Op::wide,
       [](C& c) {
         c.format = format_of(EPX_SCALING_BLOCK128_POW2);
         c.format.scale_layout = EPX_SCALES_TILES;
         c.row_scales.dtype = EPX_FLOAT8_E8M0;
       },
       {"row_scales", "ceil(N / 128) = 1", "512"}},
      {Op::wide,
       [](C& c) {
         c.format = format_of(EPX_SCALING_BLOCK128_POW2);
         c.row_scales.dtype = EPX_INT32;
       },
       {"row_scales", "int32", "float32 or float8_e8m0"}},
      {Op::wide,
       [](C& c) {
         c.wide.row_codes = c.wide.row_scales = nullptr;
         c.format.scale_layout = EPX_SCALES_COLUMNS;
       },
       {"format.scale_layout is 1", "row_codes is NULL"}},
  });
}

TEST_CASE("bad scales of rows in FP8 are refused") {
  check_refused<C>({
      {Op::fp8, [](C& c) { c.fp8.scales = nullptr; }, {"scales is NULL"}},
      {Op::fp8, [](C& c) { c.scales.dtype = EPX_FLOAT8_E8M0; }, {"scales", "float8_e8m0", "float32"}},
      {Op::fp8, [](C& c) { c.scales.sizes[0] = 4; }, {"scales", "4", "N = 5"}},
      {Op::fp8, [](C& c) { c.fp8.scale_layout = EPX_SCALES_COLUMNS; }, {"scales", "N rounded up to 4 = 8"}},
      {Op::fp8, [](C& c) { c.fp8.scale_layout = EPX_SCALES_PACKED; }, {"scale_layout is packed", "float32"}},
      {Op::fp8, [](C& c) { c.fp8.scale_layout = EPX_SCALES_TILES; }, {"scale_layout is tiles", "float32"}},
      {Op::fp8, [](C& c) { c.fp8.scale_layout = static_cast<epx_scale_layout>(-1); }, {"scale_layout is -1"}},
  });
}

TEST_CASE("bad arguments of epx_moe_quantise_weights are refused") {
  check_refused<C>({
      {Op::weights, [](C& c) { c.weights.struct_size = 0; }, {"struct_size", "0"}},
      {Op::weights, [](C& c) { c.weights.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {Op::weights, [](C& c) { c.format.scale_layout = EPX_SCALES_COLUMNS; }, {"format.scale_layout is 1", "weights"}},
      {Op::weights, [](C& c) { c.weights.weights = nullptr; }, {"weights", "NULL"}},
      {Op::weights, [](C& c) { c.matrices.dtype = EPX_FLOAT64; }, {"weights", "float64", "float32 or float16 or bfloat16"}},
      {Op::weights, [](C& c) { c.matrices.ndim = 2; }, {"weights", "2", "3"}},
      {Op::weights, [](C& c) { c.matrices.sizes[1] = 127; }, {"weights has R = 127", "multiple of 128"}},
      {Op::weights, [](C& c) { c.matrices.sizes[2] = 192; }, {"weights has C = 192", "multiple of 128"}},
      {Op::weights, [](C& c) { c.matrices.sizes[2] = 0; }, {"weights has C = 0", "not 0"}},
      {Op::weights,
       [](C& c) {
         c.weights.codes = c.weights.scales = nullptr;
         c.weights.transposed_codes = c.weights.transposed_scales = nullptr;
       },
       {"codes and transposed_codes are NULL"}},
      {Op::weights, [](C& c) { c.weights.scales = nullptr; }, {"codes is given", "scales is NULL"}},
      {Op::weights, [](C& c) { c.weights.codes = nullptr; }, {"scales is given", "codes is NULL"}},
      {Op::weights, [](C& c) { c.weights.transposed_scales = nullptr; }, {"transposed_codes is given"}},
      {Op::weights, [](C& c) { c.weights.transposed_codes = nullptr; }, {"transposed_scales is given"}},
      {Op::weights, [](C& c) { c.codes.dtype = EPX_UINT8; }, {"codes", "uint8", "float8_e4m3"}},
      {Op::weights, [](C& c) { c.codes.sizes[1] = 256; }, {"codes", "256", "R = 128"}},
      {Op::weights, [](C& c) { c.block_scales.sizes[2] = 1; }, {"scales", "1", "C / 128 = 2"}},
      {Op::weights, [](C& c) { c.block_scales.dtype = EPX_FLOAT8_E8M0; }, {"scales", "float8_e8m0", "float32"}},
      {Op::weights, [](C& c) { c.transposed_codes.sizes[1] = 128; }, {"transposed_codes", "128", "C = 256"}},
      {Op::weights, [](C& c) { c.transposed_codes.dtype = EPX_UINT8; }, {"transposed_codes", "uint8"}},
      {Op::weights, [](C& c) { c.transposed_scales.sizes[1] = 1; }, {"transposed_scales", "1", "C / 128 = 2"}},
      {Op::weights, [](C& c) { c.transposed_scales.dtype = EPX_FLOAT64; }, {"transposed_scales", "float64"}},
  });
  CHECK(not_refused(epx_moe_quantise_weights(nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("bad arguments of epx_moe_quantise_params are refused") {
  check_refused<C>({
      {Op::params, [](C& c) { c.params.struct_size = 0; }, {"struct_size", "0"}},
      {Op::params, [](C& c) { c.params.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {Op::params, [](C& c) { c.format.scale_layout = EPX_SCALES_TILES; }, {"format.scale_layout is 3", "weights"}},
      {Op::params, [](C& c) { c.params.gate_up_weight = nullptr; }, {"gate_up_weight", "NULL"}},
      {Op::params, [](C& c) { c.params.down_weight = nullptr; }, {"down_weight", "NULL"}},
      {Op::params, [](C& c) { c.gate_up.dtype = EPX_FLOAT64; }, {"gate_up_weight", "float64", "float16"}},
      {Op::params, [](C& c) { c.down.dtype = EPX_FLOAT8_E4M3; }, {"down_weight", "float8_e4m3", "bfloat16"}},
      {Op::params, [](C& c) { c.down.sizes[1] = 192; }, {"down_weight has H = 192", "multiple of 128"}},
      {Op::params, [](C& c) { c.down.sizes[2] = 0; }, {"down_weight has F = 0", "not 0"}},
      {Op::params, [](C& c) { c.gate_up.sizes[0] = 3; }, {"gate_up_weight", "3", "E_l = 2"}},
      {Op::params, [](C& c) { c.gate_up.sizes[1] = 128; }, {"gate_up_weight", "128", "2F = 256"}},
      {Op::params, [](C& c) { c.gate_up.sizes[2] = 128; }, {"gate_up_weight", "128", "H = 256"}},
      {Op::params, [](C& c) { c.params.fp8_params = nullptr; }, {"fp8_params", "NULL"}},
      {Op::params, [](C& c) { c.made.struct_size = 8; }, {"fp8_params.struct_size", "8"}},
      {Op::params,
       [](C& c) {
         c.made.down_codes = c.made.down_scales = nullptr;
         c.made.down_transposed_codes = c.made.down_transposed_scales = nullptr;
       },
       {"fp8_params.down_codes and fp8_params.down_transposed_codes are NULL"}},
      {Op::params,
       [](C& c) { c.made.gate_up_scales = nullptr; },
       {"fp8_params.gate_up_codes is given", "fp8_params.gate_up_scales is NULL"}},
      {Op::params,
       [](C& c) { c.made.down_transposed_codes = nullptr; },
       {"fp8_params.down_transposed_scales is given", "fp8_params.down_transposed_codes is NULL"}},
      {Op::params, [](C& c) { c.down_made.codes.sizes[2] = 256; }, {"fp8_params.down_codes", "256", "F = 128"}},
      {Op::params, [](C& c) { c.gate_up_made.scales.sizes[1] = 1; }, {"fp8_params.gate_up_scales", "1", "2F / 128 = 2"}},
      {Op::params,
       [](C& c) { c.gate_up_made.transposed_codes.dtype = EPX_UINT8; },
       {"fp8_params.gate_up_transposed_codes", "uint8"}},
      {Op::params,
       [](C& c) { c.down_made.transposed_scales.dtype = EPX_FLOAT64; },
       {"fp8_params.down_transposed_scales", "float64"}},
  });
  CHECK(not_refused(epx_moe_quantise_params(nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("bad arguments of epx_moe_transpose_params are refused") {
  check_refused<C>({
      {Op::transposed, [](C& c) { c.transposed.struct_size = 0; }, {"struct_size", "0"}},
      {Op::transposed, [](C& c) { c.transposed.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {Op::transposed, [](C& c) { c.transposed.fp8_params = nullptr; }, {"fp8_params", "NULL"}},
      {Op::transposed, [](C& c) { c.given.struct_size = 8; }, {"fp8_params.struct_size", "8"}},
      {Op::transposed,
       [](C& c) {
         c.given.gate_up_transposed_codes = c.given.gate_up_transposed_scales = nullptr;
         c.given.down_transposed_codes = c.given.down_transposed_scales = nullptr;
       },
       {"fp8_params.gate_up_transposed_codes and fp8_params.down_transposed_codes are NULL"}},
      {Op::transposed,
       [](C& c) { c.given.gate_up_transposed_scales = nullptr; },
       {"fp8_params.gate_up_transposed_codes is given", "fp8_params.gate_up_transposed_scales is NULL"}},
      {Op::transposed,
       [](C& c) { c.given.gate_up_transposed_codes = c.given.down_transposed_codes = nullptr; },
       {"fp8_params.gate_up_transposed_scales is given", "fp8_params.gate_up_transposed_codes is NULL"}},
      {Op::transposed, [](C& c) { c.given.gate_up_codes = nullptr; }, {"fp8_params.gate_up_codes", "NULL"}},
      {Op::transposed, [](C& c) { c.given.gate_up_scales = nullptr; }, {"fp8_params.gate_up_scales", "NULL"}},
      {Op::transposed, [](C& c) { c.given.down_codes = nullptr; }, {"fp8_params.down_codes", "NULL"}},
      {Op::transposed, [](C& c) { c.given.down_scales = nullptr; }, {"fp8_params.down_scales", "NULL"}},
      {Op::transposed, [](C& c) { c.gate_up_codes.dtype = EPX_UINT8; }, {"fp8_params.gate_up_codes", "uint8"}},
      {Op::transposed, [](C& c) { c.down_codes.ndim = 2; }, {"fp8_params.down_codes", "2", "3"}},
      {Op::transposed, [](C& c) { c.down_codes.sizes[1] = 192; }, {"fp8_params.down_codes has H = 192", "multiple of 128"}},
      {Op::transposed, [](C& c) { c.down_codes.sizes[2] = 0; }, {"fp8_params.down_codes has F = 0", "not 0"}},
      {Op::transposed, [](C& c) { c.gate_up_codes.sizes[0] = 3; }, {"fp8_params.gate_up_codes", "3", "E_l = 2"}},
      {Op::transposed, [](C& c) { c.gate_up_codes.sizes[1] = 512; }, {"fp8_params.gate_up_codes", "512", "2F = 256"}},
      {Op::transposed, [](C& c) { c.gate_up_codes.sizes[2] = 128; }, {"fp8_params.gate_up_codes", "128", "H = 256"}},
      {Op::transposed,
       [](C& c) {
         c.given.down_transposed_codes = c.given.down_transposed_scales = nullptr;
         c.gate_up_codes.sizes[1] = 128;
       },
       {"fp8_params.gate_up_codes has 2F = 128", "multiple of 256"}},
      {Op::transposed, [](C& c) { c.gate_up_scales.sizes[1] = 1; }, {"fp8_params.gate_up_scales", "1", "2F / 128 = 2"}},
      {Op::transposed, [](C& c) { c.down_scales.dtype = EPX_FLOAT64; }, {"fp8_params.down_scales", "float64", "float32"}},
      {Op::transposed,
       [](C& c) { c.gate_up_made.transposed_codes.dtype = EPX_UINT8; },
       {"fp8_params.gate_up_transposed_codes", "uint8"}},
      {Op::transposed,
       [](C& c) { c.down_made.transposed_codes.sizes[1] = 256; },
       {"fp8_params.down_transposed_codes", "256", "F = 128"}},
      {Op::transposed,
       [](C& c) { c.down_made.transposed_scales.sizes[2] = 1; },
       {"fp8_params.down_transposed_scales", "1", "H / 128 = 2"}},
  });
  CHECK(not_refused(epx_moe_transpose_params(nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("bad zones of a quantiser are refused on the host") {
  const OnHost looks_at_data;
  check_refused<C>({
      {Op::wide, [](C& c) { c.counts.values[1] = 3; }, {"counts[1] is 3", "has 2"}},
      {Op::wide, [](C& c) { c.counts.values[0] = -1; }, {"counts[0] is -1"}},
      {Op::wide, [](C& c) { c.offsets.values[0] = -1; }, {"offsets[0] is -1"}},
      {Op::wide, [](C& c) { c.offsets.values[1] = 6; }, {"offsets[2] is 5", "offsets[1] = 6"}},
      {Op::fp8, [](C& c) { c.offsets.values[2] = 6; }, {"offsets[2] is 6", "5 rows"}},
  });
}

} // namespace
} // namespace epx::test
