// SPDX-License-Identifier: Apache-2.0
#include "tests/support/group_run.h"

#include <cstring>
#include <exception>

#include "tests/support/check.h"

namespace epx::test {

std::vector<uint64_t> RankContext::gather(uint64_t value) const {
  std::vector<uint64_t> values(static_cast<size_t>(num_ranks));
  char message[EPX_MAX_MESSAGE_BYTES] = "";
  constexpr int64_t kTimeoutMs = 120'000;
  const epx_status status =
      bootstrap->all_gather(bootstrap->context, &value, values.data(), sizeof(value), kTimeoutMs, message, sizeof(message));
  check(status == EPX_SUCCESS, "the bootstrap's all-gather returned {}: {}", epx_status_string(status), message);
  return values;
}

GroupRun::GroupRun(const RankContext& context, const GroupCase& group, int color, int key, std::optional<int> expected_rank)
    : shape_(group), device_(*context.device) {
  shape_.transport = device_.transport();
  epx_group_config config = make_config(shape_);
  config.color = color;
  config.key = key;
  group_ = Group(*context.bootstrap, config);
  try {
    info_ = group_.query();
    check_info(config, expected_rank.value_or(context.rank));
    check_plan(config);
  } catch (...) {
    group_.abort();
    throw;
  }
}

GroupRun::~GroupRun() {
  if (std::uncaught_exceptions() > 0) group_.abort();
}

void GroupRun::check_info(const epx_group_config& config, int expected_rank) const {
  const int per_rank = shape_.num_experts / shape_.num_ranks;
  const int extra = shape_.num_experts % shape_.num_ranks;
  int first = 0;
  for (int rank = 0; rank < expected_rank; ++rank)
    first += per_rank + (rank < extra);
  check_equal(info_.rank, expected_rank, "info.rank");
  check_equal(info_.num_ranks, shape_.num_ranks, "info.num_ranks");
  check_equal(info_.num_experts, shape_.num_experts, "info.num_experts");
  check_equal(info_.num_local_experts, per_rank + (expected_rank < extra), "info.num_local_experts");
  check_equal(info_.first_local_expert, first, "info.first_local_expert");
  check_equal(static_cast<int>(info_.transport), static_cast<int>(device_.transport()), "info.transport");
  check_equal(info_.max_recv_tokens_per_rank, recv_capacity(shape_), "info.max_recv_tokens_per_rank");
  check_equal(info_.timeout_ms, config.timeout_ms, "info.timeout_ms");
  check_equal(info_.max_tokens_per_rank, config.max_tokens_per_rank, "info.max_tokens_per_rank");
  check_equal(info_.hidden_dim, config.hidden_dim, "info.hidden_dim");
  check_equal(info_.max_top_k, config.max_top_k, "info.max_top_k");
  check_equal(info_.max_alignment, config.max_alignment, "info.max_alignment");
  check_equal(static_cast<int>(info_.max_token_dtype), static_cast<int>(config.max_token_dtype), "info.max_token_dtype");
  check_equal(static_cast<int>(info_.combine_precision), static_cast<int>(config.combine_precision),
              "info.combine_precision");
  check_equal(info_.ranks_per_node, shape_.num_ranks / num_nodes(shape_), "info.ranks_per_node");
  check(info_.group_id != 0, "info.group_id is 0");
}

void GroupRun::check_plan(const epx_group_config& config) const {
  const epx_memory_plan plan = memory_plan(config, shape_.num_ranks);
  check_equal(plan.max_recv_tokens_per_rank, recv_capacity(shape_), "plan.max_recv_tokens_per_rank");
  check_equal(plan.window_bytes, info_.window_bytes, "plan.window_bytes");
  const int64_t parts = plan.control_bytes + plan.count_bytes + plan.slot_record_bytes + plan.scatter_row_bytes +
                        plan.scatter_sidecar_bytes + plan.scatter_weight_bytes + plan.gather_row_bytes +
                        plan.gather_weight_bytes;
  check_equal(parts, plan.window_bytes, "the sum of the plan's parts");

  const Layer largest = {.top_k = shape_.max_top_k, .alignment = shape_.max_alignment};
  const size_t handle_bytes = group_.handle_mem_size(largest);
  check_equal(plan.handle_mem_bytes, static_cast<int64_t>(handle_bytes), "plan.handle_mem_bytes");
}

void GroupRun::add_arena(int64_t bytes) {
  Memory memory = group_.mem_alloc(static_cast<size_t>(bytes));
  count_call(); // it counts as two
  count_call();
  check(memory.data() != nullptr && reinterpret_cast<uintptr_t>(memory.data()) % 256 == 0, "epx_mem_alloc gave {}",
        fmt::ptr(memory.data()));
  std::vector<std::byte> contents(memory.size());
  device_.read(contents.data(), memory.data(), memory.size());
  // memcmp of each byte with the next is one access to a sanitizer.
  check(contents.front() == std::byte{0} && std::memcmp(contents.data(), contents.data() + 1, contents.size() - 1) == 0,
        "fresh memory from epx_mem_alloc is not zero");
  arenas_.push_back({memory.data(), memory.size(), 0});
  arena_memory_.push_back(std::move(memory));
}

void GroupRun::free_arena(size_t index) {
  arena_memory_.at(index).free();
  count_call();
  const auto place = static_cast<std::ptrdiff_t>(index);
  arena_memory_.erase(arena_memory_.begin() + place);
  arenas_.erase(arenas_.begin() + place);
}

void GroupRun::expect_event(epx_event_kind kind, epx_operation operation, int64_t count) {
  if (count == 0) return;
  events_[kind] += static_cast<uint64_t>(count);
  if (!first_event_) first_event_ = FirstEvent{kind, operation, calls_};
}

void GroupRun::check_status() {
  const epx_group_report report = group_.status();
  const std::string message = report.message;
  check(report.status == EPX_SUCCESS, "the group has failed with {}: {}", epx_status_string(report.status), message);
  for (size_t kind = 0; kind < events_.size(); ++kind) {
    check(report.event_counts[kind] == events_[kind], "{} events of kind {} were reported, expected {}; message: \"{}\"",
          report.event_counts[kind], kind, events_[kind], message);
  }
  check(message.empty() == !first_event_.has_value(), "the status message is \"{}\"", message);
  if (first_event_) {
    check(report.first_event == first_event_->kind && report.first_event_operation == first_event_->operation &&
              report.first_event_sequence == first_event_->sequence,
          "the first event is {} of operation {} in call {}, expected {}, {}, {}", static_cast<int>(report.first_event),
          static_cast<int>(report.first_event_operation), report.first_event_sequence, static_cast<int>(first_event_->kind),
          static_cast<int>(first_event_->operation), first_event_->sequence);
  }
  events_ = {};
  first_event_.reset();
}

} // namespace epx::test
