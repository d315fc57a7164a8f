// SPDX-License-Identifier: Apache-2.0
// Rng is a small random generator with the same numbers on every platform, so that a seed reproduces a case everywhere.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace epx::test {

// Returns a hash of two numbers (splitmix64's finaliser).
constexpr uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t z = a + 0x9e3779b97f4a7c15ull * (b + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

class Rng {
public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t next() { return mix(state_, count_++); }
  int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); } // [0, bound)
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }                   // [low, high]
  bool chance(int percent) { return below(100) < percent; }

  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<int64_t>(choices.size()))];
  }

private:
  uint64_t state_;
  uint64_t count_ = 0;
};

} // namespace epx::test
