// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/format_errors.h"

#include <cmath>

#include "tools/named_formats.h"

namespace train {

FormatMeter::FormatMeter(epx::GroupView group, const World& world, Device& device, const Options& options)
    : group_(group), world_(world), device_(device), options_(options), layer_{options.model.top_k}, handle_mem_(device) {
  handle_mem_.resize(static_cast<int64_t>(group.handle_mem_size(layer_)));
}

std::vector<FormatError> FormatMeter::measure(const float* tokens, std::span<const int32_t> topk_idx) {
  prepare(topk_idx);
  const auto num_tokens = static_cast<int64_t>(topk_idx.size()) / options_.model.top_k;
  const std::vector<float> exact = dispatch(tokens, num_tokens, epx::NamedFormat::None);
  std::vector<FormatError> errors;
  for (const auto& [name, format] : epx::kNamedFormats) {
    if (format == epx::NamedFormat::None) continue;
    const std::vector<float> rows = dispatch(tokens, num_tokens, format);
    double sums[2] = {0, 0}; // of squares: errors, elements
    for (size_t i = 0; i < exact.size(); ++i) {
      const double error = double{rows[i]} - double{exact[i]};
      sums[0] += error * error;
      sums[1] += double{exact[i]} * double{exact[i]};
    }
    double all[2] = {0, 0};
    const std::vector<double> parts = world_.gather(std::span<const double>(sums));
    for (size_t i = 0; i < parts.size(); ++i)
      all[i % 2] += parts[i];
    errors.push_back({name, all[1] > 0 ? std::sqrt(all[0] / all[1]) : 0});
  }
  return errors;
}

void FormatMeter::prepare(std::span<const int32_t> topk_idx) {
  const int64_t num_experts = group_.query().num_local_experts;
  Array<int32_t> idx(device_), counts(device_), offsets(device_);
  idx.assign(topk_idx);
  counts.resize(num_experts);
  offsets.resize(num_experts + 1);
  group_.prepare({.layer = layer_,
                  .handle_mem = {handle_mem_.data(), static_cast<size_t>(handle_mem_.size())},
                  .stream = device_.stream(),
                  .topk_idx = {idx.data(), EPX_INT32, {idx.size() / layer_.top_k, layer_.top_k}},
                  .counts = {counts.data(), EPX_INT32, counts.size()},
                  .offsets = {offsets.data(), EPX_INT32, offsets.size()}});
  int32_t num_rows = 0;
  offsets.copy_out(num_experts, {&num_rows, 1}); // waits
  num_rows_ = num_rows;
}

// Returns the rows [N, H] that arrive.
std::vector<float> FormatMeter::dispatch(const float* tokens, int64_t num_tokens, epx::NamedFormat format) {
  const int64_t hidden = options_.model.hidden;
  Array<float> arrived(device_);
  Array<Bfloat16> narrow_tokens(device_), narrow_arrived(device_);
  arrived.resize(num_rows_ * hidden);
  epx::DispatchArgs args = {.layer = layer_,
                            .handle_mem = {handle_mem_.data(), static_cast<size_t>(handle_mem_.size())},
                            .stream = device_.stream(),
                            .tokens = {tokens, EPX_FLOAT32, {num_tokens, hidden}},
                            .recv_tokens = {arrived.data(), EPX_FLOAT32, {num_rows_, hidden}},
                            .format = epx::row_format(format)};
  if (options_.dtype == Dtype::bf16) {
    narrow_tokens.resize(num_tokens * hidden);
    narrow_arrived.resize(num_rows_ * hidden);
    device_.round(tokens, narrow_tokens.size(), narrow_tokens.data());
    args.tokens = {narrow_tokens.data(), EPX_BFLOAT16, {num_tokens, hidden}};
    args.recv_tokens = {narrow_arrived.data(), EPX_BFLOAT16, {num_rows_, hidden}};
  }
  group_.dispatch(args);
  if (options_.dtype == Dtype::bf16) device_.widen(narrow_arrived.data(), narrow_arrived.size(), arrived.data());
  std::vector<float> rows(static_cast<size_t>(arrived.size()));
  arrived.copy_out(0, rows);
  return rows;
}

} // namespace train
