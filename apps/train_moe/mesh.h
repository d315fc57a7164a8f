// SPDX-License-Identifier: Apache-2.0
// A Mesh arranges the ranks as EP x FSDP. Ranks of one EP axis share the experts among them, and exchange tokens. Ranks of one
// FSDP axis compute with the same experts, and each of them keeps a part of their parameters. Every rank has tokens of its own.
#pragma once

#include <cstdint>

#include "apps/train_moe/options.h"
#include "apps/train_moe/world.h"

namespace train {

// Where this rank is on an axis.
struct Axis {
  int rank = 0;
  int size = 1;
};

struct Mesh {
  Axis all;             // the ranks of the job
  Axis ep;              // rank r of the job is rank r % ep.size here
  Axis fsdp;            // and r / ep.size here
  int64_t row_unit = 1; // of experts' matrices a rank keeps multiples of so many rows
};

// Throws Error where --ep and --fsdp are not a mesh of all ranks.
Mesh make_mesh(const World& world, const Options& options);

// What one of several owners has of `total` things, a multiple of `unit`: contiguous blocks of multiples of it. The first owners
// have one unit more where they do not come out even, as experts in epx.
struct Ownership {
  int64_t first = 0;
  int64_t count = 0;
};
Ownership ownership(int64_t total, const Axis& axis, int64_t unit = 1);

// Of the rows of all experts' matrices, [E, rows], those whose parameters this rank keeps: a run of its experts' rows.
Ownership rows_kept(const Mesh& mesh, int64_t experts, int64_t rows);

} // namespace train
