// SPDX-License-Identifier: Apache-2.0
// A Case is a test problem: the options of a group and of a layer, and how the tokens are routed. It is made from a seed or by
// hand, and the same Case yields the same data in every process.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "epx/epx.h"

namespace epx::test {

class Rng;

struct GroupCase {
  int num_ranks = 1;   // P
  int num_experts = 8; // E
  int max_tokens = 16; // per rank
  int hidden_dim = 32; // elements
  int max_top_k = 4;
  int max_alignment = 16;    // rows
  int64_t max_recv_rows = 0; // R; 0: the worst case
  int max_sidecar_bytes = 0;
  epx_dtype max_dtype = EPX_FLOAT32;
  epx_combine_precision precision = EPX_COMBINE_WIRE;
  epx_overflow overflow = EPX_OVERFLOW_ERROR;
  epx_transport transport = EPX_TRANSPORT_HOST;
  int num_comm_sms = 0;   // 0: all; 1 stands for 2 over nodes, where transfers take one
  int ranks_per_node = 0; // 0: as the ranks were launched (epx_test_launch --ranks-per-node), else one node
  int fixed_rail_tokens = 0;
  int64_t timeout_ms = 60'000;
};

epx_group_config make_config(const GroupCase& group);
int64_t recv_capacity(const GroupCase& group); // returns R, resolved as in epx.h
int ranks_per_node(const GroupCase& group);    // resolved; 0: one node
int num_nodes(const GroupCase& group);

// T per rank. ragged: differs by rank; mixed: the most, 1 and 0 in turn, by rank
enum class TokenCount { full, ragged, none_on_one, none, mixed };
enum class RoutingStyle { uniform, distinct, hot, skewed, repeated }; // hot: one expert; repeated: duplicates in each row
enum class RecvRows { exact, more, fewer, any, capacity };            // N against offsets[E_l]; capacity: R

// M of the rank-major calls: as many rows as the largest source needs, max_tokens_per_rank, more than that, fewer than a source
// needs, or none. `absent`: the layer makes no such calls.
enum class RankMajorRows { absent, exact, max_tokens, more, fewer, none };

// How the rows of a dispatch travel; a, b and c are the ways of epx.h.
enum class FormatWay {
  none,      // as they are
  copied,    // the same, of quantised elements without scales
  given,     // a: they come quantised
  at_source, // b
  on_wire    // c
};

struct FormatCase {
  FormatWay way = FormatWay::none;
  epx_scaling scaling = EPX_SCALING_BLOCK128;
  epx_dtype dtype = EPX_FLOAT8_E4M3; // of elements
  epx_dtype scales = EPX_FLOAT32;    // the dtype of a scale; where they are packed, not that of the tensor
  float amax_floor = 1e-4F;
  std::array<epx_scale_layout, 2> layouts = {EPX_SCALES_ROWS, EPX_SCALES_ROWS}; // of even and of odd ranks
  bool has_encode_scale = false;                                                // b and c, NV: some ranks pass one

  bool is_quantised() const { return way != FormatWay::none && way != FormatWay::copied; }
  // Returns the dtypes of tokens and of recv_tokens, where `dtype_of_layer` is that of rows which are not quantised.
  epx_dtype token_dtype(epx_dtype dtype_of_layer) const {
    return way == FormatWay::copied || way == FormatWay::given ? dtype : dtype_of_layer;
  }
  epx_dtype recv_dtype(epx_dtype dtype_of_layer) const {
    return way == FormatWay::at_source ? dtype : token_dtype(dtype_of_layer);
  }
};

struct LayerCase {
  int top_k = 2;
  int alignment = 1;
  TokenCount tokens = TokenCount::full;
  RoutingStyle routing = RoutingStyle::uniform;
  int percent_masked = 0; // routes that are -1
  int percent_bad = 0;    // routes with an index outside -1 .. E-1
  epx_dtype index_dtype = EPX_INT32;
  epx_dtype counts_dtype = EPX_INT32;
  RecvRows rows = RecvRows::exact;
  int hidden = 32; // H of dispatch and dispatch_bwd
  epx_dtype dtype = EPX_FLOAT32;
  int combine_hidden = 32; // H of combine and combine_bwd
  epx_dtype combine_dtype = EPX_FLOAT32;
  int sidecar_bytes = 0;
  bool dispatch_weights = true;
  bool combine_weights = true;
  bool combine_bwd_weights = true;
  bool combine_bwd_grads = true; // also of the weights
  bool dispatch_bwd_grads = true;
  int64_t zone_stride = 0;     // 0: zones follow each other
  bool pads_untouched = false; // in dispatch, on every rank
  FormatCase format;           // of dispatch and prepare_dispatch
  FormatCase rank_major_format;
  FormatCase combine_bwd_format;            // not copied
  epx_dtype expert_dtype = EPX_DTYPE_UNSET; // of expert_out where combine_bwd has a format; EPX_DTYPE_UNSET: any, by rank
  FormatCase combine_rank_major_bwd_format;
  FormatCase sum_format; // of the calls that add rows up: none or on_wire, the latter in precision wire
  RankMajorRows rank_major = RankMajorRows::absent;
  bool rank_major_compact = false; // EPX_ROWS_COMPACT

  void clear_formats() { // of all calls
    format = rank_major_format = combine_bwd_format = combine_rank_major_bwd_format = sum_format = {};
  }
};

enum class Placement { plain, in_place, random }; // where the tensors of a call lie: own memory, or epx_mem_alloc's

struct Case {
  uint64_t seed = 1;
  GroupCase group;
  LayerCase layer;
  int iterations = 2; // each with fresh tokens and routing
  Placement placement = Placement::random;
  int64_t arena_bytes =
      1 << 18; // of epx_mem_alloc memory for tensors, per allocation; tensors that do not fit lie elsewhere
  int num_arenas = 2;
};

// Returns a case that the seed chooses, with the number of ranks (1, 2, 3, 4, 6 or 7), on one node or on several.
Case random_case(uint64_t seed);

// Returns a group of num_ranks ranks with limits that allow different layers, and one layer of it. It serves transports on
// which creating a group takes long, so that a group runs many layers. The group has one node.
GroupCase random_group(uint64_t seed, int num_ranks);
LayerCase random_layer(const GroupCase& group, uint64_t seed);
// Returns 0, or in a quarter of the cases a stride of zones that a group has room for.
int64_t random_zone_stride(const GroupCase& group, int alignment, Rng& rng);

// Returns whether the rows of the format fit those of a group whose max_dtype is wide.
bool fits(const GroupCase& group, const FormatCase& format);

// Returns one line of text.
std::string describe(const Case& test_case);

} // namespace epx::test
