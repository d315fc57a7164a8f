// SPDX-License-Identifier: Apache-2.0
// The unit tests of ep_bench share these helpers.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/options.h"

namespace epx::bench {

// Returns options from a command line that builds with and without MPI accept.
inline std::variant<Sweep, RequestedText> parse(std::vector<const char*> arguments) {
  std::vector<const char*> argv{"ep_bench", "--bootstrap", "file:/tmp", "--rank", "0", "--ranks", "1"};
  argv.insert(argv.end(), arguments.begin(), arguments.end());
  return parse_options(static_cast<int>(argv.size()), argv.data());
}

inline Options options_of(std::vector<const char*> arguments) {
  return std::get<Sweep>(parse(std::move(arguments))).common();
}

// The same of arguments that have no spaces.
inline Options options_of_line(const std::string& line) {
  std::istringstream stream(line);
  const std::vector<std::string> words{std::istream_iterator<std::string>(stream), {}};
  std::vector<const char*> arguments;
  for (const std::string& word : words)
    arguments.push_back(word.c_str());
  return options_of(arguments);
}

// Returns the sentence of the UsageError that `action` throws.
template <typename Action>
std::string refusal_of(Action&& action) {
  try {
    action();
  } catch (const UsageError& error) {
    CHECK(error.exit_code() == kExitUsage);
    CHECK_FALSE(std::string(error.what()).find('\n') != std::string::npos);
    return error.what();
  }
  return "accepted";
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class TemporaryFile {
public:
  explicit TemporaryFile(const std::string& content) {
    const int file = mkstemp(name_);
    REQUIRE(file >= 0);
    close(file);
    std::ofstream(name_) << content;
  }
  ~TemporaryFile() { std::remove(name_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  const char* name() const { return name_; }

private:
  char name_[32] = "/tmp/ep_bench_test_XXXXXX";
};

} // namespace epx::bench
