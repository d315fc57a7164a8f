// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/data.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "tools/ep_bench/block/shape.h"
#if defined(EPX_WITH_CUDA)
#include "tools/ep_bench/block/kernels.h"
#include "tools/ep_bench/gpu.h"
#endif

namespace epx::bench {
namespace {

int64_t elements_of(const epx_tensor& tensor) {
  int64_t elements = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i)
    elements *= tensor.sizes[i];
  return elements;
}

} // namespace

BlockData::BlockData(const Options& options, int rank, OwnedExperts experts, Memory& memory)
    : options_(options), memory_(memory) {
  const int64_t T = options.tokens, H = options.hidden, E = options.experts;
  tokens_ = tensor(options.dtype, {T, H});
  grad_out_ = tensor(options.dtype, {T, H});
  out_ = tensor(options.dtype, {T, H});
  grad_tokens_ = tensor(options.dtype, {T, H});
  logits_ = tensor(EPX_FLOAT32, {T, E});
  grad_logits_ = tensor(EPX_FLOAT32, {T, E});
  allocate(params_, experts);
  allocate(grads_, experts);

  const uint32_t part = token_part(0, rank);
  tokens_.buffer.write(block_elements(options, {options.seed, BlockTensor::Tokens, part}, T * H, 1));
  grad_out_.buffer.write(block_elements(options, {options.seed, BlockTensor::GradOut, part}, T * H, 1));
  logits_.buffer.write(block_logits(options, 0, rank));
  fill_params(experts);
}

BlockData::OwnedTensor BlockData::tensor(epx_dtype dtype, std::vector<int64_t> sizes) {
  OwnedTensor owned;
  owned.tensor.dtype = dtype;
  owned.tensor.ndim = static_cast<int32_t>(sizes.size());
  int64_t elements = 1;
  for (size_t i = 0; i < sizes.size(); ++i)
    elements *= owned.tensor.sizes[i] = sizes[i];
  owned.buffer = Buffer::plain(memory_, static_cast<size_t>(epx::row_bytes(dtype, elements)));
  owned.tensor.data = owned.buffer.data();
  return owned;
}

void BlockData::allocate(Params& params, OwnedExperts experts) {
  const int64_t F = options_.block.ffn, H = options_.hidden;
  params.params.struct_size = sizeof(params.params);
  params.gate_up = tensor(options_.dtype, {experts.count, 2 * F, H});
  params.params.gate_up_weight = &params.gate_up.tensor;
  params.down = tensor(options_.dtype, {experts.count, H, F});
  params.params.down_weight = &params.down.tensor;
  if (!options_.block.has_biases) return;
  params.gate_up_bias = tensor(options_.dtype, {experts.count, 2 * F});
  params.params.gate_up_bias = &params.gate_up_bias.tensor;
  params.down_bias = tensor(options_.dtype, {experts.count, H});
  params.params.down_bias = &params.down_bias.tensor;
}

void BlockData::fill_params(OwnedExperts experts) {
  for (int32_t local = 0; local < experts.count; ++local) {
    const auto expert = static_cast<uint32_t>(experts.first + local);
    const auto stream = [&](BlockTensor tensor) { return BlockStream(options_.seed, tensor, expert); };
    fill(params_.gate_up, local, stream(BlockTensor::GateUp), weight_scale(options_.hidden));
    fill(params_.down, local, stream(BlockTensor::Down), weight_scale(options_.block.ffn));
    if (!options_.block.has_biases) continue;
    fill(params_.gate_up_bias, local, stream(BlockTensor::GateUpBias), kBiasScale);
    fill(params_.down_bias, local, stream(BlockTensor::DownBias), kBiasScale);
  }
  memory_.finish();
}

void BlockData::fill(const OwnedTensor& tensor, int32_t local_expert, const BlockStream& stream, float scale) {
  const int64_t count = elements_of(tensor.tensor) / tensor.tensor.sizes[0];
  std::byte* const data = tensor.buffer.data() + epx::row_bytes(options_.dtype, count) * local_expert;
#if defined(EPX_WITH_CUDA)
  if (!memory_.is_host()) {
    auto* const gpu_stream = static_cast<cudaStream_t>(memory_.stream());
    const bool is_bf16 = options_.dtype == EPX_BFLOAT16;
    return check_cuda(launch_fill(data, count, stream, scale, is_bf16, gpu_stream), "launch of fill");
  }
#endif
  memory_.write(data, block_elements(options_, stream, count, scale));
}

std::vector<BlockData::Output> BlockData::outputs() const {
  std::vector<Output> outputs;
  const auto add = [&](const char* name, const OwnedTensor& owned) {
    if (owned.tensor.data == nullptr) return;
    Output output{name, {owned.tensor.sizes, owned.tensor.sizes + owned.tensor.ndim}, {}};
    if (owned.tensor.dtype == EPX_FLOAT32)
      output.values = owned.buffer.read<float>();
    else
      for (const uint16_t bits : owned.buffer.read<uint16_t>())
        output.values.push_back(std::bit_cast<float>(uint32_t{bits} << 16));
    outputs.push_back(std::move(output));
  };
  add("out", out_);
  add("grad_tokens", grad_tokens_);
  add("grad_logits", grad_logits_);
  add("grad_gate_up", grads_.gate_up);
  add("grad_down", grads_.down);
  add("grad_gate_up_bias", grads_.gate_up_bias);
  add("grad_down_bias", grads_.down_bias);
  return outputs;
}

} // namespace epx::bench
