// SPDX-License-Identifier: Apache-2.0
// Calls of the grouped FFN with bad input are refused with a sentence that has the names and values, and write nothing.
#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_run.h"

namespace epx::test {
namespace {

// These calls with E_l = 2, H = 5, F = 3, N = 9, zones of 4 rows with 3 and 4 in use are good. A case spoils one argument.
struct FfnCalls {
  FfnShape shape{2, 5, 3, EPX_MOE_SWIGLU};
  Rng rng{61};
  FfnParams<double> params_data;
  FfnParams<double> stacked_data = random_params<double>({2, 5, 3, EPX_MOE_SWIGLU}, {true, true}, rng);
  FfnParams<double> grads_data;
  Argument<double> recv = Tensor<double>({9, 5});
  Argument<int32_t> counts = Tensor<int32_t>({2}, {3, 4});
  Argument<int32_t> offsets = Tensor<int32_t>({3}, {0, 4, 8});
  Argument<double> weights = Tensor<double>({9});
  Argument<double> pre_act = Tensor<double>({9, 6});
  Argument<double> grad_out = Tensor<double>({9, 5});
  Argument<double> out = scribbled<double>({9, 5});
  Argument<double> out_pre_act = scribbled<double>({9, 6});
  Argument<double> out_grad = scribbled<double>({9, 5});
  Argument<double> out_grad_weights = scribbled<double>({9});

  epx_moe_ffn_config config = ffn_config(shape);
  epx_moe_ffn_params params, grads;
  epx_tensor spare{}; // a copy of a tensor in which one field is changed
  epx_moe_ffn_args fwd = {sizeof(fwd), nullptr, &params, &recv, &counts, &offsets, &weights, &out, &out_pre_act};
  epx_moe_ffn_bwd_args bwd = {sizeof(bwd), nullptr,   &params,           &recv,  &counts, &offsets, &weights, &pre_act,
                              &grad_out,   &out_grad, &out_grad_weights, &grads, 0};

  explicit FfnCalls(epx_moe_activation activation) : shape{2, 5, 3, activation} {
    params_data = random_params<double>(shape, {}, rng);
    grads_data = scribbled_like(params_data);
    params = params_data.view();
    grads = grads_data.view();
    if (shape.gated()) return;
    pre_act.sizes[1] = out_pre_act.sizes[1] = 3;
  }
  FfnCalls(const FfnCalls&) = delete;
  FfnCalls& operator=(const FfnCalls&) = delete;

  // Replaces a member of the params or the grads by a changed copy.
  epx_tensor& replace(const epx_tensor*& member) {
    spare = *member;
    member = &spare;
    return spare;
  }

  std::string changed_output() const {
    std::string changed;
    if (out.is_written()) changed += " expert_out";
    if (out_pre_act.is_written()) changed += " pre_act";
    if (out_grad.is_written()) changed += " grad_recv";
    if (out_grad_weights.is_written()) changed += " grad_recv_weights";
    const FfnParams<double> untouched = scribbled_like(grads_data);
    for_each_tensor(
        [&](const char* name, const Tensor<double>& grad, const Tensor<double>& before) {
          if (!difference(grad, before).empty()) changed += std::string(" ") + name;
        },
        grads_data, untouched);
    return changed;
  }
};

using C = FfnCalls;

struct Refusal {
  std::function<void(C&)> spoil;
  std::vector<std::string> words;
  epx_moe_activation activation = EPX_MOE_SWIGLU;
};

void check_refused(const std::vector<Refusal>& table, bool backward) {
  for (size_t i = 0; i < table.size(); ++i) {
    CAPTURE(i);
    CAPTURE(backward);
    CAPTURE(table[i].words.front());
    FfnCalls calls(table[i].activation);
    table[i].spoil(calls);
    const epx_status status =
        backward ? epx_moe_ffn_bwd(&calls.config, &calls.bwd) : epx_moe_ffn(&calls.config, &calls.fwd);
    CHECK(not_refused(status, table[i].words) == "");
    CHECK(calls.changed_output() == "");
  }
}

void check_both_refuse(const std::vector<Refusal>& table) {
  check_refused(table, false);
  check_refused(table, true);
}

TEST_CASE("good calls of the FFN are not refused") {
  for (const epx_moe_activation activation : {EPX_MOE_SWIGLU, EPX_MOE_GELU}) {
    FfnCalls calls(activation);
    require_ok(epx_moe_ffn(&calls.config, &calls.fwd), "epx_moe_ffn");
    require_ok(epx_moe_ffn_bwd(&calls.config, &calls.bwd), "epx_moe_ffn_bwd");
  }
}

TEST_CASE("a bad FFN config is refused") {
  check_both_refuse({
      {[](C& c) { c.config.struct_size = 3; }, {"struct_size", "3"}},
      {[](C& c) { c.config.num_local_experts = -1; }, {"num_local_experts", "-1"}},
      {[](C& c) { c.config.hidden_dim = 0; }, {"hidden_dim", "0"}},
      {[](C& c) { c.config.ffn_dim = -7; }, {"ffn_dim", "-7"}},
      {[](C& c) { c.config.activation = static_cast<epx_moe_activation>(9); }, {"activation", "9"}},
  });
  FfnCalls calls(EPX_MOE_SWIGLU);
  CHECK(not_refused(epx_moe_ffn(nullptr, &calls.fwd), {"config", "NULL"}) == "");
  CHECK(not_refused(epx_moe_ffn(&calls.config, nullptr), {"args", "NULL"}) == "");
  CHECK(not_refused(epx_moe_ffn_bwd(nullptr, &calls.bwd), {"config", "NULL"}) == "");
  CHECK(not_refused(epx_moe_ffn_bwd(&calls.config, nullptr), {"args", "NULL"}) == "");
}

TEST_CASE("parameters that do not fit together are refused") {
  check_both_refuse({
      {[](C& c) { c.fwd.params = c.bwd.params = nullptr; }, {"params", "NULL"}},
      {[](C& c) { c.params.struct_size = 4; }, {"struct_size", "4"}},
      {[](C& c) { c.params.gate_up_weight = c.stacked_data.gate_up_weight->get(); }, {"gate_up_weight", "gate_weight"}},
      {[](C& c) {
         c.params.gate_up_weight = c.stacked_data.gate_up_weight->get();
         c.params.gate_weight = nullptr;
       },
       {"gate_up_weight", "up_weight"}},
      {[](C& c) { c.params.gate_up_bias = c.stacked_data.gate_up_bias->get(); }, {"gate_up_bias", "gate_bias"}},
      {[](C& c) {
         c.params.gate_up_bias = c.stacked_data.gate_up_bias->get();
         c.params.gate_bias = nullptr;
       },
       {"gate_up_bias", "up_bias"}},
      {[](C& c) { c.params.gate_weight = nullptr; }, {"gate_weight"}},
      {[](C& c) { c.params.up_weight = nullptr; }, {"up_weight"}},
      {[](C& c) { c.params.gate_weight = c.params.up_weight = nullptr; }, {"gate_up_weight|gate_weight"}},
      {[](C& c) { c.params.down_weight = nullptr; }, {"down_weight"}},
      {[](C& c) { c.params.up_weight = nullptr; }, {"up_weight"}, EPX_MOE_GELU},
      {[](C& c) { c.params.gate_weight = c.params.up_weight; }, {"gate_weight", "activation|GELU|gelu"}, EPX_MOE_GELU},
      {[](C& c) { c.params.gate_bias = c.params.up_bias; }, {"gate_bias", "activation|RELU2|relu2"}, EPX_MOE_RELU2},
      {[](C& c) { c.params.gate_up_weight = c.stacked_data.gate_up_weight->get(); },
       {"gate_up_weight", "activation|GELU|gelu"},
       EPX_MOE_GELU},
      {[](C& c) { c.params.gate_up_bias = c.stacked_data.gate_up_bias->get(); },
       {"gate_up_bias", "activation|RELU2|relu2"},
       EPX_MOE_RELU2},
      {[](C& c) { c.replace(c.params.gate_weight).sizes[2] = 4; }, {"gate_weight", "4", "5"}},
      {[](C& c) { c.replace(c.params.up_weight).sizes[1] = 6; }, {"up_weight", "6", "3"}},
      {[](C& c) { c.replace(c.params.down_weight).sizes[0] = 1; }, {"down_weight", "1", "2"}},
      {[](C& c) { c.replace(c.params.down_weight).ndim = 2; }, {"down_weight", "2", "3"}},
      {[](C& c) { c.replace(c.params.up_bias).sizes[1] = 2; }, {"up_bias", "2", "3"}},
      {[](C& c) { c.replace(c.params.down_bias).sizes[1] = 3; }, {"down_bias", "3", "5"}},
      {[](C& c) { c.replace(c.params.gate_weight).dtype = EPX_FLOAT32; }, {"gate_weight", "float32", "float64"}},
      {[](C& c) { c.replace(c.params.down_bias).dtype = EPX_FLOAT32; }, {"down_bias", "float32", "float64"}},
      {[](C& c) { c.replace(c.params.up_weight).data = nullptr; }, {"up_weight", "NULL"}},
  });
}

TEST_CASE("the FFN on CUDA refuses float64") {
  const epx_moe_cuda cuda = {sizeof(cuda), nullptr, nullptr, 0, nullptr, 0, 0};
  FfnCalls calls(EPX_MOE_SWIGLU);
  calls.fwd.cuda = calls.bwd.cuda = &cuda;
  CHECK(not_refused(epx_moe_ffn(&calls.config, &calls.fwd), {"recv_tokens", "float64", "bfloat16"}) == "");
  CHECK(not_refused(epx_moe_ffn_bwd(&calls.config, &calls.bwd), {"recv_tokens", "float64", "bfloat16"}) == "");
  size_t bytes = 0;
  CHECK(not_refused(epx_moe_ffn_workspace(&calls.config, &calls.fwd, &bytes), {"recv_tokens", "float64"}) == "");
  calls.recv.dtype = EPX_FLOAT32;
  CHECK(not_refused(epx_moe_ffn_workspace(&calls.config, &calls.fwd, nullptr), {"bytes", "NULL"}) == "");
  CHECK(epx_moe_ffn_bwd_workspace(&calls.config, &calls.bwd, &bytes) == EPX_SUCCESS);
  CHECK(bytes == 256 * (1 + 1 + 1)); // three tensors of 9 rows of at most 6 floats
  calls.recv.dtype = EPX_BFLOAT16;
  CHECK(epx_moe_ffn_bwd_workspace(&calls.config, &calls.bwd, &bytes) == EPX_SUCCESS);
  CHECK(bytes == 256 * (1 + 1 + 1)); // 5 elements of a row are too few for tensor cores
  calls.config.hidden_dim = calls.recv.sizes[1] = calls.config.ffn_dim = 8;
  CHECK(epx_moe_ffn_bwd_workspace(&calls.config, &calls.bwd, &bytes) == EPX_SUCCESS);
  CHECK(bytes == 256 * (1 + 1 + 2) + 144 * 5 * 128 + 256);
  CHECK(calls.changed_output() == "");
}

TEST_CASE("rows and zones that do not fit are refused") {
  check_both_refuse({
      {[](C& c) { c.fwd.struct_size = c.bwd.struct_size = 9; }, {"struct_size", "9"}},
      {[](C& c) { c.fwd.cuda = c.bwd.cuda = &kBadCuda; }, {"cuda.struct_size", "3"}},
      {[](C& c) { c.fwd.recv_tokens = c.bwd.recv_tokens = nullptr; }, {"recv_tokens", "NULL"}},
      {[](C& c) { c.fwd.counts = c.bwd.counts = nullptr; }, {"counts", "NULL"}},
      {[](C& c) { c.fwd.offsets = c.bwd.offsets = nullptr; }, {"offsets", "NULL"}},
      {[](C& c) { c.recv.dtype = EPX_BFLOAT16; }, {"recv_tokens", "bfloat16"}},
      {[](C& c) { c.recv.sizes[1] = 4; }, {"recv_tokens", "4", "5"}},
      {[](C& c) { c.counts.sizes[0] = 1; }, {"counts", "1", "2"}},
      {[](C& c) { c.counts.dtype = EPX_FLOAT32; }, {"counts", "float32"}},
      {[](C& c) { c.offsets.sizes[0] = 2; }, {"offsets", "2", "3"}},
      {[](C& c) { c.counts.dtype = EPX_INT64; }, {"offsets", "int32", "int64"}},
      {[](C& c) { c.counts.values[1] = -1; }, {"counts", "1", "-1"}},
      {[](C& c) { c.counts.values[0] = 5; }, {"counts", "0", "5", "4"}},
      {[](C& c) { c.counts.values[1] = 5; }, {"counts", "1", "5", "8"}},
      {[](C& c) { c.offsets.values[2] = 10; }, {"offsets", "10", "9"}},
      {[](C& c) { c.offsets.values[0] = -4; }, {"offsets", "-4"}},
      {[](C& c) { c.offsets.values[1] = 9, c.counts.values[1] = 0; }, {"offsets", "9", "8"}},
      {[](C& c) { c.weights.dtype = EPX_FLOAT32; }, {"recv_weights", "float32", "float64"}},
      {[](C& c) { c.weights.sizes[0] = 8; }, {"recv_weights", "8", "9"}},
  });
  check_refused(
      {
          {[](C& c) { c.fwd.expert_out = nullptr; }, {"expert_out", "NULL"}},
          {[](C& c) { c.out.sizes[0] = 8; }, {"expert_out", "8", "9"}},
          {[](C& c) { c.out.dtype = EPX_FLOAT32; }, {"expert_out", "float32", "float64"}},
          {[](C& c) { c.out_pre_act.sizes[1] = 3; }, {"pre_act", "3", "6"}},
          {[](C& c) { c.out_pre_act.sizes[1] = 6; }, {"pre_act", "6", "3"}, EPX_MOE_GELU},
      },
      false);
}

TEST_CASE("gradients that cannot be computed are refused") {
  check_refused(
      {
          {[](C& c) { c.bwd.pre_act = nullptr; }, {"pre_act", "NULL"}},
          {[](C& c) { c.pre_act.sizes[1] = 5; }, {"pre_act", "5", "6"}},
          {[](C& c) { c.bwd.grad_expert_out = nullptr; }, {"grad_expert_out", "NULL"}},
          {[](C& c) { c.grad_out.sizes[0] = 4; }, {"grad_expert_out", "4", "9"}},
          {[](C& c) { c.bwd.grad_recv = nullptr; }, {"grad_recv", "NULL"}},
          {[](C& c) { c.out_grad.dtype = EPX_FLOAT32; }, {"grad_recv", "float32", "float64"}},
          {[](C& c) { c.bwd.recv_weights = nullptr; }, {"grad_recv_weights", "recv_weights"}},
          {[](C& c) { c.out_grad_weights.sizes[0] = 7; }, {"grad_recv_weights", "7", "9"}},
          {[](C& c) { c.bwd.accumulate = 2; }, {"accumulate", "2"}},
          {[](C& c) { c.grads.struct_size = 11; }, {"struct_size", "11"}},
          {[](C& c) { c.params.down_bias = nullptr; }, {"down_bias"}},
          {[](C& c) { c.params.up_bias = nullptr; }, {"up_bias"}},
          {[](C& c) { c.params.gate_bias = nullptr; }, {"gate_bias"}},
          {[](C& c) { c.params.up_bias = nullptr; }, {"up_bias"}, EPX_MOE_GELU},
          {[](C& c) { c.grads.gate_weight = c.grads.up_weight; }, {"gate_weight", "activation|GELU|gelu"}, EPX_MOE_GELU},
          {[](C& c) { c.replace(c.grads.down_weight).sizes[2] = 4; }, {"down_weight", "4", "3"}},
          {[](C& c) { c.replace(c.grads.up_bias).dtype = EPX_FLOAT32; }, {"up_bias", "float32", "float64"}},
      },
      true);
}

} // namespace
} // namespace epx::test
