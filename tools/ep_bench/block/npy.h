// SPDX-License-Identifier: Apache-2.0
// Writes numpy's file format, version 1.0.
#pragma once

#include <cstdint>
#include <span>
#include <string>

namespace epx::bench {

// Throws UsageError unless files can be created in the directory of --dump.
void require_directory(const std::string& directory);

// Writes a float32 array, the last dimension contiguous. Throws RuntimeError.
void write_npy(const std::string& file, std::span<const int64_t> shape, std::span<const float> values);

} // namespace epx::bench
