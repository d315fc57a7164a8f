// SPDX-License-Identifier: Apache-2.0
// An error sentence has to contain certain words.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tests/support/check.h"

namespace epx::test {

// A sentence contains "a|b" when it contains a or b: a value may be given as a number or by its name.
inline bool tells(const std::string& sentence, std::string_view word) {
  for (size_t bar = word.find('|'); bar != std::string_view::npos; bar = word.find('|')) {
    if (contains(sentence, std::string(word.substr(0, bar)))) return true;
    word.remove_prefix(bar + 1);
  }
  return contains(sentence, std::string(word));
}

inline void check_tells(const std::string& sentence, const std::vector<std::string>& words, const std::string& name) {
  for (const std::string& word : words)
    check(tells(sentence, word), "{}: \"{}\" does not tell {}", name, sentence, word);
}

} // namespace epx::test
