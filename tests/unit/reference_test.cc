// SPDX-License-Identifier: Apache-2.0
// The oracle is compared with answers worked out by hand.
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "runtime/reference/reference.h"

using namespace epx::reference;

namespace {

using Ints = std::vector<int64_t>;
using Slots = std::vector<int32_t>;
using Bits = std::vector<uint32_t>;
using Floats = std::vector<float>;
using Info = std::array<int64_t, 5>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float k2p24 = 0x1p24F; // above it a float holds even integers only: 2^24 + 1 rounds to 2^24

float float_of(uint32_t bits) {
  return std::bit_cast<float>(bits);
}

// Returns a matrix of raw elements; 16-bit ones take the low half of each entry.
Matrix raw(epx_dtype dtype, int64_t rows, int64_t cols, const Bits& elements) {
  const auto size = static_cast<size_t>(element_size(dtype));
  Matrix matrix{dtype, rows, cols, std::vector<std::byte>(elements.size() * size)};
  for (size_t i = 0; i < elements.size(); ++i)
    std::memcpy(&matrix.bytes[i * size], &elements[i], size); // little endian
  return matrix;
}

Bits bits_of(const Matrix& matrix) {
  const auto size = static_cast<size_t>(element_size(matrix.dtype));
  Bits bits(matrix.bytes.size() / size);
  for (size_t i = 0; i < bits.size(); ++i)
    std::memcpy(&bits[i], &matrix.bytes[i * size], size);
  return bits;
}

Bits bits_of(const Floats& values) {
  Bits bits;
  for (float value : values)
    bits.push_back(std::bit_cast<uint32_t>(value));
  return bits;
}

// Returns one column of values that the dtype holds exactly.
Matrix column(epx_dtype dtype, const Floats& values) {
  Matrix matrix = raw(dtype, static_cast<int64_t>(values.size()), 1, Bits(values.size()));
  for (size_t i = 0; i < values.size(); ++i)
    store(matrix, static_cast<int64_t>(i), 0, values[i]);
  return matrix;
}

// Returns a single row of float32.
Matrix row32(const Floats& values) {
  return raw(EPX_FLOAT32, 1, static_cast<int64_t>(values.size()), bits_of(values));
}

uint32_t encoded(epx_dtype dtype, float value) {
  Matrix one = raw(dtype, 1, 1, {0});
  store(one, 0, 0, value);
  return bits_of(one)[0];
}

float decoded(epx_dtype dtype, uint32_t bits) {
  return load(raw(dtype, 1, 1, {bits}), 0, 0);
}

bool is_half_nan(epx_dtype dtype, uint32_t bits) {
  return (bits & 0x7FFF) > (dtype == EPX_FLOAT16 ? 0x7C00U : 0x7F80U);
}

Routing routing(int64_t num_tokens, const Ints& topk_idx) {
  return {num_tokens, topk_idx};
}

void check_rank(const RankPlan& plan, const Ints& counts, const Ints& offsets, const Info& info) {
  CHECK(plan.counts == counts);
  CHECK(plan.offsets == offsets);
  CHECK(plan.info == info);
}

Slots origins(const RankPlan& plan, int64_t first, int64_t count) {
  const auto begin = plan.slot_origin.begin() + first * 3;
  return {begin, begin + count * 3};
}

// Most tests below use this example: two ranks, four experts (0 and 1 on rank 0, 2 and 3 on rank 1), top-2.
//   expert 0 gets (source, token, k) = (0,0,1) (0,1,0) (0,2,0) (1,0,0) (1,1,1)
//   expert 1 gets nothing
//   expert 2 gets (0,0,0) (0,2,1) (1,0,1)
//   expert 3 gets (0,1,1) (1,1,0)
std::vector<Routing> example() {
  return {routing(3, {2, 0, 0, 3, 0, 2}), routing(2, {0, 2, 3, 0})};
}

Plan example_plan(int alignment, int64_t max_recv_tokens, epx_combine_precision precision = EPX_COMBINE_WIRE) {
  return prepare({4, 2, alignment, max_recv_tokens, precision}, example());
}

// Returns the plan of one token on rank `home` with one route to each expert listed; E is ranks * experts_per_rank.
Plan one_token(int num_ranks, int experts_per_rank, int home, const Ints& experts, epx_combine_precision precision,
               int ranks_per_node = 0) {
  std::vector<Routing> ranks(num_ranks);
  ranks[home] = routing(1, experts);
  return prepare({num_ranks * experts_per_rank, static_cast<int>(experts.size()), 1, 64, precision, ranks_per_node}, ranks);
}

// Combines the only token of `plan`; route_values and weights are in k order.
Bits combine_one(const Plan& plan, int home, epx_dtype dtype, const Floats& route_values, const Floats& weights = {}) {
  std::vector<Matrix> expert_out;
  std::vector<Floats> recv_weights;
  std::vector<Matrix> out;
  for (const RankPlan& rank : plan.ranks) {
    expert_out.push_back(column(dtype, Floats(rank.offsets.back(), kNan)));
    recv_weights.emplace_back(rank.offsets.back(), kNan);
    out.push_back(column(dtype, Floats(rank.num_tokens, kNan)));
  }
  const RankPlan& mine = plan.ranks[home];
  for (size_t k = 0; k < route_values.size(); ++k) {
    if (mine.slot[k] < 0) continue;
    store(expert_out[mine.expert_rank[k]], mine.slot[k], 0, route_values[k]);
    if (!weights.empty()) recv_weights[mine.expert_rank[k]][mine.slot[k]] = weights[k];
  }
  if (weights.empty()) recv_weights.clear();
  combine(plan, {expert_out, recv_weights, out});
  return bits_of(out[home]);
}

Bits combine_one_rank(epx_combine_precision precision, epx_dtype dtype, const Floats& values, const Floats& weights = {}) {
  return combine_one(one_token(1, 1, 0, Ints(values.size(), 0), precision), 0, dtype, values, weights);
}

// The gradient that combine_bwd gives the only route of a rank's only token.
Matrix row_gradient(const Matrix& grad_out, const std::vector<Floats>& weights = {}) {
  const std::vector<Matrix> grad{grad_out};
  std::vector<Matrix> grad_expert{raw(grad_out.dtype, 1, grad_out.cols, Bits(grad_out.cols, 7))};
  combine_bwd(one_token(1, 1, 0, {0}, EPX_COMBINE_WIRE), {grad, {}, weights, grad_expert, {}});
  return grad_expert[0];
}

float weight_gradient(const Matrix& grad_out, const Matrix& expert_out) {
  const Plan plan = one_token(1, 1, 0, {0}, EPX_COMBINE_WIRE);
  const std::vector<Matrix> grad{grad_out}, expert{expert_out};
  std::vector<Matrix> grad_expert{grad_out};
  std::vector<Floats> grad_weights{{kNan}};
  combine_bwd(plan, {grad, expert, {}, grad_expert, grad_weights});
  return grad_weights[0][0];
}
float weight_gradient(const Floats& grad_out, const Floats& expert_out) {
  return weight_gradient(row32(grad_out), row32(expert_out));
}

struct Conversion {
  float value;
  uint32_t bits;
};

void check_encoded(epx_dtype dtype, std::initializer_list<Conversion> table) {
  for (const Conversion& row : table) {
    CAPTURE(row.value);
    CHECK(encoded(dtype, row.value) == row.bits);
  }
}

void check_decoded(epx_dtype dtype, std::initializer_list<Conversion> table) {
  for (const Conversion& row : table) {
    CAPTURE(row.bits);
    CHECK(std::bit_cast<uint32_t>(decoded(dtype, row.bits)) == std::bit_cast<uint32_t>(row.value));
  }
}

} // namespace

TEST_SUITE("reference: elements") {
  TEST_CASE("sizes") {
    CHECK(element_size(EPX_FLOAT32) == 4);
    CHECK(element_size(EPX_FLOAT16) == 2);
    CHECK(element_size(EPX_BFLOAT16) == 2);
    CHECK_THROWS_AS(element_size(EPX_INT32), std::invalid_argument);
  }

  TEST_CASE("float32 keeps every bit") {
    for (uint32_t bits : {0x80000000U, 0x00000001U, 0x7F800000U, 0x3F800001U}) {
      CHECK(encoded(EPX_FLOAT32, float_of(bits)) == bits);
      CHECK(std::bit_cast<uint32_t>(decoded(EPX_FLOAT32, bits)) == bits);
    }
  }

  TEST_CASE("to float16") {
    check_encoded(EPX_FLOAT16, {
                                   {0.0F, 0x0000},
                                   {-0.0F, 0x8000},
                                   {1.0F, 0x3C00},
                                   {-2.5F, 0xC100},
                                   {65504.0F, 0x7BFF},                   // largest
                                   {0x1.ffdffep15F, 0x7BFF},             // below the middle to 65536
                                   {65520.0F, 0x7C00},                   // the middle goes to infinity
                                   {-65520.0F, 0xFC00},                  // to minus infinity
                                   {1e30F, 0x7C00},                      // far above
                                   {-kInf, 0xFC00},                      // infinity stays
                                   {1.0F + 0x1p-11F, 0x3C00},            // tie to even, down
                                   {1.0F + 0x3p-11F, 0x3C02},            // tie to even, up
                                   {1.0F + 0x1p-11F + 0x1p-23F, 0x3C01}, // above the tie
                                   {1.0F + 0x3p-11F - 0x1p-23F, 0x3C01}, // below the tie
                                   {1.0F - 0x1p-12F, 0x3C00},            // tie, carries into the exponent
                                   {0x1p-14F, 0x0400},                   // smallest normal
                                   {1023 * 0x1p-24F, 0x03FF},            // largest subnormal
                                   {0x1p-14F - 0x1p-25F, 0x0400},        // tie, carries to normal
                                   {0x1p-24F, 0x0001},                   // smallest subnormal
                                   {0x1p-25F, 0x0000},                   // tie to even, to zero
                                   {-0x1p-25F, 0x8000},                  // the sign stays
                                   {0x1.000002p-25F, 0x0001},            // above the tie
                                   {0x3p-25F, 0x0002},                   // tie to even, up
                                   {0x1p-149F, 0x0000},                  // far below
                               });
  }

  TEST_CASE("to bfloat16") {
    check_encoded(EPX_BFLOAT16, {
                                    {0.0F, 0x0000},
                                    {-0.0F, 0x8000},
                                    {1.0F, 0x3F80},
                                    {-2.5F, 0xC020},
                                    {1.0F + 0x1p-8F, 0x3F80},            // tie to even, down
                                    {1.0F + 0x3p-8F, 0x3F82},            // tie to even, up
                                    {1.0F + 0x1p-8F + 0x1p-23F, 0x3F81}, // above the tie
                                    {1.0F + 0x3p-8F - 0x1p-23F, 0x3F81}, // below the tie
                                    {float_of(0x3FFF8000), 0x4000},      // tie, carries into the exponent
                                    {float_of(0x7F7F0000), 0x7F7F},      // largest
                                    {float_of(0x7F7F7FFF), 0x7F7F},      // below the middle to infinity
                                    {float_of(0x7F7F8000), 0x7F80},      // the middle goes to infinity
                                    {float_of(0xFF7FFFFF), 0xFF80},      // largest float32, negated
                                    {kInf, 0x7F80},                      // infinity stays
                                    {float_of(0x00800000), 0x0080},      // smallest normal
                                    {float_of(0x00010000), 0x0001},      // smallest subnormal
                                    {float_of(0x00008000), 0x0000},      // tie to even, to zero
                                    {float_of(0x80008000), 0x8000},      // the sign stays
                                    {float_of(0x00008001), 0x0001},      // above the tie
                                    {float_of(0x00018000), 0x0002},      // tie to even, up
                                    {float_of(0x007F8000), 0x0080},      // tie, carries to normal
                                    {float_of(0x80000001), 0x8000},      // far below
                                });
  }

  TEST_CASE("from float16") {
    check_decoded(EPX_FLOAT16, {
                                   {0.0F, 0x0000},
                                   {-0.0F, 0x8000},
                                   {0x1p-24F, 0x0001},
                                   {1023 * 0x1p-24F, 0x03FF},
                                   {0x1p-14F, 0x0400},
                                   {0x1.554p-2F, 0x3555},
                                   {1.0F, 0x3C00},
                                   {65504.0F, 0x7BFF},
                                   {kInf, 0x7C00},
                                   {-kInf, 0xFC00},
                               });
  }

  TEST_CASE("from bfloat16") {
    check_decoded(EPX_BFLOAT16, {
                                    {0.0F, 0x0000},
                                    {-0.0F, 0x8000},
                                    {0x1p-133F, 0x0001},
                                    {0x1p-126F, 0x0080},
                                    {1.0F, 0x3F80},
                                    {-3.140625F, 0xC049},
                                    {float_of(0x7F7F0000), 0x7F7F},
                                    {kInf, 0x7F80},
                                    {-kInf, 0xFF80},
                                });
  }

  TEST_CASE("NaN stays NaN, whatever its payload") {
    for (epx_dtype dtype : {EPX_FLOAT16, EPX_BFLOAT16}) {
      for (uint32_t bits : {0x7FC00000U, 0x7F800001U, 0xFF800001U, 0x7FFFFFFFU}) {
        CAPTURE(bits);
        CHECK(is_half_nan(dtype, encoded(dtype, float_of(bits))));
      }
      CHECK(std::isnan(decoded(dtype, 0x7FC1)));
      CHECK(std::isnan(decoded(dtype, 0xFFFF)));
    }
    CHECK(std::isnan(decoded(EPX_FLOAT16, 0x7C01)));
    CHECK(std::isnan(decoded(EPX_BFLOAT16, 0x7F81)));
  }

  TEST_CASE("every 16-bit number survives the way to float and back") {
    for (epx_dtype dtype : {EPX_FLOAT16, EPX_BFLOAT16}) {
      int64_t wrong = 0;
      for (uint32_t bits = 0; bits < 0x10000; ++bits) {
        const uint32_t back = encoded(dtype, decoded(dtype, bits));
        wrong += is_half_nan(dtype, bits) ? !is_half_nan(dtype, back) : back != bits;
      }
      CHECK(wrong == 0);
    }
  }
}

TEST_SUITE("reference: prepare") {
  TEST_CASE("the first E mod P ranks own one expert more") {
    const Plan plan = prepare({7, 1, 1, 4, EPX_COMBINE_WIRE}, std::vector<Routing>(3));
    const int first[] = {0, 3, 5}, count[] = {3, 2, 2};
    for (int r = 0; r < 3; ++r) {
      CHECK(plan.ranks[r].first_local_expert == first[r]);
      CHECK(plan.ranks[r].num_local_experts == count[r]);
    }
  }

  TEST_CASE("routes find the owner where experts are uneven") {
    // Experts 0..2 on rank 0, 3..4 on rank 1, 5..6 on rank 2; one route to each, from rank 1.
    const std::vector<Routing> ranks{routing(0, {}), routing(1, {6, 5, 4, 3, 2, 1, 0}), routing(0, {})};
    const Plan plan = prepare({7, 7, 1, 4, EPX_COMBINE_WIRE}, ranks);
    CHECK(plan.ranks[1].expert_rank == Slots{2, 2, 1, 1, 0, 0, 0});
    CHECK(plan.ranks[1].slot == Slots{1, 0, 1, 0, 2, 1, 0});
    CHECK(plan.ranks[0].counts == Ints{1, 1, 1});
    CHECK(plan.ranks[2].offsets == Ints{0, 1, 2});
    CHECK(origins(plan.ranks[2], 0, 3) == Slots{1, 0, 1, 1, 0, 0, -1, -1, -1});
  }

  TEST_CASE("with fewer experts than ranks the last ranks own none") {
    const std::vector<Routing> ranks{routing(0, {}), routing(0, {}), routing(1, {1}), routing(2, {0, 1})};
    const Plan plan = prepare({2, 1, 1, 4, EPX_COMBINE_WIRE}, ranks);
    for (int r : {0, 1}) {
      CHECK(plan.ranks[r].first_local_expert == r);
      CHECK(plan.ranks[r].num_local_experts == 1);
    }
    for (int r : {2, 3}) {
      CHECK(plan.ranks[r].num_local_experts == 0);
      check_rank(plan.ranks[r], {}, {0}, {0, 0, 0, 0, 0});
    }
    CHECK(plan.ranks[3].slot == Slots{0, 1});
    CHECK(plan.ranks[3].expert_rank == Slots{0, 1});
    CHECK(plan.ranks[1].counts == Ints{2});
  }

  TEST_CASE("slots are ordered by (source rank, token, k) inside a zone") {
    const Plan plan = example_plan(1, 16);
    CHECK(plan.ranks[0].slot == Slots{0, 0, 1, 3, 2, 1});
    CHECK(plan.ranks[0].expert_rank == Slots{1, 0, 0, 1, 0, 1});
    CHECK(plan.ranks[1].slot == Slots{3, 2, 4, 4});
    CHECK(plan.ranks[1].expert_rank == Slots{0, 1, 1, 0});
    check_rank(plan.ranks[0], {5, 0}, {0, 5, 5}, {5, 5, 0, 0, 5});
    check_rank(plan.ranks[1], {3, 2}, {0, 3, 5}, {5, 5, 0, 0, 5});
    CHECK(plan.global_counts == Ints{3, 0, 2, 1, 2, 0, 1, 1});
    CHECK(plan.ranks[0].slot_origin.size() == 16 * 3);
    CHECK(origins(plan.ranks[0], 0, 5) == Slots{0, 0, 1, 0, 1, 0, 0, 2, 0, 1, 0, 0, 1, 1, 1});
    CHECK(origins(plan.ranks[0], 5, 11) == Slots(33, -1));
    CHECK(origins(plan.ranks[1], 0, 5) == Slots{0, 0, 0, 0, 2, 1, 1, 0, 1, 0, 1, 1, 1, 1, 0});
  }

  TEST_CASE("zones are padded to the alignment, and an empty expert takes no rows") {
    const Plan plan = example_plan(4, 16);
    check_rank(plan.ranks[0], {5, 0}, {0, 8, 8}, {5, 5, 0, 0, 8});
    check_rank(plan.ranks[1], {3, 2}, {0, 4, 8}, {5, 5, 0, 0, 8});
    CHECK(plan.ranks[0].slot == Slots{0, 0, 1, 4, 2, 1});
    CHECK(plan.ranks[1].slot == Slots{3, 2, 5, 4});
    CHECK(origins(plan.ranks[1], 2, 4) == Slots{1, 0, 1, -1, -1, -1, 0, 1, 1, 1, 1, 0});
  }

  TEST_CASE("alignment 0 means 1") {
    const Plan zero = example_plan(0, 5);
    CHECK(zero.ranks[1].offsets == Ints{0, 3, 5});
    CHECK(zero.ranks[1].slot == Slots{3, 2, 4, 4});
  }

  TEST_CASE("an alignment need not be a power of two") {
    const Plan plan = example_plan(3, 10); // R_a = 9
    check_rank(plan.ranks[0], {5, 0}, {0, 6, 6}, {5, 5, 0, 0, 6});
    check_rank(plan.ranks[1], {3, 2}, {0, 3, 6}, {5, 5, 0, 0, 6});
  }

  TEST_CASE("overflow inside a zone drops its last routes") {
    const Plan plan = example_plan(1, 4);
    check_rank(plan.ranks[0], {4, 0}, {0, 4, 4}, {5, 4, 1, 0, 5});
    check_rank(plan.ranks[1], {3, 1}, {0, 3, 4}, {5, 4, 1, 2, 5});
    CHECK(plan.ranks[0].slot == Slots{0, 0, 1, 3, 2, 1});
    CHECK(plan.ranks[1].slot == Slots{3, 2, -1, -1});
    CHECK(plan.ranks[1].expert_rank == Slots{0, 1, 1, 0});     // a dropped route still has an owner
    CHECK(plan.global_counts == Ints{3, 0, 2, 1, 2, 0, 1, 1}); // before drops
  }

  TEST_CASE("a capacity that is no multiple of the alignment is rounded down") {
    const Plan plan = example_plan(4, 7); // R_a = 4
    check_rank(plan.ranks[0], {4, 0}, {0, 4, 4}, {5, 4, 1, 1, 8});
    check_rank(plan.ranks[1], {3, 0}, {0, 4, 4}, {5, 3, 2, 2, 8});
    CHECK(plan.ranks[0].slot == Slots{0, 0, 1, -1, 2, 1});
    CHECK(plan.ranks[1].slot == Slots{3, 2, -1, -1});
    CHECK(plan.ranks[1].slot_origin.size() == 7 * 3);
    CHECK(origins(plan.ranks[1], 3, 4) == Slots(12, -1));
  }

  TEST_CASE("a zone that starts above the capacity keeps nothing") {
    const Plan plan = example_plan(2, 3); // R_a = 2, on rank 1 S = 0, 4
    CHECK(plan.ranks[1].counts == Ints{2, 0});
    CHECK(plan.ranks[1].offsets == Ints{0, 2, 2});
    CHECK(plan.ranks[1].info[4] == 6);
  }

  TEST_CASE("a capacity below the alignment drops everything") {
    for (int64_t capacity : {3, 0}) {
      const Plan plan = example_plan(4, capacity);
      check_rank(plan.ranks[0], {0, 0}, {0, 0, 0}, {5, 0, 5, 6, 8});
      check_rank(plan.ranks[1], {0, 0}, {0, 0, 0}, {5, 0, 5, 4, 8});
      CHECK(plan.ranks[0].slot == Slots(6, -1));
      CHECK(plan.ranks[1].slot == Slots(4, -1));
      CHECK(plan.ranks[0].slot_origin == Slots(capacity * 3, -1));
    }
  }

  TEST_CASE("masked, bad and duplicate indices") {
    const int64_t wide = (int64_t{1} << 32) + 1; // 1 when cut to 32 bits
    const std::vector<Routing> ranks{routing(2, {1, 1, -1, 4, -2, 1}),
                                     routing(1, {1, wide, std::numeric_limits<int64_t>::min()})};
    const Plan plan = prepare({4, 3, 1, 16, EPX_COMBINE_WIRE}, ranks);
    CHECK(plan.ranks[0].slot == Slots{0, 1, -1, -1, -1, 2});
    CHECK(plan.ranks[0].expert_rank == Slots{0, 0, -1, -1, -1, 0});
    CHECK(plan.ranks[1].slot == Slots{3, -1, -1});
    CHECK(plan.ranks[0].bad_indices == 2);
    CHECK(plan.ranks[1].bad_indices == 2);
    CHECK(plan.ranks[0].info == Info{4, 4, 0, 0, 4}); // masked is not dropped
    CHECK(plan.ranks[1].info == Info{0, 0, 0, 0, 0});
    CHECK(plan.global_counts == Ints{0, 3, 0, 0, 0, 1, 0, 0});
  }

  TEST_CASE("input that is not [T, K] is refused") {
    CHECK_THROWS_AS(prepare({4, 2, 1, 4, EPX_COMBINE_WIRE}, std::vector{routing(2, {0, 1, 2})}), std::invalid_argument);
  }
}

TEST_SUITE("reference: dispatch") {
  // float16 [T, 2]; the first token is a pair of signalling NaNs, which a conversion would change.
  std::vector<Matrix> example_tokens() {
    return {raw(EPX_FLOAT16, 3, 2, {0x7D01, 0xFD02, 0x0011, 0x0012, 0x0021, 0x0022}),
            raw(EPX_FLOAT16, 2, 2, {0x1001, 0x1002, 0x1011, 0x1012})};
  }

  Matrix untouched(int64_t num_rows) {
    return raw(EPX_FLOAT16, num_rows, 2, Bits(num_rows * 2, 0xABCD));
  }

  // What dispatch of the example's tokens leaves in the receive rows of each rank, which nobody had touched.
  std::vector<Matrix> received(const Plan& plan, const Ints& num_rows) {
    const std::vector<Matrix> tokens = example_tokens();
    std::vector<Matrix> recv{untouched(num_rows[0]), untouched(num_rows[1])};
    dispatch(plan, {tokens, {}, {}, recv, {}, {}});
    return recv;
  }

  TEST_CASE("rows go to their slots bit by bit, pads become zero, the rest is not touched") {
    const std::vector<Matrix> recv = received(example_plan(4, 16), {10, 9});
    CHECK(bits_of(recv[0]) == Bits{0x7D01, 0xFD02, 0x0011, 0x0012, 0x0021, 0x0022, 0x1001, 0x1002, 0x1011, 0x1012,
                                   0,      0,      0,      0,      0,      0,      0xABCD, 0xABCD, 0xABCD, 0xABCD});
    CHECK(bits_of(recv[1]) == Bits{0x7D01, 0xFD02, 0x0021, 0x0022, 0x1001, 0x1002, 0, 0, 0x0011, 0x0012, 0x1011, 0x1012, 0,
                                   0, 0, 0, 0xABCD, 0xABCD});
  }

  TEST_CASE("weights and sidecars travel with the rows") {
    const Plan plan = example_plan(4, 16);
    const std::vector<Matrix> tokens = example_tokens();
    const std::vector<Sidecar> sidecars{{1, {std::byte{1}, std::byte{2}, std::byte{3}}}, {1, {std::byte{4}, std::byte{5}}}};
    const std::vector<Floats> weights{{0.5F, 1.5F, 2.5F, 3.5F, 4.5F, float_of(0x7FC12345)}, {10.5F, -0.0F, 12.5F, 13.5F}};
    std::vector<Matrix> recv{untouched(9), untouched(9)};
    std::vector<Sidecar> recv_sidecars(2, Sidecar{1, std::vector<std::byte>(9, std::byte{99})});
    std::vector<Floats> recv_weights(2, Floats(9, 77.0F));
    dispatch(plan, {tokens, sidecars, weights, recv, recv_sidecars, recv_weights});
    CHECK(recv_weights[0] == Floats{1.5F, 2.5F, 4.5F, 10.5F, 13.5F, 0.0F, 0.0F, 0.0F, 77.0F});
    CHECK(bits_of(recv_weights[1]) ==
          bits_of(Floats{0.5F, float_of(0x7FC12345), -0.0F, 0.0F, 3.5F, 12.5F, 0.0F, 0.0F, 77.0F}));
    const auto bytes = [](std::initializer_list<int> values) {
      std::vector<std::byte> result;
      for (int value : values)
        result.push_back(static_cast<std::byte>(value));
      return result;
    };
    CHECK(recv_sidecars[0].bytes == bytes({1, 2, 3, 4, 5, 0, 0, 0, 99}));
    CHECK(recv_sidecars[1].bytes == bytes({1, 3, 4, 0, 2, 5, 0, 0, 99}));
  }

  TEST_CASE("routes at or above N are dropped, and N may end within a zone or its pads") {
    const std::vector<Matrix> recv = received(example_plan(4, 16), {6, 2});
    CHECK(bits_of(recv[0]) == Bits{0x7D01, 0xFD02, 0x0011, 0x0012, 0x0021, 0x0022, 0x1001, 0x1002, 0x1011, 0x1012, 0, 0});
    CHECK(bits_of(recv[1]) == Bits{0x7D01, 0xFD02, 0x0021, 0x0022});
    CHECK(bits_of(received(example_plan(4, 16), {0, 1})[1]) == Bits{0x7D01, 0xFD02});
  }

  TEST_CASE("a call that drops everything touches nothing") {
    for (const Matrix& recv : received(example_plan(4, 3), {3, 3}))
      CHECK(bits_of(recv) == Bits(6, 0xABCD));
  }

  TEST_CASE("weights on one side only are refused") {
    const Plan plan = example_plan(4, 16);
    const std::vector<Matrix> tokens = example_tokens();
    std::vector<Matrix> recv{untouched(8), untouched(8)};
    std::vector<Floats> recv_weights(2, Floats(8));
    CHECK_THROWS_AS(dispatch(plan, {tokens, {}, {}, recv, {}, recv_weights}), std::invalid_argument);
  }
}

TEST_SUITE("reference: combine") {
  TEST_CASE("tokens get the weighted sum of their routes; pads are never read") {
    const float pad = kNan;
    const std::vector<Matrix> expert_out{column(EPX_FLOAT32, {1, 2, 3, 4, 5, pad, pad, pad}),
                                         column(EPX_FLOAT32, {10, 20, 30, pad, 40, 50, pad, pad, pad})};
    const std::vector<Floats> weights{{2, 3, 4, 5, 6, pad, pad, pad}, {7, 8, 9, pad, 10, 11, pad, pad, pad}};
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      const Plan plan = example_plan(4, 16, precision);
      std::vector<Matrix> out{column(EPX_FLOAT32, {pad, pad, pad}), column(EPX_FLOAT32, {pad, pad})};
      combine(plan, {expert_out, {}, out});
      CHECK(bits_of(out[0]) == bits_of(Floats{10 + 1, 2 + 40, 3 + 20}));
      CHECK(bits_of(out[1]) == bits_of(Floats{4 + 30, 50 + 5}));
      combine(plan, {expert_out, weights, out});
      CHECK(bits_of(out[0]) == bits_of(Floats{70 + 2, 6 + 400, 12 + 160}));
      CHECK(bits_of(out[1]) == bits_of(Floats{20 + 270, 550 + 30}));
    }
  }

  TEST_CASE("wire rounds each rank's partial, the home rank's too; exact rounds once") {
    // Experts 0, 1 on rank 0, 2, 3 on rank 1. Rank 1: 1 + 2^-8, a tie that goes to 1. Rank 0: 2^-8.
    for (int home : {0, 1}) {
      CAPTURE(home);
      const Floats values{1.0F, 0x1p-8F, 0x1p-8F};
      const Plan wire = one_token(2, 2, home, {2, 3, 0}, EPX_COMBINE_WIRE);
      const Plan exact = one_token(2, 2, home, {2, 3, 0}, EPX_COMBINE_EXACT);
      CHECK(combine_one(wire, home, EPX_BFLOAT16, values) == Bits{0x3F80});
      CHECK(combine_one(exact, home, EPX_BFLOAT16, values) == Bits{0x3F81});
    }
  }

  TEST_CASE("node rounds the sum of each node's partials, the home node's too") {
    // Ranks 0 to 2 have 1, 2^-8 and 2^-8. Nodes of 2: 1 + 2^-8 is a tie that goes to 1, and so is 1 plus the other node's 2^-8.
    const Floats values{1.0F, 0x1p-8F, 0x1p-8F};
    for (int home : {0, 3}) {
      CAPTURE(home);
      const auto sum = [&](epx_combine_precision precision, int ranks_per_node) {
        return combine_one(one_token(4, 1, home, {0, 1, 2}, precision, ranks_per_node), home, EPX_BFLOAT16, values);
      };
      CHECK(sum(EPX_COMBINE_WIRE, 2) == Bits{0x3F81});
      CHECK(sum(EPX_COMBINE_NODE, 2) == Bits{0x3F80});
      for (int ranks_per_node : {0, 1, 4}) // one node, or one rank on each
        CHECK(sum(EPX_COMBINE_NODE, ranks_per_node) == Bits{0x3F81});
    }
  }

  TEST_CASE("a node's sum is in rank order, and the sum of the nodes in their order") {
    // Rank order within nodes 0 and 1: 2^24 + 1 loses the 1, and 1 + 1 = 2. Rank order over all: 2^24 + 1 + 1 + 1 loses each.
    const Floats values{1.0F, 1.0F, 1.0F, k2p24};
    const Plan wire = one_token(4, 1, 1, {3, 2, 1, 0}, EPX_COMBINE_WIRE, 2);
    const Plan node = one_token(4, 1, 1, {3, 2, 1, 0}, EPX_COMBINE_NODE, 2);
    CHECK(combine_one(wire, 1, EPX_FLOAT32, values) == bits_of(Floats{k2p24}));
    CHECK(combine_one(node, 1, EPX_FLOAT32, values) == bits_of(Floats{k2p24 + 2}));
  }

  TEST_CASE("a node's sum that overflows its dtype is infinite") {
    const Floats values{65504, 65504, -65504, -65504};
    CHECK(combine_one(one_token(4, 1, 0, {0, 1, 2, 3}, EPX_COMBINE_WIRE, 2), 0, EPX_FLOAT16, values) == Bits{0});
    const Bits node = combine_one(one_token(4, 1, 0, {0, 1, 2, 3}, EPX_COMBINE_NODE, 2), 0, EPX_FLOAT16, values);
    CHECK(is_half_nan(EPX_FLOAT16, node[0])); // inf - inf
  }

  TEST_CASE("exact gives the same bits for every number of ranks") {
    const Floats values{1.0F, 0x1p-8F, 0x1p-8F, 0.0F};
    CHECK(combine_one(one_token(1, 4, 0, {2, 3, 0, 1}, EPX_COMBINE_EXACT), 0, EPX_BFLOAT16, values) == Bits{0x3F81});
    CHECK(combine_one(one_token(4, 1, 3, {2, 3, 0, 1}, EPX_COMBINE_EXACT), 3, EPX_BFLOAT16, values) == Bits{0x3F81});
  }

  TEST_CASE("a partial that overflows its dtype is infinite on the wire only") {
    const Floats values{65504, 65504, -65504, -65504};
    const Bits wire = combine_one(one_token(2, 1, 0, {0, 0, 1, 1}, EPX_COMBINE_WIRE), 0, EPX_FLOAT16, values);
    CHECK(is_half_nan(EPX_FLOAT16, wire[0])); // inf - inf
    CHECK(combine_one(one_token(2, 1, 0, {0, 0, 1, 1}, EPX_COMBINE_EXACT), 0, EPX_FLOAT16, values) == Bits{0});
  }

  TEST_CASE("wire sums partials in rank order, exact sums routes in k order") {
    // k order: 1 + 1 + 2^24. Rank order: 2^24 + 1 + 1, where each 1 is lost.
    const Floats values{1.0F, 1.0F, k2p24};
    CHECK(combine_one(one_token(3, 1, 1, {2, 1, 0}, EPX_COMBINE_WIRE), 1, EPX_FLOAT32, values) == bits_of(Floats{k2p24}));
    CHECK(combine_one(one_token(3, 1, 1, {2, 1, 0}, EPX_COMBINE_EXACT), 1, EPX_FLOAT32, values) ==
          bits_of(Floats{k2p24 + 2}));
  }

  TEST_CASE("a rank sums its routes in k order, not in slot order") {
    // k 0, 1, 2 lie in slots 2, 1, 0.
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      const Plan plan = one_token(1, 3, 0, {2, 1, 0}, precision);
      CHECK(plan.ranks[0].slot == Slots{2, 1, 0});
      CHECK(combine_one(plan, 0, EPX_FLOAT32, {k2p24, 1.0F, 1.0F}) == bits_of(Floats{k2p24}));
      CHECK(combine_one(plan, 0, EPX_FLOAT32, {1.0F, 1.0F, k2p24}) == bits_of(Floats{k2p24 + 2}));
    }
  }

  TEST_CASE("routes of one rank are summed there even when others lie between them in k") {
    // Rank 0 sums 2^24 and -2^24 to 0 before rank 1's 1 is added; in k order the 1 is lost.
    const Floats values{k2p24, 1.0F, -k2p24};
    CHECK(combine_one(one_token(2, 1, 0, {0, 1, 0}, EPX_COMBINE_WIRE), 0, EPX_FLOAT32, values) == bits_of(Floats{1.0F}));
    CHECK(combine_one(one_token(2, 1, 0, {0, 1, 0}, EPX_COMBINE_EXACT), 0, EPX_FLOAT32, values) == bits_of(Floats{0.0F}));
  }

  TEST_CASE("a step is a fused multiply-add") {
    // (1 + 2^-12)^2 - 1 = 2^-11 + 2^-24; the product rounded on its own would lose the 2^-24.
    const float x = 1.0F + 0x1p-12F;
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      CHECK(combine_one_rank(precision, EPX_FLOAT32, {-1.0F, x}, {1.0F, x}) == bits_of(Floats{0x1p-11F + 0x1p-24F}));
    }
  }

  TEST_CASE("minus zero is added to plus zero") {
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      CHECK(combine_one_rank(precision, EPX_FLOAT32, {-0.0F}) == Bits{0});
      CHECK(combine_one_rank(precision, EPX_FLOAT32, {-0.0F}, {1.0F}) == Bits{0});
      CHECK(combine_one_rank(precision, EPX_FLOAT16, {-0.0F, -0.0F}) == Bits{0});
    }
    // -2^-30 rounds to minus zero in float16: as a partial, which is then added to plus zero, or as the result.
    CHECK(combine_one_rank(EPX_COMBINE_WIRE, EPX_FLOAT16, {-0x1p-10F}, {0x1p-20F}) == Bits{0x0000});
    CHECK(combine_one_rank(EPX_COMBINE_EXACT, EPX_FLOAT16, {-0x1p-10F}, {0x1p-20F}) == Bits{0x8000});
  }

  TEST_CASE("a weight of zero is not a mask") {
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      const Bits bits = combine_one_rank(precision, EPX_FLOAT32, {1.0F, kInf}, {1.0F, 0.0F});
      CHECK(std::isnan(float_of(bits[0])));
    }
  }

  TEST_CASE("results overflow to infinity and keep subnormals") {
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      CHECK(combine_one_rank(precision, EPX_FLOAT16, {65504, 65504}) == Bits{0x7C00});
      CHECK(combine_one_rank(precision, EPX_FLOAT16, {0x1p-24F, 0x1p-24F}) == Bits{0x0002});
      CHECK(combine_one_rank(precision, EPX_FLOAT32, {0x1p-149F}, {3.0F}) == Bits{3});
    }
  }

  TEST_CASE("duplicate experts are two routes, masked ones none") {
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      const Plan plan = one_token(2, 1, 0, {1, -1, 1, 2}, precision);
      CHECK(combine_one(plan, 0, EPX_FLOAT32, {1.0F, kNan, 4.0F, kNan}) == bits_of(Floats{5.0F}));
      CHECK(combine_one(one_token(2, 1, 0, {-1, -1}, precision), 0, EPX_FLOAT32, {kNan, kNan}) == Bits{0});
    }
  }

  TEST_CASE("dropped routes and routes at or above N take no step") {
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      // R = 4 drops both routes of rank 1's token 1; N = 3 on rank 0 drops its slot 3, N = 0 on rank 1 all of its slots.
      const Plan plan = example_plan(1, 4, precision);
      std::vector<Matrix> expert_out{column(EPX_FLOAT32, {1, 2, 3, 4}), column(EPX_FLOAT32, {10, 20, 30, 40})};
      std::vector<Matrix> out{column(EPX_FLOAT32, {kNan, kNan, kNan}), column(EPX_FLOAT32, {kNan, kNan})};
      combine(plan, {expert_out, {}, out});
      CHECK(bits_of(out[0]) == bits_of(Floats{10 + 1, 2 + 40, 3 + 20}));
      CHECK(bits_of(out[1]) == bits_of(Floats{4 + 30, 0}));
      expert_out = {column(EPX_FLOAT32, {1, 2, 3}), column(EPX_FLOAT32, {})};
      combine(plan, {expert_out, {}, out});
      CHECK(bits_of(out[0]) == bits_of(Floats{1, 2, 3}));
      CHECK(bits_of(out[1]) == bits_of(Floats{0, 0}));
    }
  }

  TEST_CASE("a dtype that differs between input and output is refused") {
    const Plan plan = one_token(1, 1, 0, {0}, EPX_COMBINE_WIRE);
    const std::vector<Matrix> expert_out{column(EPX_FLOAT16, {1})};
    std::vector<Matrix> out{column(EPX_BFLOAT16, {1})};
    CHECK_THROWS_AS(combine(plan, {expert_out, {}, out}), std::invalid_argument);
  }
}

TEST_SUITE("reference: combine_bwd") {
  TEST_CASE("gradients go to their slots, pads become zero, the rest is not touched") {
    const Plan plan = example_plan(4, 16);
    const std::vector<Matrix> grad_out{column(EPX_FLOAT32, {1, 2, 3}), column(EPX_FLOAT32, {4, 5})};
    const std::vector<Matrix> expert_out{column(EPX_FLOAT32, {1, 2, 3, 4, 5, kNan, kNan, kNan, kNan}),
                                         column(EPX_FLOAT32, {10, 20, 30, kNan, 40})};
    const std::vector<Floats> weights{{2, 3, 4, 5, 6, kNan, kNan, kNan, kNan}, {7, 8, 9, kNan, 10}};
    std::vector<Matrix> grad_expert{column(EPX_FLOAT32, Floats(9, 77)), column(EPX_FLOAT32, Floats(5, 77))};
    std::vector<Floats> grad_weights{Floats(9, 77), Floats(5, 77)};
    combine_bwd(plan, {grad_out, expert_out, weights, grad_expert, grad_weights});
    CHECK(bits_of(grad_expert[0]) == bits_of(Floats{2, 6, 12, 20, 30, 0, 0, 0, 77}));
    CHECK(bits_of(grad_expert[1]) == bits_of(Floats{7, 24, 36, 0, 20})); // N = 5 ends within the second zone
    CHECK(grad_weights[0] == Floats{1, 4, 9, 16, 25, 0, 0, 0, 77});
    CHECK(grad_weights[1] == Floats{10, 60, 120, 0, 80});
  }

  TEST_CASE("without weights rows are copied bit by bit") {
    CHECK(bits_of(row_gradient(raw(EPX_FLOAT16, 1, 3, {0x7D01, 0x8000, 0xFC01}))) == Bits{0x7D01, 0x8000, 0xFC01});
  }

  TEST_CASE("a weighted gradient is rounded to float32 and then to the dtype") {
    // w * (1 + 2^-7) lies just above 2 + 2^-7, the middle of two bfloat16; float32 rounds it to the middle, and that goes
    // to the even 2. One rounding would give 0x4001.
    CHECK(bits_of(row_gradient(raw(EPX_BFLOAT16, 1, 1, {0x3F81}), {{16712189 * 0x1p-23F}})) == Bits{0x4000});
  }

  TEST_CASE("weighted gradients keep signs, infinities and the NaN of 0 * inf") {
    const Matrix gradient = row_gradient(row32({-1.0F, kInf, 2.0F}), {{0.0F}});
    CHECK(bits_of(gradient)[0] == 0x80000000); // no accumulator here: -1 * 0 stays minus zero
    CHECK(std::isnan(load(gradient, 0, 1)));
    CHECK(bits_of(gradient)[2] == 0);
  }

  TEST_CASE("the weight gradient adds adjacent accumulators") {
    // (2^24 + 1) + (1 + 1): adjacent pairs keep the second pair's 2. One after the other, or halves folded on each other,
    // would lose every 1.
    CHECK(weight_gradient({k2p24, 1, 1, 1}, {1, 1, 1, 1}) == k2p24 + 2);
    CHECK(weight_gradient({1, 1, k2p24, 1}, {1, 1, 1, 1}) == k2p24 + 2);
    CHECK(weight_gradient({1, k2p24, 1, 0}, {1, 1, 1, 1}) == k2p24);
  }

  TEST_CASE("the weight gradient has 256 accumulators, whatever H is") {
    Floats g(258, 0.0F);
    const Floats ones(258, 1.0F);
    // h = 256 shares accumulator 0: each 1 meets 2^24 alone. With more accumulators 1 + 1 would be added first.
    g[0] = 1;
    g[1] = 1;
    g[256] = k2p24;
    CHECK(weight_gradient(g, ones) == k2p24);
    // h = 128 and 129 have accumulators of their own: 1 + 1 is added first. With fewer they would meet 2^24 alone.
    g.assign(258, 0.0F);
    g[0] = k2p24;
    g[128] = 1;
    g[129] = 1;
    CHECK(weight_gradient(g, ones) == k2p24 + 2);
  }

  TEST_CASE("an accumulator takes h ascending, by fused multiply-adds from plus zero") {
    Floats g(513, 0.0F);
    Floats x(513, 1.0F);
    g[0] = k2p24;
    g[256] = 1;
    g[512] = 1;
    CHECK(weight_gradient(g, x) == k2p24);
    std::swap(g[0], g[512]);
    CHECK(weight_gradient(g, x) == k2p24 + 2);
    g.assign(513, 0.0F);
    g[0] = -1.0F;
    g[256] = x[256] = 1.0F + 0x1p-12F;
    CHECK(weight_gradient(g, x) == 0x1p-11F + 0x1p-24F);
    CHECK(bits_of({weight_gradient({-0.0F}, {1.0F})}) == Bits{0});
  }

  TEST_CASE("the weight gradient reads 16-bit rows as they are and rounds in float32 only") {
    const Matrix grad_out = raw(EPX_BFLOAT16, 1, 2, {0x3F81, 0x3F80});   // 1 + 2^-7, 1
    const Matrix expert_out = raw(EPX_BFLOAT16, 1, 2, {0x3F81, 0x3A80}); // 1 + 2^-7, 2^-10
    CHECK(weight_gradient(grad_out, expert_out) == 1.0F + 0x1p-6F + 0x1p-14F + 0x1p-10F);
  }
}

TEST_SUITE("reference: dispatch_bwd") {
  TEST_CASE("token gradients are sums, weight gradients come home") {
    // R = 4 drops both routes of rank 1's token 1; N = 3 on rank 0 drops its slot 3 too.
    const Plan plan = example_plan(1, 4);
    const std::vector<Matrix> grad_recv{column(EPX_FLOAT32, {1, 2, 3}), column(EPX_FLOAT32, {10, 20, 30, 40})};
    const std::vector<Floats> grad_recv_weights{{0.5F, -0.0F, float_of(0x7FC12345)}, {4.5F, 5.5F, 6.5F, 7.5F}};
    std::vector<Matrix> grad_tokens{column(EPX_FLOAT32, Floats(3, kNan)), column(EPX_FLOAT32, Floats(2, kNan))};
    std::vector<Floats> grad_topk_weights{Floats(6, kNan), Floats(4, kNan)};
    dispatch_bwd(plan, {grad_recv, grad_recv_weights, grad_tokens, grad_topk_weights});
    CHECK(bits_of(grad_tokens[0]) == bits_of(Floats{10 + 1, 2 + 40, 3 + 20}));
    CHECK(bits_of(grad_tokens[1]) == bits_of(Floats{30, 0}));
    CHECK(bits_of(grad_topk_weights[0]) == bits_of(Floats{4.5F, 0.5F, -0.0F, 7.5F, float_of(0x7FC12345), 5.5F}));
    CHECK(bits_of(grad_topk_weights[1]) == bits_of(Floats{0, 6.5F, 0, 0}));
  }

  TEST_CASE("masked routes get a weight gradient of zero") {
    const Plan plan = one_token(1, 1, 0, {-1, 0, 5}, EPX_COMBINE_WIRE);
    const std::vector<Matrix> grad_recv{column(EPX_FLOAT32, {3})};
    const std::vector<Floats> grad_recv_weights{{2}};
    std::vector<Matrix> grad_tokens{column(EPX_FLOAT32, {kNan})};
    std::vector<Floats> grad_topk_weights{Floats(3, kNan)};
    dispatch_bwd(plan, {grad_recv, grad_recv_weights, grad_tokens, grad_topk_weights});
    CHECK(bits_of(grad_topk_weights[0]) == bits_of(Floats{0, 2, 0}));
    CHECK(bits_of(grad_tokens[0]) == bits_of(Floats{3}));
  }

  TEST_CASE("sums follow the plan's precision") {
    for (epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT}) {
      const Plan plan = one_token(2, 2, 0, {2, 3, 0}, precision);
      const std::vector<Matrix> grad_recv{column(EPX_BFLOAT16, {0x1p-8F}), column(EPX_BFLOAT16, {1.0F, 0x1p-8F})};
      std::vector<Matrix> grad_tokens{column(EPX_BFLOAT16, {kNan}), column(EPX_BFLOAT16, {})};
      dispatch_bwd(plan, {grad_recv, {}, grad_tokens, {}});
      CHECK(bits_of(grad_tokens[0]) == Bits{precision == EPX_COMBINE_WIRE ? 0x3F80U : 0x3F81U});
    }
  }

  TEST_CASE("a lone minus zero comes home as plus zero") {
    const Plan plan = one_token(1, 1, 0, {0}, EPX_COMBINE_WIRE);
    const std::vector<Matrix> grad_recv{column(EPX_FLOAT32, {-0.0F})};
    std::vector<Matrix> grad_tokens{column(EPX_FLOAT32, {kNan})};
    dispatch_bwd(plan, {grad_recv, {}, grad_tokens, {}});
    CHECK(bits_of(grad_tokens[0]) == Bits{0});
  }
}

TEST_SUITE("reference: count_wrong") {
  TEST_CASE("elements differ by their bits") {
    const Matrix expected = raw(EPX_FLOAT16, 2, 2, {0x0000, 0x3C00, 0x7E00, 0x7C00});
    const Matrix actual = raw(EPX_FLOAT16, 2, 2, {0x8000, 0x3C00, 0xFE01, 0x7C00});
    CHECK(count_wrong(expected, expected, false) == 0);
    CHECK(count_wrong(expected, actual, false) == 2); // -0 is not +0, and the NaNs differ
    CHECK(count_wrong(expected, actual, true) == 1);
    const Matrix infinite = raw(EPX_FLOAT16, 2, 2, {0x0000, 0x3C00, 0x7C00, 0x7C00});
    CHECK(count_wrong(expected, infinite, true) == 1); // one NaN is not enough
  }

  TEST_CASE("another shape or dtype is wrong in every element") {
    const Matrix expected = raw(EPX_FLOAT16, 2, 2, Bits(4));
    CHECK(count_wrong(expected, raw(EPX_BFLOAT16, 2, 2, Bits(4)), true) == 4);
    CHECK(count_wrong(expected, raw(EPX_FLOAT16, 1, 4, Bits(4)), true) == 4);
    CHECK(count_wrong(expected, raw(EPX_FLOAT16, 3, 2, Bits(6)), true) == 6);
    CHECK(count_wrong(expected, raw(EPX_FLOAT16, 2, 2, Bits(3)), true) == 4);
    CHECK(count_wrong(raw(EPX_FLOAT16, 0, 2, {}), raw(EPX_FLOAT16, 0, 3, {}), true) == 1);
    CHECK(count_wrong(raw(EPX_FLOAT16, 0, 2, {}), raw(EPX_FLOAT16, 0, 2, {}), true) == 0);
  }

  TEST_CASE("vectors of float") {
    const Floats expected{0.0F, 1.0F, kNan, 2.0F};
    const Floats actual{-0.0F, 1.0F, float_of(0xFFC00001), kNan};
    CHECK(count_wrong(expected, expected, false) == 0);
    CHECK(count_wrong(expected, actual, false) == 3);
    CHECK(count_wrong(expected, actual, true) == 2);
    CHECK(count_wrong(expected, Floats{0.0F}, true) == 4);
    CHECK(count_wrong(Floats{}, Floats{1.0F}, true) == 1);
  }
}
