// SPDX-License-Identifier: Apache-2.0
#include "runtime/tuning/tuning.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <string>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "base/error.h"

namespace epx {
namespace {

constexpr int kAlways = 1'000'000;

// H200, one rank: nothing goes over a wire.
constexpr Tuning kH200x1{
    .sms_left_to_others = 48,
    .full_grid = 128,
    .split_grid = 48,
    .scatter_sender_blocks = 16,
    .scatter_senders = 384,
    .scatter_row_senders = 384,
    .scatter_sender_warps = 12,
    .mixed_sender_warps = 6,
    .stages_odd_rows = 0,
    .quantising_sender_eighths = 3,
    .all_quantising_sender_eighths = 5,
    .quantising_sender_warps = 14,
    .rank_major_senders = 768,
    .rank_major_sender_warps = 14,
    .gather_sender_eighths = 5,
    .batch_grid = 64,
    .batch_tokens = 8,
    .prepare_dispatch_grid = 8,
    .ht_prepare_dispatch_mb = 0,
    .ll_many_sms = 80,
    .ll_chunks_of_sm = 30,
    .ll_gathered_routes = 8192,
    .ll_prepare_dispatch_sender_blocks = 20,
    .ll_scatter_copies = 60,
    .ll_scatter_grid = 40,
    .ll_scatter_tiles = 2,
    .ll_gather_sender_blocks = 50,
    .ll_gather_grid = 65,
    .ll_gather_tiles = 4,
    .ll_rank_major_gather_eighths = 4,
};

constexpr Tuning h200x2() {
  Tuning tuning = kH200x1;
  tuning.scatter_sender_blocks = 32;
  tuning.ht_prepare_dispatch_mb = 250;
  tuning.ll_rank_major_gather_eighths = 3;
  return tuning;
}

constexpr Tuning h200x4() {
  Tuning tuning = h200x2();
  tuning.scatter_sender_blocks = 64;
  tuning.scatter_row_senders = 256;
  tuning.stages_odd_rows = 1;
  tuning.batch_grid = 40;
  tuning.ht_prepare_dispatch_mb = kAlways;
  tuning.ll_rank_major_gather_eighths = 4;
  return tuning;
}

// Not measured: the grid is that in which eight ranks have as many blocks together as four.
constexpr Tuning h200x8() {
  Tuning tuning = h200x4();
  tuning.batch_grid = 20;
  return tuning;
}

struct Measured {
  GpuKind kind;
  int num_ranks;
  Tuning tuning;
};

// In the order of ranks for each kind; those of H200 first.
constexpr GpuKind kHopper{9, 0};
constexpr std::array kMeasured = {Measured{kHopper, 1, kH200x1}, Measured{kHopper, 2, h200x2()},
                                  Measured{kHopper, 4, h200x4()}, Measured{kHopper, 8, h200x8()}};

struct Entry {
  std::string_view name;
  int Tuning::*member;
  int least, most;
};

// A block has 16 warps, of which one signals and, in dispatch_rank_major, one receives from the beginning. A kernel that makes
// prepare_dispatch of many tokens has room for prepare's blocks beside the senders in any grid from split_grid on.
constexpr std::array kEntries = {
    Entry{"sms_left_to_others", &Tuning::sms_left_to_others, 0, 1024},
    Entry{"full_grid", &Tuning::full_grid, 96, 1024},
    Entry{"split_grid", &Tuning::split_grid, 32, 96},
    Entry{"scatter_sender_blocks", &Tuning::scatter_sender_blocks, 1, 72},
    Entry{"scatter_senders", &Tuning::scatter_senders, 72, 1080},
    Entry{"scatter_row_senders", &Tuning::scatter_row_senders, 72, 1080},
    Entry{"scatter_sender_warps", &Tuning::scatter_sender_warps, 1, 15},
    Entry{"mixed_sender_warps", &Tuning::mixed_sender_warps, 1, 14},
    Entry{"stages_odd_rows", &Tuning::stages_odd_rows, 0, 1},
    Entry{"quantising_sender_eighths", &Tuning::quantising_sender_eighths, 1, 4},
    Entry{"all_quantising_sender_eighths", &Tuning::all_quantising_sender_eighths, 1, 7},
    Entry{"quantising_sender_warps", &Tuning::quantising_sender_warps, 1, 14},
    Entry{"rank_major_senders", &Tuning::rank_major_senders, 1, 16384},
    Entry{"rank_major_sender_warps", &Tuning::rank_major_sender_warps, 1, 14},
    Entry{"gather_sender_eighths", &Tuning::gather_sender_eighths, 1, 7},
    Entry{"batch_grid", &Tuning::batch_grid, 0, 1024},
    Entry{"batch_tokens", &Tuning::batch_tokens, 1, 4096},
    Entry{"prepare_dispatch_grid", &Tuning::prepare_dispatch_grid, 8, 1024},
    Entry{"ht_prepare_dispatch_mb", &Tuning::ht_prepare_dispatch_mb, 0, kAlways},
    Entry{"ll_many_sms", &Tuning::ll_many_sms, 1, 1024},
    Entry{"ll_chunks_of_sm", &Tuning::ll_chunks_of_sm, 0, 65536},
    Entry{"ll_gathered_routes", &Tuning::ll_gathered_routes, 0, kMaxGatheredRoutes},
    Entry{"ll_prepare_dispatch_sender_blocks", &Tuning::ll_prepare_dispatch_sender_blocks, 1, 1024},
    Entry{"ll_scatter_copies", &Tuning::ll_scatter_copies, 1, 1024},
    Entry{"ll_scatter_grid", &Tuning::ll_scatter_grid, 1, 1025},
    Entry{"ll_scatter_tiles", &Tuning::ll_scatter_tiles, 0, 4096},
    Entry{"ll_gather_sender_blocks", &Tuning::ll_gather_sender_blocks, 1, 1024},
    Entry{"ll_gather_grid", &Tuning::ll_gather_grid, 1, 1025},
    Entry{"ll_gather_tiles", &Tuning::ll_gather_tiles, 0, 4096},
    Entry{"ll_rank_major_gather_eighths", &Tuning::ll_rank_major_gather_eighths, 1, 7},
};
static_assert(sizeof(Tuning) == kEntries.size() * sizeof(int)); // each entry has a name

constexpr bool is_sound(const Tuning& tuning) {
  return std::ranges::all_of(kEntries, [&](const Entry& entry) {
    return tuning.*entry.member >= entry.least && tuning.*entry.member <= entry.most;
  });
}
static_assert(std::ranges::all_of(kMeasured, [](const Measured& measured) { return is_sound(measured.tuning); }));

std::string names_of_entries() {
  std::array<std::string_view, kEntries.size()> names;
  std::ranges::transform(kEntries, names.begin(), &Entry::name);
  return fmt::format("{}", fmt::join(names, ", "));
}

} // namespace

const Tuning& measured_tuning(GpuKind kind, int num_ranks) {
  const bool was_measured = std::ranges::find(kMeasured, kind, &Measured::kind) != kMeasured.end();
  const GpuKind wanted = was_measured ? kind : kMeasured.front().kind;
  const Tuning* found = nullptr;
  for (const Measured& measured : kMeasured) {
    if (measured.kind != wanted) continue;
    found = &measured.tuning;
    if (measured.num_ranks >= num_ranks) break;
  }
  return *found;
}

Tuning with_entries(Tuning tuning, std::string_view text) {
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(','));
    text.remove_prefix(std::min(word.size() + 1, text.size()));
    const size_t equals = std::min(word.find('='), word.size());
    const auto entry = std::ranges::find(kEntries, word.substr(0, equals), &Entry::name);
    if (entry == kEntries.end())
      fail(EPX_ERROR_INVALID_ARGUMENT, "the environment variable EPX_TUNING has \"{}\"; it takes name=value,... of {}",
           word, names_of_entries());
    const char* const end = word.data() + word.size();
    int value = 0;
    const auto parsed = std::from_chars(word.data() + std::min(equals + 1, word.size()), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end || value < entry->least || value > entry->most)
      fail(EPX_ERROR_INVALID_ARGUMENT, "the environment variable EPX_TUNING has \"{}\"; the value must be {}..{}", word,
           entry->least, entry->most);
    tuning.*entry->member = value;
  }
  return tuning;
}

LlLimits ll_limits(const Tuning& tuning, int num_sms) {
  if (num_sms >= tuning.ll_many_sms) return {std::numeric_limits<int64_t>::max(), kMaxGatheredRoutes};
  return {int64_t{tuning.ll_chunks_of_sm} * num_sms, tuning.ll_gathered_routes};
}

} // namespace epx
