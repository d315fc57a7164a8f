// SPDX-License-Identifier: Apache-2.0
// Parameters, zones and calls of the grouped FFN for the tests, with scribbled outputs.
#pragma once

#include <array>
#include <optional>

#include "epx/epx_moe.hpp"
#include "tests/moe/tensors.h"

namespace epx::test {

struct FfnShape {
  int32_t num_experts = 1;
  int32_t hidden = 1;
  int32_t ffn = 1;
  epx_moe_activation activation = EPX_MOE_SWIGLU;

  bool gated() const { return activation == EPX_MOE_SWIGLU; }
};

// Which members of the parameters are given. A stacked bias is given when gate_bias is.
struct FfnForm {
  bool stacked_weight = false;
  bool stacked_bias = false;
  bool gate_bias = true;
  bool up_bias = true;
  bool down_bias = true;
};

inline constexpr FfnForm kNoBias = {false, false, false, false, false};

inline epx_moe_ffn_config ffn_config(const FfnShape& shape) {
  moe::FfnConfig config;
  config.num_local_experts = shape.num_experts;
  config.hidden_dim = shape.hidden;
  config.ffn_dim = shape.ffn;
  config.activation = shape.activation;
  return config;
}

// FfnParams owns the memory of an epx_moe_ffn_params.
template <typename Real>
struct FfnParams {
  using Member = std::optional<Tensor<Real>>;
  Member gate_up_weight, gate_weight, up_weight, down_weight, gate_up_bias, gate_bias, up_bias, down_bias;

  struct Name {
    const char* text;
    Member FfnParams::*tensor;
    const epx_tensor* epx_moe_ffn_params::*view;
  };
  static constexpr std::array<Name, 8> kNames = {{
      {"gate_up_weight", &FfnParams::gate_up_weight, &epx_moe_ffn_params::gate_up_weight},
      {"gate_weight", &FfnParams::gate_weight, &epx_moe_ffn_params::gate_weight},
      {"up_weight", &FfnParams::up_weight, &epx_moe_ffn_params::up_weight},
      {"down_weight", &FfnParams::down_weight, &epx_moe_ffn_params::down_weight},
      {"gate_up_bias", &FfnParams::gate_up_bias, &epx_moe_ffn_params::gate_up_bias},
      {"gate_bias", &FfnParams::gate_bias, &epx_moe_ffn_params::gate_bias},
      {"up_bias", &FfnParams::up_bias, &epx_moe_ffn_params::up_bias},
      {"down_bias", &FfnParams::down_bias, &epx_moe_ffn_params::down_bias},
  }};

  // The result is valid as long as the members are neither moved nor replaced.
  epx_moe_ffn_params view() const {
    epx_moe_ffn_params params = {};
    params.struct_size = sizeof(params);
    for (const Name& name : kNames)
      params.*name.view = (this->*name.tensor) ? (this->*name.tensor)->get() : nullptr;
    return params;
  }
};

// Calls fn(name, tensor of each of the params in turn) for the members that are given.
template <typename Fn, typename First, typename... Rest>
void for_each_tensor(const Fn& fn, First& first, Rest&... rest) {
  for (const auto& name : First::kNames) {
    if (first.*name.tensor) fn(name.text, *(first.*name.tensor), *(rest.*name.tensor)...);
  }
}

template <typename To, typename From>
FfnParams<To> converted_params(const FfnParams<From>& wide) {
  FfnParams<To> params;
  for (size_t i = 0; i < wide.kNames.size(); ++i)
    if (const auto& tensor = wide.*wide.kNames[i].tensor) params.*params.kNames[i].tensor = converted<To>(*tensor);
  return params;
}

template <typename Real>
FfnParams<Real> random_params(const FfnShape& shape, const FfnForm& form, Rng& rng) {
  const int64_t e = shape.num_experts, h = shape.hidden, f = shape.ffn;
  // Drawn for every form, so that forms of one seed have the same values.
  const auto gate_weight = random_tensor<Real>({e, f, h}, rng);
  const auto up_weight = random_tensor<Real>({e, f, h}, rng);
  const auto down_weight = random_tensor<Real>({e, h, f}, rng);
  const auto gate_bias = random_tensor<Real>({e, f}, rng);
  const auto up_bias = random_tensor<Real>({e, f}, rng);
  const auto down_bias = random_tensor<Real>({e, h}, rng);
  const auto stack = [e](const Tensor<Real>& gate, const Tensor<Real>& up, Tensor<Real> stacked) {
    for (int64_t expert = 0; expert < e; ++expert) {
      for (int64_t i = 0; i < gate.per_row(); ++i) {
        stacked(expert, i) = gate(expert, i);
        stacked(expert, gate.per_row() + i) = up(expert, i);
      }
    }
    return stacked;
  };
  FfnParams<Real> params;
  params.down_weight = down_weight;
  if (form.down_bias) params.down_bias = down_bias;
  if (shape.gated() && form.stacked_weight) {
    params.gate_up_weight = stack(gate_weight, up_weight, Tensor<Real>({e, 2 * f, h}));
  } else {
    params.up_weight = up_weight;
    if (shape.gated()) params.gate_weight = gate_weight;
  }
  if (shape.gated() && form.stacked_bias) {
    if (form.gate_bias) params.gate_up_bias = stack(gate_bias, up_bias, Tensor<Real>({e, 2 * f}));
  } else {
    if (form.up_bias) params.up_bias = up_bias;
    if (shape.gated() && form.gate_bias) params.gate_bias = gate_bias;
  }
  return params;
}

// Returns the gate's (half 0) or up's (half 1) part of a stacked tensor.
template <typename Real>
Tensor<Real> unstack(const Tensor<Real>& stacked, int half) {
  const int64_t rows = stacked.size(1) / 2;
  Tensor<Real> part =
      stacked.ndim() == 2 ? Tensor<Real>({stacked.size(0), rows}) : Tensor<Real>({stacked.size(0), rows, stacked.size(2)});
  for (int64_t e = 0; e < part.size(0); ++e) {
    for (int64_t i = 0; i < part.per_row(); ++i)
      part(e, i) = stacked(e, half * part.per_row() + i);
  }
  return part;
}

struct Zones {
  Tensor<int32_t> counts;          // [E_l]
  Tensor<int32_t> offsets;         // [E_l + 1]
  int64_t num_rows = 0;            // N
  std::vector<int64_t> row_expert; // [N] -1 for rows that are not in use

  bool used(int64_t row) const { return row_expert.at(static_cast<size_t>(row)) >= 0; }
};

// `spare` rows follow the last zone.
inline Zones make_zones(const std::vector<int32_t>& counts, int32_t alignment, int64_t spare) {
  const auto num_experts = static_cast<int64_t>(counts.size());
  Zones zones = {Tensor<int32_t>({num_experts}, counts), Tensor<int32_t>({num_experts + 1}), 0, {}};
  for (int64_t e = 0; e < num_experts; ++e) {
    const int32_t padded = (zones.counts[e] + alignment - 1) / alignment * alignment;
    zones.offsets[e + 1] = zones.offsets[e] + padded;
    for (int32_t i = 0; i < padded; ++i)
      zones.row_expert.push_back(i < zones.counts[e] ? e : -1);
  }
  zones.row_expert.resize(zones.row_expert.size() + static_cast<size_t>(spare), -1);
  zones.num_rows = static_cast<int64_t>(zones.row_expert.size());
  return zones;
}

// Sets the rows that are not in use to `value`.
template <typename Real>
void fill_unused(const Zones& zones, Tensor<Real>& rows, Real value) {
  for (int64_t row = 0; row < zones.num_rows; ++row) {
    for (int64_t i = 0; i < rows.per_row() && !zones.used(row); ++i)
      rows(row, i) = value;
  }
}

template <typename Real>
struct FfnResult {
  Tensor<Real> expert_out; // [N, H]
  Tensor<Real> pre_act;    // [N, 2F] or [N, F]
};

template <typename Real>
FfnResult<Real> run_ffn(const FfnShape& shape, const FfnParams<Real>& params, const Zones& zones,
                        const Tensor<Real>& recv_tokens, const Tensor<Real>* recv_weights = nullptr,
                        bool want_pre_act = true) {
  FfnResult<Real> result = {scribbled<Real>({zones.num_rows, shape.hidden}),
                            scribbled<Real>({zones.num_rows, shape.gated() ? 2 * shape.ffn : shape.ffn})};
  const epx_moe_ffn_config config = ffn_config(shape);
  const epx_moe_ffn_params view = params.view();
  epx_moe_ffn_args args = {};
  args.struct_size = sizeof(args);
  args.params = &view;
  args.recv_tokens = recv_tokens.get();
  args.counts = zones.counts.get();
  args.offsets = zones.offsets.get();
  args.recv_weights = recv_weights != nullptr ? recv_weights->get() : nullptr;
  args.expert_out = result.expert_out.get();
  args.pre_act = want_pre_act ? result.pre_act.get() : nullptr;
  require_ok(epx_moe_ffn(&config, &args), "epx_moe_ffn");
  return result;
}

template <typename Real>
struct FfnGradients {
  Tensor<Real> recv;         // [N, H]
  Tensor<Real> recv_weights; // [N]
};

// The caller gives `grads` the tensors that it wants, scribbled or with values to add to; NULL asks for none.
template <typename Real>
FfnGradients<Real> run_ffn_bwd(const FfnShape& shape, const FfnParams<Real>& params, const Zones& zones,
                               const Tensor<Real>& recv_tokens, const Tensor<Real>* recv_weights,
                               const Tensor<Real>& pre_act, const Tensor<Real>& grad_expert_out, FfnParams<Real>* grads,
                               bool accumulate = false) {
  FfnGradients<Real> result = {scribbled<Real>({zones.num_rows, shape.hidden}), scribbled<Real>({zones.num_rows})};
  const epx_moe_ffn_config config = ffn_config(shape);
  const epx_moe_ffn_params view = params.view();
  const epx_moe_ffn_params grads_view = grads != nullptr ? grads->view() : epx_moe_ffn_params{};
  epx_moe_ffn_bwd_args args = {};
  args.struct_size = sizeof(args);
  args.params = &view;
  args.recv_tokens = recv_tokens.get();
  args.counts = zones.counts.get();
  args.offsets = zones.offsets.get();
  args.recv_weights = recv_weights != nullptr ? recv_weights->get() : nullptr;
  args.pre_act = pre_act.get();
  args.grad_expert_out = grad_expert_out.get();
  args.grad_recv = result.recv.get();
  args.grad_recv_weights = recv_weights != nullptr ? result.recv_weights.get() : nullptr;
  args.grads = grads != nullptr ? &grads_view : nullptr;
  args.accumulate = accumulate ? 1 : 0;
  require_ok(epx_moe_ffn_bwd(&config, &args), "epx_moe_ffn_bwd");
  return result;
}

// Returns scribbled tensors of the shapes of params.
template <typename Real>
FfnParams<Real> scribbled_like(const FfnParams<Real>& params) {
  FfnParams<Real> grads = params;
  for_each_tensor([](const char*, Tensor<Real>& tensor) { tensor.scribble(); }, grads);
  return grads;
}

} // namespace epx::test
