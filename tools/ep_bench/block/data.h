// SPDX-License-Identifier: Apache-2.0
// The tensors of one rank that a whole layer reads and writes. The measured layers share them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "epx/epx_moe.hpp"
#include "tools/ep_bench/memory.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

// The experts of a rank.
struct OwnedExperts {
  int32_t first = 0;
  int32_t count = 0;
};

// BlockData has the inputs of set 0, and outputs that each layer overwrites.
class BlockData {
public:
  BlockData(const Options& options, int rank, OwnedExperts experts, Memory& memory);
  BlockData(const BlockData&) = delete;
  BlockData& operator=(const BlockData&) = delete;

  // in
  ConstTensor tokens() const { return ConstTensor(tokens_.tensor); }     // [T, H]
  ConstTensor logits() const { return ConstTensor(logits_.tensor); }     // [T, E] FLOAT32
  ConstTensor grad_out() const { return ConstTensor(grad_out_.tensor); } // [T, H]
  moe::FfnParams params() const { return params_.tensors<ConstTensor>(); }
  // out
  Tensor out() const { return Tensor(out_.tensor); }                 // [T, H]
  Tensor grad_tokens() const { return Tensor(grad_tokens_.tensor); } // [T, H]
  Tensor grad_logits() const { return Tensor(grad_logits_.tensor); } // [T, E] FLOAT32
  moe::FfnGrads grads() const { return grads_.tensors<Tensor>(); }

  // An output as float32, with its name and shape.
  struct Output {
    std::string name;
    std::vector<int64_t> shape;
    std::vector<float> values;
  };
  // Returns them; of a tensor with more rows than max_rows > 0 so many rows, drawn by the seed, [max_rows, columns].
  std::vector<Output> outputs(int64_t max_rows) const;

  void scribble() const; // makes every element of the outputs a NaN

private:
  struct OwnedTensor {
    Buffer buffer;
    epx_tensor tensor{};
  };
  // The tensors of the experts' parameters, or of the gradients.
  struct Params {
    OwnedTensor gate_up, down, gate_up_bias, down_bias; // biases may be empty

    template <typename TensorType>
    moe::FfnTensors<TensorType> tensors() const {
      return {.gate_up_weight = TensorType(gate_up.tensor),
              .down_weight = TensorType(down.tensor),
              .gate_up_bias = TensorType(gate_up_bias.tensor),
              .down_bias = TensorType(down_bias.tensor)};
    }
  };

  template <typename Action>
  void for_each_output(Action&& action) const; // with its name and tensor
  Output output(const char* name, const OwnedTensor& owned, int64_t max_rows) const;

  OwnedTensor tensor(epx_dtype dtype, std::vector<int64_t> sizes);
  void allocate(Params& params, OwnedExperts experts);
  void fill_params(OwnedExperts experts);
  // Writes an expert's part of a tensor whose first size is E_l.
  void fill(const OwnedTensor& tensor, int32_t local_expert, const struct BlockStream& stream, float scale);

  Options options_;
  Memory& memory_;
  OwnedTensor tokens_, logits_, grad_out_, out_, grad_tokens_, grad_logits_;
  Params params_, grads_;
};

} // namespace epx::bench
