// SPDX-License-Identifier: Apache-2.0
#include "moe/block/block.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "base/error.h"
#include "moe/block/exchange.h"
#include "moe/ffn/ffn.h"
#include "moe/router/router.h"
#include "moe/tensors.h"

namespace epx::moe {
namespace {

// Parts of one allocation, each aligned to 256 bytes. Counts first, then cuts.
class Carver {
public:
  explicit Carver(std::byte* memory) : memory_(memory) {}

  template <typename T>
  T* take(int64_t elements) {
    T* const part = memory_ != nullptr ? reinterpret_cast<T*>(memory_ + bytes_) : nullptr;
    const int64_t bytes = checked_product({elements, sizeof(T)}, kWhat) + kAlignment - 1;
    if (__builtin_add_overflow(bytes_, bytes / kAlignment * kAlignment, &bytes_))
      fail(EPX_ERROR_INVALID_ARGUMENT, "{} has more bytes than an int64 can count", kWhat);
    return part;
  }
  size_t bytes() const { return static_cast<size_t>(bytes_); }

private:
  static constexpr int64_t kAlignment = 256;
  static constexpr const char* kWhat = "the block's memory for its rows";

  std::byte* memory_;
  int64_t bytes_ = 0;
};

struct alignas(16) HandleUnit { // epx wants handle memory aligned to 16 bytes
  std::byte bytes[16];
};

// What a forward leaves for its backward.
template <typename T>
struct Flight {
  int64_t num_tokens = -1; // -1: no forward that succeeded
  std::vector<HandleUnit> handle_mem;
  std::vector<int32_t> topk_idx;                       // [T, K]
  std::vector<T> logits, topk_weights;                 // [T, E], [T, K]
  std::vector<int32_t> counts, offsets, global_counts; // [E_l], [E_l + 1], [P, E]
  T* recv_tokens = nullptr;                            // [R, H], memory of the exchange, as the next two
  T* expert_out = nullptr;                             // [R, H]
  T* recv_weights = nullptr;                           // [R]
  std::unique_ptr<T[]> pre_act;                        // [R, 2F or F]; not initialised, so that unused rows cost nothing
};

template <typename T>
class BlockOf final : public Block {
public:
  BlockOf(std::unique_ptr<Exchange> exchange, const epx_moe_block_config& config, const FfnShape& ffn)
      : exchange_(std::move(exchange)), shape_(exchange_->shape()), router_(config.router),
        ffn_(ffn), layer_{config.router.top_k, config.alignment}, is_early_(config.weighting == EPX_MOE_WEIGHT_EARLY),
        flights_(config.max_in_flight), grad_topk_weights_(shape_.max_tokens * config.router.top_k) {
    ffn_.num_experts = shape_.num_local_experts;
    require_finite<T>(router_.scaling_factor, "router.scaling_factor");
    require_finite<T>(router_.aux_loss_coeff, "router.aux_loss_coeff");
    Carver measure(nullptr);
    carve(measure);
    for (Flight<T>& flight : flights_)
      reserve(flight);
    Carver cut(exchange_->allocate(measure.bytes()));
    carve(cut);
  }

  void forward(const epx_moe_block_fwd_args& args) override {
    Flight<T>& flight = require_flight(args.flight);
    const FfnParams<T> params = typed<T>(read_params(ffn_, args.params, "params", kHostDtypes<T>));
    const int64_t tokens = require_forward(args);

    flight.num_tokens = -1;
    std::copy_n(data_of<T>(args.logits), tokens * router_.num_experts, flight.logits.begin());
    const RouterInputs<T> inputs{tokens, flight.logits.data(), data_of<T>(args.selection_bias),
                                 data_of<uint8_t>(args.token_mask)};
    const RouterInfo info = route<T>(router_, inputs, Integers(flight.topk_idx.data()), flight.topk_weights.data());
    prepare(flight, tokens);
    dispatch(flight, *args.tokens);
    ffn_fwd<T>(ffn_, {params, zones(flight), flight.recv_tokens, is_early_ ? flight.recv_weights : nullptr,
                      flight.expert_out, flight.pre_act.get()});
    combine(flight, *args.out);
    flight.num_tokens = tokens;
    write_outputs(flight, info, args);
  }

  void backward(const epx_moe_block_bwd_args& args) override {
    Flight<T>& flight = require_flight(args.flight);
    const ParamTensors params = read_params(ffn_, args.params, "params", kHostDtypes<T>);
    const FfnParams<T> grads = typed<T>(read_grads(ffn_, params, args.grads, "grads", kHostDtypes<T>));
    require_backward(flight, args);

    combine_bwd(flight, *args.grad_out);
    FfnBackward<T> call;
    call.params = typed<T>(params);
    call.zones = zones(flight);
    call.recv_tokens = flight.recv_tokens;
    call.recv_weights = is_early_ ? flight.recv_weights : nullptr;
    call.pre_act = flight.pre_act.get();
    call.grad_expert_out = grad_expert_out_;
    call.grad_recv = grad_recv_;
    call.grad_recv_weights = is_early_ ? grad_recv_weights_ : nullptr; // late: combine_bwd has written them
    call.grads = grads;
    call.accumulate = args.accumulate == 1;
    ffn_bwd<T>(ffn_, call);
    dispatch_bwd(flight, *args.grad_tokens);

    const ExpertLoad load(Integers(flight.global_counts.data()), shape_.num_ranks, router_.num_experts);
    route_bwd<T>(router_, flight.num_tokens, flight.logits.data(), Integers(flight.topk_idx.data()),
                 grad_topk_weights_.data(), router_.aux_loss_coeff != 0 ? &load : nullptr, args.aux_loss_grad,
                 data_of<T>(args.grad_logits));
  }

  void release() override { exchange_->release(); }

private:
  static constexpr epx_dtype kReal = kDtypeOf<T>;

  // ---- Memory ----

  void reserve(Flight<T>& flight) const {
    flight.handle_mem.resize((shape_.handle_mem_bytes + sizeof(HandleUnit) - 1) / sizeof(HandleUnit));
    flight.topk_idx.resize(shape_.max_tokens * router_.top_k);
    flight.topk_weights.resize(shape_.max_tokens * router_.top_k);
    flight.logits.resize(shape_.max_tokens * router_.num_experts);
    flight.counts.resize(ffn_.num_experts);
    flight.offsets.resize(ffn_.num_experts + 1);
    flight.global_counts.resize(static_cast<int64_t>(shape_.num_ranks) * router_.num_experts);
    flight.pre_act.reset(new T[checked_product({shape_.row_capacity, ffn_.pre_act()}, "pre_act")]);
  }

  void carve(Carver& carver) {
    const int64_t rows = shape_.row_capacity;
    const int64_t elements = checked_product({rows, ffn_.hidden}, "the block's memory for its rows");
    for (Flight<T>& flight : flights_) {
      flight.recv_tokens = carver.take<T>(elements);
      flight.expert_out = carver.take<T>(elements);
      flight.recv_weights = carver.take<T>(rows);
    }
    grad_expert_out_ = carver.take<T>(elements);
    grad_recv_ = carver.take<T>(elements);
    grad_recv_weights_ = carver.take<T>(rows);
  }

  // ---- Arguments ----

  Flight<T>& require_flight(int32_t flight) {
    if (flight < 0 || flight >= static_cast<int32_t>(flights_.size()))
      fail(EPX_ERROR_INVALID_ARGUMENT, "flight is {}; max_in_flight is {}", flight, flights_.size());
    return flights_[flight];
  }

  // Returns T.
  int64_t require_forward(const epx_moe_block_fwd_args& args) const {
    require_tensor(args.tokens, "tokens", {kReal}, {{"T", kAnySize}, {"H", ffn_.hidden}});
    const Dim tokens{"T", args.tokens->sizes[0]};
    const Dim experts{"E", router_.num_experts};
    const Dim top_k{"K", router_.top_k};
    if (tokens.size > shape_.max_tokens)
      fail(EPX_ERROR_INVALID_ARGUMENT, "tokens has {} rows; max_tokens_per_rank is {}", tokens.size, shape_.max_tokens);
    require_tensor(args.logits, "logits", {kReal}, {tokens, experts});
    allow_tensor(args.selection_bias, "selection_bias", {kReal}, {experts});
    allow_tensor(args.token_mask, "token_mask", {EPX_UINT8}, {tokens});
    require_tensor(args.out, "out", {kReal}, {tokens, {"H", ffn_.hidden}});
    allow_tensor(args.topk_idx, "topk_idx", kInteger, {tokens, top_k});
    allow_tensor(args.topk_weights, "topk_weights", {kReal}, {tokens, top_k});
    allow_tensor(args.global_counts, "global_counts", kInteger, {{"P", shape_.num_ranks}, experts});
    allow_tensor(args.info, "info", {EPX_INT64}, {{"3", 3}});
    return tokens.size;
  }

  void require_backward(const Flight<T>& flight, const epx_moe_block_bwd_args& args) const {
    if (flight.num_tokens < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "flight {} has no forward to go back from", args.flight);
    const Dim tokens{"T", flight.num_tokens};
    require_tensor(args.grad_out, "grad_out", {kReal}, {tokens, {"H", ffn_.hidden}});
    require_tensor(args.grad_tokens, "grad_tokens", {kReal}, {tokens, {"H", ffn_.hidden}});
    require_tensor(args.grad_logits, "grad_logits", {kReal}, {tokens, {"E", router_.num_experts}});
    require_finite<T>(args.aux_loss_grad, "aux_loss_grad");
    if (args.accumulate != 0 && args.accumulate != 1)
      fail(EPX_ERROR_INVALID_ARGUMENT, "accumulate is {}; it must be 0 or 1", args.accumulate);
  }

  static Zones zones(Flight<T>& flight) { return {Integers(flight.counts.data()), Integers(flight.offsets.data())}; }

  // ---- The five operations, on the block's memory ----

  static std::span<std::byte> handle_mem(Flight<T>& flight) { return std::as_writable_bytes(std::span(flight.handle_mem)); }
  Tensor rows(T* data) const { return {data, kReal, {shape_.row_capacity, ffn_.hidden}}; }
  Tensor row_weights(T* data) const { return {data, kReal, shape_.row_capacity}; }
  // Without early weighting combine has the weights; else the FFN.
  ConstTensor combine_weights(Flight<T>& flight) const {
    return is_early_ ? ConstTensor() : row_weights(flight.recv_weights);
  }

  void prepare(Flight<T>& flight, int64_t tokens) {
    exchange_->prepare({.layer = layer_,
                        .handle_mem = handle_mem(flight),
                        .topk_idx = {flight.topk_idx.data(), EPX_INT32, {tokens, router_.top_k}},
                        .counts = flight.counts,
                        .offsets = flight.offsets,
                        .global_counts = {flight.global_counts, {shape_.num_ranks, router_.num_experts}}});
  }

  void dispatch(Flight<T>& flight, const epx_tensor& tokens) {
    exchange_->dispatch({.layer = layer_,
                         .handle_mem = handle_mem(flight),
                         .tokens = ConstTensor(tokens),
                         .topk_weights = {flight.topk_weights.data(), kReal, {tokens.sizes[0], router_.top_k}},
                         .recv_tokens = rows(flight.recv_tokens),
                         .recv_weights = row_weights(flight.recv_weights)});
  }

  void combine(Flight<T>& flight, const epx_tensor& out) {
    exchange_->combine({.layer = layer_,
                        .handle_mem = handle_mem(flight),
                        .expert_out = rows(flight.expert_out),
                        .recv_weights = combine_weights(flight),
                        .out = Tensor(out)});
  }

  void combine_bwd(Flight<T>& flight, const epx_tensor& grad_out) {
    CombineBwdArgs args = {.layer = layer_,
                           .handle_mem = handle_mem(flight),
                           .grad_out = ConstTensor(grad_out),
                           .recv_weights = combine_weights(flight),
                           .grad_expert_out = rows(grad_expert_out_)};
    if (!is_early_) {
      args.expert_out = rows(flight.expert_out);
      args.grad_recv_weights = row_weights(grad_recv_weights_);
    }
    exchange_->combine_bwd(args);
  }

  void dispatch_bwd(Flight<T>& flight, const epx_tensor& grad_tokens) {
    exchange_->dispatch_bwd({.layer = layer_,
                             .handle_mem = handle_mem(flight),
                             .grad_recv = rows(grad_recv_),
                             .grad_recv_weights = row_weights(grad_recv_weights_),
                             .grad_tokens = Tensor(grad_tokens),
                             .grad_topk_weights = {grad_topk_weights_.data(), kReal, {flight.num_tokens, router_.top_k}}});
  }

  void write_outputs(const Flight<T>& flight, const RouterInfo& info, const epx_moe_block_fwd_args& args) const {
    const int64_t routes = flight.num_tokens * router_.top_k;
    if (args.topk_idx != nullptr) copy_integers(flight.topk_idx, routes, *args.topk_idx);
    if (args.topk_weights != nullptr) std::copy_n(flight.topk_weights.data(), routes, data_of<T>(args.topk_weights));
    if (args.global_counts != nullptr)
      copy_integers(flight.global_counts, static_cast<int64_t>(flight.global_counts.size()), *args.global_counts);
    if (args.info != nullptr) write_info(info, *args.info);
  }

  static void copy_integers(const std::vector<int32_t>& from, int64_t size, const epx_tensor& to) {
    for (int64_t i = 0; i < size; ++i)
      Integers(&to).set(i, from[i]);
  }

  std::unique_ptr<Exchange> exchange_;
  Exchange::Shape shape_;
  epx_moe_router_config router_;
  FfnShape ffn_;
  Layer layer_;
  bool is_early_;
  std::vector<Flight<T>> flights_;
  std::vector<T> grad_topk_weights_; // [T, K], for the time of a backward
  T* grad_expert_out_ = nullptr;     // [R, H], memory of the exchange, as the next two; for the time of a backward
  T* grad_recv_ = nullptr;           // [R, H]
  T* grad_recv_weights_ = nullptr;   // [R]
};

} // namespace

std::unique_ptr<Block> make_block(epx_group group, const epx_moe_block_config& config) {
  require_struct(&config.router, "config.router");
  require_struct(&config.ffn, "config.ffn");
  validate(config.router);
  const FfnShape ffn = make_ffn_shape(config.ffn);
  if (config.dtype != EPX_FLOAT32 && config.dtype != EPX_FLOAT64)
    fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; it must be float32, or float64 without a group", name_of(config.dtype));
  if (config.weighting != EPX_MOE_WEIGHT_LATE && config.weighting != EPX_MOE_WEIGHT_EARLY)
    fail(EPX_ERROR_INVALID_ARGUMENT, "weighting is {}; it must be an epx_moe_weighting",
         static_cast<int>(config.weighting));
  if (config.alignment < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "alignment is {}; it must not be negative", config.alignment);
  if (config.max_in_flight < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "max_in_flight is {}; it must be at least 1", config.max_in_flight);
  if (group != nullptr) {
    std::unique_ptr<Exchange> exchange = make_group_exchange(group, config);
    try {
      return std::make_unique<BlockOf<float>>(std::move(exchange), config, ffn);
    } catch (const StatusError&) {
      throw; // refused on every rank, or by epx
    } catch (...) {
      GroupView(group).abort(); // no memory here: the other ranks are waiting in epx_mem_alloc
      throw;
    }
  }

  if (config.max_tokens_per_rank < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "max_tokens_per_rank is {}; without a group it must be at least 1",
         config.max_tokens_per_rank);
  if (config.dtype == EPX_FLOAT64)
    return std::make_unique<BlockOf<double>>(make_local_exchange<double>(config), config, ffn);
  return std::make_unique<BlockOf<float>>(make_local_exchange<float>(config), config, ffn);
}

} // namespace epx::moe
