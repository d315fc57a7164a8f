// SPDX-License-Identifier: Apache-2.0
// The tensors of one rank that a whole layer reads and writes. The measured layers share them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "epx/epx_moe.h"
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
  const epx_tensor& tokens() const { return tokens_.tensor; }     // [T, H]
  const epx_tensor& logits() const { return logits_.tensor; }     // [T, E] FLOAT32
  const epx_tensor& grad_out() const { return grad_out_.tensor; } // [T, H]
  const epx_moe_ffn_params& params() const { return params_.params; }
  // out
  const epx_tensor& out() const { return out_.tensor; }                 // [T, H]
  const epx_tensor& grad_tokens() const { return grad_tokens_.tensor; } // [T, H]
  const epx_tensor& grad_logits() const { return grad_logits_.tensor; } // [T, E] FLOAT32
  const epx_moe_ffn_params& grads() const { return grads_.params; }

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
    OwnedTensor gate_up, down, gate_up_bias, down_bias;
    epx_moe_ffn_params params{};
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
