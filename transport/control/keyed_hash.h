// SPDX-License-Identifier: Apache-2.0
// SipHash-2-4 (Aumasson and Bernstein, 2012): a keyed hash of short messages, which only those who know the key can compute.
// The ranks of a group prove by it that they have the group's secret, without sending it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace epx {

using HashKey = std::array<uint64_t, 2>;

constexpr uint64_t rotate_left(uint64_t word, int bits) {
  return word << bits | word >> (64 - bits);
}

// `message` is read as little-endian words, as on every machine that epx runs on.
inline uint64_t keyed_hash(const HashKey& key, std::span<const std::byte> message) {
  std::array<uint64_t, 4> v{key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d, key[0] ^ 0x6c7967656e657261,
                            key[1] ^ 0x7465646279746573};
  const auto rounds = [&v](int count) {
    for (int round = 0; round < count; ++round) {
      v[0] += v[1], v[2] += v[3];
      v[1] = rotate_left(v[1], 13) ^ v[0], v[3] = rotate_left(v[3], 16) ^ v[2];
      v[0] = rotate_left(v[0], 32);
      v[2] += v[1], v[0] += v[3];
      v[1] = rotate_left(v[1], 17) ^ v[2], v[3] = rotate_left(v[3], 21) ^ v[0];
      v[2] = rotate_left(v[2], 32);
    }
  };
  const auto take = [&](uint64_t word) {
    v[3] ^= word;
    rounds(2);
    v[0] ^= word;
  };
  constexpr size_t kWord = sizeof(uint64_t);
  size_t offset = 0;
  for (; offset + kWord <= message.size(); offset += kWord) {
    uint64_t word = 0;
    std::memcpy(&word, message.data() + offset, kWord);
    take(word);
  }
  uint64_t last = static_cast<uint64_t>(message.size()) << 56;
  std::memcpy(&last, message.data() + offset, message.size() - offset); // at most seven bytes, below the length
  take(last);
  v[2] ^= 0xff;
  rounds(4);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

} // namespace epx
