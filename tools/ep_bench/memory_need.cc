// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/memory_need.h"

#include <algorithm>
#include <limits>

#include <sys/resource.h>
#include <sys/sysinfo.h>

#include <fmt/format.h>

#include "tools/ep_bench/block/weight_gather.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/measured_group.h"
#include "tools/ep_bench/row_format.h"

namespace epx::bench {
namespace {

epx_memory_plan plan_of(const GroupConfig& config, int num_ranks) {
  try {
    return memory_plan(config, num_ranks);
  } catch (const epx::Error& error) {
    throw UsageError(describe(error));
  }
}

// What --block adds on the host. The rank with the fewest experts is counted.
double block_need(const Options& options, const epx_memory_plan& plan, int num_ranks, int64_t rows) {
  const double element = static_cast<double>(epx::row_bytes(options.dtype, 1)),
               row = static_cast<double>(row_bytes(options));
  const double tokens = options.tokens, routes = tokens * options.top_k, logits = tokens * options.experts * sizeof(float);
  const double experts = options.experts / num_ranks, hidden = options.hidden, ffn = options.block.ffn;
  const double arena_rows = static_cast<double>(plan.max_recv_tokens_per_rank), native_rows = static_cast<double>(rows);
  const double biases = options.block.has_biases ? 2 * ffn + hidden : 0, pre_act = 2 * ffn * element;
  const double params = experts * (3 * ffn * hidden + biases) * element;
  const double tensors =
      4 * tokens * row + 2 * logits + 2 * params; // BlockData: gradients are as large as what they are of
  const double arena = arena_rows * (4 * row + pre_act + 2 * sizeof(float)) + logits + routes * 3 * sizeof(float) +
                       static_cast<double>(plan.handle_mem_bytes);
  const double native = routes * (2 * row + 4 * sizeof(float)) + native_rows * (4 * row + pre_act + 2 * sizeof(int32_t));
  const double gathered = num_ranks * tokens; // places of all ranks' tokens
  const double of_path = options.block.path == EPX_MOE_PATH_DISPATCH ? 0
                         : options.block.path == EPX_MOE_PATH_RING
                             ? arena + gathered * (2 * row + options.top_k * 5 * sizeof(float))
                             : arena + routes * (2 * row + 3 * sizeof(float));
  if (options.block.recipe == EPX_MOE_RECIPE_WIDE) return tensors + arena + native + of_path;
  const double fp8_row = hidden + hidden / 32; // with its scales
  const double fp8_arena = arena_rows * (2 * fp8_row + row + pre_act + 2 * sizeof(float)) + logits +
                           routes * 3 * sizeof(float) + static_cast<double>(plan.handle_mem_bytes);
  const double codes = experts * 3 * ffn * hidden * 2; // both orientations
  return tensors + arena + fp8_arena + codes + native + of_path;
}

// What --gather adds on the host, on the rank that keeps the fewest rows.
double gather_need(const Options& options, int num_ranks) {
  const epx_memory_plan plan = plan_of(gather_group_config(options), num_ranks);
  double need = static_cast<double>(plan.window_bytes) + static_cast<double>(plan.scratch_bytes);
  for (const GatherForm form : options.block.gathers)
    for (const GatheredMatrix& matrix : gathered_matrices(options, form, num_ranks))
      need += static_cast<double>(matrix.rows + matrix.part(0, num_ranks).count) * static_cast<double>(matrix.row_bytes());
  return need;
}

} // namespace

MemoryNeed memory_need(const Options& options, int num_ranks, int64_t rows) {
  const bool is_on_host = options.transport == EPX_TRANSPORT_HOST;
  const epx_memory_plan plan = plan_of(group_config(options), num_ranks);

  constexpr double kWeightBytes = sizeof(float), kIndexBytes = sizeof(int64_t), kSlotBytes = sizeof(int32_t);
  const RowBytes of_dispatch = row_bytes_of(options, EPX_OP_DISPATCH);
  const double row = static_cast<double>(row_bytes(options)), sets = options.num_input_sets();
  const double routes_of_token = options.top_k;
  const double weights_of_row = options.is_rank_major() ? routes_of_token : 1;
  const double row_sets = is_on_host ? sets : 1; // see measure_on_gpu()
  MemoryNeed need;
  need.inputs = sets * options.tokens *
                    (static_cast<double>(of_dispatch.input) + row + routes_of_token * (kIndexBytes + kWeightBytes)) +
                row_sets * static_cast<double>(rows) * (2 * row + weights_of_row * kWeightBytes);
  if (!is_on_host) return need;
  need.tensors = options.tokens * (2 * row + routes_of_token * (kWeightBytes + kSlotBytes)) +
                 static_cast<double>(rows) *
                     (static_cast<double>(of_dispatch.received) + 3 * row + weights_of_row * 3 * kWeightBytes) +
                 static_cast<double>(plan.max_recv_tokens_per_rank) * 3 * kSlotBytes;
  need.group = static_cast<double>(plan.window_bytes) + static_cast<double>(plan.scratch_bytes) +
               static_cast<double>(plan.handle_mem_bytes);
  if (options.block.is_measured) need.block = block_need(options, plan, num_ranks, rows);
  if (!options.block.gathers.empty()) need.gather = gather_need(options, num_ranks);
  return need;
}

double available_memory(int num_ranks) {
  struct sysinfo machine {};
  double bytes = std::numeric_limits<double>::infinity();
  if (sysinfo(&machine) == 0)
    bytes = (static_cast<double>(machine.totalram) + static_cast<double>(machine.totalswap)) * machine.mem_unit / num_ranks;
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    bytes = std::min(bytes, static_cast<double>(limit.rlim_cur));
  return bytes;
}

void require_memory(const Options& options, int num_ranks, int64_t rows, double available) {
  const MemoryNeed need = memory_need(options, num_ranks, rows);
  if (need.all() <= available) return;
  throw UsageError(fmt::format(
      "--tokens {}, --hidden {}, --dtype {}, --top-k {}, --experts {}, --capacity {} and "
      "--input-sets {}{} need at least {:.0f} bytes of memory per rank: {:.0f} for inputs, {:.0f} for "
      "other tensors, {:.0f} for the group{}{}; each of {} ranks can have {:.0f}",
      options.tokens, options.hidden, to_string(options.dtype), options.top_k, options.experts, options.capacity,
      options.num_input_sets(),
      options.block.is_measured ? fmt::format(", with --block and --ffn {},", options.block.ffn) : "", need.all(),
      need.inputs, need.tensors, need.group,
      options.block.is_measured ? fmt::format(", {:.0f} for the block and the native layer", need.block) : "",
      options.block.gathers.empty() ? "" : fmt::format(", {:.0f} for --gather", need.gather), num_ranks, available));
}

} // namespace epx::bench
