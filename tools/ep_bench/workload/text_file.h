// SPDX-License-Identifier: Apache-2.0
// Reads a text that the command line names (of --routing text, or to compare).
#pragma once

#include <cstdint>
#include <string>

namespace epx::bench {

inline constexpr int64_t kMaxTextBytes = int64_t{64} << 20; // a word takes a string of its own

// Returns the contents of a regular file of at most kMaxTextBytes; a device or a fifo is refused at once. Throws UsageError, whose
// sentence calls the file `name`.
std::string read_text(const std::string& file, const std::string& name);

} // namespace epx::bench
