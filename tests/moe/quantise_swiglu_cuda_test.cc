// SPDX-License-Identifier: Apache-2.0
// SwiGLU's quantisers on CUDA: graphs, zones of any values, and tensors that do not do.
#include <cstddef>
#include <limits>
#include <string>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include "tests/moe/quantise_swiglu_run.h"

namespace epx::test {
namespace {

TEST_CASE("zones of any values are reported by SwiGLU's quantisers, and nothing beyond the tensors is read or written") {
  Rng rng(601); // main() looks at the guards
  for (int repeat = 0; repeat < 20; ++repeat) {
    CAPTURE(repeat);
    Zones zones = make_zones({5, 0, 140}, 16, 2);
    const SwigluInput input = random_swiglu_input(zones, 128, true, 0, rng);
    const auto noise = rng.pick<int32_t>({-1, 1 << 30, std::numeric_limits<int32_t>::min(), 400});
    const bool is_count = rng.chance(50);
    const int64_t at = rng.below(is_count ? 3 : 4);
    (is_count ? zones.counts : zones.offsets)[at] = noise;
    const QuantiseFormat format = random_format(rng);
    const char* const words = is_count ? "counts[" : "s[";
    CHECK_THROWS_WITH(run_swiglu(format, input, zones, Wanted::both), doctest::Contains(words));
    CHECK_THROWS_WITH(run_swiglu_bwd(format, input, zones, {}), doctest::Contains(words));
  }
}

// A call on tensors that are a row longer than it says, so that a view can be shifted.
TEST_CASE("tensors of SwiGLU's quantisers that are not aligned to 16 bytes are refused") {
  const Tensor<float> pre_act({3, 256}), grad_h({3, 128});
  const Tensor<uint8_t> codes({3, 256}), columns({256, 3}), h_columns({128, 3});
  const Tensor<float> scales({2, 2}), column_scales({1, 256}), h_scales({1, 128});
  const epx_row_format format = QuantiseFormat().get();
  const epx_tensor act = view_as(pre_act, EPX_FLOAT32, {2, 256}), grad = view_as(grad_h, EPX_FLOAT32, {2, 128});
  const epx_tensor row_codes = view_as(codes, EPX_FLOAT8_E4M3, {2, 256});
  const epx_tensor column_codes = view_as(columns, EPX_FLOAT8_E4M3, {256, 2});
  const epx_tensor h_codes = view_as(h_columns, EPX_FLOAT8_E4M3, {128, 2});
  epx_moe_quantise_swiglu_bwd_args good = {};
  good.struct_size = sizeof(good);
  good.format = &format;
  good.pre_act = &act;
  good.grad_h = &grad;
  good.row_codes = &row_codes;
  good.row_scales = scales.get();
  good.column_codes = &column_codes;
  good.column_scales = column_scales.get();
  good.h_column_codes = &h_codes;
  good.h_column_scales = h_scales.get();
  good.cuda = place_of_call();
  using Args = epx_moe_quantise_swiglu_bwd_args;
  const auto fault_of = [&](const epx_tensor* Args::*member, const char* name) {
    epx_tensor moved = *(good.*member);
    moved.data = static_cast<std::byte*>(moved.data) + 8;
    Args args = good;
    args.*member = &moved;
    return not_refused(epx_moe_quantise_swiglu_bwd(&args), {std::string(name) + " is at", "aligned to 16 bytes"});
  };
  CHECK(fault_of(&Args::pre_act, "pre_act") == "");
  CHECK(fault_of(&Args::grad_h, "grad_h") == "");
  CHECK(fault_of(&Args::row_codes, "row_codes") == "");
  CHECK(fault_of(&Args::column_codes, "column_codes") == "");
  CHECK(fault_of(&Args::h_column_codes, "h_column_codes") == "");
  const epx_tensor h_row_codes = view_as(codes, EPX_FLOAT8_E4M3, {2, 128});
  epx_tensor moved = h_row_codes;
  moved.data = static_cast<std::byte*>(moved.data) + 8;
  const epx_tensor h_row_scales = view_as(scales, EPX_FLOAT32, {2, 1});
  const epx_moe_quantise_swiglu_args forward = {sizeof(forward), good.cuda, &format,       &act,    nullptr, nullptr,
                                                nullptr,         &moved,    &h_row_scales, nullptr, nullptr};
  CHECK(not_refused(epx_moe_quantise_swiglu(&forward), {"row_codes is at", "aligned to 16 bytes"}) == "");
}

TEST_CASE("SwiGLU's quantisers that are captured in a graph follow their input") {
  Rng rng(602);
  const auto require_cuda = [](cudaError_t error) { REQUIRE(error == cudaSuccess); };
  const Zones zones = make_zones({130, 0, 3}, 16, 8);
  SwigluInput input = random_swiglu_input(zones, 128, true, 0, rng);
  const QuantiseFormat format;
  SwigluOutputs outputs(format, zones, 128);
  const epx_row_format row_format = format.get();
  const epx_tensor codes = view_as(outputs.h.column_codes, EPX_FLOAT8_E4M3, {128, zones.num_rows});
  Tensor<uint8_t> scratch({zones.num_rows * 4});
  epx_moe_cuda place = *place_of_call();
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  place.stream = stream;
  place.workspace = address_for_call(&scratch[0]);
  place.workspace_bytes = static_cast<size_t>(scratch.count());
  epx_moe_quantise_swiglu_bwd_args args = {};
  set_input(input, zones, args);
  args.cuda = &place;
  args.format = &row_format;
  args.grad_h = input.grad_h.get();
  args.h_column_codes = &codes;
  args.h_column_scales = outputs.h.column_scales.get();
  args.grad_recv_weights = outputs.grad_recv_weights.get();
  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  require_ok(epx_moe_quantise_swiglu_bwd(&args), "epx_moe_quantise_swiglu_bwd");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  require_cuda(cudaStreamEndCapture(stream, &graph));
  require_cuda(cudaGraphInstantiate(&exec, graph, 0));
  for (int replay = 0; replay < 2; ++replay) {
    CAPTURE(replay);
    for (int64_t i = 0; i < input.pre_act.count(); ++i)
      input.pre_act[i] = Bfloat16(uniform(rng));
    outputs.h.column_codes.scribble();
    outputs.h.column_scales.scribble();
    outputs.grad_recv_weights.scribble();
    copy_to_device();
    require_cuda(cudaGraphLaunch(exec, stream));
    require_cuda(cudaStreamSynchronize(stream));
    CHECK(take_report().num_errors == 0);
    const SwigluOutputs expected = run_swiglu_bwd(format, input, zones, {{}, true, true});
    CHECK(outputs.h.difference_to(expected.h) == "");
    CHECK(difference(outputs.grad_recv_weights, expected.grad_recv_weights) == "");
  }
  require_cuda(cudaGraphExecDestroy(exec));
  require_cuda(cudaGraphDestroy(graph));
  require_cuda(cudaStreamDestroy(stream));
}

} // namespace
} // namespace epx::test
