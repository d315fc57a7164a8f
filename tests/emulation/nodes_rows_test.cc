// SPDX-License-Identifier: Apache-2.0
// Tests of the kernels that begin a movement of a group of several nodes, and that take rows to and from the rails, what the
// conformance suite on several nodes cannot see: records that ask for too much, damage, sums of -0, rows of ranks with another
// plan, and what holds rows back. All ranks are in this thread: plans are made from the oracle's slots by plain loops, rails
// are memcpy, and what the kernels of a leg would stage is computed by plain loops, too.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>
#include <doctest/doctest.h>

#include "base/dtypes.h"
#include "runtime/nodes/multi_node_kernels.h"
#include "runtime/nodes/rail_records.h"
#include "runtime/reference/reference.h"
#include "tests/support/rng.h"

namespace epx::cuda {
namespace {

constexpr uint64_t kGroupId = 0x1234'5678'9abc'def0;
constexpr uint64_t kPlanId = 0x1'0000'0007; // of more than 32 bits
constexpr int kSms = 3;
constexpr size_t kGuardBytes = 4096; // around memory that kernels write

struct Case {
  int nodes, ranks_per_node;
  int top_k;
  int hidden;
  epx_dtype dtype;
  epx_combine_precision precision;
  int max_tokens = 11;
  int chunk_tokens = 4;
  WireFormat format{};
};

struct Guarded {
  explicit Guarded(size_t size) : bytes(size + 2 * kGuardBytes, std::byte{0x5a}) {}
  std::byte* data() { return bytes.data() + kGuardBytes; }
  size_t size() const { return bytes.size() - 2 * kGuardBytes; }
  bool is_intact() const {
    const auto is_guard = [](std::byte byte) { return byte == std::byte{0x5a}; };
    return std::all_of(bytes.begin(), bytes.begin() + kGuardBytes, is_guard) &&
           std::all_of(bytes.end() - kGuardBytes, bytes.end(), is_guard);
  }

  std::vector<std::byte> bytes;
};

struct Area {
  Area(const MultiNodeShape& shape, const Case& c, int64_t sidecar_bytes)
      : node_rows(shape.padded_tokens() * shape.max_back_rows(c.top_k)), node_weights(shape.padded_tokens() * c.top_k),
        node_tokens(shape.padded_tokens()),
        rows(static_cast<size_t>(c.nodes * node_rows * rail_row_bytes(c.format, c.dtype, c.hidden))),
        weights(static_cast<size_t>(c.nodes * node_weights) * sizeof(float)),
        sidecars(static_cast<size_t>(c.nodes * node_tokens * sidecar_bytes)) {}

  RailArea view() {
    return {rows.data(), reinterpret_cast<float*>(weights.data()), sidecars.data(), node_rows, node_weights, node_tokens};
  }
  bool is_intact() const { return rows.is_intact() && weights.is_intact() && sidecars.is_intact(); }

  int64_t node_rows, node_weights, node_tokens;
  Guarded rows, weights, sidecars;
};

constexpr int64_t kSidecarBytes = 5;

// One rank with all its memory.
struct Rank {
  Rank(const Case& c, const GroupShape& group, int number)
      : shape(make_multi_node_shape(group, number)), has_shape(set_chunk(c)),
        layout(make_multi_node_handle_layout(shape, c.top_k)), handle(static_cast<size_t>(layout.total_bytes)),
        headers(static_cast<size_t>(shape.num_legs())), sent_records(static_cast<size_t>(c.nodes * record_words(shape))),
        received_records(sent_records), to_rails(shape, c, kSidecarBytes), from_rails(shape, c, kSidecarBytes) {
    context.shape = shape.node;
    context.layout = make_window_layout(shape.node, WindowAccess::by_kernels);
    context.group_id = kGroupId;
    context.rank = shape.index_in_node();
    context.window_access = WindowAccess::by_kernels;
    window.resize(static_cast<size_t>(context.layout.total_bytes) + 256);
    for (const Region& region :
         {context.layout.gather_rows, context.layout.gather_weights}) // NaN, unless a rank stages there
      std::fill_n(window_base() + region.offset, region.bytes, std::byte{0xff});
    device_state.begun.sequence = 40 + static_cast<uint64_t>(number);
  }

  bool set_chunk(const Case& c) {
    shape.node.max_tokens_per_rank = c.chunk_tokens;
    return true;
  }
  MultiNodeCall device() {
    return {
        {shape, kGroupId, &state, &progress, headers.data(), sent_records.data(), received_records.data(), &device_state},
        layout};
  }
  // Where the plan of a leg lies, which must outlive the launch.
  void set_leg(MovementCall& call, int node, int chunk) {
    plan_of_leg = leg_layout(layout, shape, call.top_k, shape.leg(node, chunk));
    call.layout = &plan_of_leg;
    call.checked_header = reinterpret_cast<const std::byte*>(headers.data() + shape.leg(node, chunk));
  }
  std::byte* window_base() {
    return reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(window.data()) + 255) / 256 * 256);
  }
  DeviceGroup node_group() {
    DeviceGroup group{};
    group.context = context;
    group.bases[context.rank] = window_base();
    group.state = &device_state;
    group.record = record.get();
    group.host_abort_record = &host_abort_record;
    group.timeout_ns = 1'000'000; // no host ends the group here
    return group;
  }
  MultiNodeHandleWriter plan() { return {handle.data(), layout, shape}; }
  bool is_intact() const { return to_rails.is_intact() && from_rails.is_intact(); }

  MultiNodeShape shape;
  bool has_shape;
  MultiNodeHandleLayout layout;
  HandleLayout plan_of_leg{};
  std::vector<std::byte> handle;
  GroupContext context{};
  std::vector<std::byte> window;
  MultiNodeState state{};
  MultiNodeProgress progress{};
  DeviceState device_state{};
  std::unique_ptr<StatusRecord> record = std::make_unique<StatusRecord>();
  uint64_t host_abort_record = 0;
  std::vector<HandleHeader> headers;
  std::vector<int32_t> sent_records, received_records;
  Area to_rails, from_rails;
};

void finish(cudaError_t error) {
  REQUIRE(error == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
}

class World {
public:
  World(const Case& chosen, uint64_t seed) : c(chosen), rng(seed) {
    group.num_ranks = c.nodes * c.ranks_per_node;
    group.ranks_per_node = c.ranks_per_node;
    group.num_experts = 2 * group.num_ranks - 1;
    group.max_tokens_per_rank = c.max_tokens;
    group.hidden_dim = c.hidden;
    group.max_top_k = c.top_k;
    group.max_alignment = 1;
    group.max_sidecar_bytes = static_cast<int>(kSidecarBytes);
    group.max_recv_tokens = int64_t{c.max_tokens} * c.top_k; // some overflow
    group.max_token_dtype = c.dtype;
    group.precision = c.precision;
    const reference::Problem problem{group.num_experts, c.top_k, 1, group.max_recv_tokens, c.precision, c.ranks_per_node};
    std::vector<reference::Routing> routings;
    for (int r = 0; r < group.num_ranks; ++r) {
      reference::Routing routing;
      routing.num_tokens = r == 1 ? 0 : rng.between(1, c.max_tokens);
      for (int64_t i = 0; i < routing.num_tokens * c.top_k; ++i)
        routing.topk_idx.push_back(rng.chance(15) ? -1 : rng.below(group.num_experts));
      routings.push_back(routing);
    }
    plan = reference::prepare(problem, routings);
    for (int r = 0; r < group.num_ranks; ++r) {
      ranks.push_back(std::make_unique<Rank>(c, group, r));
      recv_rows.push_back(std::max<int64_t>(0, plan.ranks[at(r)].offsets.back() - rng.below(3))); // some late drops
    }
    for (auto& rank : ranks)
      write_home(*rank);
    for (auto& rank : ranks)
      write_relay(*rank);
  }

  static size_t at(int64_t index) { return static_cast<size_t>(index); }
  int num_ranks() const { return group.num_ranks; }
  int64_t num_tokens(int rank) const { return plan.ranks[at(rank)].num_tokens; }
  int rail_peer(const Rank& rank, int node) const { return node * c.ranks_per_node + rank.shape.index_in_node(); }
  int64_t bytes_of_row() const { return row_bytes(c.dtype, c.hidden); }
  // The route of a token as prepare has kept it, or slot -1.
  Route route(int rank, int64_t token, int k) const {
    const size_t i = at(token * c.top_k + k);
    const int32_t slot = plan.ranks[at(rank)].slot[i];
    return {slot, slot < 0 ? -1 : plan.ranks[at(rank)].expert_rank[i], ordinal(rank, token, k)};
  }
  bool is_live(const Route& route) const { return route.slot >= 0 && route.slot < recv_rows[at(route.rank)]; }

  MovementCall call(int rank, epx_operation operation) {
    MovementCall call{};
    call.operation = operation;
    call.top_k = c.top_k;
    call.alignment = 1;
    call.handle_mem = ranks[at(rank)]->handle.data();
    call.checked_header = call.handle_mem;
    call.num_tokens = num_tokens(rank);
    call.recv_rows = recv_rows[at(rank)];
    call.hidden = c.hidden;
    call.dtype = call.recv_dtype = c.dtype;
    call.format = c.format;
    return call;
  }
  // Of rows that a call quantises.
  FormatTensors format_tensors() const {
    FormatTensors tensors;
    if (!c.format.is_quantised()) return tensors;
    const auto scale_bytes = static_cast<int>(single_element_bytes(c.format.scales));
    tensors.recv_layout = {EPX_SCALES_ROWS, scale_bytes, c.format.num_scales(c.hidden), 1};
    return tensors;
  }

  AgreedFields agreed_fields(epx_operation operation) const {
    return {.operation = operation, .top_k = c.top_k, .alignment = 1, .hidden = c.hidden, .dtype = c.dtype};
  }
  void exchange_records(epx_operation operation) {
    for (int r = 0; r < num_ranks(); ++r)
      finish(launch_post_records(ranks[at(r)]->device(), call(r, operation), agreed_fields(operation), nullptr));
    for (auto& rank : ranks)
      for (int node = 0; node < c.nodes; ++node) {
        if (node == rank->shape.own_node) continue;
        const int64_t words = record_words(rank->shape);
        const Rank& peer = *ranks[at(rail_peer(*rank, node))];
        std::copy_n(peer.sent_records.begin() + rank->shape.own_node * words, words,
                    rank->received_records.begin() + node * words);
      }
  }
  void open_legs(epx_operation operation, bool has_fixed_sizes) {
    for (int r = 0; r < num_ranks(); ++r)
      finish(launch_open_legs(ranks[at(r)]->node_group(), ranks[at(r)]->device(), call(r, operation), has_fixed_sizes,
                              nullptr));
  }

  Case c;
  test::Rng rng;
  GroupShape group{};
  reference::Plan plan;
  std::vector<std::unique_ptr<Rank>> ranks;
  std::vector<int64_t> recv_rows;

private:
  int ordinal(int rank, int64_t token, int k) const {
    std::vector<bool> goes_to(at(num_ranks()));
    for (int other = 0; other < c.top_k; ++other)
      if (const size_t i = at(token * c.top_k + other); plan.ranks[at(rank)].slot[i] >= 0)
        goes_to[at(plan.ranks[at(rank)].expert_rank[i])] = true;
    const size_t i = at(token * c.top_k + k);
    if (plan.ranks[at(rank)].slot[i] < 0) return 0;
    const int32_t owner = plan.ranks[at(rank)].expert_rank[i];
    const int32_t first = group.node_of(owner) * c.ranks_per_node;
    return static_cast<int>(std::count(goes_to.begin() + first, goes_to.begin() + owner, true));
  }

  void write_header(Rank& rank) {
    HandleHeader& header = *rank.plan().header;
    header = {};
    header.magic = kHandleMagic;
    header.group_id = kGroupId;
    header.plan_id = kPlanId;
    header.num_tokens = num_tokens(rank.shape.rank);
    header.rows_in_use = plan.ranks[at(rank.shape.rank)].offsets.back();
    header.top_k = c.top_k;
    header.alignment = 1;
    header.rank = rank.shape.rank;
    header.rows_per_source = kExpertMajor;
    header.checksum = header_checksum(header);
  }
  void write_home(Rank& rank) {
    write_header(rank);
    const MultiNodeHandleWriter to = rank.plan();
    const int r = rank.shape.rank;
    for (int64_t i = 0; i < rank.shape.padded_tokens() * c.top_k; ++i)
      to.home_routes[i] = {-1, -1, 0};
    for (int64_t token = 0; token < num_tokens(r); ++token)
      for (int k = 0; k < c.top_k; ++k)
        to.home_routes[token * c.top_k + k] = route(r, token, k);
    for (int node = 0; node < c.nodes; ++node) {
      std::fill_n(to.sent_tokens(node), rank.shape.padded_tokens(), -1);
      std::fill_n(to.positions(node), rank.shape.padded_tokens(), -1);
      int32_t sent = 0, rows = 0;
      for (int64_t token = 0; token < num_tokens(r); ++token) {
        int32_t routes = 0, partials = 0;
        for (int k = 0; k < c.top_k; ++k)
          if (const Route found = route(r, token, k); found.slot >= 0 && group.node_of(found.rank) == node) {
            ++routes;
            partials = std::max(partials, found.rank_ordinal + 1);
          }
        if (node != rank.shape.own_node && routes == 0) continue;
        to.sent_tokens(node)[sent] = static_cast<int32_t>(token);
        if (routes > 0) to.positions(node)[token] = sent;
        to.home_back_rows(node)[sent++] = rows;
        rows += c.precision == EPX_COMBINE_EXACT ? routes : partials;
      }
      to.sent_counts[node] = sent;
      std::fill(to.home_back_rows(node) + sent, to.home_back_rows(node) + rank.shape.padded_tokens() + 1, rows);
    }
  }
  // The tables that travel by rail in prepare.
  void write_relay(Rank& rank) {
    const MultiNodeHandleWriter to = rank.plan();
    for (int node = 0; node < c.nodes; ++node) {
      Rank& home = *ranks[at(rail_peer(rank, node))];
      const MultiNodeHandleWriter from = home.plan();
      const int own = rank.shape.own_node;
      to.relay_counts[node] = from.sent_counts[own];
      std::copy_n(from.home_back_rows(own), rank.shape.padded_tokens() + 1, to.relay_back_rows(node));
      for (int64_t j = 0; j < rank.shape.padded_tokens(); ++j)
        for (int k = 0; k < c.top_k; ++k) {
          Route& leg_route = to.leg_routes[(node * rank.shape.padded_tokens() + j) * c.top_k + k];
          leg_route = {-1, -1, 0};
          if (j >= from.sent_counts[own]) continue;
          const Route found = route(home.shape.rank, from.sent_tokens(own)[j], k);
          if (found.slot >= 0 && group.node_of(found.rank) == own)
            leg_route = {found.slot, found.rank % c.ranks_per_node, found.rank_ordinal};
        }
    }
  }
};

reference::Matrix random_matrix(test::Rng& rng, epx_dtype dtype, int64_t rows, int64_t cols) {
  reference::Matrix matrix{dtype, rows, cols, {}};
  matrix.bytes.resize(static_cast<size_t>(row_bytes(dtype, cols) * rows));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t col = 0; col < cols; ++col)
      reference::store(matrix, row, col,
                       std::ldexp(static_cast<float>(rng.between(-999, 999)), static_cast<int>(rng.between(-14, -6))));
  return matrix;
}
std::vector<float> random_floats(test::Rng& rng, int64_t count) {
  std::vector<float> floats;
  for (int64_t i = 0; i < count; ++i)
    floats.push_back(static_cast<float>(rng.between(-400, 400)) / 256.0f);
  return floats;
}

// What combine or dispatch_bwd of all ranks takes and yields.
struct GatherTensors {
  std::vector<reference::Matrix> rows;     // [N, H]
  std::vector<std::vector<float>> weights; // [N]
  bool carries_weights;                    // dispatch_bwd
};

// Computes one row, sum by sum: fp32 steps by fma from +0, rounded once.
class RowSum {
public:
  explicit RowSum(const Case& c) : c_(c), acc_(static_cast<size_t>(c.hidden)) {}
  void add(const reference::Matrix& rows, int64_t row, float weight) {
    for (int h = 0; h < c_.hidden; ++h)
      acc_[static_cast<size_t>(h)] = std::fmaf(weight, reference::load(rows, row, h), acc_[static_cast<size_t>(h)]);
  }
  reference::Matrix rounded() const {
    reference::Matrix row{c_.dtype, 1, c_.hidden,
                          std::vector<std::byte>(static_cast<size_t>(row_bytes(c_.dtype, c_.hidden)))};
    for (int h = 0; h < c_.hidden; ++h)
      reference::store(row, 0, h, acc_[static_cast<size_t>(h)]);
    return row;
  }

private:
  const Case& c_;
  std::vector<float> acc_;
};

// Stores the descriptors of all ranks of the node in the window of `relay`, as they are behind a leg's call.
void write_descriptors(const World& world, Rank& relay, const HandleHeader& header, uint64_t sequence) {
  auto* const descriptors =
      reinterpret_cast<LlCallDescriptor*>(relay.window_base() + relay.context.layout.call_descriptors.offset) +
      static_cast<int64_t>(sequence & 1) * world.c.ranks_per_node;
  for (int i = 0; i < world.c.ranks_per_node; ++i) {
    CallDescriptor descriptor{};
    descriptor.plan_id = header.plan_id;
    descriptor.num_tokens = header.num_tokens;
    descriptor.recv_rows = world.recv_rows[World::at(relay.shape.first_rank() + i)];
    for (int word = 0; word < kNumDescriptorWords; ++word)
      descriptors[i].words[word] = {reinterpret_cast<const uint64_t*>(&descriptor)[word], sequence};
  }
}

// A gather of all ranks, in which the legs' own kernels are plain loops.
class GatherRun {
public:
  GatherRun(World& world, const GatherTensors& tensors, epx_operation operation)
      : world_(world), c_(world.c), tensors_(tensors), operation_(operation) {
    world.exchange_records(operation);
    world.open_legs(operation, false);
    for (auto& rank : world.ranks)
      for (int node = 0; node < c_.nodes; ++node)
        for (int chunk = 0; chunk < rank->shape.num_chunks(); ++chunk)
          make_leg(*rank, node, chunk);
    for (auto& home : world.ranks)
      for (int node = 0; node < c_.nodes; ++node)
        if (node != home->shape.own_node) send_home(*world.ranks[World::at(world.rail_peer(*home, node))], *home);
    for (int r = 0; r < world.num_ranks(); ++r) {
      const auto out_bytes = static_cast<size_t>(world.num_tokens(r) * world.bytes_of_row());
      outs.push_back(std::make_unique<Guarded>(out_bytes));
      carried.push_back(random_floats(world.rng, world.num_tokens(r) * c_.top_k));
      const bool is_weighted = c_.precision == EPX_COMBINE_EXACT && !tensors.carries_weights;
      const SumCall sum{world.call(r, operation), is_weighted, world.ranks[World::at(r)]->from_rails.view(),
                        outs.back()->data(), tensors.carries_weights ? carried.back().data() : nullptr};
      finish(launch_sum_rows(world.ranks[World::at(r)]->device(), sum, kSms, nullptr));
    }
  }

  std::vector<std::unique_ptr<Guarded>> outs; // [T, H]
  std::vector<std::vector<float>> carried;    // [T, K]

private:
  float weight_of(const Route& route) const {
    return tensors_.carries_weights ? 1.0f : tensors_.weights[World::at(route.rank)][World::at(route.slot)];
  }

  // What the leg's kernels leave on the relay.
  void make_leg(Rank& relay, int node, int chunk) {
    const int64_t sequence = static_cast<int64_t>(++relay.device_state.begun.sequence);
    const HandleHeader& header = relay.headers[World::at(relay.shape.leg(node, chunk))];
    const int home = world_.rail_peer(relay, node);
    RailArea area = (node == relay.shape.own_node ? relay.from_rails : relay.to_rails).view();
    write_descriptors(world_, relay, header, static_cast<uint64_t>(sequence));
    const Rank& home_rank = *world_.ranks[World::at(home)];
    const MultiNodeHandleReader plan(home_rank.handle.data(), home_rank.layout, home_rank.shape);
    for (int64_t i = 0; i < header.num_tokens; ++i) {
      const int64_t j = int64_t{chunk} * c_.chunk_tokens + i;
      const int32_t token = plan.sent_tokens(relay.shape.own_node)[j];
      if (j < plan.sent_counts[relay.shape.own_node]) stage(relay, area, node, home, token, i, j);
    }
    if (c_.precision == EPX_COMBINE_NODE) return;
    MovementCall call = world_.call(relay.shape.rank, operation_);
    call.num_tokens = header.num_tokens;
    relay.set_leg(call, node, chunk);
    const float* const weights = tensors_.carries_weights ? nullptr : tensors_.weights[World::at(relay.shape.rank)].data();
    finish(launch_forward_rows(relay.node_group(), relay.device(),
                               {call, tensors_.rows[World::at(relay.shape.rank)].bytes.data(), weights, area, node, chunk},
                               kSms, nullptr));
  }

  // Stages token `token` of rank `home`, the i-th of the leg and the j-th of those that go to the relay's node.
  void stage(Rank& relay, const RailArea& area, int node, int home, int64_t token, int64_t i, int64_t j) {
    const WindowLayout& layout = relay.context.layout;
    const auto staged_row = [&](int64_t row) {
      return relay.window_base() + layout.gather_rows.offset + row * layout.row_stride;
    };
    auto* const staged_weights = reinterpret_cast<float*>(relay.window_base() + layout.gather_weights.offset);
    RowSum of_node(c_);
    for (int owner = relay.shape.first_rank(); owner < relay.shape.first_rank() + c_.ranks_per_node; ++owner) {
      RowSum partial(c_);
      int ordinal = -1;
      for (int k = 0; k < c_.top_k; ++k) {
        const Route route = world_.route(home, token, k);
        if (!world_.is_live(route) || route.rank != owner) continue;
        ordinal = route.rank_ordinal;
        const reference::Matrix& rows = tensors_.rows[World::at(owner)];
        partial.add(rows, route.slot, weight_of(route));
        if (owner == relay.shape.rank || c_.precision != EPX_COMBINE_EXACT) continue;
        std::memcpy(staged_row(route_index(i, c_.top_k, k)), rows.bytes.data() + route.slot * world_.bytes_of_row(),
                    World::at(world_.bytes_of_row()));
        staged_weights[route_index(i, c_.top_k, k)] = weight_of(route);
      }
      if (ordinal < 0) continue;
      const reference::Matrix row = partial.rounded();
      of_node.add(row, 0, 1.0f);
      if (owner != relay.shape.rank && c_.precision == EPX_COMBINE_WIRE)
        std::memcpy(staged_row(partial_staging_row(relay.shape.node, i, c_.top_k, ordinal)), row.bytes.data(),
                    row.bytes.size());
    }
    if (c_.precision == EPX_COMBINE_NODE)
      std::memcpy(area.rows_of(node, world_.bytes_of_row()) + j * world_.bytes_of_row(), of_node.rounded().bytes.data(),
                  World::at(world_.bytes_of_row()));
    if (!tensors_.carries_weights) return;
    for (int k = 0; k < c_.top_k; ++k) { // which the leg's gather stores there itself
      const Route route = world_.route(home, token, k);
      const bool comes = world_.is_live(route) && world_.group.node_of(route.rank) == relay.shape.own_node;
      area.weights_of(node)[route_index(j, c_.top_k, k)] =
          comes ? tensors_.weights[World::at(route.rank)][World::at(route.slot)] : 0.0f;
    }
  }

  // The rail: as many rows as the records say.
  void send_home(Rank& relay, Rank& home) {
    const int to = home.shape.own_node, from = relay.shape.own_node;
    const int last = relay.shape.num_chunks() - 1;
    const RailRecords sent(relay.shape, relay.received_records.data()), expected(home.shape, home.sent_records.data());
    const int64_t rows = sent.back_rows(to, c_.top_k, last), tokens = sent.num_tokens(to);
    REQUIRE(rows == expected.back_rows(from, c_.top_k, last));
    REQUIRE(tokens == expected.num_tokens(from));
    std::memcpy(home.from_rails.view().rows_of(from, world_.bytes_of_row()),
                relay.to_rails.view().rows_of(to, world_.bytes_of_row()), World::at(rows * world_.bytes_of_row()));
    const int64_t weights = tensors_.carries_weights ? tokens * c_.top_k : c_.precision == EPX_COMBINE_EXACT ? rows : 0;
    std::memcpy(home.from_rails.view().weights_of(from), relay.to_rails.view().weights_of(to),
                World::at(weights) * sizeof(float));
  }

  World& world_;
  const Case& c_;
  const GatherTensors& tensors_;
  epx_operation operation_;
};

GatherTensors random_tensors(World& world, bool carries_weights) {
  GatherTensors tensors{{}, {}, carries_weights};
  for (const int64_t rows : world.recv_rows) {
    tensors.rows.push_back(random_matrix(world.rng, world.c.dtype, rows, world.c.hidden));
    tensors.weights.push_back(random_floats(world.rng, rows));
  }
  return tensors;
}

TEST_CASE("a route that was dropped changes no sum, not even one of -0") {
  World world({2, 2, 4, 9, EPX_FLOAT32, EPX_COMBINE_EXACT}, 77);
  GatherTensors tensors = random_tensors(world, false);
  for (reference::Matrix& rows : tensors.rows)
    for (int64_t i = 0; i < rows.rows * rows.cols; ++i)
      reference::store(rows, i / rows.cols, i % rows.cols, -1e-30f);
  for (std::vector<float>& weights : tensors.weights)
    std::fill(weights.begin(), weights.end(), 1e-30f); // the products underflow to -0
  const GatherRun run(world, tensors, EPX_OP_COMBINE);
  std::vector<reference::Matrix> outs;
  for (int r = 0; r < world.num_ranks(); ++r)
    outs.push_back({world.c.dtype, world.num_tokens(r), world.c.hidden,
                    std::vector<std::byte>(World::at(world.num_tokens(r) * world.bytes_of_row()))});
  reference::combine(world.plan, {tensors.rows, tensors.weights, outs});
  for (int r = 0; r < world.num_ranks(); ++r) {
    CAPTURE(r);
    const reference::Matrix& expected = outs[World::at(r)];
    CHECK(std::memcmp(run.outs[World::at(r)]->data(), expected.bytes.data(), expected.bytes.size()) == 0);
    CHECK(run.outs[World::at(r)]->is_intact());
    CHECK(world.ranks[World::at(r)]->is_intact());
  }
}

TEST_CASE("records say what prepare has found, and each leg has a header") {
  for (const bool has_fixed_sizes : {false, true}) {
    CAPTURE(has_fixed_sizes);
    World world({3, 2, 3, 8, EPX_FLOAT32, EPX_COMBINE_WIRE}, 5);
    world.exchange_records(EPX_OP_COMBINE);
    world.open_legs(EPX_OP_COMBINE, has_fixed_sizes);
    for (auto& rank : world.ranks) {
      CAPTURE(rank->shape.rank);
      const RailRecords sent(rank->shape, rank->sent_records.data()), received(rank->shape, rank->received_records.data());
      const MultiNodeHandleWriter plan = rank->plan();
      for (int node = 0; node < world.c.nodes; ++node) {
        CAPTURE(node);
        const Rank& peer = *world.ranks[World::at(world.rail_peer(*rank, node))];
        CHECK(sent.plan_id(node) == kPlanId);
        CHECK(sent.is_active(node));
        CHECK(sent.num_tokens(node) == plan.sent_counts[node]);
        CHECK(received.num_tokens(node) == plan.relay_counts[node]);
        for (int chunk = 0; chunk < rank->shape.num_chunks(); ++chunk) {
          CAPTURE(chunk);
          const int64_t end = int64_t{chunk + 1} * world.c.chunk_tokens;
          CHECK(sent.back_rows(node, world.c.top_k, chunk) == plan.home_back_rows(node)[end]);
          CHECK(received.back_rows(node, world.c.top_k, chunk) == plan.relay_back_rows(node)[end]);
          const HandleHeader& header = rank->headers[World::at(rank->shape.leg(node, chunk))];
          const bool has_all = has_fixed_sizes && node != rank->shape.own_node;
          const int64_t tokens = has_all ? world.c.max_tokens : world.num_tokens(rank->shape.rank);
          const int64_t from_peer = has_all || node == rank->shape.own_node ? tokens : plan.relay_counts[node];
          CHECK(header.num_tokens == std::clamp<int64_t>(from_peer - end + world.c.chunk_tokens, 0, world.c.chunk_tokens));
          const bool is_first = node == rank->shape.own_node && chunk == 0;
          CHECK(header.rows_in_use == (is_first ? plan.header->rows_in_use : 0));
          CHECK(header.checksum == header_checksum(header));
          CHECK(header.magic == kHandleMagic);
          CHECK(header.plan_id == kPlanId);
          CHECK(header.rank == rank->context.rank);
        }
        CHECK(peer.record->num_events == 0);
      }
    }
  }
}

void reseal(HandleHeader& header) {
  header.checksum = header_checksum(header);
}

TEST_CASE("what a rail peer with another plan sends home takes no step in sums") {
  for (const epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT, EPX_COMBINE_NODE}) {
    CAPTURE(precision);
    World world({2, 2, 3, 24, EPX_FLOAT32, precision}, 93);
    HandleHeader& lost = *world.ranks[3]->plan().header;
    lost.plan_id = kPlanId + 1;
    reseal(lost);
    const GatherTensors tensors = random_tensors(world, true);
    const GatherRun run(world, tensors, EPX_OP_DISPATCH_BWD);
    for (const int r : {1, 3}) // rail peers of each other
      for (int64_t token = 0; token < world.num_tokens(r); ++token) {
        CAPTURE(r);
        CAPTURE(token);
        RowSum sum(world.c);
        const int first = world.ranks[World::at(r)]->shape.first_rank();
        for (int owner = first; owner < first + 2; ++owner)
          for (int k = 0; k < world.c.top_k; ++k) {
            const Route route = world.route(r, token, k);
            if (route.slot >= 0 && world.group.node_of(route.rank) != world.group.node_of(r))
              CHECK(run.carried[World::at(r)][World::at(token * world.c.top_k + k)] == 0.0f);
            if (world.is_live(route) && route.rank == owner) sum.add(tensors.rows[World::at(owner)], route.slot, 1.0f);
          }
        // Elements are few bits wide, so that sums are exact in any order.
        CHECK(std::memcmp(run.outs[World::at(r)]->data() + token * world.bytes_of_row(), sum.rounded().bytes.data(),
                          World::at(world.bytes_of_row())) == 0);
      }
  }
}

TEST_CASE("a rank whose handle memory does not fit the call takes part without routes") {
  const auto spoil = [](int kind, HandleHeader& header) {
    if (kind == 0) header.group_id ^= 1;
    if (kind == 1) ++header.rank;
    if (kind == 2) ++header.top_k;
    if (kind == 3) ++header.alignment;
    if (kind == 4) --header.num_tokens;
    if (kind == 5) header.rows_per_source = 3;
    if (kind == 6) header.rows_in_use = -1;
    if (kind == 7) header.ll_tokens = 1;
    if (kind == 8) header.magic ^= 1;
    reseal(header);
    if (kind == 9) header.checksum ^= 1;
  };
  for (int kind = 0; kind < 10; ++kind) {
    CAPTURE(kind);
    World world({2, 1, 2, 8, EPX_FLOAT32, EPX_COMBINE_NODE}, 92);
    spoil(kind, *world.ranks[0]->plan().header);
    GatherTensors tensors = random_tensors(world, true);
    const GatherRun run(world, tensors, EPX_OP_DISPATCH_BWD);
    Rank& rank = *world.ranks[0];
    CHECK(rank.state.header.magic == 0);
    for (const HandleHeader& header : rank.headers)
      CHECK(header.magic == 0);
    const RailRecords sent(rank.shape, rank.sent_records.data());
    CHECK(sent.plan_id(1) == 0);
    CHECK(sent.num_tokens(1) == 0);
    CHECK(rank.record->num_events == 0); // the first leg reports it
    const auto is_untouched = [](std::byte byte) { return byte == std::byte{0x5a}; };
    CHECK(std::all_of(run.outs[0]->bytes.begin(), run.outs[0]->bytes.end(), is_untouched));
    const Rank& other = *world.ranks[1];
    CHECK(other.headers[World::at(other.shape.leg(0, 0))].num_tokens == world.c.chunk_tokens);
    CHECK(other.record->num_events == 0); // the rank itself reports it
  }
}

void forward_with_descriptors(World& world, Rank& rank, const GatherTensors& tensors, int node, int chunk) {
  if (world.c.precision == EPX_COMBINE_NODE) return;
  const HandleHeader& header = rank.headers[World::at(rank.shape.leg(node, chunk))];
  write_descriptors(world, rank, header, ++rank.device_state.begun.sequence);
  MovementCall call = world.call(rank.shape.rank, EPX_OP_COMBINE);
  call.num_tokens = header.num_tokens;
  rank.set_leg(call, node, chunk);
  const auto r = World::at(rank.shape.rank);
  const RailArea area = (node == rank.shape.own_node ? rank.from_rails : rank.to_rails).view();
  finish(launch_forward_rows(rank.node_group(), rank.device(),
                             {call, tensors.rows[r].bytes.data(), tensors.weights[r].data(), area, node, chunk}, kSms,
                             nullptr));
}

TEST_CASE("damaged handle memory and records never lead out of the areas") {
  constexpr WireFormat kFormats[] = {{}, // of rows in precision wire
                                     {EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0F},
                                     {EPX_SCALING_MX, EPX_FLOAT8_E5M2, EPX_FLOAT8_E8M0, 0.0F}};
  for (uint64_t seed = 0; seed < 18; ++seed) {
    CAPTURE(seed);
    Case c{
        2, 2, 3, 17, EPX_BFLOAT16, seed % 3 == 0 ? EPX_COMBINE_NODE : seed % 3 == 1 ? EPX_COMBINE_WIRE : EPX_COMBINE_EXACT};
    if (c.precision == EPX_COMBINE_WIRE) c.format = kFormats[seed / 3 % 3];
    World world(c, 300 + seed);
    const GatherTensors tensors = random_tensors(world, seed % 2 == 0);
    for (auto& rank : world.ranks) {
      auto* const words = reinterpret_cast<int32_t*>(rank->handle.data());
      const auto first = static_cast<int64_t>(sizeof(HandleHeader) / sizeof(*words) + 1);
      for (int64_t i = first; i < static_cast<int64_t>(rank->handle.size() / sizeof(*words)); ++i)
        if (world.rng.chance(40))
          words[i] = static_cast<int32_t>(world.rng.chance(50) ? world.rng.next()
                                                               : static_cast<uint64_t>(world.rng.between(-3, 200)));
    }
    const auto damage_records = [&] {
      for (auto& rank : world.ranks)
        for (int32_t& word : rank->received_records)
          if (world.rng.chance(20)) word = static_cast<int32_t>(world.rng.next());
    };
    for (auto& rank : world.ranks) {
      const int r = rank->shape.rank;
      finish(
          launch_post_records(rank->device(), world.call(r, EPX_OP_COMBINE), world.agreed_fields(EPX_OP_COMBINE), nullptr));
      damage_records();
      finish(launch_open_legs(rank->node_group(), rank->device(), world.call(r, EPX_OP_COMBINE), seed % 2 == 0, nullptr));
      const std::vector<float> weights = random_floats(world.rng, world.c.max_tokens * world.c.top_k);
      const std::vector<std::byte> rows(World::at(world.c.max_tokens * world.bytes_of_row()));
      Guarded out(World::at(world.num_tokens(r) * world.bytes_of_row()));
      Guarded carried(World::at(world.num_tokens(r) * world.c.top_k) * sizeof(float));
      for (int chunk = 0; chunk < rank->shape.num_chunks(); ++chunk) {
        const PackCall pack{
            world.call(r, EPX_OP_DISPATCH), rows.data(), world.format_tensors(), weights.data(), rows.data(), kSidecarBytes,
            rank->to_rails.view(),          chunk};
        finish(launch_pack_rows(rank->device(), pack, kSms, nullptr));
        for (int node = 0; node < world.c.nodes; ++node)
          forward_with_descriptors(world, *rank, tensors, node, chunk);
      }
      const SumCall sum{world.call(r, EPX_OP_COMBINE), world.c.precision == EPX_COMBINE_EXACT, rank->from_rails.view(),
                        out.data(), reinterpret_cast<float*>(carried.data())};
      finish(launch_sum_rows(rank->device(), sum, kSms, nullptr));
      CHECK(out.is_intact());
      CHECK(carried.is_intact());
      CHECK(rank->is_intact());
    }
  }
}

TEST_CASE("no record makes sizes that do not fit the group") {
  World world({2, 3, 4, 8, EPX_FLOAT32, EPX_COMBINE_WIRE}, 7);
  const Rank& rank = *world.ranks[4];
  std::vector<int32_t> words(rank.received_records.size());
  for (int round = 0; round < 200; ++round) {
    for (int32_t& word : words)
      word =
          static_cast<int32_t>(world.rng.chance(50) ? world.rng.next() : static_cast<uint64_t>(world.rng.between(-2, 40)));
    const RailRecords records(rank.shape, words.data());
    for (int node = 0; node < 2; ++node) {
      const int64_t tokens = records.num_tokens(node);
      CHECK(tokens == std::clamp<int64_t>(words[World::at(node * record_words(rank.shape) + 2)], 0, world.c.max_tokens));
      int64_t before = 0;
      for (int chunk = 0; chunk < rank.shape.num_chunks(); ++chunk) {
        const int64_t rows = records.back_rows(node, world.c.top_k, chunk);
        CHECK(rows >= before);
        CHECK(rows <= std::min<int64_t>(tokens, int64_t{chunk + 1} * world.c.chunk_tokens) * 3);
        before = rows;
        const int64_t leg_tokens = records.leg_tokens(node, chunk, false);
        CHECK(leg_tokens >= 0);
        CHECK(leg_tokens <= world.c.chunk_tokens);
      }
    }
  }
}

TEST_CASE("a sum has no more terms than a token can have routes, even if all nodes are said to send") {
  World world({70, 1, 2, 8, EPX_FLOAT32, EPX_COMBINE_NODE, 2, 2}, 8);
  world.exchange_records(EPX_OP_COMBINE);
  Rank& rank = *world.ranks[0];
  for (int node = 0; node < world.c.nodes; ++node)
    rank.plan().positions(node)[0] = 0;
  const RailArea area = rank.from_rails.view();
  for (int node = 0; node < world.c.nodes; ++node)
    std::fill_n(reinterpret_cast<float*>(area.rows_of(node, world.bytes_of_row())), world.c.hidden, 1.0f);
  Guarded out(World::at(world.num_tokens(0) * world.bytes_of_row()));
  finish(launch_sum_rows(rank.device(), {world.call(0, EPX_OP_COMBINE), false, area, out.data(), nullptr}, kSms, nullptr));
  CHECK(*reinterpret_cast<const float*>(out.data()) == kMaxTopK);
  CHECK(out.is_intact());
}

TEST_CASE("rows behind a leg that has failed are held until the host has ended the group, and no others") {
  using namespace std::chrono_literals;
  World world({2, 1, 1, 8, EPX_FLOAT32, EPX_COMBINE_WIRE}, 1);
  Rank& rank = *world.ranks[0];
  DeviceGroup group = rank.node_group();
  group.timeout_ns = 60'000'000'000; // much longer than the test
  finish(launch_hold_rows(group, nullptr));
  CHECK(rank.device_state.failed == 0);

  rank.device_state.failed = 1;
  REQUIRE(launch_hold_rows(group, nullptr) == cudaSuccess);
  std::this_thread::sleep_for(100ms);
  CHECK(cudaStreamQuery(nullptr) == cudaErrorNotReady);
  std::atomic_ref(rank.host_abort_record).store(1);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

  // A peer of the node has ended the group, and no verdict comes.
  rank.device_state.failed = 0;
  rank.host_abort_record = 0;
  *reinterpret_cast<uint64_t*>(rank.window_base() + group.context.layout.abort_record.offset) = 1;
  group.timeout_ns = 200'000'000;
  const auto begin = std::chrono::steady_clock::now();
  finish(launch_hold_rows(group, nullptr));
  CHECK(std::chrono::steady_clock::now() - begin >= 200ms);
  CHECK(rank.device_state.failed == 1); // so that later kernels do nothing
}

TEST_CASE("a transfer that the host has aborted ends the calls of the node, another does not") {
  World world({2, 1, 1, 8, EPX_FLOAT32, EPX_COMBINE_WIRE}, 1);
  Rank& rank = *world.ranks[0];
  finish(launch_check_transfer(rank.node_group(), nullptr));
  CHECK(rank.device_state.failed == 0);
  rank.host_abort_record = 1;
  finish(launch_check_transfer(rank.node_group(), nullptr));
  CHECK(rank.device_state.failed == 1);
}

TEST_CASE("the host sees which call has begun and ended, and its first leg") {
  World world({2, 1, 1, 8, EPX_FLOAT32, EPX_COMBINE_WIRE}, 1);
  Rank& rank = *world.ranks[0];
  for (uint64_t call = 1; call <= 2 * MultiNodeProgress::kCalls; call += 100) {
    rank.state.sequence = call - 1;
    rank.device_state.begun.sequence = 7 * call;
    finish(launch_begin_call(rank.device(), EPX_OP_COMBINE_BWD, nullptr));
    CHECK(rank.state.sequence == call);
    CHECK(rank.progress.begun == call);
    CHECK(rank.progress.ended < call);
    CHECK(rank.progress.operations[rank.progress.begun % MultiNodeProgress::kCalls] == EPX_OP_COMBINE_BWD);
    CHECK(rank.progress.first_leg[call % MultiNodeProgress::kCalls] == 7 * call + 1);
    finish(launch_end_call(rank.device(), nullptr));
    CHECK(rank.progress.ended == call);
  }
}

} // namespace
} // namespace epx::cuda
