// SPDX-License-Identifier: Apache-2.0
// Options whose value is a list, of which a sweep measures each value.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace epx::bench {

// Returns the whole numbers of a list such as "1,8,64..4096", each once, in their order. A range a..b doubles from a up to b.
// Throws UsageError with the option, the value and the limits.
std::vector<int32_t> parse_numbers(const char* option, const std::string& text, int32_t least, int32_t most);

// Returns first, first * factor, ... up to last, as nccl-tests' -b, -e and -f do. Needs 1 <= first <= last and factor >= 2.
std::vector<int32_t> geometric(int64_t first, int64_t last, int64_t factor);

// Returns the parts between commas, each once, in their order.
std::vector<std::string> split_list(const std::string& text);

// Does the same for --routing. A file name of text:FILE may have commas: a part that does not begin as a routing does belongs to
// the file name before it.
std::vector<std::string> split_routings(const std::string& text);

} // namespace epx::bench
