// SPDX-License-Identifier: Apache-2.0
// The quantisers on CUDA: the bits of the host on any number of SMs, graphs, zones of any values, and tensors that do not do.
#include <cstddef>
#include <limits>
#include <string>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include "tests/moe/ffn_fp8_run.h"
#include "tests/moe/quantise_run.h"

namespace epx::test {
namespace {

TEST_CASE("quantised rows and weights have the bits of the host on any number of SMs") {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    CAPTURE(seed);
    Rng rng(mix(seed, 0x5a5));
    QuantiseFormat format = random_format(rng);
    const Zones zones = random_quantise_zones(rng);
    const auto rows = random_rows<Bfloat16>({zones.num_rows, 256}, 256, rng);
    const auto weights = random_rows<float>({2, 128, 256}, 4096, rng);
    for (const int num_sms : {1, 3, 0}) {
      QuantisedRows outputs(format, zones.num_rows, 256, zones.counts.count());
      QuantiseRowsCall call(format, input_of(rows), &zones, outputs);
      epx_moe_cuda place = *call.args.cuda;
      place.num_sms = num_sms;
      call.args.cuda = &place;
      require_ok(epx_moe_quantise_rows(&call.args), "epx_moe_quantise_rows");
      finish_call();
      const OnHost host;
      CHECK(outputs.difference_to(run_quantise_rows(format, rows, &zones)) == "");
    }
    format.layout = EPX_SCALES_ROWS;
    const QuantisedWeights on_cuda = run_quantise_weights(format, weights);
    const OnHost host;
    CHECK(on_cuda.difference_to(run_quantise_weights(format, weights)) == "");
  }
}

TEST_CASE("transposed weights have the bits of quantised ones on any number of SMs") {
  Rng rng(403);
  const Fp8Params expected = quantised_params(random_params<float>({2, 256, 384, EPX_MOE_SWIGLU}, kStacked, rng));
  for (const int num_sms : {1, 3, 0}) {
    CAPTURE(num_sms);
    Fp8Params made = expected;
    made.scribble_transposes();
    const epx_moe_fp8_params view = made.view();
    epx_moe_cuda place = *place_of_call();
    place.num_sms = num_sms;
    const epx_moe_transpose_params_args args = {sizeof(args), &place, &view};
    require_ok(epx_moe_transpose_params(&args), "epx_moe_transpose_params");
    finish_call();
    CHECK(made.difference_to(expected) == "");
  }
}

TEST_CASE("quantisers that are captured in a graph follow their input") {
  Rng rng(401);
  const auto require_cuda = [](cudaError_t error) { REQUIRE(error == cudaSuccess); };
  Zones zones = make_zones({130, 0, 3}, 16, 40);
  const QuantiseFormat format;
  Tensor<float> rows({zones.num_rows, 128}), weights({1, 128, 128});
  QuantisedRows outputs(format, zones.num_rows, 128, 3);
  QuantisedWeights quantised(1, 128, 128);
  QuantiseRowsCall call(format, input_of(rows), &zones, outputs);
  epx_moe_quantise_weights_args of_weights = {};
  const epx_tensor codes = view_as(quantised.codes, EPX_FLOAT8_E4M3, {1, 128, 128});
  const epx_tensor transposed = view_as(quantised.transposed_codes, EPX_FLOAT8_E4M3, {1, 128, 128});
  epx_moe_cuda place = *call.args.cuda;
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  place.stream = stream;
  call.args.cuda = &place;
  of_weights = {sizeof(of_weights),
                &place,
                &call.format,
                weights.get(),
                &codes,
                quantised.scales.get(),
                &transposed,
                quantised.transposed_scales.get(),
                nullptr,
                nullptr};

  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  require_ok(epx_moe_quantise_rows(&call.args), "epx_moe_quantise_rows");
  require_ok(epx_moe_quantise_weights(&of_weights), "epx_moe_quantise_weights");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  require_cuda(cudaStreamEndCapture(stream, &graph));
  require_cuda(cudaGraphInstantiate(&exec, graph, 0));
  for (int replay = 0; replay < 3; ++replay) {
    CAPTURE(replay);
    for (int64_t i = 0; i < rows.count(); ++i)
      rows[i] = static_cast<float>(uniform(rng));
    for (int64_t i = 0; i < weights.count(); ++i)
      weights[i] = static_cast<float>(uniform(rng));
    zones.counts[0] = 130 - replay; // the zones lie in device memory, too
    for (auto* const output :
         {&outputs.row_codes, &outputs.row_scales, &outputs.column_codes, &quantised.codes, &quantised.transposed_codes})
      output->scribble();
    for (auto* const output : {&outputs.column_scales, &quantised.scales, &quantised.transposed_scales})
      output->scribble();
    copy_to_device();
    require_cuda(cudaGraphLaunch(exec, stream));
    require_cuda(cudaStreamSynchronize(stream));
    CHECK(take_report().num_errors == 0);
    const OnHost host;
    CHECK(outputs.difference_to(run_quantise_rows(format, rows, &zones)) == "");
    CHECK(quantised.difference_to(run_quantise_weights(format, weights)) == "");
  }
  require_cuda(cudaGraphExecDestroy(exec));
  require_cuda(cudaGraphDestroy(graph));
  require_cuda(cudaStreamDestroy(stream));
}

TEST_CASE(
    "zones of any values are reported, and nothing beyond the tensors is read or written") { // main() looks at the guards
  Rng rng(402);
  for (int repeat = 0; repeat < 30; ++repeat) {
    CAPTURE(repeat);
    const Zones good = make_zones({5, 0, 140}, 16, 2);
    const auto rows = random_rows<Bfloat16>({good.num_rows, 128}, 128, rng);
    Zones zones = good;
    const auto noise = rng.pick<int32_t>({-1, 1 << 30, std::numeric_limits<int32_t>::min(), 400});
    const bool is_count = rng.chance(50);
    const int64_t at = rng.below(is_count ? 3 : 4);
    (is_count ? zones.counts : zones.offsets)[at] = noise;
    const QuantiseFormat format = random_format(rng);
    CHECK_THROWS_WITH(run_quantise_rows(format, rows, &zones), doctest::Contains(is_count ? "counts[" : "s["));
  }
  const Zones zones = make_zones({5, 2}, 1, 0);
  Zones bad = zones;
  bad.counts[0] = 6;
  const auto rows = random_rows<float>({7, 128}, 128, rng);
  const QuantisedRows outputs({}, 7, 128, 2);
  const QuantiseRowsCall call({}, input_of(rows), &bad, outputs);
  require_ok(epx_moe_quantise_rows(&call.args), "epx_moe_quantise_rows");
  const Report report = take_report();
  CHECK(report.num_errors == 1);
  CHECK(report.first.op == EPX_MOE_OP_QUANTISE_ROWS);
  CHECK(report.first.kind == EPX_MOE_ERROR_ZONE_COUNT);
  CHECK(std::string(report.first.message) == "epx_moe_quantise_rows: counts[0] is 6; its zone has 5 rows");
}

TEST_CASE("tensors of a quantiser that are not aligned to 16 bytes are refused") {
  const Zones zones = make_zones({2}, 1, 0);
  const Tensor<float> rows({3, 128}), weights({2, 128, 128}); // a row more than is used, so that a shifted view fits
  const QuantiseFormat format;
  const QuantisedRows outputs(format, 3, 128, 1);
  const auto shifted = [](epx_tensor tensor) {
    tensor.data = static_cast<std::byte*>(tensor.data) + 4;
    return tensor;
  };
  QuantiseRowsCall call(format, input_of(rows), nullptr, outputs);
  const epx_moe_quantise_rows_args good = call.args;
  const auto rows_fault = [&](const epx_tensor* epx_moe_quantise_rows_args::*member, const char* name) {
    const epx_tensor moved = shifted(*(good.*member));
    call.args = good;
    call.args.*member = &moved;
    return not_refused(epx_moe_quantise_rows(&call.args), {std::string(name) + " is at", "aligned to 16 bytes"});
  };
  CHECK(rows_fault(&epx_moe_quantise_rows_args::rows, "rows") == "");
  CHECK(rows_fault(&epx_moe_quantise_rows_args::row_codes, "row_codes") == "");
  CHECK(rows_fault(&epx_moe_quantise_rows_args::column_codes, "column_codes") == "");

  const QuantisedWeights quantised(2, 128, 128);
  const epx_row_format row_format = format.get();
  const epx_tensor codes = view_as(quantised.codes, EPX_FLOAT8_E4M3, {2, 128, 128});
  const epx_tensor transposed = view_as(quantised.transposed_codes, EPX_FLOAT8_E4M3, {2, 128, 128});
  const epx_moe_quantise_weights_args good_weights = {sizeof(good_weights),
                                                      place_of_call(),
                                                      &row_format,
                                                      weights.get(),
                                                      &codes,
                                                      quantised.scales.get(),
                                                      &transposed,
                                                      quantised.transposed_scales.get(),
                                                      nullptr,
                                                      nullptr};
  const auto weights_fault = [&](const epx_tensor* epx_moe_quantise_weights_args::*member, const char* name) {
    const epx_tensor moved = shifted(*(good_weights.*member));
    epx_moe_quantise_weights_args args = good_weights;
    args.*member = &moved;
    return not_refused(epx_moe_quantise_weights(&args), {std::string(name) + " is at", "aligned to 16 bytes"});
  };
  CHECK(weights_fault(&epx_moe_quantise_weights_args::weights, "weights") == "");
  CHECK(weights_fault(&epx_moe_quantise_weights_args::codes, "codes") == "");
  CHECK(weights_fault(&epx_moe_quantise_weights_args::transposed_codes, "transposed_codes") == "");

  const Tensor<float> stacked({1, 256, 128}), down({1, 128, 128});
  const QuantisedWeights of_stacked(1, 256, 128), of_down(1, 128, 128);
  const epx_tensor stacked_codes = view_as(of_stacked.codes, EPX_FLOAT8_E4M3, {1, 256, 128});
  const epx_tensor down_transposed = view_as(of_down.transposed_codes, EPX_FLOAT8_E4M3, {1, 128, 128});
  epx_moe_fp8_params made = {};
  made.struct_size = sizeof(made);
  made.gate_up_codes = &stacked_codes;
  made.gate_up_scales = of_stacked.scales.get();
  made.down_transposed_codes = &down_transposed;
  made.down_transposed_scales = of_down.transposed_scales.get();
  const epx_moe_quantise_params_args good_params = {sizeof(good_params), place_of_call(), &row_format,
                                                    stacked.get(),       down.get(),      &made};
  require_ok(epx_moe_quantise_params(&good_params), "epx_moe_quantise_params");
  finish_call();
  const epx_tensor moved_weight = shifted(*down.get()), moved_codes = shifted(down_transposed);
  epx_moe_quantise_params_args params = good_params;
  params.down_weight = &moved_weight;
  CHECK(not_refused(epx_moe_quantise_params(&params), {"down_weight is at", "aligned to 16 bytes"}) == "");
  params = good_params;
  made.down_transposed_codes = &moved_codes;
  CHECK(not_refused(epx_moe_quantise_params(&params), {"fp8_params.down_transposed_codes is at", "aligned"}) == "");
  const epx_tensor down_codes = view_as(of_down.codes, EPX_FLOAT8_E4M3, {1, 128, 128});
  made.down_codes = &down_codes;
  made.down_scales = of_down.scales.get();
  const epx_moe_transpose_params_args transpose = {sizeof(transpose), place_of_call(), &made};
  CHECK(not_refused(epx_moe_transpose_params(&transpose), {"fp8_params.down_transposed_codes is at", "aligned"}) == "");
  const epx_tensor moved_input = shifted(down_codes);
  made.down_codes = &moved_input;
  made.down_transposed_codes = &down_transposed;
  CHECK(not_refused(epx_moe_transpose_params(&transpose), {"fp8_params.down_codes is at", "aligned to 16 bytes"}) == "");
}

} // namespace
} // namespace epx::test
