// SPDX-License-Identifier: Apache-2.0
// Says whether two builds differ in speed, from the medians of one or more starts of each. docs/ep_bench-json.md has the rule.
#pragma once

#include <cstdint>
#include <span>

#include "epx/epx.h"
#include "tools/ep_bench/stats.h"

namespace epx::bench {

// A StartMedian is the median of a line in one start, of at least one sample, and its 95 % interval, microseconds:
// 0 < lo <= median <= hi.
struct StartMedian {
  double us = 0;
  Interval interval_us;
  int64_t samples = 1;
};

// A Tolerance has what a transport is known to vary by, as fractions of a time.
struct Tolerance {
  double
      between_starts; // standard deviation of the medians of several starts of one build, on a machine that does nothing else
  double of_samples; // the same as a share of the samples' standard deviation, where that is more: the machine is busy
  double margin;     // two runs of one build may differ by this, beyond their intervals
  double same;       // a difference below this is none
};
const Tolerance& tolerance_of(epx_transport transport);

// An Estimate is of one line of a file.
struct Estimate {
  double us = 0;        // the median of the starts' medians
  Interval interval_us; // 95 %: what further starts of the same build may give
};

// Combines at least one start. Between starts: of 6 and more the interval of the median of their medians by order statistics; of
// fewer Student's t, whose variance is pooled from the medians and what `tolerance` assumes, as if the latter were of 5 starts:
// one start says nothing of it. Within starts: the widest interval of any, divided by the root of their number. The result has
// the root of the sum of their squares on either side.
Estimate estimate(std::span<const StartMedian> starts, const Tolerance& tolerance);

// Slower and faster: the interval of the ratio lies beyond the margin. Same: it lies within `same` on both sides. Else ambiguous:
// it is too wide, or reaches from a difference that matters to one that does not.
enum class Verdict { Faster, Slower, Same, Ambiguous };
const char* to_string(Verdict verdict); // "faster"

struct Comparison {
  double ratio = 1;        // time of B / time of A
  Interval ratio_interval; // 95 %
  Verdict verdict = Verdict::Ambiguous;
};

// Compares B with A. Swapped arguments give the inverse ratio and interval, and faster for slower. The two intervals are joined by
// logarithms (Zou and Donner's MOVER).
Comparison compare(const Estimate& a, const Estimate& b, const Tolerance& tolerance);

} // namespace epx::bench
