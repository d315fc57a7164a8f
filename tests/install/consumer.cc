// SPDX-License-Identifier: Apache-2.0
// This C++20 program uses an installed libepx: one rank sends its tokens to its own experts and sums them up again.
#include <cstdio>
#include <vector>

#include <epx/epx.hpp>

int main(int argc, char** argv) {
  using namespace std::chrono_literals;
  if (argc != 2) return 2;
  try {
    epx::Bootstrap bootstrap = epx::bootstrap_file(argv[1], "consumer_cc", 0, 1, 30s);
    epx::GroupConfig config;
    config.num_experts = 2;
    config.max_tokens_per_rank = 2;
    config.hidden_dim = 2;
    config.max_top_k = 1;
    config.max_token_dtype = EPX_FLOAT32;
    config.transport = EPX_TRANSPORT_HOST;
    const epx::Group group(bootstrap, config);
    bootstrap = {};

    const epx::Layer layer = {.top_k = 1};
    const std::vector<int32_t> topk_idx = {1, 0};
    const std::vector<float> tokens = {1, 2, 3, 4};
    std::vector<std::byte> handle(group.handle_mem_size(layer));
    std::vector<int32_t> counts(2), offsets(3);
    group.prepare(
        {.layer = layer, .handle_mem = handle, .topk_idx = {topk_idx, {2, 1}}, .counts = counts, .offsets = offsets});

    const epx::Memory window = group.mem_alloc(tokens.size() * sizeof(float));
    const epx::Tensor rows(window.as<float>(), {2, 2});
    std::vector<float> out(tokens.size());
    group.dispatch({.layer = layer, .handle_mem = handle, .tokens = {tokens, {2, 2}}, .recv_tokens = rows});
    if (window.as<float>()[0] != 3) return 1; // expert 0 gets token 1
    group.combine({.layer = layer, .handle_mem = handle, .expert_out = rows, .out = {out, {2, 2}}});
    if (out != tokens) return 1;

    group.prepare({.layer = layer, .handle_mem = handle}); // has no topk_idx
  } catch (const epx::Error& error) {
    std::printf("   %s: %s\n", error.function(), error.what());
    return error.status() == EPX_ERROR_INVALID_ARGUMENT ? 0 : 1;
  }
  return 1; // the bad call was not refused
}
