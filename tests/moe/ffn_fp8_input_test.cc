// SPDX-License-Identifier: Apache-2.0
// Calls of the grouped FFN in FP8 with bad input are refused with a sentence that has the names and values, and write
// nothing.
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/ffn_fp8_run.h"
#include "tests/moe/refusals.h"

namespace epx::test {
namespace {

// These calls with N = 32, H = 256, F = 128, E_l = 2 are good. A case spoils one argument. T is what is wide.
template <typename T>
struct Calls {
  epx_moe_ffn_config config = ffn_config({2, 256, 128, EPX_MOE_SWIGLU});
  Argument<E4m3> gate_up = Tensor<E4m3>({2, 256, 256}), gate_up_t = Tensor<E4m3>({2, 256, 256});
  Argument<float> gate_up_scales = Tensor<float>({2, 2, 2}, 1.0f), gate_up_t_scales = Tensor<float>({2, 2, 2}, 1.0f);
  Argument<E4m3> down = Tensor<E4m3>({2, 256, 128}), down_t = Tensor<E4m3>({2, 128, 256});
  Argument<float> down_scales = Tensor<float>({2, 2, 1}, 1.0f), down_t_scales = Tensor<float>({2, 1, 2}, 1.0f);
  Argument<E4m3> tokens = Tensor<E4m3>({32, 256}), grad_out = Tensor<E4m3>({32, 256});
  Argument<float> scales = Tensor<float>({32, 2}, 1.0f), grad_scales = Tensor<float>({32, 2}, 1.0f);
  Argument<int32_t> counts = Tensor<int32_t>({2}, {3, 2});
  Argument<int32_t> offsets = Tensor<int32_t>({3}, {0, 16, 32});
  Argument<float> weights = Tensor<float>({32}, 1.0f);
  Argument<T> pre_act_in = Tensor<T>({32, 256});
  Argument<T> out = scribbled<T>({32, 256});
  Argument<T> pre_act = scribbled<T>({32, 256});
  Argument<T> grad_recv = scribbled<T>({32, 256});
  Argument<float> grad_weights = scribbled<float>({32});
  Argument<float> grad_gate_up = scribbled<float>({2, 256, 256});
  Argument<float> grad_down = scribbled<float>({2, 256, 128});

  epx_moe_fp8_params params = {sizeof(params), &gate_up,          &gate_up_scales, &down,         &down_scales,
                               &gate_up_t,     &gate_up_t_scales, &down_t,         &down_t_scales};
  epx_moe_ffn_params grads = {sizeof(grads), &grad_gate_up, nullptr, nullptr, &grad_down,
                              nullptr,       nullptr,       nullptr, nullptr};
  epx_moe_ffn_fp8_args fwd = {sizeof(fwd), nullptr, &params, &tokens, &scales, &counts, &offsets, &weights, &out, &pre_act};
  epx_moe_ffn_fp8_bwd_args bwd = {sizeof(bwd),   nullptr,  &params,     &tokens,           &scales,      &counts,
                                  &offsets,      &weights, &pre_act_in, &grad_out,         &grad_scales, &grad_recv,
                                  &grad_weights, &grads,   0,           EPX_MOE_RECIPE_FP8};

  Calls() { fwd.cuda = bwd.cuda = place_of_call(1 << 22); }
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  std::string changed_output() const {
    const bool is_written = out.is_written() || pre_act.is_written() || grad_recv.is_written() ||
                            grad_weights.is_written() || grad_gate_up.is_written() || grad_down.is_written();
    return is_written ? "an output was written" : "";
  }

  static epx_status forward(Calls& calls) { return epx_moe_ffn_fp8(&calls.config, &calls.fwd); }
  static epx_status backward(Calls& calls) { return epx_moe_ffn_fp8_bwd(&calls.config, &calls.bwd); }
};

template <typename T>
void check_good_calls() {
  Calls<T> calls;
  for (const auto call : {Calls<T>::forward, Calls<T>::backward})
    require_ok(call(calls), "the call");
  calls.bwd.recipe = EPX_MOE_RECIPE_FP8_ACTIVATIONS;
  require_ok(Calls<T>::backward(calls), "the call");
  finish_call();
}

template <typename T>
void check_refusals() {
  using C = Calls<T>;
  constexpr auto fwd = C::forward, bwd = C::backward;
  const char* const wide = sizeof(T) == 2 ? "bfloat16" : "float32";
  check_refused<C>({
      {fwd, [](C& c) { c.config.activation = EPX_MOE_GELU; }, {"activation", "1", "SWIGLU"}},
      {fwd, [](C& c) { c.config.hidden_dim = 200; }, {"hidden_dim", "200", "128"}},
      {bwd, [](C& c) { c.config.ffn_dim = 64; }, {"ffn_dim", "64", "128"}},
      {fwd, [](C& c) { c.tokens.sizes[0] = 24; }, {"recv_tokens", "24", "16"}},
      {fwd, [](C& c) { c.tokens.dtype = EPX_FLOAT8_E5M2; }, {"recv_tokens", "float8_e4m3", "float8_e5m2"}},
      {fwd, [](C& c) { c.fwd.recv_scales = nullptr; }, {"recv_scales", "NULL"}},
      {fwd, [](C& c) { c.scales.sizes[1] = 1; }, {"recv_scales", "H / 128", "2"}},
      {fwd, [](C& c) { c.fwd.params = nullptr; }, {"params", "NULL"}},
      {fwd, [](C& c) { c.params.struct_size = 8; }, {"params", "struct_size", "8"}},
      {fwd, [](C& c) { c.params.gate_up_codes = nullptr; }, {"params.gate_up_codes", "NULL"}},
      {fwd, [](C& c) { c.gate_up.dtype = EPX_BFLOAT16; }, {"params.gate_up_codes", "bfloat16"}},
      {fwd, [](C& c) { c.gate_up_scales.sizes[1] = 1; }, {"params.gate_up_scales", "2F / 128", "2"}},
      {fwd, [](C& c) { c.params.down_scales = nullptr; }, {"params.down_scales", "NULL"}},
      {fwd, [](C& c) { c.down.sizes[2] = 256; }, {"params.down_codes", "F", "128"}},
      {fwd, [](C& c) { c.counts.sizes[0] = 3; }, {"counts", "E_l", "2"}},
      {fwd, [](C& c) { c.weights.sizes[0] = 31; }, {"recv_weights", "31", "32"}},
      {fwd, [](C& c) { c.out.dtype = EPX_FLOAT16; }, {"expert_out", wide, "float16"}},
      {fwd, [](C& c) { c.pre_act.sizes[1] = 128; }, {"pre_act", "2F", "256"}},
      {bwd, [](C& c) { c.bwd.recipe = EPX_MOE_RECIPE_WIDE; }, {"recipe", "0"}},
      {bwd, [](C& c) { c.bwd.recipe = static_cast<epx_moe_recipe>(3); }, {"recipe", "3"}},
      {bwd, [](C& c) { c.params.gate_up_transposed_codes = nullptr; }, {"params.gate_up_transposed_codes", "NULL"}},
      {bwd, [](C& c) { c.params.down_transposed_scales = nullptr; }, {"params.down_transposed_scales", "NULL"}},
      {bwd, [](C& c) { c.bwd.grad_scales = nullptr; }, {"grad_scales", "NULL"}},
      {bwd, [](C& c) { c.grad_out.dtype = EPX_BFLOAT16; }, {"grad_expert_out", "float8_e4m3"}},
      {bwd, [](C& c) { c.bwd.pre_act = nullptr; }, {"pre_act", "NULL"}},
      {bwd, [](C& c) { c.grad_recv.dtype = EPX_FLOAT16; }, {"grad_recv", wide}},
      {bwd, [](C& c) { c.bwd.recv_weights = nullptr; }, {"grad_recv_weights", "recv_weights"}},
      {bwd, [](C& c) { c.bwd.accumulate = 2; }, {"accumulate", "2"}},
      {bwd,
       [](C& c) { c.grads.gate_up_weight = nullptr, c.grads.up_weight = &c.grad_down; },
       {"grads.up_weight", "stacked"}},
      {bwd, [](C& c) { c.grads.down_bias = &c.grad_down; }, {"grads.down_bias", "no biases"}},
      {bwd, [](C& c) { c.grad_down.dtype = EPX_FLOAT16; }, {"grads.down_weight", "float16"}},
      {bwd, [](C& c) { c.grad_gate_up.dtype = EPX_BFLOAT16, c.bwd.accumulate = 1; }, {"grads.gate_up_weight", "bfloat16"}},
  });
}

TEST_CASE("good calls of the grouped FFN in FP8 are not refused") {
  on_cuda() ? check_good_calls<Bfloat16>() : check_good_calls<float>();
}

TEST_CASE("bad arguments of the grouped FFN in FP8 are refused") {
  on_cuda() ? check_refusals<Bfloat16>() : check_refusals<float>();
}

// The host looks at zones before it writes, and a GPU reports them.
TEST_CASE("bad zones of the grouped FFN in FP8 are refused, or reported") {
  if (on_cuda()) {
    Calls<Bfloat16> calls;
    calls.offsets.values[1] = 17;
    calls.offsets.data = calls.offsets.values.get()->data; // copies them to the device
    require_ok(Calls<Bfloat16>::forward(calls), "the forward");
    CHECK(take_report().num_errors == 0);
    require_ok(Calls<Bfloat16>::backward(calls), "the backward");
    const Report report = take_report();
    CHECK(report.num_errors == 1);
    CHECK(report.first.kind == EPX_MOE_ERROR_ZONE_ALIGNMENT);
    CHECK(report.first.op == EPX_MOE_OP_FFN_FP8_BWD);
    CHECK(report.first.i == 1);
    CHECK(report.first.value == 17);
    CHECK(report.first.limit == 16);
    return;
  }
  using C = Calls<float>;
  check_refused<C>({
      {C::forward, [](C& c) { c.counts.values[0] = 17; }, {"counts[0]", "17", "16"}},
      {C::backward, [](C& c) { c.offsets.values[2] = 48; }, {"offsets[2]", "48", "32"}},
      {C::backward, [](C& c) { c.offsets.values[1] = 17; }, {"offsets[1]", "17", "multiples of 16"}},
  });
  C calls;
  calls.offsets.values[1] = 17;
  require_ok(C::forward(calls), "a forward, which reads no columns");
  calls.bwd.recipe = EPX_MOE_RECIPE_FP8_ACTIVATIONS;
  require_ok(C::backward(calls), "a backward that multiplies wide rows");
}

} // namespace
} // namespace epx::test
