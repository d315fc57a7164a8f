// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli), the checksum of iSCSI (RFC 3720, appendix B.4): the one of the bytes "123456789" is e3069283.
#pragma once

#include <cstdint>
#include <span>

namespace train {

// Of what came before, whose checksum is `crc`, and `bytes` after it; 0 is the checksum of nothing.
uint32_t crc32c(uint32_t crc, std::span<const char> bytes);

} // namespace train
