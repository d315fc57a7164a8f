// SPDX-License-Identifier: Apache-2.0
#include "tests/multiprocess/independence.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/dtypes.h"
#include "tests/support/call_args.h"
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
    return make_call_args<Args>(layer_, buffers.input("handle memory", handle_, 16), handle_.size(),
                                group_.device().stream());
  }
  CallBuffers buffers() { return {group_.device(), group_.arenas(), Placement::random, rng_}; }

  epx_tensor token_rows(void* data) const { return epx_tensor_2d(data, problem_.dtype, tokens_, problem_.hidden); }
  epx_tensor slot_rows(void* data) const { return epx_tensor_2d(data, problem_.dtype, rows_, problem_.hidden); }
  epx_tensor slot_floats(void* data) const { return epx_tensor_1d(data, EPX_FLOAT32, rows_); }
  epx_tensor route_floats(void* data) const { return epx_tensor_2d(data, EPX_FLOAT32, tokens_, problem_.top_k); }
  size_t route_bytes() const { return static_cast<size_t>(tokens_ * problem_.top_k) * sizeof(float); }
  size_t token_bytes() const { return static_cast<size_t>(tokens_ * row_bytes_); }
  size_t slot_bytes() const { return static_cast<size_t>(rows_ * row_bytes_); }

  void finish(CallBuffers& used, epx_status status, const char* call) {
    check_ok(status, call);
    group_.count_call();
    used.check_surroundings();
  }

  void prepare() {
    CallBuffers used = buffers();
    size_t handle_bytes = 0;
    check_ok(epx_handle_mem_size(group_.handle(), &layer_, &handle_bytes), "epx_handle_mem_size");
    const auto num_experts = static_cast<size_t>(group_.info().num_local_experts);
    const auto indices = part_of(problem_.topk_idx, first_, tokens_, problem_.top_k);
    const epx_tensor topk_idx = epx_tensor_2d(used.input("topk_idx", indices, 4), EPX_INT32, tokens_, problem_.top_k);
    auto args = make_call_args<epx_prepare_args>(layer_, used.output("handle memory", handle_bytes, 16), handle_bytes,
                                                 group_.device().stream());
    const epx_tensor counts =
        epx_tensor_1d(used.output("counts", num_experts * 4, 4), EPX_INT32, group_.info().num_local_experts);
    const epx_tensor offsets =
        epx_tensor_1d(used.output("offsets", (num_experts + 1) * 4, 4), EPX_INT32, group_.info().num_local_experts + 1);
    args.topk_idx = &topk_idx;
    args.counts = &counts;
    args.offsets = &offsets;
    finish(used, epx_prepare(group_.handle(), &args), "epx_prepare");
    handle_ = used.read_output(0);
    const Bytes read = used.read_output(2);
    offsets_.resize(num_experts + 1);
    std::memcpy(offsets_.data(), read.data(), read.size());
    rows_ = offsets_.back();
  }

  Bytes dispatch() {
    CallBuffers used = buffers();
    auto args = make_args<epx_dispatch_args>(used);
    const auto size = static_cast<size_t>(reference::element_size(problem_.dtype));
    const epx_tensor tokens =
        token_rows(used.input("tokens", part_of(problem_.tokens.bytes, first_, tokens_, row_bytes_), size));
    const epx_tensor weights =
        route_floats(used.input("weights", part_of(problem_.weights, first_, tokens_, problem_.top_k), 4));
    const epx_tensor recv_tokens = slot_rows(used.output("recv_tokens", slot_bytes(), size));
    const epx_tensor recv_weights = slot_floats(used.output("recv_weights", static_cast<size_t>(rows_) * 4, 4));
    args.tokens = &tokens;
    args.topk_weights = &weights;
    args.recv_tokens = &recv_tokens;
    args.recv_weights = &recv_weights;
    finish(used, epx_dispatch(group_.handle(), &args), "epx_dispatch");
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

  Bytes combine(const Bytes& expert_out_bytes) {
    CallBuffers used = buffers();
    auto args = make_args<epx_combine_args>(used);
    const epx_tensor expert_out = slot_rows(used.input("expert_out", expert_out_bytes, 4));
    const epx_tensor recv_weights = slot_floats(used.input("recv_weights", recv_weights_, 4));
    const epx_tensor out = token_rows(used.output("out", token_bytes(), 4));
    args.expert_out = &expert_out;
    args.recv_weights = &recv_weights;
    args.out = &out;
    finish(used, epx_combine(group_.handle(), &args), "epx_combine");
    return used.read_output(0);
  }

  Bytes combine_bwd(const Bytes& expert_out_bytes) {
    CallBuffers used = buffers();
    auto args = make_args<epx_combine_bwd_args>(used);
    const epx_tensor grad_out =
        token_rows(used.input("grad_out", part_of(problem_.grad_out.bytes, first_, tokens_, row_bytes_), 4));
    const epx_tensor expert_out = slot_rows(used.input("expert_out", expert_out_bytes, 4));
    const epx_tensor recv_weights = slot_floats(used.input("recv_weights", recv_weights_, 4));
    const epx_tensor grad_expert_out = slot_rows(used.output("grad_expert_out", slot_bytes(), 4));
    const epx_tensor grad_recv_weights = slot_floats(used.output("grad_recv_weights", static_cast<size_t>(rows_) * 4, 4));
    args.grad_out = &grad_out;
    args.expert_out = &expert_out;
    args.recv_weights = &recv_weights;
    args.grad_expert_out = &grad_expert_out;
    args.grad_recv_weights = &grad_recv_weights;
    finish(used, epx_combine_bwd(group_.handle(), &args), "epx_combine_bwd");
    grad_recv_weights_ = used.read_output(1);
    return used.read_output(0);
  }

  void dispatch_bwd(const Bytes& grad_recv_bytes, GlobalResult& result) {
    CallBuffers used = buffers();
    auto args = make_args<epx_dispatch_bwd_args>(used);
    const epx_tensor grad_recv = slot_rows(used.input("grad_recv", grad_recv_bytes, 4));
    const epx_tensor grad_recv_weights = slot_floats(used.input("grad_recv_weights", grad_recv_weights_, 4));
    const epx_tensor grad_tokens = token_rows(used.output("grad_tokens", token_bytes(), 4));
    const epx_tensor grad_topk_weights = route_floats(used.output("grad_topk_weights", route_bytes(), 4));
    args.grad_recv = &grad_recv;
    args.grad_recv_weights = &grad_recv_weights;
    args.grad_tokens = &grad_tokens;
    args.grad_topk_weights = &grad_topk_weights;
    finish(used, epx_dispatch_bwd(group_.handle(), &args), "epx_dispatch_bwd");
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
  epx_layer layer_;
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
