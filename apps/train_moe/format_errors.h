// SPDX-License-Identifier: Apache-2.0
// A FormatMeter measures how far row formats are from the activations of a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "apps/train_moe/array.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/world.h"
#include "epx/epx.hpp"

namespace train {

struct FormatError {
  const char* name; // of a format in epx::kNamedFormats
  double error;     // ||x - q(x)|| / ||x|| over the rows that the experts of all ranks receive
};

class FormatMeter {
public:
  // All must outlive it. The group is one of make_group().
  FormatMeter(epx::GroupView group, const World& world, Device& device, const Options& options);

  // Exchanges tokens[T, H] by topk_idx[T, K] as the layers do, in the dtype of the options, once as they are and once in each
  // format. Collective.
  std::vector<FormatError> measure(const float* tokens, std::span<const int32_t> topk_idx);

private:
  void prepare(std::span<const int32_t> topk_idx);
  std::vector<float> dispatch(const float* tokens, int64_t num_tokens, epx::NamedFormat format);

  epx::GroupView group_;
  const World& world_;
  Device& device_;
  const Options& options_;
  epx::Layer layer_;
  Array<std::byte> handle_mem_;
  int64_t num_rows_ = 0; // N, of the last prepare
};

} // namespace train
