// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <string>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "moe/ffn/ffn.h"

namespace epx::moe {
namespace {

// The members of an epx_moe_ffn_params, with the names that a sentence gives them.
class Reader {
public:
  Reader(const FfnShape& shape, const char* name, const ParamDtypes& dtypes)
      : shape_(shape), name_(name), dtypes_(dtypes) {}

  // Returns a weight [E_l, rows, columns] or, without columns, a bias [E_l, rows].
  ParamTensor read_one(const epx_tensor* tensor, const std::string& member, Dim rows, Dim columns = {}) const {
    const std::string name = fmt::format("{}.{}", name_, member);
    const Dim experts{"E_l", shape_.num_experts};
    if (columns.symbol != nullptr)
      require_tensor(tensor, name.c_str(), dtypes_.weights, {experts, rows, columns});
    else
      require_tensor(tensor, name.c_str(), dtypes_.biases, {experts, rows});
    return {tensor->data, rows.size * (columns.symbol != nullptr ? columns.size : 1), tensor->dtype};
  }

  // Gate and up, each from its own tensor or from the one that stacks them. Leaves what is not given empty.
  void read_pair(const epx_tensor* stacked, const epx_tensor* gate, const epx_tensor* up, const char* what, Dim columns,
                 ParamTensor& gate_param, ParamTensor& up_param) const {
    const std::string stacked_name = fmt::format("gate_up_{}", what);
    const std::string gate_name = fmt::format("gate_{}", what);
    const std::string up_name = fmt::format("up_{}", what);
    if (!shape_.has_gate() && (stacked != nullptr || gate != nullptr))
      fail(EPX_ERROR_INVALID_ARGUMENT, "{}.{} is given, but this activation has no gate", name_,
           stacked != nullptr ? stacked_name : gate_name);
    if (stacked != nullptr && (gate != nullptr || up != nullptr))
      fail(EPX_ERROR_INVALID_ARGUMENT, "{0}.{1} and {0}.{2} are both given; gate and up are either stacked or separate",
           name_, stacked_name, gate != nullptr ? gate_name : up_name);
    if (stacked != nullptr) {
      gate_param = up_param = read_one(stacked, stacked_name, {"2F", 2 * shape_.inner}, columns);
      if (up_param) up_param.data = static_cast<std::byte*>(up_param.data) + row_bytes(up_param.dtype, up_param.stride / 2);
    }
    if (gate != nullptr) gate_param = read_one(gate, gate_name, {"F", shape_.inner}, columns);
    if (up != nullptr) up_param = read_one(up, up_name, {"F", shape_.inner}, columns);
  }

  ParamTensors read(const epx_moe_ffn_params& given) const {
    ParamTensors params;
    const Dim hidden{"H", shape_.hidden};
    read_pair(given.gate_up_weight, given.gate_weight, given.up_weight, "weight", hidden, params.gate, params.up);
    read_pair(given.gate_up_bias, given.gate_bias, given.up_bias, "bias", {}, params.gate_bias, params.up_bias);
    if (given.down_weight != nullptr) params.down = read_one(given.down_weight, "down_weight", hidden, {"F", shape_.inner});
    if (given.down_bias != nullptr) params.down_bias = read_one(given.down_bias, "down_bias", hidden);
    params.is_stacked = given.gate_up_weight != nullptr;
    return params;
  }

private:
  const FfnShape& shape_;
  const char* name_;
  const ParamDtypes& dtypes_;
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

ParamTensors read_params(const FfnShape& shape, const epx_moe_ffn_params* params, const char* name,
                         const ParamDtypes& dtypes) {
  require_struct(params, name);
  const bool has_gate_weight = params->gate_up_weight != nullptr || params->gate_weight != nullptr;
  const bool has_up_weight = params->gate_up_weight != nullptr || params->up_weight != nullptr;
  if (shape.has_gate() && !has_gate_weight)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{0}.gate_weight is NULL, and so is {0}.gate_up_weight", name);
  if (!has_up_weight) fail(EPX_ERROR_INVALID_ARGUMENT, "{}.up_weight is NULL; it is required", name);
  if (params->down_weight == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{}.down_weight is NULL; it is required", name);
  return Reader(shape, name, dtypes).read(*params);
}

ParamTensors read_grads(const FfnShape& shape, const ParamTensors& params, const epx_moe_ffn_params* grads,
                        const char* name, const ParamDtypes& dtypes) {
  if (grads == nullptr) return {};
  require_struct(grads, name);
  const auto require_param = [&](const epx_tensor* bias, bool has_param, const char* member) {
    if (bias != nullptr && !has_param)
      fail(EPX_ERROR_INVALID_ARGUMENT, "{}.{} is given, but params has no such bias", name, member);
  };
  const ParamTensors tensors = Reader(shape, name, dtypes).read(*grads);
  const bool no_experts = shape.num_experts == 0; // then nothing is to be seen of a bias
  require_param(grads->gate_up_bias, no_experts || (params.gate_bias && params.up_bias), "gate_up_bias");
  require_param(grads->gate_bias, no_experts || params.gate_bias, "gate_bias");
  require_param(grads->up_bias, no_experts || params.up_bias, "up_bias");
  require_param(grads->down_bias, no_experts || params.down_bias, "down_bias");
  return tensors;
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

} // namespace epx::moe
