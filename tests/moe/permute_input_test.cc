// SPDX-License-Identifier: Apache-2.0
// Calls of the local permutation with bad input are refused with a sentence that has the names and values, and write
// nothing.
#include <string>

#include <doctest/doctest.h>

#include "tests/moe/permute_run.h"
#include "tests/moe/refusals.h"

namespace epx::test {
namespace {

// These calls with T = 3, K = 2, E = 4, N = 7, H = 5 are good. A case spoils one argument.
struct PermuteCalls {
  Argument<int32_t> idx = Tensor<int32_t>({3, 2}, {0, 3, 3, -1, 1, 0});
  Argument<int32_t> map = Tensor<int32_t>({3, 2}, {0, 3, 4, -1, 2, 1});
  Argument<float> tokens = Tensor<float>({3, 5});
  Argument<float> weights = Tensor<float>({3, 2});
  Argument<float> rows = Tensor<float>({7, 5});
  Argument<float> row_weights = Tensor<float>({7});
  Argument<int32_t> out_counts = scribbled<int32_t>({4});
  Argument<int32_t> out_offsets = scribbled<int32_t>({5});
  Argument<int32_t> out_map = scribbled<int32_t>({3, 2});
  Argument<float> out_tokens = scribbled<float>({3, 5});
  Argument<float> out_weights = scribbled<float>({3, 2});
  Argument<float> out_rows = scribbled<float>({7, 5});
  Argument<float> out_row_weights = scribbled<float>({7});

  epx_moe_row_map_args row_map = {sizeof(row_map), nullptr, &idx, 4, &out_counts, &out_offsets, &out_map};
  epx_moe_permute_args permute = {sizeof(permute), nullptr,          &map,         &tokens, &weights,
                                  &out_rows,       &out_row_weights, EPX_PADS_ZERO};
  epx_moe_permute_bwd_args permute_bwd = {sizeof(permute_bwd), nullptr,     &map,        &rows,
                                          &row_weights,        &out_tokens, &out_weights};
  epx_moe_unpermute_args unpermute = {sizeof(unpermute), nullptr, &map, &rows, &weights, &out_tokens};
  epx_moe_unpermute_bwd_args unpermute_bwd = {sizeof(unpermute_bwd), nullptr, &map, &tokens, &rows, &weights, &out_rows,
                                              &out_weights};

  PermuteCalls() {
    row_map.cuda = permute.cuda = permute_bwd.cuda = unpermute.cuda = unpermute_bwd.cuda = place_of_call(4096);
  }
  PermuteCalls(const PermuteCalls&) = delete;
  PermuteCalls& operator=(const PermuteCalls&) = delete;

  std::string changed_output() const {
    if (out_counts.is_written()) return "counts were written";
    if (out_offsets.is_written()) return "offsets were written";
    if (out_map.is_written()) return "row_map was written";
    if (out_tokens.is_written()) return "tokens were written";
    if (out_weights.is_written()) return "weights were written";
    if (out_rows.is_written()) return "rows were written";
    if (out_row_weights.is_written()) return "row_weights were written";
    return "";
  }
};

using C = PermuteCalls;

struct Op {
  static epx_status row_map(C& calls) { return epx_moe_row_map(&calls.row_map); }
  static epx_status permute(C& calls) { return epx_moe_permute(&calls.permute); }
  static epx_status permute_bwd(C& calls) { return epx_moe_permute_bwd(&calls.permute_bwd); }
  static epx_status unpermute(C& calls) { return epx_moe_unpermute(&calls.unpermute); }
  static epx_status unpermute_bwd(C& calls) { return epx_moe_unpermute_bwd(&calls.unpermute_bwd); }
};

TEST_CASE("good calls of the local permutation are not refused") {
  PermuteCalls calls;
  for (const auto op : {Op::row_map, Op::permute, Op::permute_bwd, Op::unpermute, Op::unpermute_bwd})
    require_ok(op(calls), "the call");
  finish_call();
}

TEST_CASE("with cuda, a call needs a GPU and its memory") {
  if (on_cuda()) return; // the tensors are such memory; place_cuda_test.cc has others
  const epx_moe_cuda cuda = {sizeof(cuda), nullptr, nullptr, 0, nullptr, 0, 0};
  for (const auto op : {Op::row_map, Op::permute, Op::permute_bwd, Op::unpermute, Op::unpermute_bwd}) {
    PermuteCalls calls;
    calls.row_map.cuda = calls.permute.cuda = calls.permute_bwd.cuda = calls.unpermute.cuda = calls.unpermute_bwd.cuda =
        &cuda;
    CHECK(not_refused_without_gpu(op(calls)) == "");
    CHECK(calls.changed_output() == "");
  }
}

TEST_CASE("bad arguments of epx_moe_row_map are refused") {
  check_refused<C>({
      {Op::row_map, [](C& c) { c.row_map.struct_size = 5; }, {"struct_size", "5"}},
      {Op::row_map, [](C& c) { c.row_map.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {Op::row_map, [](C& c) { c.row_map.topk_idx = nullptr; }, {"topk_idx", "NULL"}},
      {Op::row_map, [](C& c) { c.row_map.counts = nullptr; }, {"counts", "NULL"}},
      {Op::row_map, [](C& c) { c.row_map.offsets = nullptr; }, {"offsets", "NULL"}},
      {Op::row_map, [](C& c) { c.row_map.row_map = nullptr; }, {"row_map", "NULL"}},
      {Op::row_map, [](C& c) { c.row_map.alignment = -3; }, {"alignment", "-3"}},
      {Op::row_map, [](C& c) { c.idx.dtype = EPX_FLOAT32; }, {"topk_idx", "float32"}},
      {Op::row_map, [](C& c) { c.idx.ndim = 1; }, {"topk_idx", "1"}},
      {Op::row_map, [](C& c) { c.out_counts.dtype = EPX_FLOAT32; }, {"counts", "float32"}},
      {Op::row_map, [](C& c) { c.out_offsets.sizes[0] = 4; }, {"offsets", "4", "5"}},
      {Op::row_map, [](C& c) { c.out_counts.dtype = EPX_INT64; }, {"offsets", "int32", "int64"}},
      {Op::row_map, [](C& c) { c.out_map.sizes[1] = 1; }, {"row_map", "1", "2"}},
      {Op::row_map, [](C& c) { c.out_map.dtype = EPX_INT64; }, {"row_map", "int64", "int32"}},
  });
  CHECK(not_refused(epx_moe_row_map(nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("bad arguments of epx_moe_permute are refused") {
  check_refused<C>({
      {Op::permute, [](C& c) { c.permute.struct_size = 0; }, {"struct_size", "0"}},
      {Op::permute, [](C& c) { c.permute.row_map = nullptr; }, {"row_map", "NULL"}},
      {Op::permute, [](C& c) { c.permute.tokens = nullptr; }, {"tokens", "NULL"}},
      {Op::permute, [](C& c) { c.permute.rows = nullptr; }, {"rows", "NULL"}},
      {Op::permute, [](C& c) { c.permute.row_weights = nullptr; }, {"topk_weights", "row_weights"}},
      {Op::permute, [](C& c) { c.permute.topk_weights = nullptr; }, {"topk_weights", "row_weights"}},
      {Op::permute, [](C& c) { c.map.dtype = EPX_INT64; }, {"row_map", "int64"}},
      {Op::permute, [](C& c) { c.tokens.sizes[0] = 2; }, {"tokens", "2", "3"}},
      {Op::permute, [](C& c) { c.tokens.dtype = EPX_DTYPE_UNSET; }, {"tokens", "dtype"}},
      {Op::permute, [](C& c) { c.out_rows.sizes[1] = 4; }, {"rows", "4", "5"}},
      {Op::permute, [](C& c) { c.out_rows.dtype = EPX_FLOAT64; }, {"rows", "float64", "float32"}},
      {Op::permute, [](C& c) { c.weights.sizes[1] = 3; }, {"topk_weights", "3", "2"}},
      {Op::permute, [](C& c) { c.out_row_weights.sizes[0] = 6; }, {"row_weights", "6", "7"}},
      {Op::permute, [](C& c) { c.out_row_weights.dtype = EPX_FLOAT64; }, {"row_weights", "float64", "float32"}},
      {Op::permute, [](C& c) { c.permute.pads = static_cast<epx_pads>(2); }, {"pads is 2", "EPX_PADS_UNTOUCHED"}},
      {Op::permute_bwd, [](C& c) { c.permute_bwd.struct_size = 0; }, {"struct_size", "0"}},
      {Op::permute_bwd, [](C& c) { c.permute_bwd.grad_rows = nullptr; }, {"grad_rows", "NULL"}},
      {Op::permute_bwd, [](C& c) { c.permute_bwd.grad_tokens = nullptr; }, {"grad_tokens", "NULL"}},
      {Op::permute_bwd, [](C& c) { c.permute_bwd.grad_topk_weights = nullptr; }, {"grad_row_weights", "grad_topk_weights"}},
      {Op::permute_bwd, [](C& c) { c.permute_bwd.grad_row_weights = nullptr; }, {"grad_row_weights", "grad_topk_weights"}},
      {Op::permute_bwd, [](C& c) { c.rows.dtype = c.out_tokens.dtype = EPX_INT32; }, {"grad_rows", "int32"}},
      {Op::permute_bwd, [](C& c) { c.out_tokens.sizes[1] = 6; }, {"grad_tokens", "6", "5"}},
      {Op::permute_bwd, [](C& c) { c.row_weights.sizes[0] = 5; }, {"grad_row_weights", "5", "7"}},
  });
}

TEST_CASE("bad arguments of epx_moe_unpermute are refused") {
  check_refused<C>({
      {Op::unpermute, [](C& c) { c.unpermute.struct_size = 0; }, {"struct_size", "0"}},
      {Op::unpermute, [](C& c) { c.unpermute.row_map = nullptr; }, {"row_map", "NULL"}},
      {Op::unpermute, [](C& c) { c.unpermute.rows = nullptr; }, {"rows", "NULL"}},
      {Op::unpermute, [](C& c) { c.unpermute.tokens = nullptr; }, {"tokens", "NULL"}},
      {Op::unpermute, [](C& c) { c.map.sizes[1] = 0; }, {"row_map", "K = 0"}},
      {Op::unpermute, [](C& c) { c.rows.sizes[1] = c.out_tokens.sizes[1] = 0; }, {"rows", "H = 0"}},
      {Op::unpermute, [](C& c) { c.rows.sizes[0] = int64_t{1} << 32; }, {"4294967296", "rows"}},
      {Op::unpermute, [](C& c) { c.rows.sizes[0] = int64_t{1} << 62; }, {"rows", "int64"}},
      {Op::unpermute, [](C& c) { c.rows.dtype = c.out_tokens.dtype = EPX_INT32; }, {"rows", "int32"}},
      {Op::unpermute, [](C& c) { c.weights.dtype = EPX_FLOAT64; }, {"topk_weights", "float64", "float32"}},
      {Op::unpermute, [](C& c) { c.weights.sizes[0] = 2; }, {"topk_weights", "2", "3"}},
      {Op::unpermute, [](C& c) { c.out_tokens.sizes[0] = 4; }, {"tokens", "4", "3"}},
      {Op::unpermute, [](C& c) { c.out_tokens.sizes[1] = 4; }, {"tokens", "4", "5"}},
      {Op::unpermute_bwd, [](C& c) { c.unpermute_bwd.struct_size = 0; }, {"struct_size", "0"}},
      {Op::unpermute_bwd, [](C& c) { c.unpermute_bwd.grad_tokens = nullptr; }, {"grad_tokens", "NULL"}},
      {Op::unpermute_bwd, [](C& c) { c.unpermute_bwd.grad_rows = nullptr; }, {"grad_rows", "NULL"}},
      {Op::unpermute_bwd, [](C& c) { c.unpermute_bwd.rows = nullptr; }, {"grad_topk_weights", "rows"}},
      {Op::unpermute_bwd, [](C& c) { c.unpermute_bwd.grad_topk_weights = nullptr; }, {"grad_topk_weights", "rows"}},
      {Op::unpermute_bwd, [](C& c) { c.rows.sizes[0] = 6; }, {"rows", "6", "7"}},
      {Op::unpermute_bwd, [](C& c) { c.out_weights.sizes[1] = 3; }, {"grad_topk_weights", "3", "2"}},
      {Op::unpermute_bwd, [](C& c) { c.out_rows.sizes[1] = 3; }, {"grad_rows", "3", "5"}},
  });
}

TEST_CASE("bad data of the local permutation is refused on the host") {
  const OnHost looks_at_data;
  check_refused<C>({
      {Op::row_map, [](C& c) { c.row_map.alignment = 1 << 30; }, {"rows", "2147483647|INT32|int32"}},
      {Op::row_map, [](C& c) { c.idx.values(2, 1) = 4; }, {"topk_idx", "2", "1", "4"}},
      {Op::row_map, [](C& c) { c.idx.values(1, 0) = -2; }, {"topk_idx", "1", "0", "-2"}},
      {Op::permute, [](C& c) { c.map.values(1, 0) = 7; }, {"row_map", "7"}},
      {Op::permute, [](C& c) { c.map.values(2, 1) = -2; }, {"row_map", "-2"}},
      {Op::permute_bwd, [](C& c) { c.map.values(0, 0) = 8; }, {"row_map", "8"}},
      {Op::unpermute, [](C& c) { c.map.values(1, 0) = 7; }, {"row_map", "7"}},
      {Op::unpermute_bwd, [](C& c) { c.map.values(2, 1) = 3; }, {"row_map[2, 1]", "3"}}, // as route (0, 1)
      {Op::unpermute_bwd, [](C& c) { c.map.values(1, 0) = 7; }, {"row_map", "7"}},
  });
}

} // namespace
} // namespace epx::test
