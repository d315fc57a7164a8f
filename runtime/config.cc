// SPDX-License-Identifier: Apache-2.0
#include "runtime/config.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "base/checked_math.h"
#include "base/env.h"
#include "base/error.h"
#include "base/names.h"

namespace epx {
namespace {

void require_range(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_config.{} is {}; it must be {}..{}", field, value, low, high);
}

void require_at_least(const char* field, int64_t value, int64_t low) {
  if (value < low) fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_config.{} is {}; it must be at least {}", field, value, low);
}

// For an enum of which `first` to `last` are the values.
template <typename Enum>
void require_known(const char* field, Enum value, Enum first, Enum last) {
  if (value >= first && value <= last) return;
  std::string known;
  for (int32_t each = first; each <= last; ++each)
    known += fmt::format("{}{} ({})", known.empty() ? "" : ", ", name_of(static_cast<Enum>(each)), each);
  fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_config.{} is {}; it must be one of {}", field, static_cast<int32_t>(value),
       known);
}

// Ranks must agree on each of these fields; `format` formats a value for messages.
struct AgreedField {
  const char* name;
  int64_t (*value)(const epx_group_config&);
  std::string (*format)(int64_t value) = [](int64_t value) { return std::to_string(value); };
};

template <typename Enum>
std::string format_enum(int64_t value) {
  return name_of(static_cast<Enum>(value));
}

constexpr std::array kAgreedFields = {
    AgreedField{"num_experts", [](const epx_group_config& c) -> int64_t { return c.num_experts; }},
    AgreedField{"max_tokens_per_rank", [](const epx_group_config& c) -> int64_t { return c.max_tokens_per_rank; }},
    AgreedField{"hidden_dim", [](const epx_group_config& c) -> int64_t { return c.hidden_dim; }},
    AgreedField{"max_top_k", [](const epx_group_config& c) -> int64_t { return c.max_top_k; }},
    AgreedField{"max_alignment", [](const epx_group_config& c) -> int64_t { return c.max_alignment; }},
    AgreedField{"max_token_dtype", [](const epx_group_config& c) -> int64_t { return c.max_token_dtype; },
                format_enum<epx_dtype>},
    AgreedField{"max_recv_tokens_per_rank",
                [](const epx_group_config& c) -> int64_t { return c.max_recv_tokens_per_rank; }},
    AgreedField{"max_sidecar_bytes", [](const epx_group_config& c) -> int64_t { return c.max_sidecar_bytes; }},
    AgreedField{"combine_precision", [](const epx_group_config& c) -> int64_t { return c.combine_precision; },
                format_enum<epx_combine_precision>},
    AgreedField{"overflow", [](const epx_group_config& c) -> int64_t { return c.overflow; }, format_enum<epx_overflow>},
    AgreedField{"transport", [](const epx_group_config& c) -> int64_t { return c.transport; }, format_enum<epx_transport>},
    AgreedField{"ranks_per_node", [](const epx_group_config& c) -> int64_t { return c.ranks_per_node; }},
    AgreedField{"fixed_rail_tokens", [](const epx_group_config& c) -> int64_t { return c.fixed_rail_tokens; }},
};

} // namespace

int64_t default_timeout_ms() {
  constexpr int64_t kDefault = 300'000;
  return environment().timeout_ms.value_or(kDefault);
}

void validate(const epx_group_config& config) {
  if (config.struct_size != sizeof(epx_group_config))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "epx_group_config.struct_size is {}; it is {} in every version: call epx_group_config_init before setting fields",
         config.struct_size, sizeof(epx_group_config));
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
  require_at_least("num_experts", config.num_experts, 1);
  require_at_least("max_tokens_per_rank", config.max_tokens_per_rank, 1);
  require_at_least("hidden_dim", config.hidden_dim, 1);
  require_range("max_top_k", config.max_top_k, 1, kMaxTopK);
  require_at_least("max_alignment", config.max_alignment, 1);
  if (config.max_token_dtype == EPX_DTYPE_UNSET)
    fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_config.max_token_dtype is unset; it has no default: set the widest dtype "
                                     "that rows travel in (EPX_FLOAT32, "
                                     "EPX_FLOAT16 or EPX_BFLOAT16, or one of 8 or 4 bits)");
  if (!is_token_dtype(config.max_token_dtype) && !is_quantised_dtype(config.max_token_dtype))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "epx_group_config.max_token_dtype is {} ({}); it must be float32, float16, bfloat16, float8_e4m3, float8_e5m2 or "
         "float4_e2m1",
         static_cast<int>(config.max_token_dtype), name_of(config.max_token_dtype));
  require_range("max_recv_tokens_per_rank", config.max_recv_tokens_per_rank, 0, kMaxInt);
  require_at_least("max_sidecar_bytes", config.max_sidecar_bytes, 0);
  require_known("combine_precision", config.combine_precision, EPX_COMBINE_WIRE, EPX_COMBINE_NODE);
  require_known("overflow", config.overflow, EPX_OVERFLOW_ERROR, EPX_OVERFLOW_DROP);
  require_known("transport", config.transport, EPX_TRANSPORT_AUTO, EPX_TRANSPORT_NCCL);
  require_at_least("num_comm_sms", config.num_comm_sms, 0);
  require_at_least("timeout_ms", config.timeout_ms, 1);
  require_at_least("ranks_per_node", config.ranks_per_node, 0);
  require_range("fixed_rail_tokens", config.fixed_rail_tokens, 0, config.max_tokens_per_rank);
  if (std::ranges::any_of(config.reserved, [](int64_t value) { return value != 0; }))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "epx_group_config has a reserved field that is not 0: call epx_group_config_init before setting fields");
#if !defined(EPX_WITH_CUDA)
  if (config.transport == EPX_TRANSPORT_NCCL)
    fail(EPX_ERROR_UNSUPPORTED, "epx_group_config.transport is nccl; this build of epx has the host transport only");
#endif
}

GroupShape resolve(const epx_group_config& config, int num_ranks) {
  GroupShape shape;
  shape.num_ranks = num_ranks;
  shape.ranks_per_node = config.ranks_per_node == 0 ? num_ranks : config.ranks_per_node;
  if (num_ranks % shape.ranks_per_node != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "epx_group_config.ranks_per_node is {}, which does not divide the {} ranks of the group: nodes have the same "
         "number of "
         "ranks",
         config.ranks_per_node, num_ranks);
  shape.num_experts = config.num_experts;
  shape.max_tokens_per_rank = config.max_tokens_per_rank;
  shape.hidden_dim = config.hidden_dim;
  shape.max_top_k = config.max_top_k;
  shape.fixed_rail_tokens = config.fixed_rail_tokens;
  shape.max_alignment = config.max_alignment;
  shape.max_sidecar_bytes = config.max_sidecar_bytes;
  shape.max_token_dtype = config.max_token_dtype;
  shape.precision = config.combine_precision;

  constexpr int64_t kMaxSlots = std::numeric_limits<int32_t>::max();
  if (static_cast<int64_t>(config.max_tokens_per_rank) * config.max_top_k > kMaxSlots)
    fail(EPX_ERROR_INVALID_ARGUMENT, "max_tokens_per_rank {} times max_top_k {} is more than {} routes; counts are int32",
         config.max_tokens_per_rank, config.max_top_k, kMaxSlots);
  if (static_cast<int64_t>(config.max_tokens_per_rank) * num_ranks > kMaxSlots)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "max_tokens_per_rank {} times {} ranks is more than {} tokens; the tokens of all ranks are numbered in int32",
         config.max_tokens_per_rank, num_ranks, kMaxSlots);

  const char* what = "the worst case of max_recv_tokens_per_rank";
  int64_t rows = config.max_recv_tokens_per_rank;
  if (rows == 0) {
    const int64_t routes = checked_mul(checked_mul(num_ranks, config.max_tokens_per_rank, what), config.max_top_k, what);
    const int64_t experts = (static_cast<int64_t>(config.num_experts) + num_ranks - 1) / num_ranks;
    const int64_t pads = checked_mul(experts, config.max_alignment - 1, what);
    rows = checked_round_up(checked_add(routes, pads, what), config.max_alignment, what);
  }
  if (rows > kMaxSlots)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "max_recv_tokens_per_rank would be {} rows in the worst case of {} ranks, max_tokens_per_rank {}, max_top_k {}; "
         "slots are int32: set max_recv_tokens_per_rank to at most {}",
         rows, num_ranks, config.max_tokens_per_rank, config.max_top_k, kMaxSlots);
  shape.max_recv_tokens = rows;
  return shape;
}

void require_agreement(std::span<const epx_group_config> configs, std::span<const int> world_ranks) {
  for (const AgreedField& field : kAgreedFields) {
    const int64_t first = field.value(configs[0]);
    const auto differs = [&](const epx_group_config& config) { return field.value(config) != first; };
    const auto other = std::find_if(configs.begin(), configs.end(), differs);
    if (other == configs.end()) continue;
    fail(EPX_ERROR_MISMATCH, "epx_group_config.{} differs between ranks: rank {} has {}, rank {} has {}", field.name,
         world_ranks[0], field.format(first), world_ranks[other - configs.begin()], field.format(field.value(*other)));
  }
}

} // namespace epx
