// SPDX-License-Identifier: Apache-2.0
#include "tests/moe/failing_allocation.h"

#include <cstdlib>
#include <new>

namespace epx::test {
namespace {

constexpr int64_t kNone = -1;
thread_local int64_t until_failure = kNone; // the allocations that still succeed; kNone: all do
thread_local bool has_thrown = false;

} // namespace

FailingAllocation::FailingAllocation(int64_t number) {
  until_failure = number;
  has_thrown = false;
}
FailingAllocation::~FailingAllocation() {
  until_failure = kNone;
}
bool FailingAllocation::has_failed() const {
  return has_thrown;
}

} // namespace epx::test

// These replace those of the C++ library in the whole program, the shared libraries included.
void* operator new(size_t bytes) {
  using namespace epx::test;
  if (until_failure != kNone && until_failure-- == 0) {
    has_thrown = true;
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(bytes > 0 ? bytes : 1)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  try {
    return operator new(bytes);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}
