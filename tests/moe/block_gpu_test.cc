// SPDX-License-Identifier: Apache-2.0
// block_gpu_test [--large 1]
// The block on groups of GPUs, one rank a process: the cases that the host's groups run too, and what only GPUs have: dtypes of
// two bytes, streams, CUDA graphs, and memory of the wrong kind. What is expected comes from the local block on the host.
// --large also creates the blocks of a model, which takes some 10 GB.
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>

#include "tests/gpu/graph.h"
#include "tests/gpu/suite.h"
#include "tests/moe/block_cases.h"

namespace epx::test {
namespace {

constexpr double kFloat32 = 1e-5; // of the largest element
constexpr double kTwoBytes = 2e-2;

template <typename T>
constexpr double tolerance_of() {
  return sizeof(T) == 4 ? kFloat32 : kTwoBytes;
}

const std::vector<int64_t>& split_of(const RankContext& context) {
  return kSplits[context.num_ranks - 1];
}

GroupConfig gpu_config(epx_combine_precision precision) {
  GroupConfig config = group_config(precision);
  config.transport = EPX_TRANSPORT_NCCL;
  return config;
}

// A group and this rank of it. From the first one on, tensors have a copy on the GPU.
class GpuGroup {
public:
  GpuGroup(const RankContext& context, epx_combine_precision precision) : GpuGroup(context, gpu_config(precision)) {}
  GpuGroup(const RankContext& context, const GroupConfig& config)
      : group_(*context.bootstrap, config), rank_(make_rank(group_, split_of(context))) {}
  const Rank& rank() const { return rank_; }

private:
  Group group_;
  Rank rank_;
};

template <typename T>
void check_kinds(const Rank& rank) {
  for (const epx_moe_weighting weighting : {EPX_MOE_WEIGHT_LATE, EPX_MOE_WEIGHT_EARLY}) {
    check_layer<T>(rank, {3, weighting, 4, 0.1}, tolerance_of<T>());
    check_layer<T>(rank, {1, weighting, 1}, tolerance_of<T>());
    check_layer<T>(rank, {3, weighting, 8, 0.1, false, 32, 16},
                   tolerance_of<T>()); // tensor cores can take these in bfloat16
    check_layer<T>(rank, {3, weighting, 4, 0, false, 32, 16, RowFormat(EPX_SCALING_MX).get()}, tolerance_of<T>());
  }
}

void test_kinds(const RankContext& context) {
  for (const epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
    const GpuGroup group(context, precision);
    check_kinds<float>(group.rank());
    check_kinds<Bfloat16>(group.rank());
    check_layer<Float16>(group.rank(), {2, EPX_MOE_WEIGHT_LATE, 8}, kTwoBytes);
  }
}

void test_arenas(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  check_shared_arena<float>(group.rank(), kFloat32);
  check_shared_arena<Bfloat16>(group.rank(), kTwoBytes);
  check_recompute<float>(group.rank(), kFloat32);
  check_recompute<Bfloat16>(group.rank(), kTwoBytes);
  check_many_blocks<Bfloat16>(group.rank(), kTwoBytes);
  check_arena_refusals<float>(group.rank(), kFloat32);
  check_arena_fit<float>(group.rank(), kFloat32);
}

void test_paths(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  check_paths<float>(group.rank(), kFloat32, kFloat32);
  check_paths<Bfloat16>(group.rank(), kTwoBytes, kTwoBytes);
  check_ring_bits<float>(group.rank(), kFloat32);
  check_ring_bits<Bfloat16>(group.rank(), kTwoBytes);
}

// The local block is in FLOAT32, so some of its numbers are rounded to another code.
void test_fp8(const RankContext& context) {
  constexpr double kCodes = 6e-2;
  const GpuGroup group(context, fp8_group_config(gpu_config(EPX_COMBINE_WIRE)));
  for (const epx_moe_recipe recipe : {EPX_MOE_RECIPE_FP8_ACTIVATIONS, EPX_MOE_RECIPE_FP8})
    check_recipe<Bfloat16>(group.rank(), recipe, kCodes);
}

void test_max_rows(const RankContext& context) {
  check_max_rows<float>(*context.bootstrap, split_of(context), gpu_config(EPX_COMBINE_WIRE));
}

// A graph of a forward and its backward follows its input, which changes the routing, with eager calls in between.
template <typename T>
void check_graph(const Rank& rank, epx_moe_path path = EPX_MOE_PATH_DISPATCH) {
  std::vector<LayerOf<T>> layers;
  const epx_moe_weighting weighting = path == EPX_MOE_PATH_DISPATCH ? EPX_MOE_WEIGHT_LATE : EPX_MOE_WEIGHT_EARLY;
  for (uint64_t seed = 200; seed < 204; ++seed)
    layers.push_back(make_layer_of<T>(seed, {3, weighting, 4, 0.1}));
  BlockConfig config = layers[0].config;
  config.path = path;
  const Block<T> block(rank.group, config, rank.num_ranks);
  BlockInput<T> input = share_of(rank, layers[0].input);
  FfnParams<T> params = share_of(rank, layers[0].params);
  BlockOutput<T> output = block.make_output(rank.num_tokens);
  BlockGradients<T> gradients = block.make_gradients(rank.num_tokens, params);
  typename Block<T>::Forward forward;
  typename Block<T>::Backward backward;
  block.make_call(forward, input, params, 1, output);
  block.make_call(backward, input, params, 1, gradients);
  const auto both = [&] {
    block.run(forward);
    block.run(backward);
  };
  both(); // loads the kernels
  finish_call();
  const Graph graph(static_cast<cudaStream_t>(forward.args.cuda->stream), both);
  for (size_t i = 0; i < 2 * layers.size(); ++i) {
    const LayerOf<T>& layer = layers[i % layers.size()];
    const auto set = [](auto& to, const auto& from) {
      for (int64_t k = 0; k < to.count(); ++k)
        to[k] = from[k];
    };
    const BlockInput<T> next = share_of(rank, layer.input);
    const FfnParams<T> next_params = share_of(rank, layer.params);
    set(input.tokens, next.tokens);
    set(input.logits, next.logits);
    set(input.grad_out, next.grad_out);
    set(*input.bias, *next.bias);
    set(*input.mask, *next.mask);
    for_each_tensor([&](const char*, auto& to, const auto& from) { set(to, from); }, params, next_params);
    output.out.scribble();
    output.topk_idx.scribble();
    gradients.tokens.scribble();
    gradients.logits.scribble();
    for_each_tensor([](const char*, auto& tensor) { tensor.scribble(); }, gradients.params);
    copy_to_device();
    if (i % 3 == 1)
      both();
    else
      graph.launch();
    finish_call();
    expect_forward(rank, layer, output, tolerance_of<T>());
    expect_backward(rank, layer, gradients, tolerance_of<T>());
  }
  check_status_clean(rank);
}

void test_graphs(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  check_graph<float>(group.rank());
  check_graph<Bfloat16>(group.rank());
  for (const epx_moe_path path : {EPX_MOE_PATH_RING, EPX_MOE_PATH_RAGGED})
    check_graph<Bfloat16>(group.rank(), path);
}

// Calls on two streams, which nobody waits for, use one flight one after the other.
void test_streams(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  const Rank& rank = group.rank();
  const auto first = make_layer_of<float>(210, {3, EPX_MOE_WEIGHT_LATE, 4, 0.1});
  const auto second = make_layer_of<float>(211, {3, EPX_MOE_WEIGHT_LATE, 4, 0.1});
  const Block<float> block(rank.group, first.config, rank.num_ranks);
  const auto first_input = share_of(rank, first.input), second_input = share_of(rank, second.input);
  const auto first_params = share_of(rank, first.params), second_params = share_of(rank, second.params);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (int round = 0; round < 3; ++round) {
    const auto output = block.make_output(rank.num_tokens), next_output = block.make_output(rank.num_tokens);
    const auto gradients = block.make_gradients(rank.num_tokens, first_params);
    Block<float>::Forward forward, next;
    Block<float>::Backward backward;
    block.make_call(forward, first_input, first_params, 0, output);
    block.make_call(backward, first_input, first_params, 0, gradients);
    block.make_call(next, second_input, second_params, 0, next_output);
    const epx_moe_cuda one = *forward.args.cuda;
    epx_moe_cuda other = one;
    other.stream = stream;
    forward.args.cuda = next.args.cuda = &one;
    backward.args.cuda = &other;
    block.run(forward);
    block.run(backward);
    block.run(next);
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    finish_call();
    expect_forward(rank, first, output, kFloat32);
    expect_backward(rank, first, gradients, kFloat32);
    expect_forward(rank, second, next_output, kFloat32);
  }
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  check_status_clean(rank);
}

// While the stream of the last call is captured, no call on another stream can wait for that call: it is refused, and its
// flight is as before.
void test_calls_beside_capture(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  const Rank& rank = group.rank();
  const auto layer = make_layer_of<float>(215, {3, EPX_MOE_WEIGHT_LATE, 4, 0.1});
  const RankBlockOf<float> run(rank, layer);
  const Block<float>& block = run.block();
  const auto output = block.make_output(rank.num_tokens);
  const auto gradients = block.make_gradients(rank.num_tokens, run.params());
  Block<float>::Forward forward;
  Block<float>::Backward backward;
  block.make_call(forward, run.input(), run.params(), 0, output);
  block.make_call(backward, run.input(), run.params(), 0, gradients);
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  epx_moe_cuda other = *forward.args.cuda;
  other.stream = stream;
  block.run(forward);
  Block<float>::Forward again = forward;
  again.args.cuda = backward.args.cuda = &other;
  const std::vector<std::string> words = {"stream of the arena's last call", "captured", "when the capture has ended"};
  const Graph graph(static_cast<cudaStream_t>(forward.args.cuda->stream), [&] {
    expect_none("forward", not_refused(epx_moe_block_fwd(block.handle(), &again.args), words));
    expect_none("backward", not_refused(epx_moe_block_bwd(block.handle(), &backward.args), words));
  });
  block.run(backward);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  finish_call();
  expect_forward(rank, layer, output, kFloat32);
  expect_backward(rank, layer, gradients, kFloat32);
  check_cuda(cudaStreamDestroy(stream), "cudaStreamDestroy");
  check_status_clean(rank);
}

// Logits of two bytes, integers of four, a limited number of SMs, and the block's own record of errors.
void test_variants(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  const Rank& rank = group.rank();
  LayerOptions options = {3, EPX_MOE_WEIGHT_EARLY, 4, 0.1};
  options.bfloat16_logits = true;
  const auto layer = make_layer_of<Bfloat16>(220, options);
  const RankBlockOf<Bfloat16> run(rank, layer);
  const Block<Bfloat16>& block = run.block();
  BlockOutput<Bfloat16> output = block.make_output(rank.num_tokens);
  BlockGradients<Bfloat16> gradients = block.make_gradients(rank.num_tokens, run.params());
  const auto logits = converted<Bfloat16>(run.input().logits);
  const auto grad_logits = scribbled<Bfloat16>({rank.num_tokens, kNumExperts});
  const auto topk_idx = scribbled<int32_t>({rank.num_tokens, 3});
  const auto global_counts = scribbled<int32_t>({rank.num_ranks, kNumExperts});
  Block<Bfloat16>::Forward forward;
  Block<Bfloat16>::Backward backward;
  block.make_call(forward, run.input(), run.params(), 0, output);
  block.make_call(backward, run.input(), run.params(), 0, gradients);
  forward.args.logits = logits.get();
  forward.args.topk_idx = topk_idx.get();
  forward.args.global_counts = global_counts.get();
  backward.args.grad_logits = grad_logits.get();
  epx_moe_cuda place = *forward.args.cuda;
  place.num_sms = 1;
  place.errors = nullptr;
  forward.args.cuda = backward.args.cuda = &place;
  block.run(forward);
  block.run(backward);
  finish_call();
  output.topk_idx = converted<int64_t>(topk_idx);
  output.global_counts = converted<int64_t>(global_counts);
  gradients.logits = converted<float>(grad_logits);
  expect_forward(rank, layer, output, kTwoBytes);
  expect_backward(rank, layer, gradients, kTwoBytes);
  epx_moe_errors_report report = {};
  report.struct_size = sizeof(report);
  require_ok(epx_moe_block_errors(block.handle(), &report), "epx_moe_block_errors");
  check_equal(report.num_errors, int64_t{0}, "errors");

  // The forward had logits of two bytes, and so must the gradient be.
  backward.args.grad_logits = gradients.logits.get();
  expect_none("grad_logits", not_refused(epx_moe_block_bwd(block.handle(), &backward.args), {"grad_logits", "bfloat16"}));
  finish_call();
}

void test_refusals(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  const Rank& rank = group.rank();
  const auto layer = make_layer_of<float>(230, {2});
  RankBlockOf<float> run(rank, layer);
  const auto output = run.block().make_output(rank.num_tokens);
  const auto gradients = run.block().make_gradients(rank.num_tokens, run.params());
  Block<float>::Forward forward;
  Block<float>::Backward backward;
  const auto make_calls = [&] {
    run.block().make_call(forward, run.input(), run.params(), 0, output);
    run.block().make_call(backward, run.input(), run.params(), 0, gradients);
  };
  const auto refused = [&](const std::vector<std::string>& words) {
    expect_none("forward", not_refused(epx_moe_block_fwd(run.block().handle(), &forward.args), words));
    make_calls();
  };
  const auto refused_backward = [&](const std::vector<std::string>& words) {
    expect_none("backward", not_refused(epx_moe_block_bwd(run.block().handle(), &backward.args), words));
    make_calls();
  };
  make_calls();
  run.forward(0, kFloat32); // what is refused leaves the flight as it was
  make_calls();
  forward.args.cuda = nullptr;
  refused({"cuda", "NULL", "GPU"});
  backward.args.cuda = nullptr;
  refused_backward({"cuda", "NULL", "GPU"});
  epx_moe_cuda place = *forward.args.cuda;
  place.num_sms = -2;
  forward.args.cuda = &place;
  refused({"num_sms", "-2"});

  std::vector<float> host_memory(static_cast<size_t>(kNumTokens * kHidden));
  const bool has_tokens = rank.num_tokens > 0;
  const auto on_host = [&](const epx_tensor* tensor) {
    epx_tensor copy = *tensor;
    copy.data = host_memory.data();
    return copy;
  };
  const epx_tensor tokens = on_host(forward.args.tokens), logits = on_host(forward.args.logits),
                   out = on_host(forward.args.out), grad_out = on_host(backward.args.grad_out);
  if (has_tokens) {
    forward.args.tokens = &tokens;
    refused({"tokens", "host memory"});
    forward.args.logits = &logits;
    refused({"logits", "host memory"});
    forward.args.out = &out;
    refused({"out", "host memory"});
    backward.args.grad_out = &grad_out;
    refused_backward({"grad_out", "host memory"});
  }
  epx_tensor wrong = *forward.args.tokens;
  wrong.dtype = EPX_BFLOAT16;
  forward.args.tokens = &wrong;
  refused({"tokens", "bfloat16", "float32"});
  forward.params.wide.down_weight = nullptr;
  refused({"down_weight"});
  backward.args.accumulate = 2;
  refused_backward({"accumulate", "2"});

  int num_devices = 0, device = 0;
  check_cuda(cudaGetDeviceCount(&num_devices), "cudaGetDeviceCount");
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  if (num_devices > 1) {
    const int other = (device + 1) % num_devices;
    check_cuda(cudaSetDevice(other), "cudaSetDevice");
    const epx_status status = epx_moe_block_fwd(run.block().handle(), &forward.args);
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    expect_none("device", not_refused(status, {"current device is " + std::to_string(other), std::to_string(device)}));
  }
  finish_call();
  run.backward(0, kFloat32);

  BlockConfig wide = layer.config;
  wide.dtype = EPX_FLOAT64;
  const epx_moe_block_config view = wide.c_config();
  epx_moe_block block = nullptr;
  expect_none("dtype", not_refused(epx_moe_block_create(rank.group, &view, &block), {"dtype", "float64", "bfloat16"}));
  check_status_clean(rank);
}

// Tells the bytes of an arena for a layer of DeepSeek-V3 with room for 1.5 times the rows of balanced routing, and creates its
// 58 blocks; where the GPU has no room for it, tells that instead.
void print_model_arena(const RankContext& context, epx_moe_recipe recipe, bool recomputes) {
  GroupConfig config;
  config.num_experts = 256;
  config.max_tokens_per_rank = 4096;
  config.hidden_dim = 7168;
  config.max_top_k = 8;
  config.max_token_dtype = EPX_BFLOAT16;
  config.transport = EPX_TRANSPORT_NCCL;
  BlockShape shape = {256, 8, 7168, 2048, 4096, EPX_MOE_SWIGLU};
  BlockConfig block = block_config<Bfloat16>(shape);
  block.router.score = EPX_MOE_SIGMOID;
  block.alignment = 128;
  block.weighting = EPX_MOE_WEIGHT_EARLY;
  block.recipe = recipe;
  block.recompute = recomputes ? 1 : 0;
  const std::string kind = "recipe " + std::to_string(recipe) + (recomputes ? ", recomputing" : "");
  try {
    const Group group(*context.bootstrap, config);
    const BlockArena arena(group.get(), block, 4, 4096 * 8 * 3 / 2);
    std::vector<std::unique_ptr<Block<Bfloat16>>> blocks;
    for (int i = 0; i < 58; ++i)
      blocks.push_back(std::make_unique<Block<Bfloat16>>(group.get(), arena.serve(block), context.num_ranks));
    const epx_moe_arena_info info = arena.info();
    std::printf("DeepSeek-V3, %d ranks, %s, 4 flights of %lld rows: %lld bytes, of them a flight %lld, the workspace %lld; "
                "in memory that peers reach %lld\n",
                context.num_ranks, kind.c_str(), static_cast<long long>(info.max_rows),
                static_cast<long long>(info.total_bytes), static_cast<long long>(info.flight_bytes),
                static_cast<long long>(info.workspace_bytes), static_cast<long long>(info.window_bytes));
  } catch (const std::exception& error) {
    if (!contains(describe(error), "OUT_OF_MEMORY")) throw;
    std::printf("DeepSeek-V3, %d ranks, %s: not created: %s\n", context.num_ranks, kind.c_str(), describe(error).c_str());
  }
}

// Rows cross between nodes, with a format and without.
void test_nodes(const RankContext& context) {
  const GpuGroup group(context, EPX_COMBINE_WIRE);
  check_kinds<float>(group.rank());
  check_kinds<Bfloat16>(group.rank());
}

} // namespace
} // namespace epx::test

int main(int argc, char** argv) {
  using namespace epx::test;
  const RankTest begin = [](const RankContext&) { check(use_cuda(), "there is no GPU"); };
  const RankTest end = [](const RankContext&) {
    check_equal(broken_guards(), int64_t{0}, "guard zones around tensors that were written to");
  };
  if (option(argc, argv, "--nodes", 1) > 1) return run_suite({begin, test_nodes, end});
  const bool is_large = option(argc, argv, "--large", 0) != 0;
  const RankTest model = [&](const RankContext& context) {
    if (!is_large) return;
    print_model_arena(context, EPX_MOE_RECIPE_WIDE, false);
    print_model_arena(context, EPX_MOE_RECIPE_FP8, false);
    print_model_arena(context, EPX_MOE_RECIPE_FP8, true);
  };
  return run_suite({begin, test_kinds, test_arenas, test_paths, test_fp8, test_max_rows, test_graphs, test_streams,
                    test_calls_beside_capture, test_variants, test_refusals, end, model});
}
