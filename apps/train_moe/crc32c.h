// SPDX-License-Identifier: Apache-2.0
// CRC-32C (Castagnoli) is the checksum of iSCSI (RFC 3720, appendix B.4): that of the bytes "123456789" is e3069283.
#pragma once

#include <cstdint>
#include <span>

namespace train {

// Returns the checksum of `bytes` after bytes whose checksum is `crc`; 0 is the checksum of no bytes.
uint32_t crc32c(uint32_t crc, std::span<const char> bytes);

} // namespace train
