// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <fmt/format.h>

#include "moe/ffn/ffn.h"

namespace epx::moe {
namespace {

// The members of an epx_moe_ffn_params, with the names that a sentence gives them.
class Reader {
public:
  Reader(const FfnShape& shape, const char* name, epx_dtype dtype) : shape_(shape), name_(name), dtype_(dtype) {}

  // [E_l, rows, columns] or, with columns = 0, [E_l, rows].
  void check(const epx_tensor* tensor, const char* member, Dim rows, Dim columns = {}) const {
    const std::string name = fmt::format("{}.{}", name_, member);
    const Dim experts{"E_l", shape_.num_experts};
    if (columns.symbol != nullptr)
      require_tensor(tensor, name.c_str(), {dtype_}, {experts, rows, columns});
    else
      require_tensor(tensor, name.c_str(), {dtype_}, {experts, rows});
  }

  // Gate and up, each from its own tensor or from the one that stacks them. Leaves what is not given empty.
  template <typename T>
  void read_pair(const epx_tensor* stacked, const epx_tensor* gate, const epx_tensor* up, const char* what, Dim columns,
                 ParamView<T>& gate_view, ParamView<T>& up_view) const {
    const std::string stacked_name = fmt::format("gate_up_{}", what);
    const std::string gate_name = fmt::format("gate_{}", what);
    const std::string up_name = fmt::format("up_{}", what);
    const int64_t block = shape_.inner * (columns.symbol != nullptr ? columns.size : 1);
    if (!shape_.has_gate() && (stacked != nullptr || gate != nullptr))
      fail(EPX_ERROR_INVALID_ARGUMENT, "{}.{} is given, but this activation has no gate", name_,
           stacked != nullptr ? stacked_name : gate_name);
    if (stacked != nullptr && (gate != nullptr || up != nullptr))
      fail(EPX_ERROR_INVALID_ARGUMENT, "{0}.{1} and {0}.{2} are both given; gate and up are either stacked or separate",
           name_, stacked_name, gate != nullptr ? gate_name : up_name);
    if (stacked != nullptr) {
      check(stacked, stacked_name.c_str(), {"2F", 2 * shape_.inner}, columns);
      gate_view = {data_of<T>(stacked), 2 * block};
      up_view = {stacked->data != nullptr ? data_of<T>(stacked) + block : nullptr, 2 * block};
    }
    if (gate != nullptr) {
      check(gate, gate_name.c_str(), {"F", shape_.inner}, columns);
      gate_view = {data_of<T>(gate), block};
    }
    if (up != nullptr) {
      check(up, up_name.c_str(), {"F", shape_.inner}, columns);
      up_view = {data_of<T>(up), block};
    }
  }

  template <typename T>
  FfnParams<T> read(const epx_moe_ffn_params& given) const {
    FfnParams<T> views;
    const Dim hidden{"H", shape_.hidden};
    read_pair(given.gate_up_weight, given.gate_weight, given.up_weight, "weight", hidden, views.gate, views.up);
    read_pair(given.gate_up_bias, given.gate_bias, given.up_bias, "bias", {}, views.gate_bias, views.up_bias);
    if (given.down_weight != nullptr) {
      check(given.down_weight, "down_weight", hidden, {"F", shape_.inner});
      views.down = {data_of<T>(given.down_weight), shape_.hidden * shape_.inner};
    }
    if (given.down_bias != nullptr) {
      check(given.down_bias, "down_bias", hidden);
      views.down_bias = {data_of<T>(given.down_bias), shape_.hidden};
    }
    return views;
  }

private:
  const FfnShape& shape_;
  const char* name_;
  epx_dtype dtype_;
};

} // namespace

FfnShape make_ffn_shape(const epx_moe_ffn_config& config) {
  if (config.num_local_experts < 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "num_local_experts is {}; it must not be negative", config.num_local_experts);
  if (config.hidden_dim < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "hidden_dim is {}; it must be at least 1 (it has no default)", config.hidden_dim);
  if (config.ffn_dim < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "ffn_dim is {}; it must be at least 1 (it has no default)", config.ffn_dim);
  if (config.activation != EPX_MOE_SWIGLU && config.activation != EPX_MOE_GELU && config.activation != EPX_MOE_RELU2)
    fail(EPX_ERROR_INVALID_ARGUMENT, "activation is {}; it must be an epx_moe_activation",
         static_cast<int>(config.activation));
  for (const int64_t reserved : config.reserved)
    if (reserved != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "a reserved field of the FFN's config is {}; it must be 0", reserved);
  return {config.num_local_experts, config.hidden_dim, config.ffn_dim, config.activation};
}

template <typename T>
FfnParams<T> view_params(const FfnShape& shape, const epx_moe_ffn_params* params, const char* name) {
  require_struct(params, name);
  const bool has_gate_weight = params->gate_up_weight != nullptr || params->gate_weight != nullptr;
  const bool has_up_weight = params->gate_up_weight != nullptr || params->up_weight != nullptr;
  if (shape.has_gate() && !has_gate_weight)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{0}.gate_weight is NULL, and so is {0}.gate_up_weight", name);
  if (!has_up_weight) fail(EPX_ERROR_INVALID_ARGUMENT, "{}.up_weight is NULL; it is required", name);
  if (params->down_weight == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{}.down_weight is NULL; it is required", name);
  return Reader(shape, name, kDtypeOf<T>).template read<T>(*params);
}

template <typename T>
FfnParams<T> view_grads(const FfnShape& shape, const FfnParams<T>& params, const epx_moe_ffn_params* grads,
                        const char* name) {
  if (grads == nullptr) return {};
  require_struct(grads, name);
  const FfnParams<T> views = Reader(shape, name, kDtypeOf<T>).template read<T>(*grads);
  const auto require_param = [&](const epx_tensor* bias, bool has_param, const char* member) {
    if (bias != nullptr && !has_param)
      fail(EPX_ERROR_INVALID_ARGUMENT, "{}.{} is given, but params has no such bias", name, member);
  };
  const bool no_experts = shape.num_experts == 0; // then nothing is to be seen of a bias
  require_param(grads->gate_up_bias, no_experts || (params.gate_bias && params.up_bias), "gate_up_bias");
  require_param(grads->gate_bias, no_experts || params.gate_bias, "gate_bias");
  require_param(grads->up_bias, no_experts || params.up_bias, "up_bias");
  require_param(grads->down_bias, no_experts || params.down_bias, "down_bias");
  return views;
}

void validate(const Zones& zones, int num_experts, int64_t num_rows) {
  for (int e = 0; e < num_experts; ++e) {
    const int64_t first = zones.offsets[e];
    const int64_t last = zones.offsets[e + 1];
    const int64_t count = zones.counts[e];
    if (first < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "offsets[{}] is {}; it must not be negative", e, first);
    if (last < first)
      fail(EPX_ERROR_INVALID_ARGUMENT, "offsets[{}] is {}, less than offsets[{}] = {}", e + 1, last, e, first);
    if (count < 0 || count > last - first)
      fail(EPX_ERROR_INVALID_ARGUMENT, "counts[{}] is {}; its zone, rows {} to {}, has {}", e, count, first, last,
           last - first);
  }
  if (const int64_t used = zones.offsets[num_experts]; used < 0 || used > num_rows)
    fail(EPX_ERROR_INVALID_ARGUMENT, "offsets[{}] is {}; there are {} rows", num_experts, used, num_rows);
}

template FfnParams<float> view_params(const FfnShape&, const epx_moe_ffn_params*, const char*);
template FfnParams<double> view_params(const FfnShape&, const epx_moe_ffn_params*, const char*);
template FfnParams<float> view_grads(const FfnShape&, const FfnParams<float>&, const epx_moe_ffn_params*, const char*);
template FfnParams<double> view_grads(const FfnShape&, const FfnParams<double>&, const epx_moe_ffn_params*, const char*);

} // namespace epx::moe
