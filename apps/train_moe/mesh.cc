// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/mesh.h"

#include <algorithm>
#include <utility>

#include "apps/train_moe/errors.h"

namespace train {

Mesh make_mesh(const World& world, const Options& options) {
  const int ranks = world.size();
  for (const auto& [name, size] : {std::pair{"--ep", options.ep}, {"--fsdp", options.fsdp}})
    if (size > 0 && ranks % size != 0) fail(kExitUsage, "{} is {}, which does not divide the {} ranks", name, size, ranks);
  const int ep = options.ep > 0 ? options.ep : ranks / std::max(options.fsdp, 1);
  const int fsdp = options.fsdp > 0 ? options.fsdp : ranks / ep;
  if (int64_t{ep} * fsdp != ranks)
    fail(kExitUsage, "--ep {} and --fsdp {} are a mesh of {} ranks; there are {}", ep, fsdp, int64_t{ep} * fsdp, ranks);
  if (fsdp == 1 && options.fsdp_grads == Dtype::bf16)
    fail(kExitUsage, "--fsdp-grads is bf16 and the FSDP axis has 1 rank; no gradients travel over it");
  // A rank quantises what it keeps, and rows of a block have one scale.
  const int64_t row_unit = options.recipe == EPX_MOE_RECIPE_WIDE ? 1 : kFp8Block;
  return {{world.rank(), ranks}, {world.rank() % ep, ep}, {world.rank() / ep, fsdp}, row_unit};
}

Ownership ownership(int64_t total, const Axis& axis, int64_t unit) {
  const int64_t each = total / unit / axis.size;
  const int64_t extra = total / unit % axis.size;
  return {(axis.rank * each + std::min<int64_t>(axis.rank, extra)) * unit, (each + (axis.rank < extra ? 1 : 0)) * unit};
}

Ownership rows_kept(const Mesh& mesh, int64_t experts, int64_t rows) {
  const Ownership here = ownership(experts, mesh.ep);
  const Ownership part = ownership(here.count * rows, mesh.fsdp, mesh.row_unit);
  return {here.first * rows + part.first, part.count};
}

} // namespace train
