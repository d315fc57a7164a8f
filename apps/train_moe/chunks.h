// SPDX-License-Identifier: Apache-2.0
// The batch is split into chunks of fixed size, and each rank takes consecutive ones. What is computed chunk by chunk has
// the same shapes, and so the same bits, for every number of ranks; on GPUs of one kind also where cuBLAS computes it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace train {

inline constexpr int64_t kChunk = 32; // tokens

// Chunks are those of one rank.
class Chunks {
public:
  Chunks(int64_t batch, int rank, int num_ranks) {
    const int64_t chunks = (batch + kChunk - 1) / kChunk;
    first_token_ = std::min(chunks * rank / num_ranks * kChunk, batch);
    num_tokens_ = std::min(chunks * (rank + 1) / num_ranks * kChunk, batch) - first_token_;
  }

  int64_t first_token() const { return first_token_; } // in the batch
  int64_t num_tokens() const { return num_tokens_; }
  int64_t count() const { return (num_tokens_ + kChunk - 1) / kChunk; }
  int64_t begin(int64_t chunk) const { return chunk * kChunk; } // in this rank's tokens
  int64_t size(int64_t chunk) const { return std::min(kChunk, num_tokens_ - begin(chunk)); }

private:
  int64_t first_token_ = 0;
  int64_t num_tokens_ = 0;
};

} // namespace train
