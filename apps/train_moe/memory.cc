// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/memory.h"

#include "apps/train_moe/chunks.h"
#include "apps/train_moe/errors.h"

namespace train {
namespace {

// Need is in bytes, as double, since a product of options may be more than any integer type holds.
struct Need {
  double parameters = 0;      // with their gradients and AdamW's moments, and what is gathered of others'
  double chunk_gradients = 0; // of the shared parameters, one copy per chunk
  double activations = 0;     // of a step

  double all() const { return parameters + chunk_gradients + activations; }
};

// Of a weight that is gathered. In FP8 there are two codes, one of the transpose.
double bytes_of_weight(const Options& options) {
  const bool is_float = options.recipe == EPX_MOE_RECIPE_WIDE && options.dtype == Dtype::fp32;
  return is_float ? sizeof(float) : sizeof(Bfloat16);
}

// Computes the need from the shapes that Model declares.
Need need_of(const Options& options, const Mesh& mesh, const Chunks& chunks, int64_t experts_here) {
  const ModelOptions& model = options.model;
  const bool replicates_experts = options.path == Path::replicated, is_split = mesh.fsdp.size > 1;
  constexpr double kBytesOfFloat = sizeof(float);
  constexpr double kByteValues = 256;
  constexpr double kAdamCopies = 4; // values, gradients, two moments
  const double hidden = model.hidden, embedding = model.embedding, layers = model.layers;
  const double embedded = model.context * embedding;
  const double experts = layers * 3 * static_cast<double>(experts_here) * model.ffn * hidden;
  const double shared = kByteValues * embedding + hidden * embedded + hidden + layers * model.experts * hidden +
                        kByteValues * hidden + kByteValues;
  const double tokens = static_cast<double>(chunks.num_tokens());
  Need need;
  need.parameters = kBytesOfFloat * kAdamCopies * ((is_split ? shared / mesh.all.size : shared) + experts / mesh.fsdp.size);
  // What is gathered, and a layer's gradients with the parts of their sums: of gate and up, two thirds, in float32, and with
  // bfloat16 what is sent and what arrives in it, too.
  const double parts = options.fsdp_grads == Dtype::bf16 ? 4.0 / 3 : 2.0 / 3;
  if (is_split)
    need.parameters += kBytesOfFloat * (shared + (1 + parts) * experts / layers) + bytes_of_weight(options) * experts;
  need.chunk_gradients =
      kBytesOfFloat * static_cast<double>(chunks.count()) * (replicates_experts ? shared + experts : shared);
  need.activations =
      kBytesOfFloat * (tokens * (layers * (2 * hidden + model.experts) + 4 * hidden + kByteValues) + kChunk * embedded);
  return need;
}

} // namespace

void require_memory(const World& world, const Mesh& mesh, const Options& options, const Device& device) {
  const ModelOptions& model = options.model;
  const int64_t experts_here = options.path == Path::replicated ? model.experts : ownership(model.experts, mesh.ep).count;
  const Need need = need_of(options, mesh, Chunks(model.batch, world.rank(), world.size()), experts_here);
  const double models = options.path == Path::both ? 2 : 1;
  const double available = device.available_memory();
  if (models * need.all() <= available) return;
  fail(kExitUsage,
       "--hidden {}, --ffn {}, --experts {}, --layers {}, --embedding {}, --context {} and --batch {} need at least {:.0f} "
       "bytes of memory on rank {}: {:.0f} for parameters, gradients and AdamW's moments, {:.0f} for gradients by chunk, "
       "{:.0f} for activations{}; {} can have {:.0f}",
       model.hidden, model.ffn, model.experts, model.layers, model.embedding, model.context, model.batch,
       models * need.all(), world.rank(), need.parameters, need.chunk_gradients, need.activations,
       models > 1 ? ", for each of two paths" : "", device.is_host() ? "a process" : "a process on its GPU", available);
}

} // namespace train
