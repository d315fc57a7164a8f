// SPDX-License-Identifier: Apache-2.0
// Options are those of the command line.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "epx/epx_moe.h"
#include "tools/named_formats.h"

namespace train {

// How tokens reach their experts.
enum class Path {
  dispatch,   // an epx_moe_block on a group, on its path of this name
  ring,       // likewise
  ragged,     // likewise
  native,     // the baseline without epx: counts, then MPI_Alltoallv of permuted rows
  dense,      // the other baseline: all tokens to all ranks, whose experts compute all of them
  replicated, // not at all: each rank computes all experts on its tokens
  both        // dispatch and native side by side, step by step
};

const char* name_of(Path path);
bool is_of_block(Path path); // whether an epx_moe_block has it

enum class DeviceKind { host, cuda };

// What a step does whose routes exceed the receive capacity.
enum class OnOverflow {
  error, // end the training
  drop,  // go on without them
  rerun  // run the step again with a capacity that has room for any routing
};

// Dtype is what the experts compute in, and what their tokens travel in. All else is float32, but for gradients that travel in
// fsdp_grads.
enum class Dtype { fp32, bf16 };

constexpr epx_dtype as_epx(Dtype dtype) {
  return dtype == Dtype::bf16 ? EPX_BFLOAT16 : EPX_FLOAT32;
}

inline constexpr int kFp8Block = 128; // elements of H and F that have a scale in common

// ModelOptions decide the model's shape and its curve; a checkpoint has them.
struct ModelOptions {
  int context = 8;    // bytes that the model sees
  int embedding = 16; // elements per byte
  int hidden = 64;
  int ffn = 128;
  int layers = 2;
  int experts = 8;
  int top_k = 2;
  int batch = 768; // predicted bytes per step, over all ranks
  uint64_t seed = 1;
};

struct Options {
  ModelOptions model;
  std::string text = "/usr/share/common-licenses/GPL-3";
  int steps = 200; // the last step's number
  double learning_rate = 4e-3;
  double weight_decay = 0.1;
  double aux_loss = 0.01;
  Path path = Path::dispatch;
  int ep = 0, fsdp = 0;           // ranks of the mesh's axes; 0: as many as the other leaves (mesh.h)
  Dtype fsdp_grads = Dtype::fp32; // in which gradients of experts travel over the FSDP axis
  DeviceKind device = DeviceKind::host;
  Dtype dtype = Dtype::fp32;
  epx::NamedFormat dispatch_format = epx::NamedFormat::None; // in which the rows of a forward travel to their experts
  epx_moe_recipe recipe = EPX_MOE_RECIPE_WIDE;               // which products of the experts are in FP8
  double capacity_factor = 0; // receive rows of a rank over those of balanced routing; 0: room for any routing
  OnOverflow on_overflow = OnOverflow::error;
  bool measures_format_errors = false;
  std::string checkpoint_file; // "" for none
  int checkpoint_every = 0;    // steps; 0: after the last one only
  std::string resume_file;
  std::string routing_file;
  std::string log_file; // "" for standard output
  std::string progress = "auto";
  int64_t timeout_ms = 60'000;
};

// RequestedText is what --help or --version prints before the program ends.
struct RequestedText {
  std::string text;
};

// Throws Error.
std::variant<Options, RequestedText> parse_options(int argc, char** argv);

} // namespace train
