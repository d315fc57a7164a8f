// SPDX-License-Identifier: Apache-2.0
// Calls of which a test spoils one argument. `Calls` has all arguments, which are good, and its changed_output() says which
// outputs have been written.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/moe/tensors.h"

namespace epx::test {

template <typename Calls>
struct Refusal {
  epx_status (*call)(Calls&);
  std::function<void(Calls&)> spoil;
  std::vector<std::string> words; // which the sentence has
};

template <typename Calls>
void check_refused(const std::vector<Refusal<Calls>>& table) {
  for (size_t i = 0; i < table.size(); ++i) {
    CAPTURE(i);
    CAPTURE(table[i].words.front());
    Calls calls;
    table[i].spoil(calls);
    CHECK(not_refused(table[i].call(calls), table[i].words) == "");
    CHECK(calls.changed_output() == "");
  }
}

} // namespace epx::test
