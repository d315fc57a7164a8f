// SPDX-License-Identifier: Apache-2.0
// Where a call on CUDA runs: workspaces and memory that do not do, and graphs.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include "tests/moe/permute_run.h"
#include "tests/moe/router_run.h"

namespace epx::test {
namespace {

void require_cuda(cudaError_t error) {
  REQUIRE(error == cudaSuccess);
}

TEST_CASE("a workspace that does not do is refused") {
  epx_moe_router_config config = router_config(6, 2);
  config.aux_loss_coeff = 0.5;
  const Tensor<float> logits({4, 6}), weights({4, 2});
  const Tensor<int32_t> topk_idx({4, 2}, -1), counts({1, 6}, 1);
  auto grads = scribbled<float>({4, 6});
  epx_moe_router_bwd_args args = {sizeof(args), nullptr, logits.get(), topk_idx.get(), weights.get(),
                                  counts.get(), 1,       grads.get()};
  size_t bytes = 0;
  require_ok(epx_moe_router_bwd_workspace(&config, &args, &bytes), "epx_moe_router_bwd_workspace");
  REQUIRE(bytes > 0);
  CHECK(not_refused(epx_moe_router_bwd_workspace(&config, &args, nullptr), {"bytes", "NULL"}) == "");
  const std::string needed = std::to_string(bytes);
  std::vector<std::byte> on_host(bytes + 256);
  auto* const aligned = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(on_host.data()) + 255) / 256 * 256);
  epx_moe_cuda place = *place_of_call(bytes);
  struct Case {
    void* workspace;
    size_t bytes;
    std::vector<std::string> words;
  };
  for (const Case& bad : {Case{nullptr, bytes, {"workspace", "NULL", needed}},
                          Case{place.workspace, bytes - 1, {"workspace", std::to_string(bytes - 1), needed}},
                          Case{static_cast<std::byte*>(place.workspace) + 16, bytes, {"workspace", "aligned", "256"}},
                          Case{aligned, bytes, {"workspace", "host memory"}}}) {
    CAPTURE(bad.words.back());
    epx_moe_cuda spoiled = place;
    spoiled.workspace = bad.workspace;
    spoiled.workspace_bytes = bad.bytes;
    args.cuda = &spoiled;
    CHECK(not_refused(epx_moe_router_bwd(&config, &args), bad.words) == "");
    finish_call();
    CHECK(difference(grads, scribbled<float>({4, 6})) == "");
  }
  args.cuda = &place;
  require_ok(epx_moe_router_bwd(&config, &args), "epx_moe_router_bwd");
  finish_call();
}

TEST_CASE("workspaces are asked for without data, a GPU or `cuda`") {
  const epx_tensor logits = epx_tensor_2d(nullptr, EPX_FLOAT32, 4096, 256);
  const epx_tensor topk_idx = epx_tensor_2d(nullptr, EPX_INT32, 4096, 8);
  const epx_tensor counts = epx_tensor_1d(nullptr, EPX_INT32, 256);
  const epx_tensor rows = epx_tensor_2d(nullptr, EPX_BFLOAT16, 32768, 7168);
  auto config = router_config(256, 8);
  size_t bytes = 1;
  epx_moe_router_bwd_args bwd = {};
  bwd.struct_size = sizeof(bwd);
  require_ok(epx_moe_router_bwd_workspace(&config, &bwd, &bytes), "epx_moe_router_bwd_workspace");
  CHECK(bytes == 0); // there is no load-balance loss
  epx_moe_aux_loss_args aux = {};
  aux.struct_size = sizeof(aux);
  aux.logits = &logits;
  require_ok(epx_moe_aux_loss_workspace(&config, &aux, &bytes), "epx_moe_aux_loss_workspace");
  CHECK(bytes >= 257 * 8);
  CHECK(bytes < 1 << 20);
  epx_moe_row_map_args sort = {};
  sort.struct_size = sizeof(sort);
  CHECK(not_refused(epx_moe_row_map_workspace(&sort, &bytes), {"topk_idx", "NULL"}) == "");
  sort.topk_idx = &topk_idx;
  sort.counts = &counts;
  require_ok(epx_moe_row_map_workspace(&sort, &bytes), "epx_moe_row_map_workspace");
  CHECK(bytes >= 256 * 4);
  CHECK(bytes < 1 << 20);
  epx_moe_permute_args permute = {};
  permute.struct_size = sizeof(permute);
  permute.rows = &rows;
  require_ok(epx_moe_permute_workspace(&permute, &bytes), "epx_moe_permute_workspace");
  CHECK(bytes == 32768 * 4);
  epx_moe_unpermute_bwd_args unpermute_bwd = {};
  unpermute_bwd.struct_size = sizeof(unpermute_bwd);
  unpermute_bwd.grad_rows = &rows;
  require_ok(epx_moe_unpermute_bwd_workspace(&unpermute_bwd, &bytes), "epx_moe_unpermute_bwd_workspace");
  CHECK(bytes == 32768 * 4);
}

TEST_CASE("tensors that are not the current device's memory are refused") {
  const Tensor<float> logits({2, 3});
  auto topk_idx = scribbled<int32_t>({2, 1});
  auto weights = scribbled<float>({2, 1});
  std::vector<float> on_host(6);
  epx_tensor elsewhere = *logits.get();
  elsewhere.data = on_host.data();
  const auto config = router_config(3, 1);
  epx_moe_router_args args = {sizeof(args), place_of_call(), &elsewhere,    nullptr,
                              nullptr,      topk_idx.get(),  weights.get(), nullptr};
  CHECK(not_refused(epx_moe_router(&config, &args), {"logits", "host memory", "device"}) == "");

  void* pinned = nullptr;
  require_cuda(cudaHostAlloc(&pinned, 6 * sizeof(float), cudaHostAllocMapped));
  elsewhere.data = pinned;
  CHECK(not_refused(epx_moe_router(&config, &args), {"logits", "pinned host memory"}) == "");
  require_cuda(cudaFreeHost(pinned));

  int count = 0;
  require_cuda(cudaGetDeviceCount(&count));
  if (count > 1) {
    require_cuda(cudaSetDevice(1));
    require_cuda(cudaMalloc(&elsewhere.data, 6 * sizeof(float)));
    require_cuda(cudaSetDevice(0));
    CHECK(not_refused(epx_moe_router(&config, &args), {"logits", "device 1", "current device is 0"}) == "");
    require_cuda(cudaFree(elsewhere.data));
  }
  finish_call();
  CHECK(difference(topk_idx, scribbled<int32_t>({2, 1})) == "");
  CHECK(difference(weights, scribbled<float>({2, 1})) == "");
}

TEST_CASE("a GPU that is too old for the kernels is refused") { // only the emulation can pretend to be one
  setenv("EPX_EMULATED_COMPUTE_CAPABILITY", "86", 1);
  int major = 0;
  require_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  const Tensor<float> logits({2, 3});
  const auto topk_idx = scribbled<int32_t>({2, 1});
  const auto weights = scribbled<float>({2, 1});
  const auto config = router_config(3, 1);
  const epx_moe_router_args args = {sizeof(args), place_of_call(), logits.get(),  nullptr,
                                    nullptr,      topk_idx.get(),  weights.get(), nullptr};
  const epx_status status = epx_moe_router(&config, &args);
  unsetenv("EPX_EMULATED_COMPUTE_CAPABILITY");
  CHECK(status == (major == 8 ? EPX_ERROR_UNSUPPORTED : EPX_SUCCESS));
  if (major == 8)
    CHECK(std::string(epx_last_error()) ==
          "epx_moe_router: the current device, 0, has compute capability 8.6; the kernels need 9.0 or later");
  finish_call();
  CHECK((difference(topk_idx, scribbled<int32_t>({2, 1})) == "") == (major == 8));
}

TEST_CASE("a layer that is captured in a graph follows its input") {
  Rng rng(76);
  constexpr int64_t kTokens = 12, kHidden = 24;
  constexpr int64_t kRows = kTokens * 2 + 5 * 3;
  epx_moe_router_config config = router_config(5, 2, EPX_MOE_SOFTMAX_THEN_TOPK);
  config.aux_loss_coeff = 0.25;
  Tensor<float> logits({kTokens, 5});
  Tensor<float> tokens({kTokens, kHidden});
  Tensor<int32_t> topk_idx({kTokens, 2}), counts({5}), offsets({6}), row_map({kTokens, 2});
  Tensor<int64_t> info({3});
  Tensor<float> weights({kTokens, 2}), rows({kRows, kHidden}), out({kTokens, kHidden}), grad_rows({kRows, kHidden}),
      grad_weights({kTokens, 2}), grad_logits({kTokens, 5}), bias({5});
  Tensor<double> loss({1});
  const Tensor<int64_t> global_counts({1, 5}, {7, 1, 5, 2, 9});
  const auto workspace = [&](size_t bytes) { return Tensor<uint8_t>({static_cast<int64_t>(bytes)}); };
  auto scratch = workspace(1 << 16);

  epx_moe_cuda place = *place_of_call();
  cudaStream_t stream = nullptr;
  require_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  place.stream = stream;
  place.workspace = address_for_call(&scratch[0]);
  place.workspace_bytes = static_cast<size_t>(scratch.count());
  const epx_moe_router_args route = {sizeof(route), &place,         logits.get(),  nullptr,
                                     nullptr,       topk_idx.get(), weights.get(), info.get()};
  const epx_moe_row_map_args sort = {sizeof(sort), &place, topk_idx.get(), 4, counts.get(), offsets.get(), row_map.get()};
  const epx_moe_permute_args permute = {sizeof(permute), &place,     row_map.get(), tokens.get(),
                                        nullptr,         rows.get(), nullptr,       EPX_PADS_ZERO};
  const epx_moe_unpermute_args unpermute = {sizeof(unpermute), &place, row_map.get(), rows.get(), weights.get(), out.get()};
  const epx_moe_unpermute_bwd_args unpermute_bwd = {
      sizeof(unpermute_bwd), &place,          row_map.get(),     out.get(), rows.get(),
      weights.get(),         grad_rows.get(), grad_weights.get()};
  const epx_moe_router_bwd_args route_bwd = {
      sizeof(route_bwd),   &place, logits.get(),     topk_idx.get(), grad_weights.get(),
      global_counts.get(), 0.5,    grad_logits.get()};
  const epx_moe_aux_loss_args aux = {sizeof(aux), &place, logits.get(), topk_idx.get(), global_counts.get(), loss.get()};
  const epx_moe_bias_update_args update = {sizeof(update), &place, global_counts.get(), 0.5, bias.get()};

  require_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  require_ok(epx_moe_router(&config, &route), "epx_moe_router");
  require_ok(epx_moe_row_map(&sort), "epx_moe_row_map");
  require_ok(epx_moe_permute(&permute), "epx_moe_permute");
  require_ok(epx_moe_unpermute(&unpermute), "epx_moe_unpermute");
  require_ok(epx_moe_unpermute_bwd(&unpermute_bwd), "epx_moe_unpermute_bwd");
  require_ok(epx_moe_router_bwd(&config, &route_bwd), "epx_moe_router_bwd");
  require_ok(epx_moe_aux_loss(&config, &aux), "epx_moe_aux_loss");
  require_ok(epx_moe_bias_update(&update), "epx_moe_bias_update");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  require_cuda(cudaStreamEndCapture(stream, &graph));
  require_cuda(cudaGraphInstantiate(&exec, graph, 0));

  for (int replay = 1; replay <= 3; ++replay) {
    CAPTURE(replay);
    for (int64_t i = 0; i < logits.count(); ++i)
      logits[i] = static_cast<float>(uniform(rng, -2, 2));
    for (int64_t i = 0; i < tokens.count(); ++i)
      tokens[i] = static_cast<float>(uniform(rng, -2, 2));
    if (replay == 2) logits(3, 1) = std::nanf("");
    for (auto* const output : {&weights, &rows, &out, &grad_rows, &grad_weights, &grad_logits})
      output->scribble();
    info.scribble();
    copy_to_device();
    require_cuda(cudaGraphLaunch(exec, stream));
    require_cuda(cudaStreamSynchronize(stream));
    CHECK(take_report().num_errors == 0);

    const auto routed = run_router<float, int32_t>(config, logits);
    CHECK(difference(topk_idx, routed.topk_idx) == "");
    CHECK(difference(weights, routed.topk_weights) == "");
    CHECK(difference(info, routed.info) == "");
    CHECK(info[1] == (replay == 2 ? 1 : 0));
    const auto map = run_row_map(topk_idx, 5, 4);
    CHECK(difference(row_map, map.row_map) == "");
    CHECK(difference(offsets, map.offsets) == "");
    CHECK(difference(rows, run_permute(row_map, tokens, kRows).rows) == "");
    CHECK(difference(out, run_unpermute(row_map, rows, &weights)) == "");
    const auto gradients = run_unpermute_bwd(row_map, out, rows, &weights, true);
    CHECK(difference(grad_rows, gradients.of_rows) == "");
    CHECK(difference(grad_weights, gradients.of_topk_weights) == "");
    const auto wide_idx = converted<int64_t>(topk_idx);
    CHECK(difference(grad_logits,
                     run_router_bwd<float, int64_t>(config, logits, wide_idx, {&grad_weights, &global_counts, 0.5})) == "");
    CHECK(loss[0] == aux_loss(config, logits, wide_idx, global_counts));
    CHECK(bias[4] == -0.5f * static_cast<float>(replay));
  }
  require_cuda(cudaGraphExecDestroy(exec));
  require_cuda(cudaGraphDestroy(graph));
  require_cuda(cudaStreamDestroy(stream));
}

} // namespace
} // namespace epx::test
