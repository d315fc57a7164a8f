// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/peers.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tools/ep_bench/interrupt.h"

namespace epx::bench {
namespace {

// This is longer than ranks take to leave an all-gather after the last has entered.
constexpr std::chrono::milliseconds kStartDelay{2};
// No rank is so late after a barrier; where one seems to be, the clocks are those of different machines.
constexpr std::chrono::seconds kClocksDiffer{1};

using Message = std::array<char, EPX_MAX_MESSAGE_BYTES>;

// Returns "rank 0, 2: no space" for each different message; without the ranks where all messages are the same.
std::string join(std::span<const Message> messages, std::span<const int32_t> exit_codes) {
  std::vector<std::pair<std::string, std::vector<int>>> ranks_by_message;
  for (size_t rank = 0; rank < messages.size(); ++rank) {
    if (exit_codes[rank] == 0) continue;
    const std::string text = messages[rank].data();
    auto known = std::ranges::find(ranks_by_message, text, [](const auto& entry) { return entry.first; });
    if (known == ranks_by_message.end()) known = ranks_by_message.insert(known, {text, {}});
    known->second.push_back(static_cast<int>(rank));
  }
  std::string joined;
  for (const auto& [text, ranks] : ranks_by_message) {
    if (!joined.empty()) joined += '\n';
    joined += ranks.size() == messages.size() ? text : fmt::format("rank {}: {}", fmt::join(ranks, ", "), text);
  }
  return joined;
}

} // namespace

void Peers::all_gather(const void* mine, void* all, size_t bytes_per_rank) const {
  Message why{};
  const KeepWaiting keep_waiting; // else a signal would end this wait on one rank only
  const epx_status status =
      bootstrap_.all_gather(bootstrap_.context, mine, all, bytes_per_rank, timeout_ms_, why.data(), why.size());
  if (status != EPX_SUCCESS)
    throw RuntimeError(fmt::format("all-gather of {} ranks: {}: {}", num_ranks(), epx_status_string(status), why.data()));
}

void Peers::agree(const Failure& failure) const {
  const Failure interrupt = interruption();
  const Failure& mine = interrupt.exit_code != 0 ? interrupt : failure;
  const std::vector<int32_t> exit_codes = gather(static_cast<int32_t>(mine.exit_code));
  const int32_t worst = *std::ranges::max_element(exit_codes);
  if (worst == 0) return;
  Message message{};
  std::strncpy(message.data(), mine.message.c_str(), message.size() - 1);
  throw AgreedError(worst, join(gather(message), exit_codes));
}

void Peers::start_together(const Failure& mine) const {
  using std::chrono::steady_clock;
  agree(mine);
  const auto now = steady_clock::now().time_since_epoch();
  const auto latest = std::ranges::max(gather(static_cast<int64_t>(now.count())));
  const auto start = steady_clock::duration(latest) + kStartDelay;
  if (start < now + kClocksDiffer) std::this_thread::sleep_until(steady_clock::time_point(start));
}

} // namespace epx::bench
