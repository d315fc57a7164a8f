// SPDX-License-Identifier: Apache-2.0
// The grouped FFN on CUDA in BFLOAT16 with shapes that tensor cores can take, on GPUs that have them: against the host's in
// float64, and bits that depend on nothing but a zone's own rows.
#include <limits>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include "tests/moe/ffn_cuda_run.h"

namespace epx::test {
namespace {

constexpr double kTolerance = 2e-2;

template <typename G>
using Case = FfnCase<Bfloat16, G>;

TEST_CASE("the FFN on tensor cores computes what the host does in float64") {
  for (uint64_t seed = 300; seed < 300 + num_cases(30); ++seed) {
    CAPTURE(seed);
    CHECK(ffn_fault<Bfloat16, float>(seed, kTolerance, CaseShapes::tensor_cores) == "");
    CHECK(ffn_fault<Bfloat16, Bfloat16>(seed, kTolerance, CaseShapes::tensor_cores) == "");
  }
}

TEST_CASE("one expert has all rows, or nobody has any") {
  for (const auto& counts : {std::vector<int32_t>{0, 777, 0}, std::vector<int32_t>{0, 0}, std::vector<int32_t>(70, 3)})
    for (const bool accumulate : {false, true}) {
      CAPTURE(counts.size());
      CAPTURE(accumulate);
      Case<float> c(350, CaseShapes::tensor_cores);
      c.accumulate = accumulate;
      c.fill(counts, 1, 0);
      CHECK(result_fault(c, run_on_cuda(c, 0), kTolerance) == "");
    }
}

TEST_CASE("the FFN on tensor cores has the same bits on any number of SMs, and every time") {
  for (uint64_t seed = 400; seed < 406; ++seed) {
    CAPTURE(seed);
    const Case<float> c(seed, CaseShapes::tensor_cores);
    const auto expected = run_on_cuda(c, 0);
    for (const int num_sms : {16, 3, 1, 0}) {
      CAPTURE(num_sms);
      CHECK(bits_fault(run_on_cuda(c, num_sms), expected) == "");
    }
  }
}

// Copies expert's rows from the zones of one case to those of another one.
template <typename T>
void copy_zone(int expert, const Zones& from_zones, const Tensor<T>& from, const Zones& to_zones, Tensor<T>& to) {
  for (int64_t i = 0; i < from_zones.counts[expert] * from.per_row(); ++i)
    to[to_zones.offsets[expert] * to.per_row() + i] = from[from_zones.offsets[expert] * from.per_row() + i];
}

TEST_CASE("what a zone's results are does not depend on the other zones") {
  for (uint64_t seed = 500; seed < 506; ++seed) {
    CAPTURE(seed);
    Case<float> c(seed, CaseShapes::tensor_cores);
    c.fill({64, 131, 0, 300}, 4, 2);
    Case<float> moved = c;
    moved.fill({0, 131, 901, 300}, 1, 0);
    moved.params = c.params;
    moved.first_grads = c.first_grads;
    for (const int expert : {1, 3}) {
      copy_zone(expert, c.zones, c.recv_tokens, moved.zones, moved.recv_tokens);
      copy_zone(expert, c.zones, c.grad_out, moved.zones, moved.grad_out);
      copy_zone(expert, c.zones, c.weights, moved.zones, moved.weights);
    }
    const auto expected = run_on_cuda(c, 0);
    auto actual = run_on_cuda(moved, 0);
    Result<Bfloat16, float> in_place = expected; // with the rows of both experts from `actual`
    for (const int expert : {1, 3}) {
      copy_zone(expert, moved.zones, actual.expert_out, c.zones, in_place.expert_out);
      copy_zone(expert, moved.zones, actual.pre_act, c.zones, in_place.pre_act);
      copy_zone(expert, moved.zones, actual.grad_recv, c.zones, in_place.grad_recv);
      copy_zone(expert, moved.zones, actual.grad_weights, c.zones, in_place.grad_weights);
      for_each_tensor(
          [&](const char*, Tensor<float>& to, const Tensor<float>& from) {
            for (int64_t i = 0; i < to.per_row(); ++i)
              to(expert, i) = from(expert, i);
          },
          in_place.grads, actual.grads);
    }
    CHECK(bits_fault(in_place, expected) == "");
  }
}

TEST_CASE("gate and up have the same gradients whether they are stacked or separate") {
  Case<float> c(600, CaseShapes::tensor_cores);
  c.shape.activation = EPX_MOE_SWIGLU;
  c.form = kNoBias;
  c.fill({65, 0, 200}, 1, 1);
  Case<float> stacked = c;
  stacked.params.gate_weight.reset();
  stacked.params.up_weight.reset();
  auto& both = stacked.params.gate_up_weight.emplace(
      Tensor<Bfloat16>({c.shape.num_experts, int64_t{2} * c.shape.ffn, c.shape.hidden}));
  for (int64_t e = 0; e < c.shape.num_experts; ++e)
    for (int64_t i = 0, half = c.params.gate_weight->per_row(); i < half; ++i) {
      both(e, i) = (*c.params.gate_weight)(e, i);
      both(e, half + i) = (*c.params.up_weight)(e, i);
    }
  const auto separate = run_on_cuda(c, 0);
  auto actual = run_on_cuda(stacked, 0);
  CHECK(result_fault(stacked, actual, kTolerance) == "");
  actual.grad_recv = separate.grad_recv; // is rounded twice with separate tensors
  CHECK(bits_fault(actual, separate) == "");
}

TEST_CASE("zones of any values are reported, and nothing beyond the tensors is read or written on tensor cores") {
  Rng rng(78);
  for (int repeat = 0; repeat < 20; ++repeat) {
    CAPTURE(repeat);
    Case<float> c(700, CaseShapes::tensor_cores);
    c.fill({70, 0, 9}, 4, 2);
    const auto noise = rng.pick<int32_t>({-1, 1 << 30, std::numeric_limits<int32_t>::min(), 200});
    const bool is_count = rng.chance(50);
    const int64_t at = rng.below(is_count ? 3 : 4);
    (is_count ? c.zones.counts : c.zones.offsets)[at] = noise;
    CHECK_THROWS_WITH(run_on_cuda(c, 0), doctest::Contains(is_count ? "counts[" : "s["));
  }
}

void require_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

TEST_CASE("calls that are captured in a graph follow the zones") {
  Case<float> c(900, CaseShapes::tensor_cores);
  c.accumulate = false;
  c.fill({300, 64, 0, 65}, 1, 100);
  Result<Bfloat16, float> result(c);
  FfnCalls<Bfloat16, float> calls(c, result);
  epx_moe_cuda place = *place_of_call();
  size_t fwd_bytes = 0, bwd_bytes = 0;
  require_ok(epx_moe_ffn_workspace(&calls.config, &calls.fwd, &fwd_bytes), "epx_moe_ffn_workspace");
  require_ok(epx_moe_ffn_bwd_workspace(&calls.config, &calls.bwd, &bwd_bytes), "epx_moe_ffn_bwd_workspace");
  Tensor<uint8_t> workspace({static_cast<int64_t>(std::max(fwd_bytes, bwd_bytes))});
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  place.stream = stream;
  place.workspace = address_for_call(&workspace[0]);
  place.workspace_bytes = static_cast<size_t>(workspace.count());
  calls.fwd.cuda = calls.bwd.cuda = &place;

  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  require_ok(epx_moe_ffn(&calls.config, &calls.fwd), "epx_moe_ffn");
  require_ok(epx_moe_ffn_bwd(&calls.config, &calls.bwd), "epx_moe_ffn_bwd");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  require_cuda(cudaStreamEndCapture(stream, &graph));
  require_cuda(cudaGraphInstantiate(&exec, graph, 0));

  for (const auto& counts : {std::vector<int32_t>{300, 64, 0, 65}, {0, 1, 400, 0}, {0, 0, 0, 0}, {129, 129, 129, 129}}) {
    CAPTURE(counts);
    // The captured calls read the tensors of `c`, whose memory stays where it is.
    Zones zones = make_zones(counts, 1, c.zones.num_rows - (counts[0] + counts[1] + counts[2] + counts[3]));
    for (int64_t e = 0; e < 4; ++e)
      c.zones.counts[e] = zones.counts[e];
    for (int64_t e = 0; e <= 4; ++e)
      c.zones.offsets[e] = zones.offsets[e];
    c.zones.row_expert = zones.row_expert;
    for (auto* const rows : {&c.recv_tokens, &c.grad_out}) {
      for (int64_t i = 0; i < rows->count(); ++i)
        (*rows)[i] = Bfloat16(uniform(c.rng));
      fill_unused(c.zones, *rows, Bfloat16(kNaN));
    }
    for (int64_t i = 0; i < c.weights.count(); ++i)
      c.weights[i] = static_cast<float>(uniform(c.rng));
    for (auto* const output : {&result.expert_out, &result.pre_act, &result.grad_recv})
      output->scribble();
    result.grad_weights.scribble();
    for_each_tensor([](const char*, Tensor<float>& grad) { grad.scribble(); }, result.grads);
    copy_to_device();
    require_cuda(cudaGraphLaunch(exec, stream));
    require_cuda(cudaStreamSynchronize(stream));
    CHECK(take_report().num_errors == 0);
    CHECK(result_fault(c, result, kTolerance) == "");
    CHECK(bits_fault(result, run_on_cuda(c, 0)) == "");
  }
  require_cuda(cudaGraphExecDestroy(exec));
  require_cuda(cudaGraphDestroy(graph));
  require_cuda(cudaStreamDestroy(stream));
}

} // namespace
} // namespace epx::test
