// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/independence.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/dtypes.h"
#include "tests/support/check.h"
#include "tests/support/compare.h"
#include "tests/support/group_run.h"
#include "tests/support/launcher.h"
#include "tests/support/values.h"

namespace epx::test {

namespace {

using reference::Matrix;
using Bytes = std::vector<std::byte>;

struct GlobalProblem {
  GroupCase group; // num_ranks is set per run
  int top_k = 1;
  epx_dtype dtype = EPX_BFLOAT16;
  int64_t num_tokens = 0;
  int64_t hidden = 1;
  std::vector<int32_t> topk_idx;
  std::vector<float> weights; // [T, K]
  Matrix tokens;
  Matrix grad_out;
};

struct GlobalResult {
  Bytes out;               // [T, H]
  Bytes grad_tokens;       // [T, H]
  Bytes grad_topk_weights; // [T, K] float32
};

GlobalProblem make_problem(uint64_t seed) {
  Rng rng(mix(seed, 0x1de9));
  GlobalProblem problem;
  problem.num_tokens = rng.between(1, 30);
  problem.hidden = rng.between(1, 70);
  problem.top_k = static_cast<int>(rng.between(1, 8));
  problem.dtype = rng.pick({EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16});
  GroupCase& group = problem.group;
  group.num_experts = static_cast<int>(rng.between(1, 20));
  group.max_tokens = static_cast<int>(problem.num_tokens);
  group.hidden_dim = static_cast<int>(problem.hidden);
  group.max_top_k = problem.top_k;
  group.max_alignment = static_cast<int>(rng.pick({1, 8, 16}));
  group.max_dtype = problem.dtype;
  group.precision = EPX_COMBINE_EXACT;
  for (int64_t i = 0; i < problem.num_tokens * problem.top_k; ++i) {
    problem.topk_idx.push_back(static_cast<int32_t>(rng.chance(10) ? -1 : rng.below(group.num_experts)));
  }
  problem.weights = random_weights(problem.num_tokens * problem.top_k, rng);
  problem.tokens = random_rows(problem.dtype, problem.num_tokens, problem.hidden, rng);
  problem.grad_out = random_rows(problem.dtype, problem.num_tokens, problem.hidden, rng);
  return problem;
}

template <typename T>
std::span<const std::byte> part_of(const std::vector<T>& values, int64_t first_row, int64_t rows, int64_t per_row) {
  const auto all = std::span(values).subspan(static_cast<size_t>(first_row * per_row), static_cast<size_t>(rows * per_row));
  return std::as_bytes(all);
}

// Rank runs one rank's part of the problem through the public API.
class Rank {
public:
  Rank(const RankContext& context, const GlobalProblem& problem, const GroupCase& group, int64_t first, int64_t tokens)
      : problem_(problem), group_(context, group), first_(first), tokens_(tokens),
        row_bytes_(row_bytes(problem.dtype, problem.hidden)),
        rng_(mix(9, static_cast<uint64_t>(first))), layer_{problem.top_k, group.max_alignment} {
    group_.add_arena(1 << 15);
  }

  void run(GlobalResult& result) {
    prepare();
    const Bytes received = dispatch();
    const Bytes expert_out = apply_experts(received);
    store_part(result.out, combine(expert_out), row_bytes_);
    const Bytes grad_expert_out = combine_bwd(expert_out);
    dispatch_bwd(apply_experts(grad_expert_out), result);
    group_.check_status();
  }

private:
  template <typename Args>
  Args make_args(CallBuffers& buffers) {
    return {.layer = layer_,
            .handle_mem = {static_cast<const std::byte*>(buffers.input("handle memory", handle_, 16)), handle_.size()},
            .stream = group_.device().stream()};
  }
  CallBuffers buffers() { return {group_.device(), group_.arenas(), Placement::random, rng_}; }

  Shape token_rows() const { return {tokens_, problem_.hidden}; }
  Shape slot_rows() const { return {rows_, problem_.hidden}; }
  Shape routes() const { return {tokens_, problem_.top_k}; }
  static Tensor output(CallBuffers& to, const char* name, epx_dtype dtype, Shape shape) {
    const auto size = static_cast<size_t>(reference::element_size(dtype));
    return {to.output(name, static_cast<size_t>(shape.num_elements()) * size, size), dtype, shape};
  }
  static ConstTensor input(CallBuffers& to, const char* name, epx_dtype dtype, Shape shape,
                           std::span<const std::byte> bytes) {
    return {to.input(name, bytes, static_cast<size_t>(reference::element_size(dtype))), dtype, shape};
  }

  void finish(CallBuffers& used) {
    group_.count_call();
    used.check_surroundings();
  }

  void prepare() {
    CallBuffers used = buffers();
    const size_t handle_bytes = group_.view().handle_mem_size(layer_);
    const int64_t num_experts = group_.info().num_local_experts;
    const auto indices = part_of(problem_.topk_idx, first_, tokens_, problem_.top_k);
    PrepareArgs args{.layer = layer_, .stream = group_.device().stream()};
    args.topk_idx = {used.input("topk_idx", indices, 4), EPX_INT32, routes()};
    args.handle_mem = {static_cast<std::byte*>(used.output("handle memory", handle_bytes, 16)), handle_bytes};
    args.counts = {used.output("counts", static_cast<size_t>(num_experts) * 4, 4), EPX_INT32, num_experts};
    args.offsets = {used.output("offsets", static_cast<size_t>(num_experts + 1) * 4, 4), EPX_INT32, num_experts + 1};
    group_.view().prepare(args);
    finish(used);
    handle_ = used.read_output(0);
    const Bytes read = used.read_output(2);
    offsets_.resize(static_cast<size_t>(num_experts) + 1);
    std::memcpy(offsets_.data(), read.data(), read.size());
    rows_ = offsets_.back();
  }

  Bytes dispatch() {
    CallBuffers used = buffers();
    auto args = make_args<DispatchArgs>(used);
    args.tokens =
        input(used, "tokens", problem_.dtype, token_rows(), part_of(problem_.tokens.bytes, first_, tokens_, row_bytes_));
    args.topk_weights =
        input(used, "weights", EPX_FLOAT32, routes(), part_of(problem_.weights, first_, tokens_, problem_.top_k));
    args.recv_tokens = output(used, "recv_tokens", problem_.dtype, slot_rows());
    args.recv_weights = output(used, "recv_weights", EPX_FLOAT32, rows_);
    group_.view().dispatch(args);
    finish(used);
    recv_weights_ = used.read_output(1);
    return used.read_output(0);
  }

  // Scales each row by a number that belongs to its expert.
  Bytes apply_experts(const Bytes& rows) const {
    Matrix matrix{problem_.dtype, rows_, problem_.hidden, rows};
    for (size_t e = 0; e + 1 < offsets_.size(); ++e) {
      const float scale = 1.0F + static_cast<float>(group_.info().first_local_expert + static_cast<int>(e)) / 16.0F;
      for (int64_t row = offsets_[e]; row < offsets_[e + 1]; ++row) {
        for (int64_t h = 0; h < problem_.hidden; ++h) {
          reference::store(matrix, row, h, scale * reference::load(matrix, row, h));
        }
      }
    }
    return matrix.bytes;
  }

  Bytes combine(const Bytes& expert_out) {
    CallBuffers used = buffers();
    auto args = make_args<CombineArgs>(used);
    args.expert_out = input(used, "expert_out", problem_.dtype, slot_rows(), expert_out);
    args.recv_weights = input(used, "recv_weights", EPX_FLOAT32, rows_, recv_weights_);
    args.out = output(used, "out", problem_.dtype, token_rows());
    group_.view().combine(args);
    finish(used);
    return used.read_output(0);
  }

  Bytes combine_bwd(const Bytes& expert_out) {
    CallBuffers used = buffers();
    auto args = make_args<CombineBwdArgs>(used);
    args.grad_out = input(used, "grad_out", problem_.dtype, token_rows(),
                          part_of(problem_.grad_out.bytes, first_, tokens_, row_bytes_));
    args.expert_out = input(used, "expert_out", problem_.dtype, slot_rows(), expert_out);
    args.recv_weights = input(used, "recv_weights", EPX_FLOAT32, rows_, recv_weights_);
    args.grad_expert_out = output(used, "grad_expert_out", problem_.dtype, slot_rows());
    args.grad_recv_weights = output(used, "grad_recv_weights", EPX_FLOAT32, rows_);
    group_.view().combine_bwd(args);
    finish(used);
    grad_recv_weights_ = used.read_output(1);
    return used.read_output(0);
  }

  void dispatch_bwd(const Bytes& grad_recv, GlobalResult& result) {
    CallBuffers used = buffers();
    auto args = make_args<DispatchBwdArgs>(used);
    args.grad_recv = input(used, "grad_recv", problem_.dtype, slot_rows(), grad_recv);
    args.grad_recv_weights = input(used, "grad_recv_weights", EPX_FLOAT32, rows_, grad_recv_weights_);
    args.grad_tokens = output(used, "grad_tokens", problem_.dtype, token_rows());
    args.grad_topk_weights = output(used, "grad_topk_weights", EPX_FLOAT32, routes());
    group_.view().dispatch_bwd(args);
    finish(used);
    store_part(result.grad_tokens, used.read_output(0), row_bytes_);
    store_part(result.grad_topk_weights, used.read_output(1), problem_.top_k * static_cast<int64_t>(sizeof(float)));
  }

  void store_part(Bytes& whole, const Bytes& part, int64_t bytes_per_token) const {
    std::ranges::copy(part, whole.begin() + static_cast<std::ptrdiff_t>(first_ * bytes_per_token));
  }

  const GlobalProblem& problem_;
  GroupRun group_;
  int64_t first_;  // global number of this rank's first token
  int64_t tokens_; // T
  int64_t row_bytes_;
  Rng rng_;
  Layer layer_;
  Bytes handle_;
  std::vector<int32_t> offsets_;
  int64_t rows_ = 0; // N
  Bytes recv_weights_;
  Bytes grad_recv_weights_;
};

GlobalResult run_on(const GlobalProblem& problem, int num_ranks, const std::string& transport, Rng& rng) {
  GroupCase group = problem.group;
  group.num_ranks = num_ranks;
  std::vector<int64_t> cuts = {0, problem.num_tokens};
  for (int i = 1; i < num_ranks; ++i)
    cuts.push_back(rng.between(0, problem.num_tokens));
  std::ranges::sort(cuts);

  GlobalResult result;
  const auto rows_bytes = static_cast<size_t>(problem.num_tokens * row_bytes(problem.dtype, problem.hidden));
  result.out.resize(rows_bytes);
  result.grad_tokens.resize(rows_bytes);
  result.grad_topk_weights.resize(problem.weights.size() * sizeof(float));
  make_thread_launcher(transport, num_ranks)->each_rank([&](const RankContext& context) {
    const auto i = static_cast<size_t>(context.rank);
    Rank(context, problem, group, cuts[i], cuts[i + 1] - cuts[i]).run(result); // ranks write disjoint parts
  });
  return result;
}

void check_equal_results(const GlobalProblem& problem, const GlobalResult& expected, const GlobalResult& actual) {
  const auto rows = [&](const Bytes& bytes) { return Matrix{problem.dtype, problem.num_tokens, problem.hidden, bytes}; };
  check_rows("out", rows(expected.out), actual.out, NanRule::any_nan);
  check_rows("grad_tokens", rows(expected.grad_tokens), actual.grad_tokens, NanRule::any_nan);
  const Matrix weights{EPX_FLOAT32, problem.num_tokens, problem.top_k, expected.grad_topk_weights};
  check_rows("grad_topk_weights", weights, actual.grad_topk_weights, NanRule::any_nan);
}

} // namespace

void check_independence(uint64_t seed, const std::string& transport) {
  const GlobalProblem problem = make_problem(seed);
  Rng rng(mix(seed, 0xc075));
  const GlobalResult alone = run_on(problem, 1, transport, rng);
  for (const int num_ranks : {2, 4, rng.pick({3, 7})}) {
    try {
      check_equal_results(problem, alone, run_on(problem, num_ranks, transport, rng));
    } catch (const std::exception& error) {
      fail_check("with {} ranks instead of 1: {}", num_ranks, error.what());
    }
  }
}

} // namespace epx::test
