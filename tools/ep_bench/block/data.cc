// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/data.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "tools/ep_bench/block/shape.h"
#if defined(EPX_WITH_CUDA)
#include "tools/ep_bench/block/kernels.h"
#include "tools/ep_bench/gpu/gpu.h"
#endif

namespace epx::bench {
namespace {

int64_t elements_of(const epx_tensor& tensor) {
  int64_t elements = 1;
  for (int32_t i = 0; i < tensor.ndim; ++i)
    elements *= tensor.sizes[i];
  return elements;
}

std::vector<float> as_floats(std::span<const std::byte> bytes, epx_dtype dtype) {
  std::vector<float> values(bytes.size() / static_cast<size_t>(epx::row_bytes(dtype, 1)));
  for (size_t i = 0; i < values.size(); ++i)
    if (dtype == EPX_FLOAT32) {
      std::memcpy(&values[i], bytes.data() + i * sizeof(float), sizeof(float));
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, bytes.data() + i * sizeof(bits), sizeof(bits));
      values[i] = std::bit_cast<float>(uint32_t{bits} << 16);
    }
  return values;
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
  params.gate_up = tensor(options_.dtype, {experts.count, 2 * F, H});
  params.down = tensor(options_.dtype, {experts.count, H, F});
  if (!options_.block.has_biases) return;
  params.gate_up_bias = tensor(options_.dtype, {experts.count, 2 * F});
  params.down_bias = tensor(options_.dtype, {experts.count, H});
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

template <typename Action>
void BlockData::for_each_output(Action&& action) const {
  action("out", out_);
  action("grad_tokens", grad_tokens_);
  action("grad_logits", grad_logits_);
  action("grad_gate_up", grads_.gate_up);
  action("grad_down", grads_.down);
  if (!options_.block.has_biases) return;
  action("grad_gate_up_bias", grads_.gate_up_bias);
  action("grad_down_bias", grads_.down_bias);
}

BlockData::Output BlockData::output(const char* name, const OwnedTensor& owned, int64_t max_rows) const {
  const epx_tensor& tensor = owned.tensor;
  const int64_t columns = tensor.sizes[tensor.ndim - 1], rows = elements_of(tensor) / std::max<int64_t>(columns, 1);
  const auto row_size = static_cast<size_t>(epx::row_bytes(tensor.dtype, columns));
  Output output{name, {tensor.sizes, tensor.sizes + tensor.ndim}, {}};
  std::vector<std::byte> bytes;
  if (max_rows == 0 || rows <= max_rows) {
    bytes = owned.buffer.read<std::byte>();
  } else {
    output.shape = {max_rows, columns};
    bytes.resize(static_cast<size_t>(max_rows) * row_size);
    for (int64_t i = 0; i < max_rows; ++i)
      memory_.read(std::span(bytes).subspan(static_cast<size_t>(i) * row_size, row_size),
                   owned.buffer.data() + sample_row(options_.seed, i, rows) * row_size);
  }
  output.values = as_floats(bytes, tensor.dtype);
  return output;
}

std::vector<BlockData::Output> BlockData::outputs(int64_t max_rows) const {
  std::vector<Output> outputs;
  for_each_output([&](const char* name, const OwnedTensor& owned) { outputs.push_back(output(name, owned, max_rows)); });
  return outputs;
}

void BlockData::scribble() const {
  for_each_output([](const char*, const OwnedTensor& owned) { owned.buffer.fill(std::byte{0xff}); });
}

} // namespace epx::bench
