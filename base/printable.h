// SPDX-License-Identifier: Apache-2.0
// Text from other processes gets into messages through this function.
#pragma once

#include <string>
#include <string_view>

#include <fmt/format.h>

namespace epx {

// Returns the text up to its first NUL, with each byte that is not printable ASCII as \xNN: a terminal or a log must not act on
// the bytes of a peer.
inline std::string printable(std::string_view text) {
  std::string result;
  for (const char c : text.substr(0, text.find('\0'))) {
    if (c >= ' ' && c <= '~')
      result += c;
    else
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
  }
  return result;
}

} // namespace epx
