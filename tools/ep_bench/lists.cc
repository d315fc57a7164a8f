// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/lists.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {
namespace {

constexpr std::string_view kRange = "..", kText = "text:";

template <typename Value>
void add_once(std::vector<Value>& values, const Value& value) {
  if (std::ranges::find(values, value) == values.end()) values.push_back(value);
}

std::vector<std::string_view> parts_of(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

int32_t number_of(const char* option, const std::string& list, std::string_view text, int32_t least, int32_t most) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stop != end || number > std::numeric_limits<int32_t>::max())
    throw UsageError(fmt::format(
        "{} is '{}'; each value must be a whole number of at most {}, or a range such as 64..4096, which doubles", option,
        list, std::numeric_limits<int32_t>::max()));
  if (number < least || number > most)
    throw UsageError(fmt::format("{} is {}; it must be between {} and {}", option, number, least, most));
  return static_cast<int32_t>(number);
}

bool begins_a_routing(std::string_view text) {
  constexpr std::array<std::string_view, 4> kBegins{"uniform", "zipf:", "hot:", kText};
  return std::ranges::any_of(kBegins, [&](std::string_view begin) { return text.starts_with(begin); });
}

} // namespace

std::vector<int32_t> geometric(int64_t first, int64_t last, int64_t factor) {
  std::vector<int32_t> values;
  for (int64_t value = first; value <= last; value *= factor)
    values.push_back(static_cast<int32_t>(value));
  return values;
}

std::vector<int32_t> parse_numbers(const char* option, const std::string& text, int32_t least, int32_t most) {
  std::vector<int32_t> numbers;
  for (const std::string_view part : parts_of(text)) {
    const size_t range = part.find(kRange);
    if (range == std::string_view::npos) {
      add_once(numbers, number_of(option, text, part, least, most));
      continue;
    }
    const int32_t first = number_of(option, text, part.substr(0, range), least, most);
    const int32_t last = number_of(option, text, part.substr(range + kRange.size()), least, most);
    if (first < 1 || first > last)
      throw UsageError(fmt::format("{} has the range {}..{}; it must begin with at least 1 and not end below its begin",
                                   option, first, last));
    for (const int32_t number : geometric(first, last, 2))
      add_once(numbers, number);
  }
  return numbers;
}

std::vector<std::string> split_list(const std::string& text) {
  std::vector<std::string> values;
  for (const std::string_view part : parts_of(text))
    add_once(values, std::string(part));
  return values;
}

std::vector<std::string> split_routings(const std::string& text) {
  std::vector<std::string> routings, values;
  for (const std::string_view part : parts_of(text))
    if (!routings.empty() && routings.back().starts_with(kText) && !begins_a_routing(part))
      routings.back() += fmt::format(",{}", part);
    else
      routings.emplace_back(part);
  for (const std::string& routing : routings)
    add_once(values, routing);
  return values;
}

} // namespace epx::bench
