// SPDX-License-Identifier: Apache-2.0
// epx_moe.h for C++20: the layer of epx.hpp over libepx_moe, all of it in this header. Link libepx_moe and libepx.
//
// It adds owners (Block, Arena, Errors), their views (BlockView, ...), configs with their defaults, and argument structs for
// designated initialisers. What a call means is told in epx_moe.h at the C function. A function here has the name of its C
// function without epx_moe_ (epx_moe_block_ and the like for members). The conventions are those of epx.hpp.
//
//   epx::moe::BlockConfig config;
//   config.router.num_experts = 32; ...
//   const epx::moe::Block block(group, config);
//   block.fwd({.tokens = {tokens, {T, H}}, .logits = {logits, {T, 32}},
//              .params = {.gate_up_weight = {gate_up, {4, 2 * F, H}}, .down_weight = {down, {4, H, F}}},
//              .out = {out, {T, H}}}); // five vectors of float
//
// To end a block or an arena in which a group has memory is a call of all ranks, and leaving a scope is the matter of one.
// So the destructors are the _destroy_local functions: what peers reach stays the group's until the group ends. destroy()
// gives it back earlier, and is called by all ranks.
#ifndef EPX_EPX_MOE_HPP_
#define EPX_EPX_MOE_HPP_

#include <optional>

#include "epx/epx.hpp"
#include "epx/epx_moe.h"

namespace epx::moe {
inline namespace v0 {

// ---- CUDA ------------------------------------------------------------------------------------------------------------

// An epx_moe_cuda. The args of a call point to one; NULL means the host.
struct Cuda : epx_moe_cuda {
  explicit Cuda(epx_stream of_calls = nullptr, std::span<std::byte> scratch = {}) noexcept : epx_moe_cuda() {
    struct_size = sizeof(epx_moe_cuda);
    stream = of_calls;
    workspace = scratch.data();
    workspace_bytes = scratch.size();
  }
};

namespace detail {

// Owns what a View shows. kDestroy is the C function that ends it on this rank alone.
template <typename View, auto kDestroy>
class Owner : public View {
public:
  using Handle = decltype(View().get());

  Owner() noexcept = default;
  explicit Owner(Handle handle) noexcept : View(handle) {} // takes it over
  Owner(Owner&& other) noexcept : View(other.release()) {}
  Owner& operator=(Owner&& other) noexcept {
    if (this != &other) {
      reset();
      this->handle_ = other.release();
    }
    return *this;
  }
  ~Owner() { reset(); }

  void reset() noexcept { kDestroy(release()); }
  [[nodiscard]] Handle release() noexcept { return std::exchange(this->handle_, nullptr); }
};

// What the args of all calls begin with.
template <typename CArgs, typename Args>
CArgs c_args(const Args& args) noexcept {
  CArgs call = {};
  call.struct_size = sizeof(call);
  call.cuda = args.cuda;
  return call;
}

} // namespace detail

// A record of what calls on a GPU saw in their data. Members throw Error.
class ErrorsView {
public:
  ErrorsView() noexcept = default;
  ErrorsView(epx_moe_errors errors) noexcept : handle_(errors) {}

  explicit operator bool() const noexcept { return handle_ != nullptr; }
  epx_moe_errors get() const noexcept { return handle_; }

  epx_moe_errors_report read() const {
    epx_moe_errors_report report = {};
    report.struct_size = sizeof(report);
    require_success(epx_moe_errors_read(handle_, &report), "epx_moe_errors_read");
    return report;
  }

protected:
  epx_moe_errors handle_ = nullptr;
};

class Errors : public detail::Owner<ErrorsView, epx_moe_errors_destroy> {
public:
  using Owner::Owner;
};

// epx_moe_errors_create. Throws Error.
[[nodiscard]] inline Errors make_errors() {
  epx_moe_errors errors = nullptr;
  require_success(epx_moe_errors_create(&errors), "epx_moe_errors_create");
  return Errors(errors);
}

// ---- Router ----------------------------------------------------------------------------------------------------------

// A config of the C API with its defaults; the required fields are still to be set. The constructors throw Error.
struct RouterConfig : epx_moe_router_config {
  RouterConfig() : epx_moe_router_config() {
    require_success(epx_moe_router_config_init(this, sizeof(epx_moe_router_config)), "epx_moe_router_config_init");
  }
};

// Arguments of the calls: the fields of the C structs, in their order, which designated initialisers keep. `cuda` NULL:
// tensors are host memory, and the call computes there.
struct RouterArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor logits = {};
  ConstTensor selection_bias = {}; // optional, as is the next
  ConstTensor token_mask = {};
  Tensor topk_idx = {};
  Tensor topk_weights = {};
  Tensor info = {}; // optional
};

struct RouterBwdArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor logits = {};
  ConstTensor topk_idx = {};
  ConstTensor grad_topk_weights = {}; // optional
  ConstTensor global_counts = {};     // iff aux_loss_coeff is not 0
  double aux_loss_grad = 0;
  Tensor grad_logits = {};
};

struct AuxLossArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor logits = {};
  ConstTensor topk_idx = {};
  ConstTensor global_counts = {};
  Tensor loss = {};
};

struct BiasUpdateArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor global_counts = {};
  double rate = 0;
  Tensor selection_bias = {};
};

// ---- Local permutation -----------------------------------------------------------------------------------------------

struct RowMapArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor topk_idx = {};
  int32_t alignment = 0; // rows; 0 means 1
  Tensor counts = {};
  Tensor offsets = {};
  Tensor row_map = {};
};

struct PermuteArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor row_map = {};
  ConstTensor tokens = {};
  ConstTensor topk_weights = {}; // optional
  Tensor rows = {};
  Tensor row_weights = {}; // iff topk_weights is given
  epx_pads pads = EPX_PADS_ZERO;
};

struct PermuteBwdArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor row_map = {};
  ConstTensor grad_rows = {};
  ConstTensor grad_row_weights = {}; // optional
  Tensor grad_tokens = {};
  Tensor grad_topk_weights = {}; // iff grad_row_weights is given
};

struct UnpermuteArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor row_map = {};
  ConstTensor rows = {};
  ConstTensor topk_weights = {}; // optional
  Tensor tokens = {};
};

struct UnpermuteBwdArgs {
  const epx_moe_cuda* cuda = nullptr;
  ConstTensor row_map = {};
  ConstTensor grad_tokens = {};
  ConstTensor rows = {};         // iff grad_topk_weights is wanted
  ConstTensor topk_weights = {}; // optional
  Tensor grad_rows = {};
  Tensor grad_topk_weights = {}; // optional
};

// ---- Grouped FFN -----------------------------------------------------------------------------------------------------

struct FfnConfig : epx_moe_ffn_config {
  FfnConfig() : epx_moe_ffn_config() {
    require_success(epx_moe_ffn_config_init(this, sizeof(epx_moe_ffn_config)), "epx_moe_ffn_config_init");
  }
};

// Parameters of experts, or gradients of them: an epx_moe_ffn_params that holds its tensors.
template <typename TensorType>
struct FfnTensors {
  TensorType gate_up_weight = {};
  TensorType gate_weight = {};
  TensorType up_weight = {};
  TensorType down_weight = {};
  TensorType gate_up_bias = {};
  TensorType gate_bias = {};
  TensorType up_bias = {};
  TensorType down_bias = {};

  // Points to the tensors here.
  epx_moe_ffn_params c_params() const noexcept {
    return {sizeof(epx_moe_ffn_params), gate_up_weight.get(), gate_weight.get(), up_weight.get(), down_weight.get(),
            gate_up_bias.get(),         gate_bias.get(),      up_bias.get(),     down_bias.get()};
  }
};
using FfnParams = FfnTensors<ConstTensor>;
using FfnGrads = FfnTensors<Tensor>; // those that are not wanted are left out

struct FfnArgs {
  const epx_moe_cuda* cuda = nullptr;
  FfnParams params = {};
  ConstTensor recv_tokens = {};
  ConstTensor counts = {};
  ConstTensor offsets = {};
  ConstTensor recv_weights = {}; // optional
  Tensor expert_out = {};
  Tensor pre_act = {}; // optional
};

struct FfnBwdArgs {
  const epx_moe_cuda* cuda = nullptr;
  FfnParams params = {};
  ConstTensor recv_tokens = {};
  ConstTensor counts = {};
  ConstTensor offsets = {};
  ConstTensor recv_weights = {}; // optional
  ConstTensor pre_act = {};
  ConstTensor grad_expert_out = {};
  Tensor grad_recv = {};
  Tensor grad_recv_weights = {}; // optional
  FfnGrads grads = {};
  bool accumulate = false;
};

// ---- Grouped FFN in FP8 ----------------------------------------------------------------------------------------------

// An epx_moe_fp8_params that holds its tensors. A forward needs the first four, a backward the others; that of a block with
// `recompute` the first two as well.
template <typename TensorType>
struct Fp8Tensors {
  TensorType gate_up_codes = {};
  TensorType gate_up_scales = {};
  TensorType down_codes = {};
  TensorType down_scales = {};
  TensorType gate_up_transposed_codes = {};
  TensorType gate_up_transposed_scales = {};
  TensorType down_transposed_codes = {};
  TensorType down_transposed_scales = {};

  // Points to the tensors here.
  epx_moe_fp8_params c_params() const noexcept {
    return {sizeof(epx_moe_fp8_params),
            gate_up_codes.get(),
            gate_up_scales.get(),
            down_codes.get(),
            down_scales.get(),
            gate_up_transposed_codes.get(),
            gate_up_transposed_scales.get(),
            down_transposed_codes.get(),
            down_transposed_scales.get()};
  }

  // For the calls that read what quantise_params() has written.
  operator Fp8Tensors<ConstTensor>() const noexcept requires(std::is_same_v<TensorType, Tensor>) {
    return {gate_up_codes,         gate_up_scales,           down_codes,
            down_scales,           gate_up_transposed_codes, gate_up_transposed_scales,
            down_transposed_codes, down_transposed_scales};
  }
};
using Fp8Params = Fp8Tensors<ConstTensor>;

// The tensors of both orientations for experts with these sizes. tensor_of(dtype, rows, columns) returns a Tensor or a
// ConstTensor [E_l, rows, columns] on memory of the caller.
template <typename TensorOf>
auto fp8_tensors(int64_t hidden_dim, int64_t ffn_dim, TensorOf&& tensor_of) {
  constexpr int64_t kBlock = 128; // rows and columns of a weight that have a scale in common
  const auto codes = [&](int64_t rows, int64_t columns) { return tensor_of(EPX_FLOAT8_E4M3, rows, columns); };
  const auto scales = [&](int64_t rows, int64_t columns) {
    return tensor_of(EPX_FLOAT32, rows / kBlock, columns / kBlock);
  };
  const int64_t stacked = 2 * ffn_dim;
  return Fp8Tensors<decltype(codes(stacked, hidden_dim))>{.gate_up_codes = codes(stacked, hidden_dim),
                                                          .gate_up_scales = scales(stacked, hidden_dim),
                                                          .down_codes = codes(hidden_dim, ffn_dim),
                                                          .down_scales = scales(hidden_dim, ffn_dim),
                                                          .gate_up_transposed_codes = codes(hidden_dim, stacked),
                                                          .gate_up_transposed_scales = scales(hidden_dim, stacked),
                                                          .down_transposed_codes = codes(ffn_dim, hidden_dim),
                                                          .down_transposed_scales = scales(ffn_dim, hidden_dim)};
}

struct QuantiseParamsArgs {
  const epx_moe_cuda* cuda = nullptr;
  RowFormat format = {}; // scaling and amax_floor
  ConstTensor gate_up_weight = {};
  ConstTensor down_weight = {};
  Fp8Tensors<Tensor> fp8_params = {}; // those that are not wanted are left out
};

struct TransposeParamsArgs {
  const epx_moe_cuda* cuda = nullptr;
  Fp8Tensors<Tensor> fp8_params = {}; // transposes that are not wanted are left out
};

struct FfnFp8Args {
  const epx_moe_cuda* cuda = nullptr;
  Fp8Params params = {};
  ConstTensor recv_tokens = {};
  ConstTensor recv_scales = {};
  ConstTensor counts = {};
  ConstTensor offsets = {};
  ConstTensor recv_weights = {}; // optional
  Tensor expert_out = {};
  Tensor pre_act = {}; // optional
};

struct FfnFp8BwdArgs {
  const epx_moe_cuda* cuda = nullptr;
  Fp8Params params = {};
  ConstTensor recv_tokens = {};
  ConstTensor recv_scales = {};
  ConstTensor counts = {};
  ConstTensor offsets = {};
  ConstTensor recv_weights = {}; // optional
  ConstTensor pre_act = {};
  ConstTensor grad_expert_out = {};
  ConstTensor grad_scales = {};
  Tensor grad_recv = {};
  Tensor grad_recv_weights = {}; // optional
  FfnGrads grads = {};           // gate_up_weight and down_weight
  bool accumulate = false;
  epx_moe_recipe recipe = EPX_MOE_RECIPE_FP8;
};

// ---- Quantisers ------------------------------------------------------------------------------------------------------

struct QuantiseRowsArgs {
  const epx_moe_cuda* cuda = nullptr;
  RowFormat format = {}; // scaling, amax_floor, and in scale_layout the layout of row_scales
  ConstTensor rows = {};
  ConstTensor scales = {}; // iff rows are E4M3
  epx_scale_layout scale_layout = EPX_SCALES_ROWS;
  ConstTensor counts = {};   // optional, given with offsets
  ConstTensor offsets = {};  // optional
  Tensor row_codes = {};     // optional
  Tensor row_scales = {};    // iff row_codes is given
  Tensor column_codes = {};  // optional
  Tensor column_scales = {}; // iff column_codes is given
};

struct QuantiseSwigluArgs {
  const epx_moe_cuda* cuda = nullptr;
  RowFormat format = {};
  ConstTensor pre_act = {};
  ConstTensor recv_weights = {}; // optional, as are the next two
  ConstTensor counts = {};
  ConstTensor offsets = {};
  Tensor row_codes = {};     // optional
  Tensor row_scales = {};    // iff row_codes is given
  Tensor column_codes = {};  // optional
  Tensor column_scales = {}; // iff column_codes is given
};

struct QuantiseSwigluBwdArgs {
  const epx_moe_cuda* cuda = nullptr;
  RowFormat format = {};
  ConstTensor pre_act = {};
  ConstTensor grad_h = {};
  ConstTensor recv_weights = {}; // optional, as are the next two
  ConstTensor counts = {};
  ConstTensor offsets = {};
  Tensor row_codes = {};         // optional
  Tensor row_scales = {};        // iff row_codes is given
  Tensor column_codes = {};      // optional
  Tensor column_scales = {};     // iff column_codes is given
  Tensor h_column_codes = {};    // optional
  Tensor h_column_scales = {};   // iff h_column_codes is given
  Tensor grad_recv_weights = {}; // optional
};

struct QuantiseWeightsArgs {
  const epx_moe_cuda* cuda = nullptr;
  RowFormat format = {}; // scaling, dtype, amax_floor and scale_layout
  ConstTensor weights = {};
  Tensor codes = {};                 // optional
  Tensor scales = {};                // iff codes is given
  Tensor transposed_codes = {};      // optional
  Tensor transposed_scales = {};     // iff transposed_codes is given
  Tensor row_scales = {};            // with NV iff codes is given
  Tensor transposed_row_scales = {}; // with NV iff transposed_codes is given
};

// ---- Calls -----------------------------------------------------------------------------------------------------------

namespace detail {

// Return the args for the C function, which point to the tensors of `args`.
inline epx_moe_router_bwd_args c_call(const RouterBwdArgs& args) noexcept {
  auto call = c_args<epx_moe_router_bwd_args>(args);
  call.logits = args.logits.get();
  call.topk_idx = args.topk_idx.get();
  call.grad_topk_weights = args.grad_topk_weights.get();
  call.global_counts = args.global_counts.get();
  call.aux_loss_grad = args.aux_loss_grad;
  call.grad_logits = args.grad_logits.get();
  return call;
}

inline epx_moe_aux_loss_args c_call(const AuxLossArgs& args) noexcept {
  auto call = c_args<epx_moe_aux_loss_args>(args);
  call.logits = args.logits.get();
  call.topk_idx = args.topk_idx.get();
  call.global_counts = args.global_counts.get();
  call.loss = args.loss.get();
  return call;
}

inline epx_moe_row_map_args c_call(const RowMapArgs& args) noexcept {
  auto call = c_args<epx_moe_row_map_args>(args);
  call.topk_idx = args.topk_idx.get();
  call.alignment = args.alignment;
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.row_map = args.row_map.get();
  return call;
}

inline epx_moe_permute_args c_call(const PermuteArgs& args) noexcept {
  auto call = c_args<epx_moe_permute_args>(args);
  call.row_map = args.row_map.get();
  call.tokens = args.tokens.get();
  call.topk_weights = args.topk_weights.get();
  call.rows = args.rows.get();
  call.row_weights = args.row_weights.get();
  call.pads = args.pads;
  return call;
}

inline epx_moe_unpermute_bwd_args c_call(const UnpermuteBwdArgs& args) noexcept {
  auto call = c_args<epx_moe_unpermute_bwd_args>(args);
  call.row_map = args.row_map.get();
  call.grad_tokens = args.grad_tokens.get();
  call.rows = args.rows.get();
  call.topk_weights = args.topk_weights.get();
  call.grad_rows = args.grad_rows.get();
  call.grad_topk_weights = args.grad_topk_weights.get();
  return call;
}

inline epx_moe_quantise_swiglu_bwd_args c_call(const QuantiseSwigluBwdArgs& args, const epx_row_format* format) noexcept {
  auto call = c_args<epx_moe_quantise_swiglu_bwd_args>(args);
  call.format = format;
  call.pre_act = args.pre_act.get();
  call.grad_h = args.grad_h.get();
  call.recv_weights = args.recv_weights.get();
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.row_codes = args.row_codes.get();
  call.row_scales = args.row_scales.get();
  call.column_codes = args.column_codes.get();
  call.column_scales = args.column_scales.get();
  call.h_column_codes = args.h_column_codes.get();
  call.h_column_scales = args.h_column_scales.get();
  call.grad_recv_weights = args.grad_recv_weights.get();
  return call;
}

inline epx_moe_ffn_args c_call(const FfnArgs& args, const epx_moe_ffn_params& params) noexcept {
  auto call = c_args<epx_moe_ffn_args>(args);
  call.params = &params;
  call.recv_tokens = args.recv_tokens.get();
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.recv_weights = args.recv_weights.get();
  call.expert_out = args.expert_out.get();
  call.pre_act = args.pre_act.get();
  return call;
}

inline epx_moe_ffn_bwd_args c_call(const FfnBwdArgs& args, const epx_moe_ffn_params& params,
                                   const epx_moe_ffn_params& grads) noexcept {
  auto call = c_args<epx_moe_ffn_bwd_args>(args);
  call.params = &params;
  call.recv_tokens = args.recv_tokens.get();
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.recv_weights = args.recv_weights.get();
  call.pre_act = args.pre_act.get();
  call.grad_expert_out = args.grad_expert_out.get();
  call.grad_recv = args.grad_recv.get();
  call.grad_recv_weights = args.grad_recv_weights.get();
  call.grads = &grads;
  call.accumulate = args.accumulate ? 1 : 0;
  return call;
}

inline epx_moe_ffn_fp8_args c_call(const FfnFp8Args& args, const epx_moe_fp8_params& params) noexcept {
  auto call = c_args<epx_moe_ffn_fp8_args>(args);
  call.params = &params;
  call.recv_tokens = args.recv_tokens.get();
  call.recv_scales = args.recv_scales.get();
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.recv_weights = args.recv_weights.get();
  call.expert_out = args.expert_out.get();
  call.pre_act = args.pre_act.get();
  return call;
}

inline epx_moe_ffn_fp8_bwd_args c_call(const FfnFp8BwdArgs& args, const epx_moe_fp8_params& params,
                                       const epx_moe_ffn_params& grads) noexcept {
  auto call = c_args<epx_moe_ffn_fp8_bwd_args>(args);
  call.params = &params;
  call.recv_tokens = args.recv_tokens.get();
  call.recv_scales = args.recv_scales.get();
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.recv_weights = args.recv_weights.get();
  call.pre_act = args.pre_act.get();
  call.grad_expert_out = args.grad_expert_out.get();
  call.grad_scales = args.grad_scales.get();
  call.grad_recv = args.grad_recv.get();
  call.grad_recv_weights = args.grad_recv_weights.get();
  call.grads = &grads;
  call.accumulate = args.accumulate ? 1 : 0;
  call.recipe = args.recipe;
  return call;
}

} // namespace detail

// All throw Error. The _workspace functions return bytes.
inline void router(const epx_moe_router_config& config, const RouterArgs& args) {
  auto call = detail::c_args<epx_moe_router_args>(args);
  call.logits = args.logits.get();
  call.selection_bias = args.selection_bias.get();
  call.token_mask = args.token_mask.get();
  call.topk_idx = args.topk_idx.get();
  call.topk_weights = args.topk_weights.get();
  call.info = args.info.get();
  require_success(epx_moe_router(&config, &call), "epx_moe_router");
}

inline void router_bwd(const epx_moe_router_config& config, const RouterBwdArgs& args) {
  const auto call = detail::c_call(args);
  require_success(epx_moe_router_bwd(&config, &call), "epx_moe_router_bwd");
}

[[nodiscard]] inline size_t router_bwd_workspace(const epx_moe_router_config& config, const RouterBwdArgs& args) {
  const auto call = detail::c_call(args);
  size_t bytes = 0;
  require_success(epx_moe_router_bwd_workspace(&config, &call, &bytes), "epx_moe_router_bwd_workspace");
  return bytes;
}

inline void aux_loss(const epx_moe_router_config& config, const AuxLossArgs& args) {
  const auto call = detail::c_call(args);
  require_success(epx_moe_aux_loss(&config, &call), "epx_moe_aux_loss");
}

[[nodiscard]] inline size_t aux_loss_workspace(const epx_moe_router_config& config, const AuxLossArgs& args) {
  const auto call = detail::c_call(args);
  size_t bytes = 0;
  require_success(epx_moe_aux_loss_workspace(&config, &call, &bytes), "epx_moe_aux_loss_workspace");
  return bytes;
}

inline void bias_update(const BiasUpdateArgs& args) {
  auto call = detail::c_args<epx_moe_bias_update_args>(args);
  call.global_counts = args.global_counts.get();
  call.rate = args.rate;
  call.selection_bias = args.selection_bias.get();
  require_success(epx_moe_bias_update(&call), "epx_moe_bias_update");
}

inline void row_map(const RowMapArgs& args) {
  const auto call = detail::c_call(args);
  require_success(epx_moe_row_map(&call), "epx_moe_row_map");
}

[[nodiscard]] inline size_t row_map_workspace(const RowMapArgs& args) {
  const auto call = detail::c_call(args);
  size_t bytes = 0;
  require_success(epx_moe_row_map_workspace(&call, &bytes), "epx_moe_row_map_workspace");
  return bytes;
}

inline void permute(const PermuteArgs& args) {
  const auto call = detail::c_call(args);
  require_success(epx_moe_permute(&call), "epx_moe_permute");
}

[[nodiscard]] inline size_t permute_workspace(const PermuteArgs& args) {
  const auto call = detail::c_call(args);
  size_t bytes = 0;
  require_success(epx_moe_permute_workspace(&call, &bytes), "epx_moe_permute_workspace");
  return bytes;
}

inline void permute_bwd(const PermuteBwdArgs& args) {
  auto call = detail::c_args<epx_moe_permute_bwd_args>(args);
  call.row_map = args.row_map.get();
  call.grad_rows = args.grad_rows.get();
  call.grad_row_weights = args.grad_row_weights.get();
  call.grad_tokens = args.grad_tokens.get();
  call.grad_topk_weights = args.grad_topk_weights.get();
  require_success(epx_moe_permute_bwd(&call), "epx_moe_permute_bwd");
}

inline void unpermute(const UnpermuteArgs& args) {
  auto call = detail::c_args<epx_moe_unpermute_args>(args);
  call.row_map = args.row_map.get();
  call.rows = args.rows.get();
  call.topk_weights = args.topk_weights.get();
  call.tokens = args.tokens.get();
  require_success(epx_moe_unpermute(&call), "epx_moe_unpermute");
}

inline void unpermute_bwd(const UnpermuteBwdArgs& args) {
  const auto call = detail::c_call(args);
  require_success(epx_moe_unpermute_bwd(&call), "epx_moe_unpermute_bwd");
}

[[nodiscard]] inline size_t unpermute_bwd_workspace(const UnpermuteBwdArgs& args) {
  const auto call = detail::c_call(args);
  size_t bytes = 0;
  require_success(epx_moe_unpermute_bwd_workspace(&call, &bytes), "epx_moe_unpermute_bwd_workspace");
  return bytes;
}

inline void quantise_rows(const QuantiseRowsArgs& args) {
  const epx_row_format format = args.format.get();
  auto call = detail::c_args<epx_moe_quantise_rows_args>(args);
  if (args.format) call.format = &format;
  call.rows = args.rows.get();
  call.scales = args.scales.get();
  call.scale_layout = args.scale_layout;
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.row_codes = args.row_codes.get();
  call.row_scales = args.row_scales.get();
  call.column_codes = args.column_codes.get();
  call.column_scales = args.column_scales.get();
  require_success(epx_moe_quantise_rows(&call), "epx_moe_quantise_rows");
}

inline void quantise_swiglu(const QuantiseSwigluArgs& args) {
  const epx_row_format format = args.format.get();
  auto call = detail::c_args<epx_moe_quantise_swiglu_args>(args);
  if (args.format) call.format = &format;
  call.pre_act = args.pre_act.get();
  call.recv_weights = args.recv_weights.get();
  call.counts = args.counts.get();
  call.offsets = args.offsets.get();
  call.row_codes = args.row_codes.get();
  call.row_scales = args.row_scales.get();
  call.column_codes = args.column_codes.get();
  call.column_scales = args.column_scales.get();
  require_success(epx_moe_quantise_swiglu(&call), "epx_moe_quantise_swiglu");
}

inline void quantise_swiglu_bwd(const QuantiseSwigluBwdArgs& args) {
  const epx_row_format format = args.format.get();
  const auto call = detail::c_call(args, args.format ? &format : nullptr);
  require_success(epx_moe_quantise_swiglu_bwd(&call), "epx_moe_quantise_swiglu_bwd");
}

[[nodiscard]] inline size_t quantise_swiglu_bwd_workspace(const QuantiseSwigluBwdArgs& args) {
  const auto call = detail::c_call(args, nullptr);
  size_t bytes = 0;
  require_success(epx_moe_quantise_swiglu_bwd_workspace(&call, &bytes), "epx_moe_quantise_swiglu_bwd_workspace");
  return bytes;
}

inline void quantise_weights(const QuantiseWeightsArgs& args) {
  const epx_row_format format = args.format.get();
  auto call = detail::c_args<epx_moe_quantise_weights_args>(args);
  if (args.format) call.format = &format;
  call.weights = args.weights.get();
  call.codes = args.codes.get();
  call.scales = args.scales.get();
  call.transposed_codes = args.transposed_codes.get();
  call.transposed_scales = args.transposed_scales.get();
  call.row_scales = args.row_scales.get();
  call.transposed_row_scales = args.transposed_row_scales.get();
  require_success(epx_moe_quantise_weights(&call), "epx_moe_quantise_weights");
}

inline void quantise_params(const QuantiseParamsArgs& args) {
  const epx_row_format format = args.format.get();
  const epx_moe_fp8_params made = args.fp8_params.c_params();
  auto call = detail::c_args<epx_moe_quantise_params_args>(args);
  if (args.format) call.format = &format;
  call.gate_up_weight = args.gate_up_weight.get();
  call.down_weight = args.down_weight.get();
  call.fp8_params = &made;
  require_success(epx_moe_quantise_params(&call), "epx_moe_quantise_params");
}

inline void transpose_params(const TransposeParamsArgs& args) {
  const epx_moe_fp8_params params = args.fp8_params.c_params();
  auto call = detail::c_args<epx_moe_transpose_params_args>(args);
  call.fp8_params = &params;
  require_success(epx_moe_transpose_params(&call), "epx_moe_transpose_params");
}

inline void ffn(const epx_moe_ffn_config& config, const FfnArgs& args) {
  const epx_moe_ffn_params params = args.params.c_params();
  const auto call = detail::c_call(args, params);
  require_success(epx_moe_ffn(&config, &call), "epx_moe_ffn");
}

[[nodiscard]] inline size_t ffn_workspace(const epx_moe_ffn_config& config, const FfnArgs& args) {
  const epx_moe_ffn_params params = args.params.c_params();
  const auto call = detail::c_call(args, params);
  size_t bytes = 0;
  require_success(epx_moe_ffn_workspace(&config, &call, &bytes), "epx_moe_ffn_workspace");
  return bytes;
}

inline void ffn_bwd(const epx_moe_ffn_config& config, const FfnBwdArgs& args) {
  const epx_moe_ffn_params params = args.params.c_params(), grads = args.grads.c_params();
  const auto call = detail::c_call(args, params, grads);
  require_success(epx_moe_ffn_bwd(&config, &call), "epx_moe_ffn_bwd");
}

[[nodiscard]] inline size_t ffn_bwd_workspace(const epx_moe_ffn_config& config, const FfnBwdArgs& args) {
  const epx_moe_ffn_params params = args.params.c_params(), grads = args.grads.c_params();
  const auto call = detail::c_call(args, params, grads);
  size_t bytes = 0;
  require_success(epx_moe_ffn_bwd_workspace(&config, &call, &bytes), "epx_moe_ffn_bwd_workspace");
  return bytes;
}

inline void ffn_fp8(const epx_moe_ffn_config& config, const FfnFp8Args& args) {
  const epx_moe_fp8_params params = args.params.c_params();
  const auto call = detail::c_call(args, params);
  require_success(epx_moe_ffn_fp8(&config, &call), "epx_moe_ffn_fp8");
}

[[nodiscard]] inline size_t ffn_fp8_workspace(const epx_moe_ffn_config& config, const FfnFp8Args& args) {
  const epx_moe_fp8_params params = args.params.c_params();
  const auto call = detail::c_call(args, params);
  size_t bytes = 0;
  require_success(epx_moe_ffn_fp8_workspace(&config, &call, &bytes), "epx_moe_ffn_fp8_workspace");
  return bytes;
}

inline void ffn_fp8_bwd(const epx_moe_ffn_config& config, const FfnFp8BwdArgs& args) {
  const epx_moe_fp8_params params = args.params.c_params();
  const epx_moe_ffn_params grads = args.grads.c_params();
  const auto call = detail::c_call(args, params, grads);
  require_success(epx_moe_ffn_fp8_bwd(&config, &call), "epx_moe_ffn_fp8_bwd");
}

[[nodiscard]] inline size_t ffn_fp8_bwd_workspace(const epx_moe_ffn_config& config, const FfnFp8BwdArgs& args) {
  const epx_moe_fp8_params params = args.params.c_params();
  const epx_moe_ffn_params grads = args.grads.c_params();
  const auto call = detail::c_call(args, params, grads);
  size_t bytes = 0;
  require_success(epx_moe_ffn_fp8_bwd_workspace(&config, &call, &bytes), "epx_moe_ffn_fp8_bwd_workspace");
  return bytes;
}

// ---- Block -----------------------------------------------------------------------------------------------------------

// An epx_moe_block_config with its defaults, which holds the configs of its router and its FFN, and its format. Their members
// here hide the pointers of the C struct, so that a copy is a config of its own.
struct BlockConfig : epx_moe_block_config {
  BlockConfig() : epx_moe_block_config() {
    require_success(epx_moe_block_config_init(this, sizeof(epx_moe_block_config)), "epx_moe_block_config_init");
  }

  // For the C API; valid as long as this object lives.
  epx_moe_block_config c_config() const noexcept {
    epx_moe_block_config config = *this;
    config.router = &router;
    config.ffn = &ffn;
    config.dispatch_format = dispatch_format ? &*dispatch_format : nullptr;
    return config;
  }

  RouterConfig router;
  FfnConfig ffn;
  std::optional<epx_row_format> dispatch_format; // RowFormat::get()
};

struct ArenaConfig {
  BlockConfig block = {};
  int32_t num_flights = 1;
  int64_t max_rows = 0; // 0: the group's R
};

struct BlockFwdArgs {
  const epx_moe_cuda* cuda = nullptr; // iff the block computes on a GPU
  int32_t flight = 0;
  ConstTensor tokens = {};
  ConstTensor logits = {};
  ConstTensor selection_bias = {}; // optional, as is the next
  ConstTensor token_mask = {};
  FfnParams params = {};                    // ignored where fp8_params are given
  std::optional<Fp8Params> fp8_params = {}; // iff the block's recipe is in FP8
  Tensor out = {};
  Tensor topk_idx = {}; // optional, as all that follow
  Tensor topk_weights = {};
  Tensor global_counts = {};
  Tensor info = {};
};

struct BlockBwdArgs {
  const epx_moe_cuda* cuda = nullptr;
  int32_t flight = 0;
  FfnParams params = {}; // as in the forward, and so is the next
  std::optional<Fp8Params> fp8_params = {};
  ConstTensor grad_out = {};
  double aux_loss_grad = 0;
  Tensor grad_tokens = {};
  Tensor grad_logits = {};
  FfnGrads grads = {};
  bool accumulate = false;
};

// An arena that something else owns. Members throw Error.
class ArenaView {
public:
  ArenaView() noexcept = default;
  ArenaView(epx_moe_arena arena) noexcept : handle_(arena) {}

  explicit operator bool() const noexcept { return handle_ != nullptr; }
  epx_moe_arena get() const noexcept { return handle_; }

  epx_moe_arena_info query() const {
    epx_moe_arena_info info = {};
    info.struct_size = sizeof(info);
    require_success(epx_moe_arena_query(handle_, &info), "epx_moe_arena_query");
    return info;
  }

protected:
  epx_moe_arena handle_ = nullptr;
};

// Owns an arena. It goes after the blocks that use it.
class Arena : public detail::Owner<ArenaView, epx_moe_arena_destroy_local> {
public:
  using Owner::Owner;

  // epx_moe_arena_create: collective over the group; an empty view for local blocks. Throws Error.
  Arena(GroupView group, const ArenaConfig& config) {
    const epx_moe_block_config block = config.block.c_config();
    epx_moe_arena_config c_config = {};
    require_success(epx_moe_arena_config_init(&c_config, sizeof(c_config)), "epx_moe_arena_config_init");
    c_config.block = &block;
    c_config.num_flights = config.num_flights;
    c_config.max_rows = config.max_rows;
    require_success(epx_moe_arena_create(group.get(), &c_config, &handle_), "epx_moe_arena_create");
  }

  // epx_moe_arena_destroy, which is collective. Empty afterwards, also where it throws Error.
  void destroy() { require_success(epx_moe_arena_destroy(release()), "epx_moe_arena_destroy"); }
};

// A block that something else owns. Members throw Error.
class BlockView {
public:
  BlockView() noexcept = default;
  BlockView(epx_moe_block block) noexcept : handle_(block) {}

  explicit operator bool() const noexcept { return handle_ != nullptr; }
  epx_moe_block get() const noexcept { return handle_; }

  // Collective, as is bwd.
  void fwd(const BlockFwdArgs& args) const {
    const epx_moe_ffn_params params = args.params.c_params();
    const Fp8Params fp8 = args.fp8_params.value_or(Fp8Params());
    const epx_moe_fp8_params fp8_params = fp8.c_params();
    auto call = detail::c_args<epx_moe_block_fwd_args>(args);
    call.flight = args.flight;
    call.tokens = args.tokens.get();
    call.logits = args.logits.get();
    call.selection_bias = args.selection_bias.get();
    call.token_mask = args.token_mask.get();
    if (args.fp8_params)
      call.fp8_params = &fp8_params;
    else
      call.params = &params;
    call.out = args.out.get();
    call.topk_idx = args.topk_idx.get();
    call.topk_weights = args.topk_weights.get();
    call.global_counts = args.global_counts.get();
    call.info = args.info.get();
    require_success(epx_moe_block_fwd(handle_, &call), "epx_moe_block_fwd");
  }

  void bwd(const BlockBwdArgs& args) const {
    const epx_moe_ffn_params params = args.params.c_params(), grads = args.grads.c_params();
    const Fp8Params fp8 = args.fp8_params.value_or(Fp8Params());
    const epx_moe_fp8_params fp8_params = fp8.c_params();
    auto call = detail::c_args<epx_moe_block_bwd_args>(args);
    call.flight = args.flight;
    if (args.fp8_params)
      call.fp8_params = &fp8_params;
    else
      call.params = &params;
    call.grad_out = args.grad_out.get();
    call.aux_loss_grad = args.aux_loss_grad;
    call.grad_tokens = args.grad_tokens.get();
    call.grad_logits = args.grad_logits.get();
    call.grads = &grads;
    call.accumulate = args.accumulate ? 1 : 0;
    require_success(epx_moe_block_bwd(handle_, &call), "epx_moe_block_bwd");
  }

  epx_moe_errors_report errors() const {
    epx_moe_errors_report report = {};
    report.struct_size = sizeof(report);
    require_success(epx_moe_block_errors(handle_, &report), "epx_moe_block_errors");
    return report;
  }

protected:
  epx_moe_block handle_ = nullptr;
};

// Owns a block. It goes before its arena; a group may go first.
class Block : public detail::Owner<BlockView, epx_moe_block_destroy_local> {
public:
  using Owner::Owner;

  // epx_moe_block_create: collective over the group; an empty view for a block of its own. Throws Error.
  Block(GroupView group, const BlockConfig& config) {
    const epx_moe_block_config c_config = config.c_config();
    require_success(epx_moe_block_create(group.get(), &c_config, &handle_), "epx_moe_block_create");
  }

  // epx_moe_block_destroy, which is collective. Empty afterwards, also where it throws Error.
  void destroy() { require_success(epx_moe_block_destroy(release()), "epx_moe_block_destroy"); }
};

} // namespace v0
} // namespace epx::moe

#endif // EPX_EPX_MOE_HPP_
