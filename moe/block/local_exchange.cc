// SPDX-License-Identifier: Apache-2.0
// The five operations where all experts are on one rank: the local permutation, with the bits of EPX_COMBINE_EXACT. Rows of
// a format are quantised as a group's are. Where a block gives combine_bwd a format, the FFN applies the weights. Handle
// memory is the number of rows in use and the row map.
#include <algorithm>
#include <vector>

#include "base/dtypes.h"
#include "moe/block/exchange.h"
#include "moe/permute/permute.h"
#include "moe/tensors.h"
#include "runtime/formats/format_arguments.h"
#include "runtime/stages/host/rows/float_environment.h"
#include "runtime/stages/host/rows/wire_rows.h"

namespace epx::moe {
namespace {

// Rows [T, H] of a call with a format, each quantised by itself.
template <typename T>
class QuantisedRows {
public:
  QuantisedRows(const epx_row_format& format, const char* operation, const T* rows, int64_t num_rows, int64_t hidden)
      : wire_(check_format(format, operation), hidden), num_rows_(num_rows), hidden_(hidden),
        pitch_((wire_.bytes() + kAlignment - 1) / kAlignment * kAlignment),
        quantised_(static_cast<size_t>(num_rows * pitch_)) {
    const host::DefaultFloatEnvironment environment;
    for (int64_t row = 0; row < num_rows; ++row)
      wire_.quantise(kDtypeOf<T>, reinterpret_cast<const std::byte*>(rows + row * hidden), nullptr, at(row));
  }

  // What arrives where the wire alone is quantised.
  void dequantise(std::vector<T>& arrived) {
    const host::DefaultFloatEnvironment environment;
    arrived.resize(static_cast<size_t>(num_rows_ * hidden_));
    for (int64_t row = 0; row < num_rows_; ++row)
      wire_.dequantise(at(row), kDtypeOf<T>, nullptr, reinterpret_cast<std::byte*>(arrived.data() + row * hidden_));
  }
  // Writes codes and scales, in EPX_SCALES_ROWS, to the rows of the map.
  void scatter(const RowMap& map, const epx_tensor& codes, const epx_tensor& scales) {
    const auto scatter_parts = [&](size_t bytes, const auto& part_of, void* to) {
      std::vector<std::byte> parts(static_cast<size_t>(num_rows_) * bytes);
      for (int64_t row = 0; row < num_rows_; ++row)
        std::copy_n(part_of(row), bytes, parts.data() + static_cast<size_t>(row) * bytes);
      scatter_tokens(map, parts.data(), to, static_cast<int64_t>(bytes), EPX_PADS_ZERO);
    };
    scatter_parts(
        wire_.element_bytes(), [&](int64_t row) { return at(row); }, codes.data);
    scatter_parts(
        wire_.scale_bytes(), [&](int64_t row) { return wire_.scales(at(row)); }, scales.data);
  }

private:
  static constexpr int64_t kAlignment = 16;

  std::byte* at(int64_t row) { return quantised_.data() + row * pitch_; }

  host::WireRows wire_;
  int64_t num_rows_, hidden_, pitch_;
  std::vector<std::byte> quantised_;
};

template <typename T>
class LocalExchange final : public Exchange {
public:
  explicit LocalExchange(const BlockPlan& plan)
      : num_experts_(plan.router.num_experts), top_k_(plan.layer.top_k), alignment_(std::max(plan.layer.alignment, 1)),
        weights_(static_cast<size_t>(plan.max_tokens * top_k_)) {}

  size_t handle_mem_bytes() const override { return (1 + weights_.size()) * sizeof(int32_t); }

  void prepare(const ExchangeCall&, const epx_prepare_args& args) override {
    const int64_t tokens = args.topk_idx->sizes[0];
    const Integers counts(args.counts);
    const Integers global_counts(args.global_counts);
    const Integers offsets(args.offsets);
    auto* const handle = static_cast<int32_t*>(args.handle_mem);
    make_row_map(Integers(args.topk_idx), tokens, top_k_, num_experts_, alignment_, counts, offsets, handle + 1);
    handle[0] = static_cast<int32_t>(offsets[num_experts_]);
    for (int e = 0; e < num_experts_; ++e)
      global_counts.set(e, counts[e]);
  }

  void dispatch(const ExchangeCall&, const epx_dispatch_args& args) override {
    const RowMap map = row_map(args.handle_mem, *args.tokens);
    const int64_t hidden = args.tokens->sizes[1];
    const T* tokens = data_of<T>(args.tokens);
    if (args.format != nullptr) {
      QuantisedRows<T> quantised(*args.format, "dispatch", tokens, args.tokens->sizes[0], hidden);
      if (args.format->recv_scales != nullptr) {
        quantised.scatter(map, *args.recv_tokens, *args.format->recv_scales);
      } else {
        quantised.dequantise(arrived_);
        tokens = arrived_.data();
      }
    }
    if (args.recv_tokens->dtype == kDtypeOf<T>)
      scatter_tokens(map, tokens, args.recv_tokens->data, row_bytes(kDtypeOf<T>, hidden), EPX_PADS_ZERO);
    scatter_routes(map, args.topk_weights->data, args.recv_weights->data, sizeof(T), EPX_PADS_ZERO);
  }

  void combine(const ExchangeCall&, const epx_combine_args& args) override {
    const RowMap map = row_map(args.handle_mem, *args.out);
    sum_rows<T>(map, data_of<T>(args.expert_out), weights_by_route(map, args.recv_weights), args.out->sizes[1],
                data_of<T>(args.out));
  }

  void combine_bwd(const ExchangeCall&, const epx_combine_bwd_args& args) override {
    const RowMap map = row_map(args.handle_mem, *args.grad_out);
    const T* const grad_out = data_of<T>(args.grad_out);
    const int64_t hidden = args.grad_out->sizes[1];
    if (args.format != nullptr)
      return QuantisedRows<T>(*args.format, "combine_bwd", grad_out, args.grad_out->sizes[0], hidden)
          .scatter(map, *args.grad_expert_out, *args.format->recv_scales);
    scatter_weighted<T>(map, grad_out, weights_by_route(map, args.recv_weights), hidden, data_of<T>(args.grad_expert_out));
    if (args.grad_recv_weights == nullptr) return;
    dot_rows<T>(map, grad_out, data_of<T>(args.expert_out), hidden, weights_.data());
    scatter_routes(map, weights_.data(), args.grad_recv_weights->data, sizeof(T), EPX_PADS_ZERO);
  }

  void dispatch_bwd(const ExchangeCall&, const epx_dispatch_bwd_args& args) override {
    const RowMap map = row_map(args.handle_mem, *args.grad_tokens);
    sum_rows<T>(map, data_of<T>(args.grad_recv), nullptr, args.grad_tokens->sizes[1], data_of<T>(args.grad_tokens));
    gather_routes<T>(map, data_of<T>(args.grad_recv_weights), data_of<T>(args.grad_topk_weights));
  }

private:
  RowMap row_map(const void* handle_mem, const epx_tensor& tokens) const {
    const auto* const handle = static_cast<const int32_t*>(handle_mem);
    return {handle + 1, tokens.sizes[0], top_k_, handle[0]};
  }

  // [T, K] from [N]; NULL for NULL.
  const T* weights_by_route(const RowMap& map, const epx_tensor* recv_weights) {
    if (recv_weights == nullptr) return nullptr;
    gather_routes<T>(map, data_of<T>(recv_weights), weights_.data());
    return weights_.data();
  }

  int num_experts_;
  int64_t top_k_;
  int64_t alignment_;
  std::vector<T> weights_; // [max_tokens, K]
  std::vector<T> arrived_; // [T, H] of a call with a format: tokens as they arrive
};

} // namespace

std::unique_ptr<Exchange> make_local_exchange(const BlockPlan& plan) {
  return with_real(plan.dtype,
                   [&]<typename T>(T) -> std::unique_ptr<Exchange> { return std::make_unique<LocalExchange<T>>(plan); });
}

} // namespace epx::moe
