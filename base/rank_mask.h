// SPDX-License-Identifier: Apache-2.0
// A RankMask is a set of ranks of a group, for host and device.
#pragma once

#include <bit>
#include <cstdint>

#include "base/host_device.h"

namespace epx {

// A rank's bit is private to this class: it need not be the rank's number, which messages name, nor the index of its window
// (transport/peer_window.h). Records in shared memory hold a RankMask as one 64-bit word.
class RankMask {
public:
  static constexpr int kMaxRanks = 64;

  constexpr RankMask() = default;
  static constexpr RankMask from_bits(uint64_t bits) {
    RankMask mask;
    mask.bits_ = bits;
    return mask;
  }

  constexpr uint64_t bits() const { return bits_; }
  constexpr void set(int rank) { bits_ |= bit_of(rank); }
  constexpr void remove(int rank) { bits_ &= ~bit_of(rank); }
  constexpr bool contains(int rank) const { return (bits_ >> rank & 1) != 0; }
  constexpr bool is_empty() const { return bits_ == 0; }
  EPX_HOST_DEVICE int count() const { return count_of(bits_); }
  EPX_HOST_DEVICE int count_below(int rank) const { return count_of(bits_ & (bit_of(rank) - 1)); }
  // The mask is not empty.
  EPX_HOST_DEVICE int lowest() const {
#if defined(__CUDA_ARCH__)
    return __ffsll(static_cast<long long>(bits_)) - 1;
#else
    return std::countr_zero(bits_);
#endif
  }
  constexpr void remove_lowest() {
    bits_ &= bits_ - 1;
  }

private:
  static constexpr uint64_t bit_of(int rank) {
    return uint64_t{1} << rank;
  }
  EPX_HOST_DEVICE static int count_of(uint64_t bits) {
#if defined(__CUDA_ARCH__)
    return __popcll(bits);
#else
    return std::popcount(bits);
#endif
  }

  uint64_t bits_ = 0;
};
static_assert(sizeof(RankMask) == sizeof(uint64_t));

} // namespace epx
