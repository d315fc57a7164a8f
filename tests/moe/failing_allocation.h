// SPDX-License-Identifier: Apache-2.0
// Lets one allocation of a thread fail.
#pragma once

#include <cstdint>

namespace epx::test {

// While it lives, the allocation by operator new of this thread with that number, from 0, throws std::bad_alloc.
class FailingAllocation {
public:
  explicit FailingAllocation(int64_t number);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  bool has_failed() const; // there have been so many
};

} // namespace epx::test
