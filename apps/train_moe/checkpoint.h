// SPDX-License-Identifier: Apache-2.0
// A checkpoint is one file, the same for every number of ranks and every path, so that any of them can resume it. It has
// a line of JSON (format, step, model, text, tensors), then for each tensor its values and AdamW's two moments, float32 in the
// machine's byte order, then a line with the checksum of all that: "crc32c 0123abcd".
#pragma once

#include <cstdint>
#include <string>

#include "apps/train_moe/options.h"
#include "apps/train_moe/parameters.h"
#include "apps/train_moe/text.h"
#include "apps/train_moe/world.h"

namespace train {

// Throws Error when a checkpoint cannot be written here, for instance because `file` is there and not a regular file. Local.
void require_writable(const std::string& file);

// Collective. The file appears whole or not at all (replacement.h). Throws AgreedError.
void save_checkpoint(const World& world, const std::string& file, int64_t step, const ModelOptions& model, const Text& text,
                     Parameters& parameters);

// Collective. Returns the step after which it was saved. Throws AgreedError for a file that is unreadable, damaged, or of
// another model or text, and names what differs.
int64_t load_checkpoint(const World& world, const std::string& file, const ModelOptions& model, const Text& text,
                        Parameters& parameters);

} // namespace train
