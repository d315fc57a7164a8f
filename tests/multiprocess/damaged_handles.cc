// SPDX-License-Identifier: Apache-2.0
// damaged_handles [--damages N] [--first F] [--seed S]
// Damages handle memory N times, half of them on 1 rank and half on 3 ranks, which are threads of this process.
#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <exception>
#include <mutex>
#include <string>

#include "tests/support/check.h"
#include "tests/support/damaged_layer.h"
#include "tests/support/launcher.h"

namespace {

using namespace epx::test;

int64_t parse_number(const std::string& name, const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  check(error == std::errc() && end == text.data() + text.size() && number >= 0, "{} is \"{}\", not a number", name, text);
  return number;
}

DamageOptions parse(int argc, char** argv) {
  DamageOptions options;
  options.seed = static_cast<uint64_t>(std::chrono::system_clock::now().time_since_epoch().count());
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i];
    check(i + 1 < argc, "{} has no value", name);
    const int64_t number = parse_number(name, argv[i + 1]);
    if (name == "--damages")
      options.count = number;
    else if (name == "--first")
      options.first = number;
    else if (name == "--seed")
      options.seed = static_cast<uint64_t>(number);
    else
      fail_check("unknown option {}", name);
  }
  return options;
}

// The counts are rank 0's; only the reported ones are summed over the ranks.
DamageCounts run_on(int num_ranks, const DamageOptions& options) {
  DamageCounts counts;
  std::mutex mutex;
  constexpr int64_t kAtATime = 20'000; // threads are given so many seconds
  DamageOptions some = options;
  for (some.first = options.first; some.first < options.first + options.count; some.first += kAtATime) {
    some.count = std::min(kAtATime, options.first + options.count - some.first);
    make_thread_launcher("host", num_ranks)->each_rank([&](const RankContext& context) {
      const DamageCounts mine = run_damages(context, some);
      const std::scoped_lock lock(mutex);
      counts.reported += mine.reported;
      if (context.rank != 0) return;
      counts.damages += mine.damages;
      counts.calls += mine.calls;
    });
  }
  return counts;
}

} // namespace

int main(int argc, char** argv) {
  try {
    DamageOptions options = parse(argc, argv);
    options.count /= 2;
    for (const int num_ranks : {1, 3}) {
      const auto begin = std::chrono::steady_clock::now();
      const DamageCounts counts = run_on(num_ranks, options);
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      std::printf("%d ranks, seed %lu: %ld damages, %ld calls, %ld reported, %.1f s\n", num_ranks, options.seed,
                  counts.damages, counts.calls, counts.reported, seconds.count());
      std::fflush(stdout);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "FAILED: %s\n", error.what());
    return 1;
  }
}
