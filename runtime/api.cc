// SPDX-License-Identifier: Apache-2.0
// The C boundary of libepx: checks what it is handed, calls, and turns exceptions into statuses. Nothing else is extern
// "C".

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/c_boundary.h"
#include "base/deadline.h"
#include "base/env.h"
#include "base/error.h"
#include "base/log.h"
#include "base/names.h"
#include "base/operations.h"
#include "epx/epx.h"
#include "runtime/argument_checker.h"
#include "runtime/arguments.h"
#include "runtime/config.h"
#include "runtime/formats/format_arguments.h"
#include "runtime/group.h"
#include "runtime/group_guard.h"
#include "runtime/layout/load.h"
#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/planner.h"
#include "runtime/layout/slots.h"
#include "runtime/struct_size.h"
#include "transport/bootstrap/file.h"
#include "transport/interrupt.h"

using namespace epx;

// What a handle names outlives its group, so that a call that comes too late is refused instead of reading freed memory.
struct epx_group_s {
  explicit epx_group_s(std::unique_ptr<Group> created) : group(std::move(created)) {}

  std::unique_ptr<Group> group;
  GroupGuard guard;
  epx_group_s* kept_before = nullptr; // in the list of keep_handle()
};

namespace {

constexpr int32_t kDefaultMaxAlignment = 128; // rows of a tile of the usual grouped matrix products

constexpr std::chrono::seconds kTimeToLeave{10}; // for the threads that are in a call when its group is destroyed

thread_local std::string last_error;

// Runs `body` with the group, which is there until it returns.
template <typename Body>
void with_group(const char* function, epx_group group, Body&& body) {
  require_pointer(function, "group", group);
  struct Freer {
    epx_group group;
    ~Freer() {
      if (group->guard.must_free()) group->group.reset();
    }
  } freer{group};
  const GroupGuard::Use use(group->guard, function); // ends before the freer does
  body(*group->group);
}

// Runs `body`, which may wait for peers. Where an interrupt has ended it, the thread's next call waits again.
template <typename Body>
epx_status waiting_call(Body&& body) {
  begin_waiting_call();
  const epx_status status = at_c_boundary(std::forward<Body>(body));
  if (status != EPX_SUCCESS && was_interrupted()) take_interrupt();
  return status;
}

// What the handle of a destroyed group names is never freed; leak checkers find it here.
void keep_handle(epx_group group) noexcept {
  static std::atomic<epx_group> last{nullptr};
  group->kept_before = last.load();
  while (!last.compare_exchange_weak(group->kept_before, group)) {
  }
}

// Ends the calls that threads are in, and frees the group, at the latest when the last of them has left.
void free_group(epx_group_s& handle) noexcept {
  if (!handle.guard.wait_until_unused(Deadline(std::chrono::milliseconds(0)))) {
    at_c_boundary([&] { handle.group->backend().abort(); });
    // A signal handler of an interpreter: the call of this thread goes on when it returns.
    const bool is_in_own_call = is_in_interrupt_check();
    if (is_in_own_call || !handle.guard.wait_until_unused(Deadline(kTimeToLeave))) {
      if (!is_in_own_call)
        log::group().warn("group {:016x} is freed later: a thread has not left its call within {} s after the group was "
                          "aborted",
                          handle.group->context().group_id, kTimeToLeave.count());
      handle.guard.free_when_unused();
      if (!handle.guard.must_free()) return;
    }
  }
  handle.group.reset();
}

epx_group_info info_of(const Group& group) {
  const GroupContext& context = group.context();
  const ExpertBlocks experts{context.shape.num_experts, context.shape.num_ranks};
  epx_group_info info{};
  info.group_id = context.group_id;
  info.rank = context.rank;
  info.num_ranks = context.shape.num_ranks;
  info.num_experts = context.shape.num_experts;
  info.num_local_experts = experts.num_local_experts(context.rank);
  info.first_local_expert = experts.first_expert(context.rank);
  info.transport = context.transport;
  info.max_recv_tokens_per_rank = context.shape.max_recv_tokens;
  info.window_bytes = context.layout.total_bytes;
  info.timeout_ms = context.timeout_ms;
  info.max_tokens_per_rank = context.shape.max_tokens_per_rank;
  info.hidden_dim = context.shape.hidden_dim;
  info.max_top_k = context.shape.max_top_k;
  info.max_alignment = context.shape.max_alignment;
  info.max_token_dtype = context.shape.max_token_dtype;
  info.combine_precision = context.shape.precision;
  info.num_comm_sms = group.backend().num_comm_sms();
  info.ranks_per_node = context.shape.ranks_per_node;
  return info;
}

// Runs `body` as a call of the group's sequence, of which one thread makes one at a time.
template <typename Body>
epx_status in_call(const char* function, epx_group group, Body&& body) {
  return waiting_call([&] {
    with_group(function, group, [&](Group& target) {
      const GroupGuard::Call call(group->guard, function);
      body(target);
    });
  });
}

// One of the operations. `stage` makes the call that the args describe.
template <typename Args, typename Call>
epx_status operation(epx_group group, const Args* args, void (Stages::*stage)(const Call&)) {
  constexpr const char* kFunction = OperationOf<Args>::kFunction;
  return in_call(kFunction, group, [&](Group& target) {
    require_pointer(kFunction, "args", args);
    (target.backend().stages().*stage)(check(target.context(), read_args(args)));
  });
}

} // namespace

int32_t epx_version(void) {
  return EPX_VERSION_MAJOR * 10000 + EPX_VERSION_MINOR * 100 + EPX_VERSION_PATCH;
}

const char* epx_status_string(epx_status status) {
  return name_of(status);
}

const char* epx_last_error(void) {
  return last_error.c_str();
}

void epx_set_last_error(const char* message) {
  last_error = message == nullptr ? "" : message;
}

void epx_interrupt(void) {
  interrupt();
}

int32_t epx_interrupted(void) {
  return take_interrupt() ? 1 : 0;
}

void epx_set_interrupt_check(int32_t (*check)(void)) {
  set_interrupt_check(check);
}

epx_status epx_bootstrap_file(const char* directory, const char* job_id, int32_t rank, int32_t num_ranks,
                              int64_t timeout_ms, epx_bootstrap* bootstrap) {
  return waiting_call([&] {
    require_pointer("epx_bootstrap_file", "directory", directory);
    require_pointer("epx_bootstrap_file", "job_id", job_id);
    require_pointer("epx_bootstrap_file", "bootstrap", bootstrap);
    if (num_ranks < 1 || num_ranks > kMaxRanks)
      fail(EPX_ERROR_INVALID_ARGUMENT, "epx_bootstrap_file: num_ranks is {}; it must be 1..{}", num_ranks, kMaxRanks);
    *bootstrap = make_file_bootstrap(directory, job_id, rank, num_ranks, std::chrono::milliseconds(timeout_ms));
  });
}

void epx_bootstrap_free(epx_bootstrap* bootstrap) {
  if (bootstrap == nullptr) return;
  if (bootstrap->release != nullptr) bootstrap->release(bootstrap->context);
  *bootstrap = {};
}

epx_status epx_group_config_init(epx_group_config* config) {
  return at_c_boundary([&] {
    require_pointer("epx_group_config_init", "config", config);
    const Environment& env = environment();
    if (env.timeout_text && !env.timeout_ms)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "the environment variable EPX_TIMEOUT_MS is \"{}\"; it must be a positive number of milliseconds",
           *env.timeout_text);
    *config = {};
    config->struct_size = sizeof(*config);
    config->max_alignment = kDefaultMaxAlignment;
    config->timeout_ms = default_timeout_ms();
  });
}

epx_status epx_row_format_init(epx_row_format* format, epx_scaling scaling) {
  return at_c_boundary([&] {
    require_pointer("epx_row_format_init", "format", format);
    *format = default_format(scaling, "epx_row_format_init");
  });
}

epx_status epx_group_create(const epx_bootstrap* bootstrap, const epx_group_config* config, epx_group* group) {
  return waiting_call([&] {
    require_pointer("epx_group_create", "bootstrap", bootstrap);
    require_pointer("epx_group_create", "config", config);
    require_pointer("epx_group_create", "group", group);
    *group = new epx_group_s(Group::create(*bootstrap, *config));
  });
}

void epx_group_destroy(epx_group group) {
  // In a child of fork() the windows, their names and everything on a GPU belong to the parent.
  if (group == nullptr || !group->guard.is_own_process() || !group->guard.close()) return;
  keep_handle(group);
  begin_waiting_call();
  free_group(*group);
  if (was_interrupted()) take_interrupt(); // it has ended a wait for the GPU
}

epx_status epx_group_abort(epx_group group) {
  return at_c_boundary([&] { with_group("epx_group_abort", group, [](Group& target) { target.backend().abort(); }); });
}

epx_status epx_group_query(epx_group group, epx_group_info* info) {
  return at_c_boundary([&] {
    with_group("epx_group_query", group, [&](const Group& target) {
      require_pointer("epx_group_query", "info", info);
      write_output(info, [&] { return info_of(target); });
    });
  });
}

epx_status epx_group_memory_plan(const epx_group_config* config, int32_t num_ranks, epx_memory_plan* plan) {
  return at_c_boundary([&] {
    require_pointer("epx_group_memory_plan", "config", config);
    require_pointer("epx_group_memory_plan", "plan", plan);
    if (num_ranks < 1 || num_ranks > kMaxRanks)
      fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_memory_plan: num_ranks is {}; it must be 1..{}", num_ranks, kMaxRanks);
    validate(*config);
    const GroupShape shape = resolve(*config, num_ranks);
    write_output(plan, [&] { return plan_memory(shape, config->transport); });
  });
}

epx_status epx_group_status(epx_group group, epx_group_report* report) {
  return at_c_boundary([&] {
    with_group("epx_group_status", group, [&](Group& target) {
      require_pointer("epx_group_status", "report", report);
      write_output(report, [&] { return target.backend().report(); });
    });
  });
}

epx_status epx_mem_alloc(epx_group group, size_t bytes, void** ptr) {
  return in_call("epx_mem_alloc", group, [&](Group& target) {
    require_pointer("epx_mem_alloc", "ptr", ptr);
    if (bytes == 0 || bytes > INT64_MAX)
      fail(EPX_ERROR_INVALID_ARGUMENT, "epx_mem_alloc: bytes is {}; it must be 1..2^63 - 1", bytes);
    *ptr = target.backend().allocate(static_cast<int64_t>(bytes));
  });
}

epx_status epx_mem_register(epx_group group, void* ptr, size_t bytes) {
  return in_call("epx_mem_register", group, [&](Group& target) {
    require_pointer("epx_mem_register", "ptr", ptr);
    if (bytes == 0 || bytes > INT64_MAX)
      fail(EPX_ERROR_INVALID_ARGUMENT, "epx_mem_register: bytes is {}; it must be 1..2^63 - 1", bytes);
    target.backend().register_memory(static_cast<std::byte*>(ptr), static_cast<int64_t>(bytes));
  });
}

epx_status epx_mem_free(epx_group group, void* ptr) {
  return in_call("epx_mem_free", group, [&](Group& target) {
    require_pointer("epx_mem_free", "ptr", ptr);
    target.backend().free(ptr);
  });
}

epx_status epx_group_all_gather(epx_group group, const void* send, void* recv, size_t bytes_per_rank) {
  return in_call("epx_group_all_gather", group, [&](Group& target) {
    require_pointer("epx_group_all_gather", "send", send);
    require_pointer("epx_group_all_gather", "recv", recv);
    if (bytes_per_rank == 0 || bytes_per_rank > EPX_MAX_RECORD_BYTES)
      fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_all_gather: bytes_per_rank is {}; it must be 1..{}", bytes_per_rank,
           static_cast<int>(EPX_MAX_RECORD_BYTES));
    GroupRecord mine{};
    std::memcpy(mine.data(), send, bytes_per_rank);
    std::byte* next = static_cast<std::byte*>(recv);
    for (const GroupRecord& record : target.backend().all_gather(mine, static_cast<int64_t>(bytes_per_rank))) {
      std::memcpy(next, record.data(), bytes_per_rank);
      next += bytes_per_rank;
    }
  });
}

epx_status epx_handle_mem_size(epx_group group, const epx_layer* layer, size_t* bytes) {
  return at_c_boundary([&] {
    with_group("epx_handle_mem_size", group, [&](const Group& target) {
      require_pointer("epx_handle_mem_size", "layer", layer);
      require_pointer("epx_handle_mem_size", "bytes", bytes);
      require_layer(target.context(), *layer, "epx_handle_mem_size");
      *bytes = static_cast<size_t>(handle_mem_bytes(target.context().shape, target.context().window_access, layer->top_k));
    });
  });
}

epx_status epx_load_of_counts(epx_group group, const epx_layer* layer, int64_t zone_stride, const epx_tensor* global_counts,
                              epx_load_report* report) {
  constexpr const char* kName = "epx_load_of_counts";
  return at_c_boundary([&] {
    with_group(kName, group, [&](const Group& target) {
      require_pointer(kName, "layer", layer);
      require_pointer(kName, "global_counts", global_counts);
      require_pointer(kName, "report", report);
      const GroupContext& context = target.context();
      const int alignment = require_layer(context, *layer, kName);
      require_zone_stride(context, alignment, zone_stride, kName);
      const std::vector<int64_t> counts = check_counts(context, *layer, *global_counts);
      const ZoneRule zones = {usable_slots(context.shape.max_recv_tokens, alignment), alignment, zone_stride};
      write_output(report, [&] { return load_of(counts, {context.shape.num_experts, context.shape.num_ranks}, zones); });
    });
  });
}

#define EPX_DEFINE(NUMBER, name, first_bytes, Call, stage)                                                                 \
  epx_status epx_##name(epx_group group, const epx_##name##_args* args) {                                                  \
    return operation(group, args, &Stages::stage);                                                                         \
  }
EPX_OPERATIONS(EPX_DEFINE)
#undef EPX_DEFINE
