// SPDX-License-Identifier: Apache-2.0
// Calls of SwiGLU's quantisers with bad input are refused with a sentence that has the names and values, and write nothing.
#include <string>

#include <doctest/doctest.h>

#include "tests/moe/quantise_run.h"
#include "tests/moe/refusals.h"

namespace epx::test {
namespace {

struct Codes : Argument<uint8_t> {
  Codes(Tensor<uint8_t> tensor) : Argument(std::move(tensor)) { dtype = EPX_FLOAT8_E4M3; }
};

// These calls with N = 5, F = 128, E_l = 2 are good. A case spoils one argument.
struct SwigluCalls {
  epx_row_format format = QuantiseFormat().get();
  Argument<float> pre_act = Tensor<float>({5, 256}, 1.0f);
  Argument<float> grad_h = Tensor<float>({5, 128}, 1.0f);
  Argument<float> weights = Tensor<float>({5}, 1.0f);
  Argument<int32_t> counts = Tensor<int32_t>({2}, {2, 1});
  Argument<int32_t> offsets = Tensor<int32_t>({3}, {0, 3, 5});
  Codes row_codes = scribbled<uint8_t>({5, 128});
  Argument<float> row_scales = scribbled<float>({5, 1});
  Codes column_codes = scribbled<uint8_t>({128, 5});
  Argument<float> column_scales = scribbled<float>({2, 128});
  Codes grad_row_codes = scribbled<uint8_t>({5, 256});
  Argument<float> grad_row_scales = scribbled<float>({5, 2});
  Codes grad_column_codes = scribbled<uint8_t>({256, 5});
  Argument<float> grad_column_scales = scribbled<float>({2, 256});
  Argument<float> grad_weights = scribbled<float>({5});

  epx_moe_quantise_swiglu_args fwd = {sizeof(fwd), nullptr,    &format,     &pre_act,      &weights,      &counts,
                                      &offsets,    &row_codes, &row_scales, &column_codes, &column_scales};
  epx_moe_quantise_swiglu_bwd_args bwd = {sizeof(bwd),
                                          nullptr,
                                          &format,
                                          &pre_act,
                                          &grad_h,
                                          &weights,
                                          &counts,
                                          &offsets,
                                          &grad_row_codes,
                                          &grad_row_scales,
                                          &grad_column_codes,
                                          &grad_column_scales,
                                          &column_codes,
                                          &column_scales,
                                          &grad_weights};

  SwigluCalls() { fwd.cuda = bwd.cuda = place_of_call(1024); }
  SwigluCalls(const SwigluCalls&) = delete;
  SwigluCalls& operator=(const SwigluCalls&) = delete;

  std::string changed_output() const {
    const bool is_written = row_codes.is_written() || row_scales.is_written() || column_codes.is_written() ||
                            column_scales.is_written() || grad_row_codes.is_written() || grad_row_scales.is_written() ||
                            grad_column_codes.is_written() || grad_column_scales.is_written() || grad_weights.is_written();
    return is_written ? "an output was written" : "";
  }
};

using C = SwigluCalls;

struct Op {
  static epx_status fwd(C& calls) { return epx_moe_quantise_swiglu(&calls.fwd); }
  static epx_status bwd(C& calls) { return epx_moe_quantise_swiglu_bwd(&calls.bwd); }
};

TEST_CASE("good calls of SwiGLU's quantisers are not refused") {
  SwigluCalls calls;
  for (const auto op : {Op::fwd, Op::bwd})
    require_ok(op(calls), "the call");
  finish_call();
}

TEST_CASE("with cuda, SwiGLU's quantisers need a GPU and its memory") {
  if (on_cuda()) return; // the tensors are such memory; place_cuda_test.cc has others
  const epx_moe_cuda cuda = {sizeof(cuda), nullptr, nullptr, 0, nullptr, 0, 0};
  for (const auto op : {Op::fwd, Op::bwd}) {
    SwigluCalls calls;
    calls.fwd.cuda = calls.bwd.cuda = &cuda;
    CHECK(not_refused_without_gpu(op(calls)) == "");
    CHECK(calls.changed_output() == "");
  }
}

TEST_CASE("bad arguments of epx_moe_quantise_swiglu are refused") {
  check_refused<C>({
      {Op::fwd, [](C& c) { c.fwd.struct_size = 5; }, {"struct_size", "5"}},
      {Op::fwd, [](C& c) { c.fwd.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {Op::fwd, [](C& c) { c.fwd.format = nullptr; }, {"format", "NULL"}},
      {Op::fwd, [](C& c) { c.format.scaling = EPX_SCALING_MX; }, {"scaling", "mx"}},
      {Op::fwd, [](C& c) { c.fwd.pre_act = nullptr; }, {"pre_act", "NULL"}},
      {Op::fwd, [](C& c) { c.pre_act.dtype = EPX_FLOAT16; }, {"pre_act", "float16", "float32 or bfloat16"}},
      {Op::fwd, [](C& c) { c.pre_act.sizes[1] = 128; }, {"pre_act has 2F = 128", "multiple of 128"}},
      {Op::fwd, [](C& c) { c.pre_act.sizes[1] = 257; }, {"pre_act has 2F = 257", "multiple of 128"}},
      {Op::fwd, [](C& c) { c.pre_act.sizes[1] = 0; }, {"pre_act has 2F = 0", "not 0"}},
      {Op::fwd, [](C& c) { c.weights.sizes[0] = 4; }, {"recv_weights", "4", "5"}},
      {Op::fwd, [](C& c) { c.weights.dtype = EPX_FLOAT64; }, {"recv_weights", "float64", "float32"}},
      {Op::fwd, [](C& c) { c.fwd.counts = nullptr; }, {"offsets is given", "counts is NULL"}},
      {Op::fwd,
       [](C& c) { c.fwd.row_codes = c.fwd.row_scales = c.fwd.column_codes = c.fwd.column_scales = nullptr; },
       {"row_codes and column_codes are NULL"}},
      {Op::fwd, [](C& c) { c.fwd.row_scales = nullptr; }, {"row_codes is given", "row_scales is NULL"}},
      {Op::fwd, [](C& c) { c.fwd.column_codes = nullptr; }, {"column_scales is given", "column_codes is NULL"}},
      {Op::fwd, [](C& c) { c.row_codes.sizes[1] = 256; }, {"row_codes", "256", "F = 128"}},
      {Op::fwd, [](C& c) { c.column_codes.sizes[0] = 256; }, {"column_codes", "256", "F = 128"}},
      {Op::fwd, [](C& c) { c.column_scales.sizes[0] = 3; }, {"column_scales", "3", "N / 128 + E_l = 2"}},
  });
  CHECK(not_refused(epx_moe_quantise_swiglu(nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("bad arguments of epx_moe_quantise_swiglu_bwd are refused") {
  check_refused<C>({
      {Op::bwd, [](C& c) { c.bwd.struct_size = 5; }, {"struct_size", "5"}},
      {Op::bwd, [](C& c) { c.bwd.format = nullptr; }, {"format", "NULL"}},
      {Op::bwd, [](C& c) { c.bwd.pre_act = nullptr; }, {"pre_act", "NULL"}},
      {Op::bwd, [](C& c) { c.bwd.grad_h = nullptr; }, {"grad_h", "NULL"}},
      {Op::bwd, [](C& c) { c.grad_h.dtype = EPX_BFLOAT16; }, {"grad_h", "bfloat16", "float32"}},
      {Op::bwd, [](C& c) { c.grad_h.sizes[1] = 256; }, {"grad_h", "256", "F = 128"}},
      {Op::bwd, [](C& c) { c.weights.sizes[0] = 4; }, {"recv_weights", "4", "5"}},
      {Op::bwd, [](C& c) { c.bwd.recv_weights = nullptr; }, {"grad_recv_weights is given", "recv_weights is NULL"}},
      {Op::bwd,
       [](C& c) {
         c.bwd.row_codes = c.bwd.row_scales = c.bwd.column_codes = c.bwd.column_scales = nullptr;
         c.bwd.h_column_codes = c.bwd.h_column_scales = c.bwd.grad_recv_weights = nullptr;
       },
       {"row_codes, column_codes, h_column_codes and grad_recv_weights are NULL"}},
      {Op::bwd, [](C& c) { c.grad_row_codes.sizes[1] = 128; }, {"row_codes", "128", "2F = 256"}},
      {Op::bwd, [](C& c) { c.grad_row_scales.sizes[1] = 1; }, {"row_scales", "1", "S = 2"}},
      {Op::bwd, [](C& c) { c.grad_column_codes.sizes[0] = 128; }, {"column_codes", "128", "2F = 256"}},
      {Op::bwd, [](C& c) { c.bwd.h_column_scales = nullptr; }, {"h_column_codes is given", "h_column_scales is NULL"}},
      {Op::bwd, [](C& c) { c.bwd.h_column_codes = nullptr; }, {"h_column_scales is given", "h_column_codes is NULL"}},
      {Op::bwd, [](C& c) { c.column_codes.dtype = EPX_UINT8; }, {"h_column_codes", "uint8", "float8_e4m3"}},
      {Op::bwd, [](C& c) { c.column_scales.sizes[1] = 256; }, {"h_column_scales", "256", "F = 128"}},
      {Op::bwd, [](C& c) { c.grad_weights.sizes[0] = 6; }, {"grad_recv_weights", "6", "5"}},
      {Op::bwd, [](C& c) { c.grad_weights.dtype = EPX_FLOAT64; }, {"grad_recv_weights", "float64", "float32"}},
  });
  CHECK(not_refused(epx_moe_quantise_swiglu_bwd(nullptr), {"args", "NULL"}) == "");
  size_t bytes = 0;
  SwigluCalls calls;
  CHECK(not_refused(epx_moe_quantise_swiglu_bwd_workspace(&calls.bwd, nullptr), {"bytes", "NULL"}) == "");
  require_ok(epx_moe_quantise_swiglu_bwd_workspace(&calls.bwd, &bytes), "epx_moe_quantise_swiglu_bwd_workspace");
  CHECK(bytes == 5 * 4);
  calls.bwd.grad_recv_weights = nullptr;
  require_ok(epx_moe_quantise_swiglu_bwd_workspace(&calls.bwd, &bytes), "epx_moe_quantise_swiglu_bwd_workspace");
  CHECK(bytes == 0);
}

TEST_CASE("bad zones of SwiGLU's quantisers are refused on the host") {
  const OnHost looks_at_data;
  check_refused<C>({
      {Op::fwd, [](C& c) { c.counts.values[1] = 3; }, {"counts[1] is 3", "has 2"}},
      {Op::bwd, [](C& c) { c.offsets.values[2] = 6; }, {"offsets[2] is 6", "5 rows"}},
  });
}

} // namespace
} // namespace epx::test
