// SPDX-License-Identifier: Apache-2.0
// Random identifiers (group ids, names of shared memory); they are not meant for statistics.
#pragma once

#include <cstdint>
#include <random>

namespace epx {

inline uint64_t random_u64() {
  std::random_device device; // the operating system's entropy
  return static_cast<uint64_t>(device()) << 32 | device();
}

} // namespace epx
