// SPDX-License-Identifier: Apache-2.0
// Warp-level primitives: shuffles, reductions, and lists whose elements are spread over the lanes.
//
// __syncwarp() stands where lanes read what other lanes have stored or acquired, or write what other lanes have read: it orders
// the memory accesses of the participating lanes (PTX, bar.warp.sync), which votes and shuffles do not. On Hopper no test
// notices a missing one while the compiler keeps the warp converged; the kernels on the CPU, where lanes run one after the
// other, notice some (tests/gpu/remove_fences.py emulate).
#pragma once

#include <cstdint>

namespace epx::cuda {

constexpr int kWarp = 32;

__device__ inline int lane() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

template <typename T>
__device__ inline T from_lane(T value, int lane) {
  return __shfl_sync(~0u, value, lane);
}
template <typename T>
__device__ inline T* from_lane(T* pointer, int lane) {
  return reinterpret_cast<T*>(__shfl_sync(~0u, reinterpret_cast<unsigned long long>(pointer), lane));
}

// Returns the index of the lowest set bit, or -1.
__device__ inline int lowest_bit(uint32_t bits) {
  return __ffs(static_cast<int>(bits)) - 1;
}
__device__ inline int lowest_bit(uint64_t bits) {
  return __ffsll(static_cast<long long>(bits)) - 1;
}

// Returns the index of the highest set bit, or -1.
__device__ inline int highest_bit(uint32_t bits) {
  return 31 - __clz(static_cast<int>(bits));
}

// Every lane gets the bitwise OR of all lanes' values.
__device__ inline uint64_t or_of_lanes(uint64_t bits) {
  const auto low = static_cast<uint32_t>(bits);
  const auto high = static_cast<uint32_t>(bits >> 32);
  return static_cast<uint64_t>(__reduce_or_sync(~0u, high)) << 32 | __reduce_or_sync(~0u, low);
}

// A list of up to 64 values, of which each lane holds two. All lanes make the same calls.
template <typename T>
class WarpList {
public:
  WarpList() = default;
  // A list of up to 32 values: lane i passes the i-th.
  __device__ WarpList(T value, int size) : low_(value), size_(size) {}

  __device__ int size() const { return size_; }
  __device__ void append(T value) {
    if (size_ % kWarp == lane()) (size_ < kWarp ? low_ : high_) = value;
    ++size_;
  }
  __device__ T operator[](unsigned index) const { return from_lane(index < kWarp ? low_ : high_, index % kWarp); }
  // Applies `of` to each value, in the lane that holds it, and returns the list of the results.
  template <typename Of>
  __device__ auto map(const Of& of) const {
    using Result = decltype(of(low_));
    WarpList<Result> results;
    if (has_own(0)) results.low_ = of(low_);
    if (has_own(kWarp)) results.high_ = of(high_);
    results.size_ = size_;
    return results;
  }

  // The calling lane holds the values `first` + lane for first = 0 and first = 32. own() takes any index, and returns the
  // lane's value of that half.
  __device__ bool has_own(int first) const { return first + lane() < size_; }
  __device__ T own(int first) const { return first < kWarp ? low_ : high_; }

private:
  template <typename>
  friend class WarpList;

  T low_{}, high_{};
  int size_ = 0;
};

} // namespace epx::cuda
