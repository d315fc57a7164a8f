// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <utility>

#include "base/keep_until_exit.h"

namespace epx {
namespace {

// `more_bytes` beside what it counts.
template <size_t more_bytes>
class Owner {
public:
  explicit Owner(int& released) : released_(&released) {}
  Owner(Owner&& from) noexcept : released_(std::exchange(from.released_, nullptr)) {}
  Owner& operator=(Owner&&) = delete;
  ~Owner() {
    if (released_ != nullptr) ++*released_;
  }

private:
  int* released_;
  std::array<std::byte, more_bytes> more_{};
};

} // namespace

TEST_CASE("what is kept until exit is not released, and keeping it throws nothing") {
  static int released = 0; // as long as what is kept
  for (int i = 0; i < 3; ++i) {
    Owner<1> owner(released);
    static_assert(noexcept(keep_until_exit(std::move(owner))));
    keep_until_exit(std::move(owner));
  }
  keep_until_exit(Owner<64>(released));
  CHECK(released == 0);
}

} // namespace epx
