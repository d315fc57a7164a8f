// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/options_check.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/row_format.h"

namespace epx::bench {
namespace {

void check_shape(const Options& options) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check_range("--hidden", options.hidden, 1, kMax);
  check_range("--experts", options.experts, 1, kMax);
  check_range("--top-k", options.top_k, 1, 64);
  check_range("--alignment", options.alignment, 0, kMax);
  check_range("--zone-stride", options.zone_stride, 0, kMax);
  check_range("--capacity", options.capacity, 0, kMax);
  check_range("--ranks-per-node", options.ranks_per_node, 0, kMax);
  check_range("--fixed-rail-tokens", options.fixed_rail_tokens, 0, std::max(options.tokens, 1));
  check_range("--iters", options.iterations, 1, 1'000'000);
  check_range("--warmup", options.warmup, 0, 1'000'000);
  check_range("--input-sets", options.input_sets, 1, 1024);
  check_range("--timeout-ms", options.timeout_ms, 0, std::numeric_limits<int64_t>::max());
  if (options.routing.kind != RoutingSpec::Kind::Text && options.top_k > options.experts)
    throw UsageError(
        fmt::format("--top-k is {} and --experts is {}; with --routing {} the experts of a token are distinct, "
                    "so there must be as many",
                    options.top_k, options.experts, to_string(options.routing)));
  if (options.routing.kind == RoutingSpec::Kind::Hot && options.top_k == options.experts)
    throw UsageError(
        fmt::format("--top-k and --experts are {}; with --routing {} there must be more experts, so that a token "
                    "can do without the hot one",
                    options.top_k, to_string(options.routing)));
}

void check_transport(const Options& options) {
  if (options.transport == EPX_TRANSPORT_NCCL) {
    if (!built_with_cuda()) throw UsageError("--transport is 'nccl', but this ep_bench was built without CUDA; use host");
    if (options.native && !built_with_moe())
      throw UsageError("--native is given, but this ep_bench was built without libepx_moe");
    return;
  }
  for (const auto& [option, is_given] :
       {std::pair("--graph", options.graph), std::pair("--floor", options.floor), std::pair("--native", options.native),
        std::pair("--fixed-rail-tokens", options.fixed_rail_tokens != 0)})
    if (is_given)
      throw UsageError(
          fmt::format("{} is given, but --transport is '{}'; it belongs to nccl", option, to_string(options.transport)));
}

void check_layout(const Options& options) {
  check_range("--max-rows", options.max_rows, 0, std::numeric_limits<int32_t>::max());
  if (!options.is_rank_major()) {
    if (options.max_rows > 0)
      throw UsageError(
          fmt::format("--max-rows is {} and --layout is 'expert-major'; it belongs to rank-major", options.max_rows));
    return;
  }
  const auto refuse = [&](const char* option, const auto& value, const char* reason) {
    throw UsageError(fmt::format("{} is {} and --layout is '{}'; {}", option, value, to_string(options.layout), reason));
  };
  if (options.alignment > 1) refuse("--alignment", options.alignment, "that layout has no zones to align");
  if (options.zone_stride > 0) refuse("--zone-stride", options.zone_stride, "that layout has no zones");
  if (options.pads != EPX_PADS_ZERO) refuse("--pads", to_string(options.pads), "that layout has no pads");
  if (options.capacity > 0) refuse("--capacity", options.capacity, "--max-rows bounds the rows of that layout");
  if (options.combine_precision != EPX_COMBINE_WIRE)
    refuse("--combine-precision", to_string(options.combine_precision), "that layout has combine in 'wire' only");
  if (options.block.is_measured)
    throw UsageError(
        fmt::format("--block is given and --layout is '{}'; the block is expert-major", to_string(options.layout)));
  if (options.native)
    throw UsageError(
        fmt::format("--native is given and --layout is '{}'; the native way is expert-major", to_string(options.layout)));
}

// What the library's own sentences do not tell in terms of options.
void check_sum_format(const Options& options) {
  if (options.sum_format == NamedFormat::None) return;
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(fmt::format("--sum-format is '{}'{}", to_string(options.sum_format), reason));
  };
  const epx_scaling scaling = quantised_sum(options).scaling;
  if (scaling != EPX_SCALING_BLOCK128 && scaling != EPX_SCALING_MX)
    refuse("; partial sums travel in fp8-block128, fp8-mx or fp8-e5m2-mx");
  if (options.combine_precision != EPX_COMBINE_WIRE)
    refuse(fmt::format(" and --combine-precision is '{}'; the sums of wire alone may travel quantised",
                       to_string(options.combine_precision)));
}

// The same for dispatch.
void check_row_formats(const Options& options) {
  const char* const option = options.wire_format == NamedFormat::None ? "--row-format" : "--wire-format";
  const auto refuse = [&](const std::string& reason) {
    throw UsageError(fmt::format("{} is '{}' and {}", option, to_string(options.format()), reason));
  };
  if (options.row_format != NamedFormat::None && options.wire_format != NamedFormat::None)
    throw UsageError(fmt::format("--row-format is '{}' and --wire-format is '{}'; rows that arrive quantised travel so",
                                 to_string(options.row_format), to_string(options.wire_format)));
  if (options.row_format == NamedFormat::None) {
    if (options.has_quantised_input) refuse("--quantised-input is given; it belongs to --row-format");
    if (options.scale_layout != EPX_SCALES_ROWS)
      refuse(fmt::format("--scale-layout is '{}'; it belongs to --row-format", to_string(options.scale_layout)));
  }
  if (options.format() == NamedFormat::None) return;
  const QuantisedRow row = quantised_row(options);
  if (options.hidden % elements_per_byte(row.elements) != 0)
    refuse(fmt::format("--hidden is {}; it must be even, since a byte has two elements", options.hidden));
  if (options.scale_layout == EPX_SCALES_PACKED && row.scales != EPX_FLOAT8_E8M0)
    refuse("--scale-layout is 'packed'; that is for fp8-block128-pow2, fp8-mx and fp8-e5m2-mx, whose scales are E8M0");
  if (options.scale_layout != EPX_SCALES_TILES) return;
  if (single_element_bytes(row.scales) != 1) refuse("--scale-layout is 'tiles'; that is for scales of one byte");
  if (options.is_rank_major())
    refuse(fmt::format("--scale-layout is 'tiles' and --layout is '{}'; that layout has rows or columns, or packed ones",
                       to_string(options.layout)));
  if (options.alignment == 0 || options.alignment % 128 != 0)
    refuse(fmt::format("--scale-layout is 'tiles' and --alignment is {}; it must be a multiple of 128", options.alignment));
}

void check_formats(const Options& options) {
  check_row_formats(options);
  check_sum_format(options);
  for (const auto& [option, format] : named_formats(options)) {
    if (format == NamedFormat::None) continue;
    const std::string given = fmt::format("{} is '{}'", option, to_string(format));
    if (options.block.is_measured) throw UsageError(given + " and --block is given; the block's rows travel in --dtype");
    if (options.native) throw UsageError(given + " and --native is given; the rows of the native way travel in --dtype");
  }
}

void refuse_with_block(const char* option, const std::string& value, const char* reason) {
  throw UsageError(fmt::format("{} is '{}' and --block is given; {}", option, value, reason));
}

// `reason` is an option that asks for it, with its value.
void require_multiple(const char* option, int64_t value, int64_t of, const std::string& reason) {
  if (value == 0 || value % of != 0)
    throw UsageError(fmt::format("{} is {} and {}; it must be a multiple of {}", option, value, reason, of));
}

// What products in FP8 take (epx_moe.h, "Grouped FFN in FP8").
void check_recipe(const Options& options) {
  const std::string reason = fmt::format("--recipe is '{}'", to_string(options.block.recipe));
  require_multiple("--hidden", options.hidden, 128, reason);
  require_multiple("--ffn", options.block.ffn, 128, reason);
  require_multiple("--alignment", options.alignment, 16, reason);
  if (options.block.has_biases)
    throw UsageError(fmt::format("--biases is given and --recipe is '{}'; experts in FP8 have no biases",
                                 to_string(options.block.recipe)));
  if (options.transport == EPX_TRANSPORT_NCCL && options.dtype != EPX_BFLOAT16)
    throw UsageError(fmt::format("--dtype is '{}' and --recipe is '{}'; on nccl experts in FP8 are beside bf16",
                                 to_string(options.dtype), to_string(options.block.recipe)));
}

void check_gather(const Options& options) {
  check_range("--gather-sms", options.block.gather_sms, 0, std::numeric_limits<int32_t>::max());
  for (const GatherForm form : options.block.gathers) {
    if (form != GatherForm::Fp8) continue;
    const std::string reason = fmt::format("--gather is '{}'", to_string(form));
    require_multiple("--hidden", options.hidden, kGatherFp8Block, reason);
    require_multiple("--ffn", options.block.ffn, kGatherFp8Block, reason);
  }
}

void check_block(const Options& options) {
  if (!options.block.is_measured) return;
  if (!built_with_moe()) throw UsageError("--block is given, but this ep_bench was built without libepx_moe");
  check_range("--ffn", options.block.ffn, 1, std::numeric_limits<int32_t>::max() / 2);
  check_range("--pause-ms", options.block.pause_ms, 0, 60'000);
  check_range("--rounds", options.block.rounds, 1, options.iterations);
  check_range("--dump-rows", options.block.dump_rows, 0, std::numeric_limits<int32_t>::max());
  check_range("--experts", options.experts, 1, 4096); // so many have distinct logits, see block_logits()
  const bool is_on_host = options.transport == EPX_TRANSPORT_HOST;
  if (is_on_host && options.dtype != EPX_FLOAT32)
    refuse_with_block("--dtype", to_string(options.dtype), "on the host the block computes in fp32");
  if (options.dtype == EPX_FLOAT16) refuse_with_block("--dtype", "fp16", "the block is measured in bf16 and fp32");
  if (is_on_host && options.block.pause_ms > 0)
    refuse_with_block("--pause-ms", fmt::format("{}", options.block.pause_ms), "pauses belong to --transport nccl");
  if (options.routing.kind != RoutingSpec::Kind::Uniform && options.routing.kind != RoutingSpec::Kind::Zipf)
    refuse_with_block("--routing", to_string(options.routing), "a router makes the block's routing: uniform or zipf:S");
  if (options.zone_stride > 0)
    refuse_with_block("--zone-stride", fmt::format("{}", options.zone_stride), "the block's zones follow each other");
  if (options.capacity > 0)
    refuse_with_block("--capacity", fmt::format("{}", options.capacity), "the native layer beside it drops no routes");
  if (options.block.recipe != EPX_MOE_RECIPE_WIDE) check_recipe(options);
  if (!options.block.gathers.empty()) check_gather(options);
  if (options.tokens == 0) refuse_with_block("--tokens", "0", "there must be a token, or nothing is computed");
}

} // namespace

void check_range(const char* option, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw UsageError(fmt::format("{} is {}; it must be between {} and {}", option, value, low, high));
}

void check_point(const Options& options) {
  check_transport(options);
  check_shape(options);
  check_layout(options);
  check_formats(options);
  check_block(options);
}

} // namespace epx::bench
