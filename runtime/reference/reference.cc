// SPDX-License-Identifier: Apache-2.0
#include "runtime/reference/reference.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>

#include "base/dtypes.h"
#include "runtime/reference/formats.h"

namespace epx::reference {
namespace {

void require(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

// ---- Elements ----------------------------------------------------------------------------------------------------------

// A 16-bit float: sign, exponent, `mantissa_bits` of mantissa.
struct Half {
  int mantissa_bits;
  int min_exponent; // of the smallest normal number; subnormals share it
  uint32_t infinity;
};
constexpr Half kFloat16{10, -14, 0x7C00};
constexpr Half kBfloat16{7, -126, 0x7F80};
constexpr uint32_t kHalfSign = 0x8000;

const Half& half_of(epx_dtype dtype) {
  return dtype == EPX_FLOAT16 ? kFloat16 : kBfloat16;
}

uint16_t encode(float value, const Half& format) {
  const uint32_t sign = std::signbit(value) ? kHalfSign : 0;
  const uint32_t quiet_bit = 1U << (format.mantissa_bits - 1);
  if (std::isnan(value)) return static_cast<uint16_t>(sign | format.infinity | quiet_bit);
  if (std::isinf(value)) return static_cast<uint16_t>(sign | format.infinity);
  if (value == 0.0F) return static_cast<uint16_t>(sign);

  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const double units_in_last_place = std::ldexp(std::fabs(static_cast<double>(value)), format.mantissa_bits - exponent);
  const auto mantissa = static_cast<uint32_t>(std::nearbyint(units_in_last_place)); // half to even
  // A normal number's leading 1 counts the exponent field up by one, and so does a carry of the rounding; from there
  // to infinity is a carry too.
  const uint32_t exponent_field = static_cast<uint32_t>(exponent - format.min_exponent) << format.mantissa_bits;
  return static_cast<uint16_t>(sign | std::min(exponent_field + mantissa, format.infinity));
}

float decode_float16(uint16_t bits) {
  const float sign = (bits & kHalfSign) != 0 ? -1.0F : 1.0F;
  const int exponent_field = (bits >> 10) & 0x1F;
  const int fraction = bits & 0x3FF;
  if (exponent_field == 0x1F) {
    const bool infinite = fraction == 0;
    return std::copysign(infinite ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN(), sign);
  }
  if (exponent_field == 0) return sign * std::ldexp(static_cast<float>(fraction), -24); // subnormal or zero
  return sign * std::ldexp(static_cast<float>(0x400 + fraction), exponent_field - 25);
}

// A bfloat16 is the upper half of a float32.
float decode_bfloat16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

float decode(uint16_t bits, epx_dtype dtype) {
  return dtype == EPX_FLOAT16 ? decode_float16(bits) : decode_bfloat16(bits);
}

// `value` after one rounding to dtype.
float rounded(float value, epx_dtype dtype) {
  if (dtype == EPX_FLOAT32) return value;
  return decode(encode(value, half_of(dtype)), dtype);
}

// ---- Rows --------------------------------------------------------------------------------------------------------------

int64_t row_bytes(const Matrix& matrix) {
  return epx::row_bytes(matrix.dtype, matrix.cols);
}
int64_t row_bytes(const Sidecar& sidecar) {
  return sidecar.row_bytes;
}

// One row of a Matrix or a Sidecar, const or not.
template <typename Rows>
auto row_of(Rows& rows, int64_t row) {
  return std::span(rows.bytes).subspan(row * row_bytes(rows), row_bytes(rows));
}

void copy_row(std::span<const std::byte> from, std::span<std::byte> to) {
  require(from.size() == to.size(), "rows differ in bytes");
  std::ranges::copy(from, to.begin());
}

void zero_row(std::span<std::byte> row) {
  std::ranges::fill(row, std::byte{0});
}

bool well_formed(const Matrix& matrix) {
  return static_cast<int64_t>(matrix.bytes.size()) == matrix.rows * row_bytes(matrix);
}

// Per rank a [T, H] and an [N, H] matrix, all of one dtype and one H.
void require_matrices(const Plan& plan, std::span<const Matrix> tokens, std::span<const Matrix> slots) {
  require(tokens.size() == plan.ranks.size() && slots.size() == plan.ranks.size(), "not one matrix per rank");
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    for (const Matrix* matrix : {&tokens[r], &slots[r]}) {
      require(well_formed(*matrix), "a matrix has other bytes than its shape");
      require(matrix->dtype == tokens[0].dtype && matrix->cols == tokens[0].cols, "matrices differ in dtype or H");
    }
    require(tokens[r].rows == plan.ranks[r].num_tokens, "a token matrix has other than T rows");
  }
}

// One vector per rank, [N] or [T, K] beside `rows`, or none at all.
template <typename Vector>
void require_weights(std::span<Vector> weights, std::span<const Matrix> rows, int64_t per_row) {
  require(weights.empty() || weights.size() == rows.size(), "not one vector of weights per rank");
  for (size_t r = 0; r < weights.size(); ++r) {
    require(static_cast<int64_t>(weights[r].size()) == rows[r].rows * per_row, "weights of another shape");
  }
}

// An empty span and row_bytes = 0 on every rank both mean that no sidecars are passed.
bool has_sidecars(std::span<const Sidecar> sidecars) {
  return std::ranges::any_of(sidecars, [](const Sidecar& sidecar) { return sidecar.row_bytes > 0; });
}

void require_sidecars(std::span<const Sidecar> sidecars, std::span<const Matrix> rows) {
  require(sidecars.size() == rows.size(), "not one sidecar per rank");
  for (size_t r = 0; r < sidecars.size(); ++r) {
    const bool right_size = static_cast<int64_t>(sidecars[r].bytes.size()) == rows[r].rows * sidecars[r].row_bytes;
    require(right_size && sidecars[r].row_bytes == sidecars[0].row_bytes, "a sidecar of another shape");
  }
}

// ---- The plan ----------------------------------------------------------------------------------------------------------

struct Route {
  int32_t source = -1; // rank
  int32_t token = -1;
  int32_t k = -1;
};

// Contiguous blocks; the first E mod P ranks own one expert more.
void assign_experts(Plan& plan) {
  const int num_ranks = static_cast<int>(plan.ranks.size());
  int next_expert = 0;
  for (int r = 0; r < num_ranks; ++r) {
    plan.ranks[r].first_local_expert = next_expert;
    plan.ranks[r].num_local_experts = plan.problem.num_experts / num_ranks + (r < plan.problem.num_experts % num_ranks);
    next_expert += plan.ranks[r].num_local_experts;
  }
}

// The routes of each expert in (source rank, token, k) order. -1 masks a route; a bad index is counted, and masks it too.
std::vector<std::vector<Route>> collect_routes(Plan& plan, std::span<const Routing> ranks) {
  const int64_t num_experts = plan.problem.num_experts;
  const int64_t top_k = plan.problem.top_k;
  std::vector<std::vector<Route>> routes(num_experts);
  for (size_t source = 0; source < ranks.size(); ++source) {
    RankPlan& mine = plan.ranks[source];
    for (int64_t token = 0; token < mine.num_tokens; ++token) {
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t expert = ranks[source].topk_idx[token * top_k + k];
        if (expert < -1 || expert >= num_experts) ++mine.bad_indices;
        if (expert < 0 || expert >= num_experts) continue;
        ++plan.global_counts[source * num_experts + expert];
        routes[expert].push_back({static_cast<int32_t>(source), static_cast<int32_t>(token), static_cast<int32_t>(k)});
      }
    }
  }
  return routes;
}

int64_t index_of(const Plan& plan, const Route& route) {
  return int64_t{route.token} * plan.problem.top_k + route.k;
}

// Lays the zones of one rank's experts one behind the other, each rounded up to the alignment, or a stride apart. Drops what
// does not fit a stride, or lies at or above R_a, the capacity rounded down to the alignment.
void lay_zones(Plan& plan, int destination, std::span<const std::vector<Route>> routes_of_expert) {
  RankPlan& mine = plan.ranks[destination];
  const int64_t alignment = std::max<int64_t>(plan.problem.alignment, 1);
  const int64_t capacity = plan.problem.max_recv_tokens / alignment * alignment;
  int64_t zone_start = 0;
  int64_t total_demand = 0;
  int64_t total_kept = 0;
  for (int e = 0; e < mine.num_local_experts; ++e) {
    const std::vector<Route>& routes = routes_of_expert[mine.first_local_expert + e];
    const auto demand = static_cast<int64_t>(routes.size());
    const int64_t stride = plan.problem.zone_stride;
    const int64_t kept = std::clamp<int64_t>(stride > 0 ? stride : capacity - zone_start, 0, demand);
    mine.counts.push_back(kept);
    mine.offsets.push_back(std::min(zone_start, capacity));
    for (int64_t i = 0; i < demand; ++i) {
      RankPlan& source = plan.ranks[routes[i].source];
      source.expert_rank[index_of(plan, routes[i])] = destination;
      if (i >= kept) continue;
      source.slot[index_of(plan, routes[i])] = static_cast<int32_t>(zone_start + i);
      std::ranges::copy(std::array{routes[i].source, routes[i].token, routes[i].k},
                        mine.slot_origin.begin() + (zone_start + i) * 3);
    }
    zone_start += stride > 0 ? stride : (demand + alignment - 1) / alignment * alignment;
    total_demand += demand;
    total_kept += kept;
  }
  mine.offsets.push_back(std::min(zone_start, capacity));
  mine.info[0] = total_demand;
  mine.info[1] = total_kept;
  mine.info[2] = total_demand - total_kept;
  mine.info[4] = zone_start; // rows needed
}

int64_t dropped_of_mine(const RankPlan& mine) {
  int64_t dropped = 0;
  for (size_t i = 0; i < mine.slot.size(); ++i)
    dropped += mine.expert_rank[i] >= 0 && mine.slot[i] < 0;
  return dropped;
}

// The route that lies in a slot; none in a pad.
std::optional<Route> route_in(const RankPlan& plan, int64_t slot) {
  const int32_t* origin = &plan.slot_origin[slot * 3];
  if (origin[0] < 0) return std::nullopt;
  return Route{origin[0], origin[1], origin[2]};
}

// Rows that a scatter writes, pads included: those below offsets[E_l], as far as the tensor goes.
int64_t written_rows(const RankPlan& plan, int64_t num_rows) {
  return std::min(plan.offsets.back(), num_rows);
}

// ---- Sums --------------------------------------------------------------------------------------------------------------

// Whether a slot lies between the rows of its zone and the next multiple of the alignment.
bool is_pad(const Plan& plan, size_t rank, int64_t slot) {
  const RankPlan& mine = plan.ranks[rank];
  const int64_t alignment = std::max<int64_t>(plan.problem.alignment, 1);
  for (size_t e = 0; e < mine.counts.size(); ++e) {
    const int64_t end_of_rows = mine.offsets[e] + mine.counts[e];
    if (slot >= end_of_rows && slot < mine.offsets[e] + (mine.counts[e] + alignment - 1) / alignment * alignment)
      return true;
  }
  return false;
}

// One row on its way home.
struct Term {
  int rank;
  int64_t slot;
};

// The routes of a token that were kept and whose slot lies within the N rows of their expert's rank, in k order.
std::vector<Term> kept_routes(const Plan& plan, const RankPlan& home, int64_t token, std::span<const Matrix> rows) {
  std::vector<Term> terms;
  for (int k = 0; k < plan.problem.top_k; ++k) {
    const int64_t i = token * plan.problem.top_k + k;
    const int32_t slot = home.slot[i];
    if (slot >= 0 && slot < rows[home.expert_rank[i]].rows) terms.push_back({home.expert_rank[i], slot});
  }
  return terms;
}

// Rows on the experts' ranks, and their weights unless all are 1.
struct Sources {
  std::span<const Matrix> rows;
  std::span<const std::vector<float>> weights;
};

float step(float acc, const Sources& sources, const Term& term, int64_t h) {
  const float x = load(sources.rows[term.rank], term.slot, h);
  if (sources.weights.empty()) return acc + x;
  return std::fma(sources.weights[term.rank][term.slot], x, acc);
}

// Exact: every route in k order, in fp32. The one rounding is the caller's.
float exact_sum(const Sources& sources, std::span<const Term> terms, int64_t h) {
  float acc = 0.0F;
  for (const Term& term : terms)
    acc = step(acc, sources, term, h);
  return acc;
}

// Wire, of terms in (rank, k) order: each rank sums its own routes in k order in fp32 and rounds once to the dtype; these
// partials are summed in rank order in fp32. A rank without a kept route of the token takes no step. The last rounding is
// the caller's.
float wire_sum(const Sources& sources, std::span<const Term> terms, int64_t h) {
  float acc = 0.0F;
  for (size_t i = 0; i < terms.size();) {
    const int rank = terms[i].rank;
    float partial = 0.0F;
    for (; i < terms.size() && terms[i].rank == rank; ++i)
      partial = step(partial, sources, terms[i], h);
    acc += rounded(partial, sources.rows[rank].dtype);
  }
  return acc;
}

// Node, of terms in (rank, k) order: the partials of a node's ranks are summed as on the wire and rounded once to the dtype;
// these are summed in node order in fp32. A node without a kept route of the token takes no step. The last rounding is the
// caller's.
float node_sum(const Sources& sources, std::span<const Term> terms, int ranks_per_node, int64_t h) {
  float acc = 0.0F;
  for (size_t first = 0; first < terms.size();) {
    const int node = terms[first].rank / ranks_per_node;
    size_t end = first;
    while (end < terms.size() && terms[end].rank / ranks_per_node == node)
      ++end;
    acc += rounded(wire_sum(sources, terms.subspan(first, end - first), h), sources.rows[terms[first].rank].dtype);
    first = end;
  }
  return acc;
}

// The sum of a token's rows, but for the last rounding. `terms` are in (rank, k) order, for exact in k order.
float token_sum(const Problem& problem, size_t num_ranks, const Sources& sources, std::span<const Term> terms, int64_t h) {
  if (problem.precision == EPX_COMBINE_EXACT) return exact_sum(sources, terms, h);
  const bool has_nodes = problem.ranks_per_node > 0 && static_cast<size_t>(problem.ranks_per_node) < num_ranks;
  if (problem.precision == EPX_COMBINE_NODE && has_nodes) return node_sum(sources, terms, problem.ranks_per_node, h);
  return wire_sum(sources, terms, h);
}

// A format: each rank's partial sum of a token travels quantised, from fp32; what arrives is summed in rank order. `terms` are
// in (rank, k) order.
void store_quantised_sum(const Format& format, const Sources& sources, std::span<const Term> terms, Matrix& out,
                         int64_t token) {
  std::vector<int> ranks;
  for (const Term& term : terms)
    if (ranks.empty() || ranks.back() != term.rank) ranks.push_back(term.rank);
  Matrix partials{EPX_FLOAT32, static_cast<int64_t>(ranks.size()), out.cols, {}};
  partials.bytes.resize(ranks.size() * static_cast<size_t>(epx::row_bytes(EPX_FLOAT32, out.cols)));
  for (size_t i = 0; i < ranks.size(); ++i)
    for (int64_t h = 0; h < out.cols; ++h) {
      float partial = 0.0F;
      for (const Term& term : terms)
        if (term.rank == ranks[i]) partial = step(partial, sources, term, h);
      store(partials, static_cast<int64_t>(i), h, partial);
    }
  const Matrix arrived = dequantise(format, quantise(format, partials), EPX_FLOAT32);
  for (int64_t h = 0; h < out.cols; ++h) {
    float acc = 0.0F;
    for (int64_t i = 0; i < arrived.rows; ++i)
      acc += load(arrived, i, h);
    store(out, token, h, acc);
  }
}

// Rows from slots to tokens. A token without a kept route gets zero: the sum of nothing. `format` NULL: partial sums travel in
// the dtype.
void gather(const Plan& plan, const Sources& sources, std::span<Matrix> out, const Format* format) {
  require_matrices(plan, out, sources.rows);
  require_weights(sources.weights, sources.rows, 1);
  for (size_t home = 0; home < plan.ranks.size(); ++home) {
    for (int64_t token = 0; token < plan.ranks[home].num_tokens; ++token) {
      std::vector<Term> terms = kept_routes(plan, plan.ranks[home], token, sources.rows);
      if (plan.problem.precision != EPX_COMBINE_EXACT) std::ranges::stable_sort(terms, {}, &Term::rank);
      if (format != nullptr) {
        store_quantised_sum(*format, sources, terms, out[home], token);
        continue;
      }
      for (int64_t h = 0; h < out[home].cols; ++h) {
        store(out[home], token, h, token_sum(plan.problem, plan.ranks.size(), sources, terms, h));
      }
    }
  }
}

// <g, x> by the contract's tree: 256 accumulators, filled in turn, then adjacent pairs.
float dot(const Matrix& g, int64_t g_row, const Matrix& x, int64_t x_row) {
  std::array<float, 256> acc{};
  for (int64_t h = 0; h < g.cols; ++h) {
    float& mine = acc[h % 256];
    mine = std::fma(load(g, g_row, h), load(x, x_row, h), mine);
  }
  for (size_t left = acc.size() / 2; left >= 1; left /= 2) {
    for (size_t i = 0; i < left; ++i)
      acc[i] = acc[2 * i] + acc[2 * i + 1];
  }
  return acc[0];
}

} // namespace

// ---- Operations --------------------------------------------------------------------------------------------------------

Plan prepare(const Problem& problem, std::span<const Routing> ranks) {
  require(!ranks.empty() && problem.num_experts >= 1 && problem.top_k >= 1, "P, E and K are at least 1");
  require(problem.alignment >= 0 && problem.max_recv_tokens >= 0, "alignment and R are not negative");
  Plan plan{problem, std::vector<RankPlan>(ranks.size()), {}};
  plan.global_counts.resize(ranks.size() * problem.num_experts);
  for (size_t r = 0; r < ranks.size(); ++r) {
    const int64_t num_routes = ranks[r].num_tokens * problem.top_k;
    require(static_cast<int64_t>(ranks[r].topk_idx.size()) == num_routes, "topk_idx is not [T, K]");
    plan.ranks[r].num_tokens = ranks[r].num_tokens;
    plan.ranks[r].slot.assign(num_routes, -1);
    plan.ranks[r].expert_rank.assign(num_routes, -1);
    plan.ranks[r].slot_origin.assign(problem.max_recv_tokens * 3, -1);
  }
  assign_experts(plan);
  const std::vector<std::vector<Route>> routes_of_expert = collect_routes(plan, ranks);
  for (size_t r = 0; r < ranks.size(); ++r)
    lay_zones(plan, static_cast<int>(r), routes_of_expert);
  for (RankPlan& mine : plan.ranks)
    mine.info[3] = dropped_of_mine(mine);
  return plan;
}

void dispatch(const Plan& plan, const DispatchTensors& tensors) {
  const bool with_weights = !tensors.recv_weights.empty();
  const bool with_sidecars = has_sidecars(tensors.sidecars);
  const Arrivals arrivals(tensors.tokens, tensors.formats);
  require_matrices(plan, arrivals.rows(), tensors.recv_tokens);
  require_weights(tensors.topk_weights, tensors.tokens, plan.problem.top_k);
  require_weights(tensors.recv_weights, tensors.recv_tokens, 1);
  require(tensors.topk_weights.size() == tensors.recv_weights.size(), "weights are given on one side only");
  require(with_sidecars == has_sidecars(tensors.recv_sidecars), "sidecars are given on one side only");
  if (with_sidecars) {
    require_sidecars(tensors.sidecars, tensors.tokens);
    require_sidecars(tensors.recv_sidecars, tensors.recv_tokens);
  }
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    Matrix& recv = tensors.recv_tokens[r];
    for (int64_t slot = 0; slot < written_rows(plan.ranks[r], recv.rows); ++slot) {
      if (const std::optional<Route> route = route_in(plan.ranks[r], slot)) {
        copy_row(row_of(arrivals.rows()[route->source], route->token), row_of(recv, slot));
        arrivals.put_scales(route->source, route->token, r, slot);
        if (with_sidecars) {
          copy_row(row_of(tensors.sidecars[route->source], route->token), row_of(tensors.recv_sidecars[r], slot));
        }
        if (with_weights) tensors.recv_weights[r][slot] = tensors.topk_weights[route->source][index_of(plan, *route)];
      } else if (plan.ranks[r].slot_origin[slot * 3] != -1 || (!tensors.pads_untouched && is_pad(plan, r, slot))) {
        zero_row(row_of(recv, slot));
        arrivals.zero_scales(r, slot);
        if (with_sidecars) zero_row(row_of(tensors.recv_sidecars[r], slot));
        if (with_weights) tensors.recv_weights[r][slot] = 0.0F;
      }
    }
  }
}

void combine(const Plan& plan, const CombineTensors& tensors) {
  gather(plan, {tensors.expert_out, tensors.recv_weights}, tensors.out, tensors.format);
}

void combine_bwd(const Plan& plan, const CombineBwdTensors& tensors) {
  const bool with_weights = !tensors.recv_weights.empty();
  const bool wants_weight_grads = !tensors.grad_recv_weights.empty();
  const Arrivals arrivals(tensors.grad_out, tensors.formats);
  const bool is_plain = tensors.formats == nullptr;
  const bool arrives_quantised = !is_plain && !tensors.formats->recv_scales.empty();
  require_matrices(plan, arrivals.rows(), tensors.grad_expert_out);
  require_weights(tensors.recv_weights, tensors.grad_expert_out, 1);
  require_weights(tensors.grad_recv_weights, tensors.grad_expert_out, 1);
  if (wants_weight_grads) {
    if (is_plain) require_matrices(plan, tensors.grad_out, tensors.expert_out);
    require_weights(tensors.grad_recv_weights, tensors.expert_out, 1); // the same N
  }
  for (size_t r = 0; r < plan.ranks.size(); ++r) {
    Matrix& grad = tensors.grad_expert_out[r];
    for (int64_t slot = 0; slot < written_rows(plan.ranks[r], grad.rows); ++slot) {
      const std::optional<Route> route = route_in(plan.ranks[r], slot);
      if (!route && plan.ranks[r].slot_origin[slot * 3] == -1 && !is_pad(plan, r, slot)) continue;
      if (!route) {
        zero_row(row_of(grad, slot));
        arrivals.zero_scales(r, slot);
        if (wants_weight_grads) tensors.grad_recv_weights[r][slot] = 0.0F;
        continue;
      }
      const Matrix& grad_out = is_plain ? tensors.grad_out[route->source] : arrivals.values(route->source);
      const std::optional<float> weight = with_weights ? std::optional(tensors.recv_weights[r][slot]) : std::nullopt;
      if (weight && !arrives_quantised) {
        for (int64_t h = 0; h < grad.cols; ++h)
          store(grad, slot, h, *weight * load(grad_out, route->token, h));
      } else {
        copy_row(row_of(arrivals.rows()[route->source], route->token), row_of(grad, slot));
        arrivals.put_scales(route->source, route->token, r, slot, weight);
      }
      if (wants_weight_grads) {
        tensors.grad_recv_weights[r][slot] = dot(grad_out, route->token, tensors.expert_out[r], slot);
      }
    }
  }
}

void dispatch_bwd(const Plan& plan, const DispatchBwdTensors& tensors) {
  require_matrices(plan, tensors.grad_tokens, tensors.grad_recv);
  require(tensors.grad_recv_weights.size() == tensors.grad_topk_weights.size(), "weight gradients on one side only");
  require_weights(tensors.grad_recv_weights, tensors.grad_recv, 1);
  require_weights(tensors.grad_topk_weights, tensors.grad_tokens, plan.problem.top_k);
  gather(plan, {tensors.grad_recv, {}}, tensors.grad_tokens, tensors.format);
  for (size_t home = 0; home < tensors.grad_topk_weights.size(); ++home) {
    const RankPlan& mine = plan.ranks[home];
    for (size_t i = 0; i < mine.slot.size(); ++i) {
      const bool kept = mine.slot[i] >= 0 && mine.slot[i] < tensors.grad_recv[mine.expert_rank[i]].rows;
      tensors.grad_topk_weights[home][i] = kept ? tensors.grad_recv_weights[mine.expert_rank[i]][mine.slot[i]] : 0.0F;
    }
  }
}

// ---- Comparison and elements -------------------------------------------------------------------------------------------

int64_t count_wrong(const Matrix& expected, const Matrix& actual, bool nan_equals_nan) {
  const bool same_shape = expected.dtype == actual.dtype && expected.rows == actual.rows && expected.cols == actual.cols &&
                          well_formed(expected) && well_formed(actual);
  if (!same_shape) return std::max<int64_t>({1, expected.rows * expected.cols, actual.rows * actual.cols});
  const int64_t size = element_size(expected.dtype);
  int64_t wrong = 0;
  for (int64_t row = 0; row < expected.rows; ++row) {
    for (int64_t col = 0; col < expected.cols; ++col) {
      const int64_t at = (row * expected.cols + col) * size;
      if (std::memcmp(&expected.bytes[at], &actual.bytes[at], size) == 0) continue;
      const bool both_nan = std::isnan(load(expected, row, col)) && std::isnan(load(actual, row, col));
      wrong += !(nan_equals_nan && both_nan);
    }
  }
  return wrong;
}

int64_t count_wrong(std::span<const float> expected, std::span<const float> actual, bool nan_equals_nan) {
  if (expected.size() != actual.size()) return static_cast<int64_t>(std::max(expected.size(), actual.size()));
  int64_t wrong = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool same_bits = std::bit_cast<uint32_t>(expected[i]) == std::bit_cast<uint32_t>(actual[i]);
    const bool both_nan = std::isnan(expected[i]) && std::isnan(actual[i]);
    wrong += !(same_bits || (nan_equals_nan && both_nan));
  }
  return wrong;
}

float load(const Matrix& matrix, int64_t row, int64_t col) {
  const std::byte* element = &matrix.bytes[(row * matrix.cols + col) * element_size(matrix.dtype)];
  if (matrix.dtype == EPX_FLOAT32) {
    float value = 0.0F;
    std::memcpy(&value, element, sizeof(value));
    return value;
  }
  uint16_t bits = 0;
  std::memcpy(&bits, element, sizeof(bits));
  return decode(bits, matrix.dtype);
}

void store(Matrix& matrix, int64_t row, int64_t col, float value) {
  std::byte* element = &matrix.bytes[(row * matrix.cols + col) * element_size(matrix.dtype)];
  if (matrix.dtype == EPX_FLOAT32) {
    std::memcpy(element, &value, sizeof(value));
    return;
  }
  const uint16_t bits = encode(value, half_of(matrix.dtype));
  std::memcpy(element, &bits, sizeof(bits));
}

int64_t element_size(epx_dtype dtype) {
  switch (dtype) {
  case EPX_FLOAT32:
    return 4;
  case EPX_FLOAT16:
  case EPX_BFLOAT16:
    return 2;
  default:
    throw std::invalid_argument("not a token dtype");
  }
}

} // namespace epx::reference
