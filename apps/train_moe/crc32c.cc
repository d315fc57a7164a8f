// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/crc32c.h"

#include <array>

namespace train {
namespace {

// Returns what a byte at the end of the register leaves in it; the polynomial is bit-reversed.
constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < table.size(); ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit)
      value = value >> 1 ^ ((value & 1) != 0 ? 0x82f63b78u : 0u);
    table[byte] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = make_table();

} // namespace

uint32_t crc32c(uint32_t crc, std::span<const char> bytes) {
  crc = ~crc;
  for (const char byte : bytes)
    crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return ~crc;
}

} // namespace train
