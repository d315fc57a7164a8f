// SPDX-License-Identifier: Apache-2.0
// These scenarios run groups of several nodes. On the host transport epx_group_config.ranks_per_node makes them; on the others
// they are as the ranks were launched (epx_test_launch --ranks-per-node), and on one node precision node has the bits of wire.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "runtime/reference/reference.h"
#include "tests/multiprocess/conformance.h"
#include "tests/support/check.h"
#include "tests/support/layer_memory.h"

namespace epx::test {

namespace {

// Returns every number of ranks that a node can have here; 0 leaves it to the library.
std::vector<int> node_sizes() {
  if (!is_on_host()) return {0, ranks_per_node(GroupCase{.num_ranks = launcher().num_ranks()})};
  std::vector<int> sizes{0, launcher().num_ranks()};
  for (int ranks = 1; ranks < launcher().num_ranks(); ++ranks)
    if (launcher().num_ranks() % ranks == 0) sizes.push_back(ranks);
  return sizes;
}

void run_on_nodes(const std::function<void(Case&)>& change) {
  for (const int node_size : node_sizes()) {
    run_changed([&](Case& c) {
      c.group.ranks_per_node = node_size;
      c.group.precision = EPX_COMBINE_NODE;
      change(c);
    });
  }
}

// Returns how many elements of the sums of combine and dispatch_bwd differ between two precisions.
int64_t count_different(const Case& c, epx_combine_precision one, epx_combine_precision other) {
  GroupCase group = c.group;
  group.precision = one;
  const Workload first = make_workload(group, c.layer, c.seed);
  group.precision = other;
  const Workload second = make_workload(group, c.layer, c.seed);
  int64_t different = 0;
  for (size_t rank = 0; rank < first.combine.out.size(); ++rank) {
    different += reference::count_wrong(first.combine.out[rank], second.combine.out[rank], true);
    different += reference::count_wrong(first.dispatch_bwd.grad_tokens[rank], second.dispatch_bwd.grad_tokens[rank], true);
  }
  return different;
}

// Each rank has one expert and as many tokens as there are ranks; the only route of token t goes to rank t. So the slot of a
// token is the number of its rank.
class OneRouteEach {
public:
  OneRouteEach(const RankContext& context, bool has_fixed_rail_tokens) : device_(*context.device) {
    GroupCase shape;
    shape.num_ranks = shape.num_experts = shape.max_tokens = context.num_ranks;
    shape.hidden_dim = kHidden;
    shape.transport = device_.transport();
    if (has_fixed_rail_tokens) shape.fixed_rail_tokens = shape.max_tokens;
    num_ranks_ = context.num_ranks;
    group_ = Group(*context.bootstrap, make_config(shape));
    for (std::byte*& memory : memory_)
      memory = device_.allocate(kTensorBytes);
    layer_.layer = {1, 1};
    const size_t handle_bytes = group_.handle_mem_size(layer_.layer);
    layer_.handle_mem = {device_.allocate(handle_bytes), handle_bytes};
    layer_.stream = device_.stream();
    layer_.num_tokens = layer_.num_rows = num_ranks_;
    layer_.hidden = kHidden;
    layer_.num_local_experts = 1;
    layer_.topk_idx = layer_.grad_out = memory_[0];
    layer_.counts = layer_.expert_out = memory_[1];
    layer_.offsets = layer_.bwd_weights = memory_[2];
    layer_.out = layer_.grad_expert_out = memory_[3];
    ranks_per_node_ = group_.query().ranks_per_node;
  }
  OneRouteEach(const OneRouteEach&) = delete;
  OneRouteEach& operator=(const OneRouteEach&) = delete;
  ~OneRouteEach() {
    group_.reset();
    device_.free(layer_.handle_mem.data());
    for (std::byte* memory : memory_)
      device_.free(memory);
  }

  int ranks_per_node() const { return ranks_per_node_; }

  void prepare() {
    std::vector<int32_t> experts(static_cast<size_t>(num_ranks_));
    std::iota(experts.begin(), experts.end(), 0);
    write(0, experts);
    make(EPX_OP_PREPARE);
  }

  // Prepares twice. A rank that uses the earlier handle memory has another plan than its peers from then on.
  void prepare_with_earlier_handle(bool uses_earlier) {
    prepare();
    std::vector<std::byte> earlier(layer_.handle_mem.size());
    device_.read(earlier.data(), layer_.handle_mem.data(), earlier.size());
    prepare();
    if (uses_earlier) device_.write(layer_.handle_mem.data(), earlier.data(), earlier.size());
  }

  // Each gradient is 1, each weight is `weight`, and the products are with rows of `weight`.
  void combine_bwd(float weight, bool has_products) {
    const auto elements = static_cast<size_t>(num_ranks_) * kHidden;
    write(0, std::vector<float>(elements, 1.0f));
    write(1, std::vector<float>(elements, weight));
    write(2, std::vector<float>(static_cast<size_t>(num_ranks_), weight));
    for (const int out : {3, 4})
      write(out, std::vector<float>(elements, 7.0f));
    layer_.bwd_expert_out = has_products ? memory_[1] : nullptr;
    layer_.grad_recv_weights = has_products ? memory_[4] : nullptr;
    make(EPX_OP_COMBINE_BWD);
  }
  void combine() { make(EPX_OP_COMBINE); }
  uint64_t num_mismatches() const { return group_.status().event_counts[EPX_EVENT_HANDLE_MISMATCH]; }
  // Compares bits, which tell +0 from -0.
  void check_gradient(int source, float expected, bool has_products) const {
    std::vector<float> row(kHidden);
    const size_t row_bytes = row.size() * sizeof(float);
    device_.read(row.data(), memory_[3] + static_cast<size_t>(source) * row_bytes, row_bytes);
    for (const float element : row)
      check(std::bit_cast<uint32_t>(element) == std::bit_cast<uint32_t>(expected),
            "the gradient of a row from rank {} is {}, expected {}", source, element, expected);
    if (!has_products) return;
    float product = 0.0f;
    device_.read(&product, memory_[4] + source * sizeof(float), sizeof(float));
    const float expected_product = kHidden * expected; // of kHidden times 1 and the weight
    check(std::bit_cast<uint32_t>(product) == std::bit_cast<uint32_t>(expected_product),
          "the gradient of a weight of a row from rank {} is {}, expected {}", source, product, expected_product);
  }

private:
  static constexpr int kHidden = 8;
  static constexpr size_t kTensorBytes = 1 << 12;

  void make(epx_operation operation) {
    layer_.call(group_, operation);
    device_.finish();
  }
  template <typename T>
  void write(int which, const std::vector<T>& values) {
    check(values.size() * sizeof(T) <= kTensorBytes, "a tensor has {} values", values.size());
    device_.write(memory_[static_cast<size_t>(which)], values.data(), values.size() * sizeof(T));
  }

  Device& device_;
  int num_ranks_;
  int ranks_per_node_;
  Group group_;
  LayerMemory layer_;
  std::array<std::byte*, 5> memory_{};
};

void disagree_on(epx_operation operation, void (*change)(CallFields&), const std::vector<std::string>& words,
                 const CallFields& common = {}) {
  disagree(operation, operation, change, EPX_ERROR_MISMATCH, words, false, common);
}

} // namespace

TEST_CASE("nodes: each precision, staged and in memory that peers reach") {
  for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT, EPX_COMBINE_NODE}) {
    for (const auto placement : {Placement::plain, Placement::in_place}) {
      run_on_nodes([&](Case& c) {
        c.group.precision = precision;
        c.placement = placement;
        c.iterations = 3;
      });
    }
  }
}

TEST_CASE("nodes: every dtype, odd rows, top-1 to top-64, and experts that the ranks do not divide") {
  for (const auto dtype : {EPX_FLOAT32, EPX_FLOAT16, EPX_BFLOAT16}) {
    for (const int top_k : {1, 3, 64}) {
      run_on_nodes([&](Case& c) {
        c.group.max_tokens = 8;
        c.group.max_top_k = 64;
        c.group.hidden_dim = c.layer.hidden = 33;
        c.layer.combine_hidden = 31;
        c.layer.dtype = c.layer.combine_dtype = dtype;
        c.layer.top_k = top_k;
        c.layer.percent_masked = top_k > 1 ? 10 : 0;
        c.iterations = 1;
      });
    }
  }
  run_on_nodes([](Case& c) { c.group.num_experts = std::max(1, c.group.num_ranks - 1); });
}

TEST_CASE("nodes: one hot expert, ranks without tokens, dropped routes, and too few receive rows") {
  run_on_nodes([](Case& c) { c.layer.routing = RoutingStyle::hot; });
  run_on_nodes([](Case& c) {
    c.layer.tokens = TokenCount::none_on_one;
    c.iterations = 4;
  });
  run_on_nodes([](Case& c) {
    c.group.max_recv_rows = 40;
    c.layer.tokens = TokenCount::full;
    c.layer.routing = RoutingStyle::skewed;
  });
  run_on_nodes([](Case& c) { c.layer.rows = RecvRows::fewer; });
}

TEST_CASE("nodes: more tokens than a chunk of the rails has") {
  for (const auto precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT, EPX_COMBINE_NODE}) {
    run_on_nodes([&](Case& c) {
      c.group.precision = precision;
      c.group.max_tokens = 1030;
      c.group.hidden_dim = c.layer.hidden = c.layer.combine_hidden = 8;
      c.layer.top_k = 2;
      c.layer.tokens = TokenCount::none_on_one;
      c.iterations = 1;
    });
  }
}

TEST_CASE("nodes: the sums of several nodes have other bits than wire, those of one node or of single ranks the same") {
  const int num_ranks = launcher().num_ranks();
  for (const int node_size : node_sizes()) {
    Case c = base_case();
    c.group.ranks_per_node = node_size;
    c.group.precision = EPX_COMBINE_NODE;
    c.group.max_top_k = c.layer.top_k = 8;
    c.layer.routing = RoutingStyle::uniform;
    const bool has_relays = num_nodes(c.group) > 1 && num_nodes(c.group) < num_ranks;
    CHECK((count_different(c, EPX_COMBINE_NODE, EPX_COMBINE_WIRE) > 0) == has_relays);
    CHECK(count_different(c, EPX_COMBINE_NODE, EPX_COMBINE_NODE) == 0);
    run_everywhere(c); // compares the library's bits with these
  }
}

TEST_CASE("nodes: gradients of rows that come from a rank with another plan are +0, whatever their weights are") {
  for (const float weight : {-1.0f, std::numeric_limits<float>::infinity()})
    for (const bool has_products : {false, true})
      for (const bool has_fixed_rail_tokens : {false, true})
        on_every_rank([&](const RankContext& context) {
          OneRouteEach layer(context, has_fixed_rail_tokens);
          const int lost = context.num_ranks - 1;
          layer.prepare_with_earlier_handle(context.rank == lost);
          layer.combine_bwd(weight, has_products);
          const uint64_t reported = layer.num_mismatches();
          check(reported <= 1 && (context.rank != lost || lost == 0 || reported == 1), "the mismatch is reported {} times",
                reported);
          for (int source = 0; source < context.num_ranks; ++source) {
            const bool is_lost = (source == lost) != (context.rank == lost);
            // What a lost rank relays is zero on its node, too.
            const bool is_own_node = source / layer.ranks_per_node() == context.rank / layer.ranks_per_node();
            const bool is_relayed = !is_own_node && source % layer.ranks_per_node() == lost % layer.ranks_per_node() &&
                                    context.rank / layer.ranks_per_node() == lost / layer.ranks_per_node();
            if (is_relayed && !is_lost && context.device->transport() == EPX_TRANSPORT_HOST)
              continue; // which has no relays
            layer.check_gradient(source, is_lost || is_relayed ? 0.0f : weight, has_products);
          }
        });
}

TEST_CASE("nodes: a mismatch that the node and a rail peer show is counted once in each call") {
  constexpr uint64_t kCalls = 3;
  on_every_rank([&](const RankContext& context) {
    OneRouteEach layer(context, false);
    const int lost = context.num_ranks - 1;
    layer.prepare_with_earlier_handle(context.rank == lost);
    for (const bool is_gather : {false, true}) {
      for (uint64_t call = 0; call < kCalls; ++call)
        is_gather ? layer.combine() : layer.combine_bwd(1.0f, false);
      const uint64_t reported = layer.num_mismatches();
      // Every rank of the lost one's node shows it, and so does each of its rail peers.
      const int ranks_per_node = layer.ranks_per_node();
      const bool shows =
          context.rank / ranks_per_node == lost / ranks_per_node || context.rank % ranks_per_node == lost % ranks_per_node;
      const bool is_told = context.num_ranks > 1 && (shows || context.device->transport() == EPX_TRANSPORT_HOST);
      check_equal(reported, is_told ? kCalls : 0,
                  is_gather ? "the mismatches of combine" : "the mismatches of combine_bwd");
    }
  });
}

TEST_CASE(
    "nodes: epx_group_query tells no more SMs than asked for or than the GPU has, and one is too few for several nodes") {
  for (const int least : {0, 1, 2, 3, 9, 20})
    on_every_rank([&](const RankContext& context) {
      Case c = base_case();
      c.group.num_comm_sms = least == 0 ? 0 : least + context.rank; // which may differ
      const bool has_gpus = context.device->transport() != EPX_TRANSPORT_HOST;
      if (has_gpus && num_nodes(c.group) > 1 && least == 1) {
        epx_group_config config = make_config(c.group);
        config.num_comm_sms = c.group.num_comm_sms;
        config.transport = context.device->transport();
        epx_group group = nullptr;
        check_status(epx_group_create(context.bootstrap, &config, &group), EPX_ERROR_INVALID_ARGUMENT, "epx_group_create");
        const std::string sentence = epx_last_error();
        check(contains(sentence, "num_comm_sms is 1") && contains(sentence, "at least 2"), "the sentence is \"{}\"",
              sentence);
        return;
      }
      GroupRun group(context, c.group);
      const int sms = group.view().query().num_comm_sms;
      const int of_gpu = context.device->num_sms();
      const int most = least == 0 ? of_gpu : std::min(c.group.num_comm_sms, of_gpu);
      check(has_gpus ? sms >= 1 && sms <= most : sms == 0, "calls take {} SMs of {}", sms, most);
      LayerRun layer(group, c.layer, Placement::plain, c.seed);
      run_iteration(group, layer, make_workload(c.group, c.layer, c.seed));
    });
}

TEST_CASE("nodes: rank-major calls are refused in groups of several, with the bytes that they would take") {
  for (const int ranks_per_node : node_sizes()) {
    on_every_rank([&](const RankContext& context) {
      Case c = base_case();
      c.group.ranks_per_node = ranks_per_node;
      GroupRun group(context, c.group);
      if (num_nodes(c.group) > 1) {
        const epx_layer layer{3, 1};
        const int64_t row_bytes = 384; // 72 float32, padded to lines
        const std::string bytes = std::to_string(int64_t{c.group.num_ranks} * c.group.max_tokens * row_bytes) + " bytes";
        const auto check_refused = [&](auto args, auto call, const char* name) {
          args.struct_size = sizeof(args);
          args.layer = layer;
          check_status(call(group.handle(), &args), EPX_ERROR_UNSUPPORTED, name);
          const std::string sentence = epx_last_error();
          for (const std::string& part : {std::string(name), std::to_string(num_nodes(c.group)) + " nodes", bytes})
            check(contains(sentence, part), "the sentence \"{}\" has no \"{}\"", sentence, part);
        };
        check_refused(epx_dispatch_rank_major_args{}, epx_dispatch_rank_major, "epx_dispatch_rank_major");
        check_refused(epx_combine_rank_major_args{}, epx_combine_rank_major, "epx_combine_rank_major");
        check_refused(epx_combine_rank_major_bwd_args{}, epx_combine_rank_major_bwd, "epx_combine_rank_major_bwd");
        check_refused(epx_dispatch_rank_major_bwd_args{}, epx_dispatch_rank_major_bwd, "epx_dispatch_rank_major_bwd");
      }
      LayerRun layer(group, c.layer, Placement::random, c.seed); // the group lives on
      run_iteration(group, layer, make_workload(c.group, c.layer, c.seed));
    });
  }
}

TEST_CASE("nodes: ragged_all_to_all is refused in groups of several") {
  for (const int ranks_per_node : node_sizes()) {
    on_every_rank([&](const RankContext& context) {
      Case c = base_case();
      c.group.ranks_per_node = ranks_per_node;
      GroupRun group(context, c.group);
      if (num_nodes(c.group) > 1) {
        std::byte* const memory = context.device->allocate(256);
        const int64_t ranks = context.num_ranks;
        const auto integers = [&](int64_t offset) { return ConstTensor(memory + offset, EPX_INT32, {ranks}); };
        const RaggedAllToAllArgs args{.stream = context.device->stream(),
                                      .operand = {memory, EPX_FLOAT32, {4, 2}},
                                      .output = Tensor(memory + 32, EPX_FLOAT32, {4, 2}),
                                      .input_offsets = integers(64),
                                      .send_sizes = integers(96),
                                      .output_offsets = integers(128),
                                      .recv_sizes = integers(160)};
        epx_status status = EPX_SUCCESS;
        std::string sentence;
        try {
          group.view().ragged_all_to_all(args);
        } catch (const Error& error) {
          status = error.status();
          sentence = error.what();
        }
        context.device->free(memory);
        check_status(status, EPX_ERROR_UNSUPPORTED, "epx_ragged_all_to_all");
        for (const std::string& part :
             {std::string("epx_ragged_all_to_all"), std::to_string(num_nodes(c.group)) + " nodes"})
          check(contains(sentence, part), "the sentence \"{}\" has no \"{}\"", sentence, part);
      }
      LayerRun layer(group, c.layer, Placement::random, c.seed); // the group lives on
      run_iteration(group, layer, make_workload(c.group, c.layer, c.seed));
    });
  }
}

TEST_CASE("nodes: a number of ranks that is not the machine's or does not divide the group's is refused on every rank") {
  on_every_rank([](const RankContext& context) {
    const int num_ranks = context.num_ranks;
    epx_group_config config = make_config(base_case().group);
    config.transport = context.device->transport();
    epx_group group = nullptr;
    config.ranks_per_node = num_ranks + 1;
    check_status(epx_group_create(context.bootstrap, &config, &group), EPX_ERROR_INVALID_ARGUMENT, "epx_group_create");
    std::string sentence = epx_last_error();
    check(contains(sentence, "ranks_per_node is " + std::to_string(num_ranks + 1)) &&
              contains(sentence, std::to_string(num_ranks) + " ranks"),
          "the sentence is \"{}\"", sentence);
    const int found = ranks_per_node(base_case().group) == 0 ? num_ranks : ranks_per_node(base_case().group);
    if (config.transport == EPX_TRANSPORT_HOST || found == 1) return;
    config.ranks_per_node = 1;
    check_status(epx_group_create(context.bootstrap, &config, &group), EPX_ERROR_INVALID_ARGUMENT, "epx_group_create");
    sentence = epx_last_error();
    check(contains(sentence, "ranks_per_node is 1, but the " + std::to_string(num_ranks) + " ranks of the group are on"),
          "the sentence is \"{}\"", sentence);
    const auto plan_for = [&](int node_size) {
      config.ranks_per_node = node_size;
      epx_memory_plan plan = {};
      plan.struct_size = sizeof(plan);
      check_status(epx_group_memory_plan(&config, num_ranks, &plan), EPX_SUCCESS, "epx_group_memory_plan");
      return plan;
    };
    const epx_memory_plan apart = plan_for(1), together = plan_for(num_ranks);
    check(apart.window_bytes < together.window_bytes, "the window has {} bytes with {} nodes and {} with one",
          apart.window_bytes, num_ranks, together.window_bytes);
    check(apart.scratch_bytes > together.scratch_bytes, "the group has {} bytes of its own with {} nodes and {} with one",
          apart.scratch_bytes, num_ranks, together.scratch_bytes);
  });
}

TEST_CASE("nodes: arguments of a call that differ between ranks are reported in the call, with the ranks and the values") {
  if (launcher().num_ranks() == 1) return;
  disagree_on(EPX_OP_PREPARE, [](CallFields& fields) { fields.top_k = 3; }, {"top_k", "passes 2", "passes 3"});
  disagree_on(EPX_OP_PREPARE, [](CallFields& fields) { fields.top_k = 1; }, {"top_k", "passes 2", "passes 1"});
  disagree_on(EPX_OP_PREPARE, [](CallFields& fields) { fields.alignment = 8; }, {"alignment", "passes 4", "passes 8"});
  disagree_on(EPX_OP_PREPARE_DISPATCH, [](CallFields& fields) { fields.top_k = 3; }, {"top_k", "passes 2", "passes 3"});
  disagree_on(EPX_OP_PREPARE_DISPATCH, [](CallFields& fields) { fields.hidden = 7; },
              {"hidden size", "passes 8", "passes 7"});
  disagree_on(EPX_OP_DISPATCH, [](CallFields& fields) { fields.dtype = EPX_BFLOAT16; }, {"dtype", "float32", "bfloat16"});
  disagree_on(EPX_OP_DISPATCH, [](CallFields& fields) { fields.sidecar_bytes = 5; }, {"sidecar", "passes 0", "passes 5"});
  disagree_on(EPX_OP_DISPATCH, [](CallFields& fields) { fields.weights = false; }, {"weights"});
  disagree_on(EPX_OP_COMBINE, [](CallFields& fields) { fields.hidden = 7; }, {"hidden size", "passes 8", "passes 7"});
  disagree_on(EPX_OP_COMBINE_BWD, [](CallFields& fields) { fields.grads = false; }, {"weights"});
  disagree_on(EPX_OP_DISPATCH_BWD, [](CallFields& fields) { fields.grads = false; }, {"weights"});
}

TEST_CASE("nodes: arguments that differ between ranks are reported where no call waits on the host") {
  if (launcher().num_ranks() == 1) return;
  const auto disagree_on_sizes = [](epx_operation operation, void (*change)(CallFields&), const std::string& word) {
    disagree(operation, operation, change, EPX_ERROR_MISMATCH, {word}, true);
  };
  disagree_on_sizes(
      EPX_OP_DISPATCH, [](CallFields& fields) { fields.dtype = EPX_BFLOAT16; }, "dtype");
  disagree_on_sizes(
      EPX_OP_DISPATCH, [](CallFields& fields) { fields.hidden = 12; }, "hidden size");
  disagree_on_sizes(
      EPX_OP_COMBINE, [](CallFields& fields) { fields.hidden = 7; }, "hidden size");
  disagree_on_sizes(
      EPX_OP_DISPATCH_BWD, [](CallFields& fields) { fields.grads = false; }, "weights");
}

TEST_CASE("nodes: formats of a call that differ between ranks are reported in the call, with the ranks and the values") {
  if (launcher().num_ranks() == 1) return;
  CallFields common;
  common.weights = false; // which not all scalings take in combine_bwd
  common.scaling = EPX_SCALING_BLOCK128_POW2;
  for (const auto operation : {EPX_OP_DISPATCH, EPX_OP_PREPARE_DISPATCH, EPX_OP_COMBINE_BWD}) {
    disagree_on(
        operation, [](CallFields& fields) { fields.scaling = EPX_SCALING_NONE; },
        {"format.scaling", "block128_pow2", "none"}, common);
    disagree_on(
        operation, [](CallFields& fields) { fields.amax_floor = 0.5F; }, {"format.amax_floor", "passes 0.5"}, common);
    disagree_on(
        operation, [](CallFields& fields) { fields.scales = EPX_FLOAT8_E8M0; },
        {"dtype of the receive rows", "float32", "float8_e4m3"}, common);
  }
  common.scales = EPX_FLOAT32;
  disagree_on(
      EPX_OP_DISPATCH, [](CallFields& fields) { fields.scales = EPX_FLOAT8_E8M0; },
      {"dtype of the scales", "float32", "float8_e8m0"}, common);
  common.scaling = EPX_SCALING_MX;
  common.scales = EPX_DTYPE_UNSET;
  disagree(
      EPX_OP_DISPATCH, EPX_OP_DISPATCH, [](CallFields& fields) { fields.elements = EPX_FLOAT8_E5M2; }, EPX_ERROR_MISMATCH,
      {"format.dtype", "float8_e4m3", "float8_e5m2"}, true, common);
  for (const auto operation : {EPX_OP_COMBINE, EPX_OP_DISPATCH_BWD})
    disagree_on(
        operation, [](CallFields& fields) { fields.scaling = EPX_SCALING_BLOCK128; }, {"format.scaling", "mx", "block128"},
        common);
}

TEST_CASE("nodes: ranks that make different calls are out of sequence") {
  if (launcher().num_ranks() == 1) return;
  const auto nothing = [](CallFields&) {};
  disagree(EPX_OP_DISPATCH, EPX_OP_COMBINE, nothing, EPX_ERROR_OUT_OF_SEQUENCE, {"dispatch", "combine"});
  disagree(EPX_OP_PREPARE, EPX_OP_PREPARE_DISPATCH, nothing, EPX_ERROR_OUT_OF_SEQUENCE, {"prepare", "prepare_dispatch"});
  // prepare gathers counts of all ranks while movements exchange records with rail peers, so neither gets the other's fields.
  disagree(EPX_OP_PREPARE, EPX_OP_DISPATCH, nothing, EPX_ERROR_OUT_OF_SEQUENCE, {"prepare", "dispatch"});
  disagree(EPX_OP_COMBINE, EPX_OP_PREPARE, nothing, EPX_ERROR_OUT_OF_SEQUENCE, {"combine", "prepare"});
}

} // namespace epx::test
