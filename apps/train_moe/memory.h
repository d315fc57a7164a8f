// SPDX-License-Identifier: Apache-2.0
// Checks that a model fits into memory before any of it is allocated.
#pragma once

#include "apps/train_moe/device.h"
#include "apps/train_moe/mesh.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/world.h"

namespace train {

// Throws Error when this rank needs more memory than its device lets a process have. It counts the least that training takes,
// without the exchange. Local.
void require_memory(const World& world, const Mesh& mesh, const Options& options, const Device& device);

} // namespace train
