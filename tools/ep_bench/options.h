// SPDX-License-Identifier: Apache-2.0
// Options are those of the command line of ep_bench.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/dtypes.h"
#include "epx/epx.h"
#include "epx/epx_moe.h"
#include "tools/named_formats.h"

namespace epx::bench {

struct RoutingSpec {
  enum class Kind { Uniform, Zipf, Hot, Text };
  Kind kind = Kind::Uniform;
  double zipf_exponent = 0; // Zipf
  double hot_fraction = 0;  // Hot, in [0, 1]
  std::string text_file;    // Text
};

// The layout of the receive tensors (epx.h).
enum class Layout { ExpertMajor, RankMajor, RankMajorCompact };
constexpr bool is_rank_major(Layout layout) {
  return layout != Layout::ExpertMajor;
}

// In which form --gather gathers a layer's expert weights: in dtype, or as FP8 codes with scales of blocks.
enum class GatherForm { Wide, Fp8 };
inline constexpr int32_t kGatherFp8Block = 128; // rows and columns that share a scale

// BlockOptions say what --block measures.
struct BlockOptions {
  bool is_measured = false;
  int32_t ffn = 1024;                          // F
  bool has_biases = false;                     // of both projections
  epx_moe_recipe recipe = EPX_MOE_RECIPE_WIDE; // of a second block beside the first; WIDE: none
  epx_moe_path path = EPX_MOE_PATH_DISPATCH;   // of another block beside the first; DISPATCH: none
  std::vector<GatherForm> gathers;             // of weights beside the blocks; empty: none
  int32_t gather_sms = 0;                      // that a gather takes on nccl; 0: none, by copy engines
  int64_t pause_ms = 0;                        // 0: no times after a pause
  int32_t rounds = 1;                          // the iterations of its lines are split into so many
  std::string dump_directory;                  // empty: none
  int32_t dump_rows = 0;                       // of each tensor; 0: all
};

// A NoiseTarget says when the iterations of a point may end.
struct NoiseTarget {
  double percent = 1;  // of a median: its 95 % interval shall lie within so much of it
  double budget_s = 2; // the timed iterations may take so long for each line
};

inline constexpr int32_t kNotGiven = std::numeric_limits<int32_t>::min();

struct Options {
  // What is exchanged.
  int32_t tokens = 512; // T, on every rank
  int32_t hidden = 1024;
  int32_t experts = 32;
  int32_t top_k = 4;
  epx_dtype dtype = EPX_BFLOAT16;
  NamedFormat row_format = NamedFormat::None;      // in which the rows of dispatch arrive
  bool has_quantised_input = false;                // they come in it, too
  NamedFormat wire_format = NamedFormat::None;     // in which they travel, and arrive in dtype
  epx_scale_layout scale_layout = EPX_SCALES_ROWS; // of received scales
  NamedFormat sum_format = NamedFormat::None;      // in which the partial sums of combine and dispatch_bwd travel
  RoutingSpec routing;
  Layout layout = Layout::ExpertMajor;
  int32_t max_rows = 0;          // M, rows of each source rank in the rank-major layout; 0: T
  int32_t alignment = 0;         // rows
  int64_t zone_stride = 0;       // rows; 0: zones follow each other
  epx_pads pads = EPX_PADS_ZERO; // of dispatch
  int64_t capacity = 0;          // R in rows; 0: worst case
  uint64_t seed = 1;

  // How.
  epx_transport transport = EPX_TRANSPORT_HOST;
  epx_combine_precision combine_precision = EPX_COMBINE_WIRE;
  int32_t ranks_per_node = 0;    // 0: as found
  int32_t fixed_rail_tokens = 0; // 0: exact sizes, or with graph all tokens; nccl
  bool staged = false;           // receive tensors in plain memory instead of epx_mem_alloc's
  bool graph = false;            // calls are replays of CUDA graphs; nccl
  int32_t num_comm_sms = 0;      // 0: the library's default
  int64_t timeout_ms = 0;        // 0: the library's default

  // How often, and what comes out.
  int32_t iterations = 20;          // with `noise` only those of --native and --block
  int32_t warmup = 5;               // iterations
  std::optional<NoiseTarget> noise; // empty: exactly `iterations`
  bool warms_up_until_stable = false;
  int32_t input_sets = 4;
  bool verify = false;
  bool floor = false;    // also measure what the hardware needs for the rows alone; nccl
  bool native = false;   // also measure dispatch and combine the native way; nccl
  std::string json_file; // empty: none
  bool appends = false;  // adds a start to the file
  int32_t starts = 1;    // of the run, each in new processes
  bool is_paced = false; // phases begin when standard input says so, see pacer.h
  BlockOptions block;

  // Who takes part.
  std::string bootstrap_directory; // empty: MPI
  int32_t rank = kNotGiven;        // file bootstrap only
  int32_t num_ranks = kNotGiven;   // file bootstrap only
  std::string job_id = "ep_bench";

  NamedFormat format() const { return row_format != NamedFormat::None ? row_format : wire_format; }
  bool is_rank_major() const { return bench::is_rank_major(layout); }
  int64_t rows_per_source() const { return max_rows > 0 ? max_rows : tokens > 0 ? tokens : 1; } // M
  // Returns the number of input sets; a verified run compares at least two.
  int num_input_sets() const { return verify && input_sets < 2 ? 2 : input_sets; }
};

// A Sweep is what a run measures. Its points differ in tokens, layout, routing and num_comm_sms, and in nothing else.
struct Sweep {
  std::vector<Options> points; // at least one

  const Options& common() const { return points.front(); } // for all other fields
};

// RequestedText is what --help or --version asks for.
struct RequestedText {
  std::string text;
};

bool built_with_mpi();
bool built_with_cuda();
bool built_with_moe();

// Throws UsageError with one sentence that has the option and its value.
std::variant<Sweep, RequestedText> parse_options(int argc, const char* const* argv);

// Returns the spelling of the command line.
std::string to_string(const RoutingSpec& routing); // "zipf:1.2"
const char* to_string(epx_dtype dtype);            // "bf16"
const char* to_string(NamedFormat format);         // "fp8-mx"
const char* to_string(epx_scale_layout layout);    // "columns"
const char* to_string(epx_transport transport);
const char* to_string(epx_combine_precision precision);
const char* to_string(epx_pads pads);
const char* to_string(epx_moe_recipe recipe); // "fp8"
const char* to_string(epx_moe_path path);     // "ring"
const char* to_string(GatherForm form);       // "fp8"
const char* to_string(Layout layout);

// Returns the bytes of a row of hidden elements of dtype. row_format.h has those of quantised rows.
inline int64_t row_bytes(const Options& options) {
  return epx::row_bytes(options.dtype, options.hidden);
}

} // namespace epx::bench
