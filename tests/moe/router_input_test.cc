// SPDX-License-Identifier: Apache-2.0
// The router's calls with bad input are refused with a sentence that has the names and values, and write nothing.
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/refusals.h"
#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

using Words = std::vector<std::string>;

// These calls of a router with T = 4, E = 6, K = 2, P = 3 are good. A case spoils one argument.
struct RouterCalls {
  Argument<float> logits = Tensor<float>({4, 6});
  Argument<float> bias = Tensor<float>({6});
  Argument<uint8_t> mask = Tensor<uint8_t>({4}, 1);
  Argument<int32_t> counts = Tensor<int32_t>({3, 6});
  Argument<float> grad_weights = Tensor<float>({4, 2});
  Argument<int32_t> idx = Tensor<int32_t>({4, 2}, {0, 1, 0, 1, 0, 1, 0, 1});
  Argument<int32_t> out_idx = scribbled<int32_t>({4, 2});
  Argument<float> out_weights = scribbled<float>({4, 2});
  Argument<int64_t> info = scribbled<int64_t>({3});
  Argument<float> grad_logits = scribbled<float>({4, 6});
  Argument<double> loss = scribbled<double>({1});

  epx_moe_router_config config = router_config(6, 2);
  epx_moe_router_args fwd = {sizeof(fwd), nullptr, &logits, &bias, &mask, &out_idx, &out_weights, &info};
  epx_moe_router_bwd_args bwd = {sizeof(bwd), nullptr, &logits, &idx, &grad_weights, &counts, 1.0, &grad_logits};
  epx_moe_aux_loss_args aux = {sizeof(aux), nullptr, &logits, &idx, &counts, &loss};
  epx_moe_bias_update_args update = {sizeof(update), nullptr, &counts, 0.5, &bias};

  RouterCalls() {
    config.aux_loss_coeff = 0.1;
    fwd.cuda = bwd.cuda = aux.cuda = update.cuda = place_of_call(4096);
  }
  RouterCalls(const RouterCalls&) = delete;
  RouterCalls& operator=(const RouterCalls&) = delete;

  std::string changed_output() const {
    if (out_idx.is_written()) return "topk_idx was written";
    if (out_weights.is_written()) return "topk_weights were written";
    if (info.is_written()) return "info was written";
    if (grad_logits.is_written()) return "grad_logits were written";
    if (loss.is_written()) return "loss was written";
    if (!difference(bias.values, Tensor<float>({6})).empty()) return "selection_bias was written";
    return "";
  }
};

using C = RouterCalls;

struct Op {
  static epx_status fwd(C& calls) { return epx_moe_router(&calls.config, &calls.fwd); }
  static epx_status bwd(C& calls) { return epx_moe_router_bwd(&calls.config, &calls.bwd); }
  static epx_status aux(C& calls) { return epx_moe_aux_loss(&calls.config, &calls.aux); }
  static epx_status update(C& calls) { return epx_moe_bias_update(&calls.update); }
};

TEST_CASE("good calls of the router are not refused") {
  RouterCalls calls;
  for (const auto op : {Op::fwd, Op::bwd, Op::aux, Op::update})
    require_ok(op(calls), "the call");
  finish_call();
}

TEST_CASE("with cuda, a call needs a GPU and its memory") {
  if (on_cuda()) return; // the tensors are such memory; place_cuda_test.cc has others
  const epx_moe_cuda cuda = {sizeof(cuda), nullptr, nullptr, 0, nullptr, 0, 0};
  for (const auto op : {Op::fwd, Op::bwd, Op::aux, Op::update}) {
    RouterCalls calls;
    calls.fwd.cuda = calls.bwd.cuda = calls.aux.cuda = calls.update.cuda = &cuda;
    CHECK(not_refused_without_gpu(op(calls)) == "");
    CHECK(calls.changed_output() == "");
  }
}

TEST_CASE("a bad router config is refused") {
  const auto config = [](std::function<void(epx_moe_router_config&)> spoil, Words words) -> Refusal<C> {
    return {Op::fwd, [spoil](C& c) { spoil(c.config); }, std::move(words)};
  };
  using Config = epx_moe_router_config;
  check_refused<C>({
      config([](Config& c) { c.struct_size = 3; }, {"struct_size", "3", std::to_string(sizeof(Config))}),
      config([](Config& c) { c.num_experts = 0; }, {"num_experts", "0"}),
      config([](Config& c) { c.num_experts = -4; }, {"num_experts", "-4"}),
      config([](Config& c) { c.top_k = 0; }, {"top_k", "0"}),
      config([](Config& c) { c.top_k = 7; }, {"top_k", "7", "num_experts", "6"}),
      config([](Config& c) { c.score = static_cast<epx_moe_score>(3); }, {"score", "3"}),
      config([](Config& c) { c.num_groups = 0; }, {"num_groups", "0"}),
      config([](Config& c) { c.num_groups = 4; }, {"num_groups", "4", "num_experts", "6"}),
      config([](Config& c) { c.num_groups = 3, c.topk_groups = 0; }, {"topk_groups", "0"}),
      config([](Config& c) { c.num_groups = 2, c.topk_groups = 3, c.top_k = 3; }, {"topk_groups", "3", "num_groups", "2"}),
      config([](Config& c) { c.num_groups = 3, c.topk_groups = 2, c.top_k = 3; }, {"topk_groups", "2", "top_k", "3"}),
      config([](Config& c) { c.num_groups = 3, c.topk_groups = 1, c.top_k = 3; }, {"top_k", "3", "num_groups", "6"}),
      config([](Config& c) { c.num_groups = 3, c.topk_groups = 1, c.top_k = 3, c.group_score_top_k = 1; },
             {"top_k is 3", "topk_groups = 1", "only 2"}),
      config([](Config& c) { c.group_score_top_k = -1; }, {"group_score_top_k is -1", "6"}),
      config([](Config& c) { c.num_groups = 2, c.group_score_top_k = 4; }, {"group_score_top_k is 4", "1..", "3"}),
      config([](Config& c) { c.renormalize = 2; }, {"renormalize", "2"}),
      config([](Config& c) { c.scaling_factor = kNaN; }, {"scaling_factor", "nan"}),
      config([](Config& c) { c.scaling_factor = -kInfinity; }, {"scaling_factor", "-inf"}),
      config([](Config& c) { c.aux_loss_coeff = kInfinity; }, {"aux_loss_coeff", "inf"}),
  });
}

TEST_CASE("bad arguments of the router are refused") {
  check_refused<C>({
      {Op::fwd, [](C& c) { c.fwd.struct_size = 7; }, {"struct_size", "7", std::to_string(sizeof(epx_moe_router_args))}},
      {Op::fwd, [](C& c) { c.fwd.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {Op::fwd, [](C& c) { c.fwd.logits = nullptr; }, {"logits", "NULL"}},
      {Op::fwd, [](C& c) { c.fwd.topk_idx = nullptr; }, {"topk_idx", "NULL"}},
      {Op::fwd, [](C& c) { c.fwd.topk_weights = nullptr; }, {"topk_weights", "NULL"}},
      {Op::fwd, [](C& c) { c.logits.data = nullptr; }, {"logits", "NULL"}},
      {Op::fwd, [](C& c) { c.logits.ndim = 1; }, {"logits", "1"}},
      {Op::fwd, [](C& c) { c.logits.sizes[1] = 5; }, {"logits", "5", "6"}},
      {Op::fwd, [](C& c) { c.logits.sizes[0] = -1; }, {"logits", "-1"}},
      {Op::fwd, [](C& c) { c.logits.dtype = EPX_FLOAT16; }, {"logits", "float16"}},
      {Op::fwd, [](C& c) { c.logits.data = reinterpret_cast<char*>(c.logits.data) + 1; }, {"logits", "align"}},
      {Op::fwd, [](C& c) { c.bias.dtype = EPX_FLOAT64; }, {"selection_bias", "float64", "float32"}},
      {Op::fwd, [](C& c) { c.bias.sizes[0] = 5; }, {"selection_bias", "5", "6"}},
      {Op::fwd, [](C& c) { c.mask.dtype = EPX_INT32; }, {"token_mask", "int32", "uint8"}},
      {Op::fwd, [](C& c) { c.mask.sizes[0] = 3; }, {"token_mask", "3", "4"}},
      {Op::fwd, [](C& c) { c.out_idx.dtype = EPX_FLOAT32; }, {"topk_idx", "float32"}},
      {Op::fwd, [](C& c) { c.out_idx.sizes[1] = 3; }, {"topk_idx", "3", "2"}},
      {Op::fwd, [](C& c) { c.out_weights.dtype = EPX_FLOAT64; }, {"topk_weights", "float64", "float32"}},
      {Op::fwd, [](C& c) { c.out_weights.sizes[0] = 3; }, {"topk_weights", "3", "4"}},
      {Op::fwd, [](C& c) { c.info.dtype = EPX_INT32; }, {"info", "int32", "int64"}},
      {Op::fwd, [](C& c) { c.info.sizes[0] = 5; }, {"info", "5", "3"}},
  });
  RouterCalls calls;
  CHECK(not_refused(epx_moe_router(nullptr, &calls.fwd), {"config", "NULL"}) == "");
  CHECK(not_refused(epx_moe_router(&calls.config, nullptr), {"args", "NULL"}) == "");
  CHECK(calls.changed_output() == "");
}

TEST_CASE("bad arguments of the router's backward are refused") {
  check_refused<C>({
      {Op::bwd, [](C& c) { c.bwd.struct_size = 8; }, {"struct_size", "8"}},
      {Op::bwd, [](C& c) { c.config.top_k = 9; }, {"top_k", "9", "6"}},
      {Op::bwd, [](C& c) { c.bwd.logits = nullptr; }, {"logits", "NULL"}},
      {Op::bwd, [](C& c) { c.bwd.topk_idx = nullptr; }, {"topk_idx", "NULL"}},
      {Op::bwd, [](C& c) { c.bwd.grad_logits = nullptr; }, {"grad_logits", "NULL"}},
      {Op::bwd, [](C& c) { c.bwd.global_counts = nullptr; }, {"global_counts", "NULL", "aux_loss_coeff", "0.1"}},
      {Op::bwd, [](C& c) { c.config.aux_loss_coeff = 0; }, {"global_counts", "aux_loss_coeff"}},
      {Op::bwd, [](C& c) { c.bwd.aux_loss_grad = kNaN; }, {"aux_loss_grad", "nan"}},
      {Op::bwd, [](C& c) { c.idx.sizes[1] = 1; }, {"topk_idx", "1", "2"}},
      {Op::bwd, [](C& c) { c.config.reserved[2] = 9; }, {"reserved", "9"}},
      {Op::bwd, [](C& c) { c.config.reserved0 = 8; }, {"reserved", "8"}},
      {Op::bwd, [](C& c) { c.logits.reserved[1] = 1; }, {"logits", "reserved"}},
      {Op::bwd, [](C& c) { c.grad_weights.dtype = EPX_FLOAT64; }, {"grad_topk_weights", "float64", "float32"}},
      {Op::bwd, [](C& c) { c.grad_weights.sizes[1] = 6; }, {"grad_topk_weights", "6", "2"}},
      {Op::bwd, [](C& c) { c.counts.dtype = EPX_FLOAT64; }, {"global_counts", "float64"}},
      {Op::bwd, [](C& c) { c.counts.sizes[1] = 5; }, {"global_counts", "5", "6"}},
      {Op::bwd, [](C& c) { c.grad_logits.sizes[1] = 5; }, {"grad_logits", "5", "6"}},
      {Op::bwd, [](C& c) { c.grad_logits.dtype = EPX_FLOAT64; }, {"grad_logits", "float64", "float32"}},
  });
}

TEST_CASE("bad data of the router's backward is refused on the host") {
  const OnHost looks_at_data;
  check_refused<C>({
      {Op::bwd, [](C& c) { c.idx.values(2, 1) = 6; }, {"topk_idx", "6", "2", "1"}},
      {Op::bwd, [](C& c) { c.idx.values(2, 0) = -2; }, {"topk_idx", "-2"}},
      {Op::bwd, [](C& c) { c.idx.values(2, 0) = c.idx.values(2, 1) = 5; }, {"topk_idx[2, 0]", "[2, 1]", "5"}},
      {Op::bwd, [](C& c) { c.counts.values(1, 2) = -7; }, {"global_counts[1, 2]", "-7"}},
  });
}

TEST_CASE("bad arguments of the load-balance loss and of the bias update are refused") {
  check_refused<C>({
      {Op::aux, [](C& c) { c.aux.struct_size = 0; }, {"struct_size", "0"}},
      {Op::aux, [](C& c) { c.aux.logits = nullptr; }, {"logits", "NULL"}},
      {Op::aux, [](C& c) { c.aux.topk_idx = nullptr; }, {"topk_idx", "NULL"}},
      {Op::aux, [](C& c) { c.aux.global_counts = nullptr; }, {"global_counts", "NULL"}},
      {Op::aux, [](C& c) { c.aux.loss = nullptr; }, {"loss", "NULL"}},
      {Op::aux, [](C& c) { c.loss.dtype = EPX_FLOAT32; }, {"loss", "float32", "float64"}},
      {Op::aux, [](C& c) { c.loss.sizes[0] = 2; }, {"loss", "2", "1"}},
      {Op::aux, [](C& c) { c.counts.sizes[1] = 4; }, {"global_counts", "4", "6"}},
      {Op::aux, [](C& c) { c.idx.sizes[0] = 3; }, {"topk_idx", "3", "4"}},
      {Op::update, [](C& c) { c.update.struct_size = 1; }, {"struct_size", "1"}},
      {Op::update, [](C& c) { c.update.global_counts = nullptr; }, {"global_counts", "NULL"}},
      {Op::update, [](C& c) { c.update.selection_bias = nullptr; }, {"selection_bias", "NULL"}},
      {Op::update, [](C& c) { c.update.rate = kNaN; }, {"rate", "nan"}},
      {Op::update, [](C& c) { c.bias.dtype = EPX_INT64; }, {"selection_bias", "int64"}},
      {Op::update, [](C& c) { c.bias.sizes[0] = 5; }, {"selection_bias", "5", "6"}},
      {Op::update, [](C& c) { c.counts.dtype = EPX_UINT8; }, {"global_counts", "uint8"}},
  });
}

} // namespace
} // namespace epx::test
