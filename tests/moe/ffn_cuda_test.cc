// SPDX-License-Identifier: Apache-2.0
// The grouped FFN on CUDA against the host's in float64: random shapes in every dtype, bits that do not depend on the number of
// SMs, and zones of any values.
#include <limits>

#include <doctest/doctest.h>

#include "tests/moe/ffn_cuda_run.h"

namespace epx::test {
namespace {

TEST_CASE("the FFN on CUDA computes what the host does in float64") {
  for (uint64_t seed = 0; seed < num_cases(50); ++seed) {
    CAPTURE(seed);
    CHECK(ffn_fault<float, float>(seed, 1e-5) == "");
    CHECK(ffn_fault<Bfloat16, float>(seed, 2e-2) == "");
    CHECK(ffn_fault<Bfloat16, Bfloat16>(seed, 2e-2) == "");
    CHECK(ffn_fault<Float16, float>(seed, 3e-3) == "");
  }
}

TEST_CASE("the FFN has the same bits on any number of SMs") {
  for (uint64_t seed = 100; seed < 110; ++seed) {
    CAPTURE(seed);
    const FfnCase<Bfloat16, float> c(seed);
    CHECK(bits_fault(run_on_cuda(c, 1), run_on_cuda(c, 0)) == "");
  }
}

TEST_CASE("zones of any values are reported, and nothing beyond the tensors is read or written") {
  Rng rng(77);
  for (int repeat = 0; repeat < 30; ++repeat) {
    CAPTURE(repeat);
    FfnCase<float, float> c(200);
    c.shape.activation = EPX_MOE_SWIGLU;
    c.fill({5, 0, 9}, 4, 2);
    const auto noise = rng.pick<int32_t>({-1, 1 << 30, std::numeric_limits<int32_t>::min(), 200});
    const bool is_count = rng.chance(50);
    const int64_t at = rng.below(is_count ? 3 : 4);
    (is_count ? c.zones.counts : c.zones.offsets)[at] = noise;
    CHECK_THROWS_WITH(run_on_cuda(c, 0), doctest::Contains(is_count ? "counts[" : "s["));
  }
}

TEST_CASE("tensors that tensor cores cannot take are refused") {
  using Calls = FfnCalls<Bfloat16, float>;
  const auto fault_of = [](const std::string& name, const epx_tensor*& (*tensor_of)(Calls&), bool is_bwd = false) {
    FfnCase<Bfloat16, float> c(800, CaseShapes::tensor_cores);
    c.shape.activation = EPX_MOE_GELU;
    c.fill({70, 9}, 1, 0);
    Result<Bfloat16, float> result(c);
    Calls calls(c, result);
    calls.fwd.cuda = place_of_call(epx_moe_ffn_workspace, &calls.config, &calls.fwd);
    if (is_bwd) calls.bwd.cuda = place_of_call(epx_moe_ffn_bwd_workspace, &calls.config, &calls.bwd);
    const epx_tensor*& tensor = tensor_of(calls);
    epx_tensor moved = *tensor;
    moved.data = static_cast<std::byte*>(moved.data) + 8;
    tensor = &moved;
    return not_refused(is_bwd ? epx_moe_ffn_bwd(&calls.config, &calls.bwd) : epx_moe_ffn(&calls.config, &calls.fwd),
                       {name + " is at", "aligned to 16 bytes"});
  };
  using Member = const epx_tensor*&;
  CHECK(fault_of("recv_tokens", [](Calls& c) -> Member { return c.fwd.recv_tokens; }) == "");
  CHECK(fault_of("expert_out", [](Calls& c) -> Member { return c.fwd.expert_out; }) == "");
  CHECK(fault_of("pre_act", [](Calls& c) -> Member { return c.fwd.pre_act; }) == "");
  CHECK(fault_of("params.up_weight", [](Calls& c) -> Member { return c.params.up_weight; }) == "");
  CHECK(fault_of("params.down_weight", [](Calls& c) -> Member { return c.params.down_weight; }) == "");
  CHECK(fault_of(
            "grad_expert_out", [](Calls& c) -> Member { return c.bwd.grad_expert_out; }, true) == "");
  CHECK(fault_of(
            "grad_recv", [](Calls& c) -> Member { return c.bwd.grad_recv; }, true) == "");
  CHECK(fault_of(
            "grads.up_weight", [](Calls& c) -> Member { return c.grads.up_weight; }, true) == "");
}

} // namespace
} // namespace epx::test
