// SPDX-License-Identifier: Apache-2.0
// These random numbers have no state: element i of a stream depends on the stream's key and on i alone, so every rank can make
// the data of every other rank, in any order.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace epx::bench {

// The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): a
// bijection of 64-bit words.
constexpr uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// RandomStream is SplitMix64 read by index: at(i) is the (i + 1)-th output of the generator seeded with the key.
class RandomStream {
public:
  // Streams with different key words, or the same ones in another order, have nothing in common.
  constexpr RandomStream(std::initializer_list<uint64_t> key_words) {
    for (uint64_t word : key_words)
      key_ = mix64(key_ + kGolden + word);
  }

  constexpr uint64_t at(uint64_t index) const { return mix64(key_ + (index + 1) * kGolden); }

  // Returns a number uniform in [0, bound), 1 <= bound < 2^32.
  constexpr uint32_t below(uint64_t index, uint32_t bound) const {
    return static_cast<uint32_t>(((at(index) >> 32) * bound) >> 32);
  }

  // Returns a number uniform in [0, 1), of 53 bits.
  constexpr double unit(uint64_t index) const { return static_cast<double>(at(index) >> 11) * 0x1p-53; }

private:
  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u; // 2^64 / golden ratio, odd
  uint64_t key_ = 0;
};

} // namespace epx::bench
