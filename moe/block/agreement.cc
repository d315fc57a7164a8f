// SPDX-License-Identifier: Apache-2.0
#include "moe/block/agreement.h"

#include <array>
#include <bit>
#include <cstddef>
#include <optional>
#include <string_view>
#include <type_traits>

#include <fmt/format.h>

#include "base/error.h"
#include "base/names.h"
#include "moe/block/group.h"
#include "moe/names.h"

namespace epx::moe {
namespace {

// A value of an option as its peers get it, and back.
template <typename Value>
int64_t to_word(Value value) {
  if constexpr (std::is_same_v<Value, double>)
    return std::bit_cast<int64_t>(value);
  else if constexpr (std::is_same_v<Value, float>)
    return std::bit_cast<int32_t>(value);
  else
    return static_cast<int64_t>(value);
}

template <typename Value>
std::string format_word(int64_t word) {
  if constexpr (std::is_same_v<Value, double>) {
    return fmt::format("{}", std::bit_cast<double>(word));
  } else if constexpr (std::is_same_v<Value, float>) {
    return fmt::format("{}", std::bit_cast<float>(static_cast<int32_t>(word)));
  } else if constexpr (std::is_enum_v<Value>) {
    const std::string_view name = name_of(static_cast<Value>(word));
    return name.starts_with("unknown") ? std::to_string(word) : std::string(name);
  } else {
    return std::to_string(word);
  }
}

// A member of a config of epx_moe.h.
template <typename Config>
struct Member {
  size_t bytes;
  const char* name;                // NULL: ranks may have different values
  int64_t (*value)(const Config&); // that ranks agree on
  std::string (*format)(int64_t value);
};

template <auto kMember>
struct MemberTraits;
template <typename OfConfig, typename OfMember, OfMember OfConfig::*kMember>
struct MemberTraits<kMember> {
  using Config = OfConfig;
  using Value = OfMember;
  static constexpr size_t kBytes = sizeof(OfMember[1]); // also of pointers to structs
};

template <auto kMember, typename Traits = MemberTraits<kMember>>
constexpr auto agreed(const char* name) {
  using Config = typename Traits::Config;
  return Member<Config>{Traits::kBytes, name, [](const Config& config) { return to_word(config.*kMember); },
                        format_word<typename Traits::Value>};
}

// Ranks agree on value(config).
template <auto kMember, typename Traits = MemberTraits<kMember>>
constexpr auto agreed(const char* name, int64_t (*value)(const typename Traits::Config&),
                      std::string (*format)(int64_t value) = format_word<int64_t>) {
  return Member<typename Traits::Config>{Traits::kBytes, name, value, format};
}

template <auto kMember, typename Traits = MemberTraits<kMember>>
constexpr auto may_differ() {
  return Member<typename Traits::Config>{Traits::kBytes, nullptr, nullptr, nullptr};
}

template <typename Members>
constexpr size_t bytes_of(const Members& members) {
  size_t bytes = 0;
  for (const auto& member : members)
    bytes += member.bytes;
  return bytes;
}

template <typename Members>
constexpr size_t num_agreed(const Members& members) {
  size_t count = 0;
  for (const auto& member : members)
    count += member.name != nullptr ? 1 : 0;
  return count;
}

// ---- The table. `reserved` is 0 on every rank that goes on, and struct_size the same ----

using RouterConfig = epx_moe_router_config;
constexpr std::array kRouterMembers = {
    may_differ<&RouterConfig::struct_size>(),
    agreed<&RouterConfig::num_experts>("num_experts"),
    agreed<&RouterConfig::top_k>("top_k"),
    agreed<&RouterConfig::score>("score"),
    agreed<&RouterConfig::num_groups>("num_groups"),
    agreed<&RouterConfig::topk_groups>("topk_groups"),
    agreed<&RouterConfig::renormalize>("renormalize"),
    agreed<&RouterConfig::scaling_factor>("scaling_factor"),
    agreed<&RouterConfig::aux_loss_coeff>("aux_loss_coeff"),
    agreed<&RouterConfig::group_score_top_k>("group_score_top_k"),
    may_differ<&RouterConfig::reserved0>(),
    may_differ<&RouterConfig::reserved>(),
};

using FfnConfig = epx_moe_ffn_config;
constexpr std::array kFfnMembers = {
    may_differ<&FfnConfig::struct_size>(),
    may_differ<&FfnConfig::num_local_experts>(), // not used: the group has it
    agreed<&FfnConfig::hidden_dim>("hidden_dim"), agreed<&FfnConfig::ffn_dim>("ffn_dim"),
    agreed<&FfnConfig::activation>("activation"), may_differ<&FfnConfig::reserved>(),
};

// Of a rank whose rows travel as they are, with scaling NONE and zeros. Its tensors are NULL and its scale_layout is ROWS on
// every rank that goes on.
using RowFormat = epx_row_format;
constexpr std::array kFormatMembers = {
    may_differ<&RowFormat::struct_size>(),
    agreed<&RowFormat::scaling>("scaling"),
    agreed<&RowFormat::dtype>("dtype"),
    agreed<&RowFormat::amax_floor>(
        "amax_floor", [](const RowFormat& format) { return to_word(format.amax_floor + 0.0F); }, // -0 is 0
        format_word<float>),
    may_differ<&RowFormat::scale_layout>(),
    may_differ<&RowFormat::scales>(),
    may_differ<&RowFormat::row_scales>(),
    may_differ<&RowFormat::encode_scale>(),
    may_differ<&RowFormat::recv_scales>(),
    may_differ<&RowFormat::recv_row_scales>(),
    may_differ<&RowFormat::reserved>(),
};

using BlockConfig = epx_moe_block_config;
constexpr std::array kBlockMembers = {
    may_differ<&BlockConfig::struct_size>(),
    may_differ<&BlockConfig::router>(), // whose members are compared
    may_differ<&BlockConfig::ffn>(),    // likewise
    agreed<&BlockConfig::arena>(
        "arena", [](const BlockConfig& config) -> int64_t { return config.arena != nullptr ? 1 : 0; },
        [](int64_t is_shared) { return std::string(is_shared != 0 ? "a shared one" : "NULL"); }),
    agreed<&BlockConfig::dtype>("dtype"),
    agreed<&BlockConfig::weighting>("weighting"),
    agreed<&BlockConfig::alignment>(
        "alignment", [](const BlockConfig& config) -> int64_t { return config.alignment == 0 ? 1 : config.alignment; }),
    agreed<&BlockConfig::max_in_flight>(
        "max_in_flight",
        [](const BlockConfig& config) -> int64_t { return config.arena == nullptr ? config.max_in_flight : 0; }),
    may_differ<&BlockConfig::max_tokens_per_rank>(), // not used: the group has it
    may_differ<&BlockConfig::recompute>(),           // the results have the same bits, and peers reach the same memory
    may_differ<&BlockConfig::dispatch_format>(),     // whose members are compared
    agreed<&BlockConfig::recipe>("recipe"),
    agreed<&BlockConfig::path>("path"),
    may_differ<&BlockConfig::reserved>(),
};

using ArenaConfig = epx_moe_arena_config;
constexpr std::array kArenaMembers = {
    may_differ<&ArenaConfig::struct_size>(),
    may_differ<&ArenaConfig::block>(), // whose members are compared
    agreed<&ArenaConfig::num_flights>("num_flights"),
    may_differ<&ArenaConfig::reserved0>(),
    agreed<&ArenaConfig::max_rows>("max_rows"),
    may_differ<&ArenaConfig::reserved>(),
};

// The configs have no padding, so a member that no line above names shows here.
static_assert(bytes_of(kRouterMembers) == sizeof(RouterConfig), "a member has no line in the table");
static_assert(bytes_of(kFfnMembers) == sizeof(FfnConfig), "a member has no line in the table");
static_assert(bytes_of(kFormatMembers) == sizeof(RowFormat), "a member has no line in the table");
static_assert(bytes_of(kBlockMembers) == sizeof(BlockConfig), "a member has no line in the table");
static_assert(bytes_of(kArenaMembers) == sizeof(ArenaConfig), "a member has no line in the table");

// What ranks exchange.
struct Record {
  epx_status status; // of this rank's own part
  int32_t is_arena;
  int64_t values[num_agreed(kArenaMembers) + num_agreed(kBlockMembers) + num_agreed(kRouterMembers) +
                 num_agreed(kFfnMembers) + num_agreed(kFormatMembers)];
};
static_assert(sizeof(Record) <= EPX_MAX_RECORD_BYTES);

template <typename Config, typename Members>
void add_options(std::vector<Options::Option>& list, const std::string& prefix, const Config& config,
                 const Members& members) {
  for (const Member<Config>& member : members)
    if (member.name != nullptr) list.push_back({prefix + member.name, member.value(config), member.format});
}

void add_block_options(std::vector<Options::Option>& list, const std::string& prefix, const BlockConfig& config) {
  add_options(list, prefix, config, kBlockMembers);
  add_options(list, prefix + "router.", *config.router, kRouterMembers);
  add_options(list, prefix + "ffn.", *config.ffn, kFfnMembers);
  add_options(list, prefix + "dispatch_format.", config.dispatch_format != nullptr ? *config.dispatch_format : RowFormat{},
              kFormatMembers);
}

void require_equal(const Options& options, const std::vector<Record>& ranks) {
  const Record& first = ranks.front();
  for (size_t rank = 1; rank < ranks.size(); ++rank)
    if (ranks[rank].is_arena != first.is_arena)
      fail(EPX_ERROR_MISMATCH, "ranks create different things: rank 0 {}, rank {} {}",
           first.is_arena != 0 ? "an arena" : "a block", rank, first.is_arena != 0 ? "a block" : "an arena");
  for (size_t i = 0; i < options.list().size(); ++i) {
    const Options::Option& option = options.list()[i];
    for (size_t rank = 1; rank < ranks.size(); ++rank)
      if (ranks[rank].values[i] != first.values[i])
        fail(EPX_ERROR_MISMATCH, "the {}'s {} differs between ranks: rank 0 has {}, rank {} has {}", options.created(),
             option.name, option.format(first.values[i]), rank, option.format(ranks[rank].values[i]));
  }
}

} // namespace

Options::Options(const BlockConfig& block) : is_arena_(false) {
  add_block_options(list_, "", block);
}

Options::Options(const ArenaConfig& arena) : is_arena_(true) {
  add_options(list_, "", arena, kArenaMembers);
  BlockConfig block = *arena.block;
  block.arena = nullptr; // an arena ignores it, and the next one
  block.max_in_flight = 1;
  add_block_options(list_, "block.", block);
}

void agree_after(epx_group group, const Options& options, const std::function<void()>& make) {
  if (group == nullptr) return make();
  std::optional<StatusError> failure;
  try {
    make();
  } catch (const StatusError& error) {
    failure = error;
  }
  Record mine{};
  mine.status = failure ? failure->status() : EPX_SUCCESS;
  mine.is_arena = options.is_arena() ? 1 : 0;
  for (size_t i = 0; i < options.list().size(); ++i)
    mine.values[i] = options.list()[i].value;
  std::vector<Record> ranks(static_cast<size_t>(query(group).num_ranks));
  throw_if_failed(epx_group_all_gather(group, &mine, ranks.data(), sizeof(Record)));
  require_equal(options, ranks);
  if (failure) throw *failure;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].status != EPX_SUCCESS)
      fail(ranks[rank].status, "rank {} could not create its {}: its own error says why", rank, options.created());
}

} // namespace epx::moe
