// The C boundary of libepx: checks what it is handed, calls, and turns exceptions into statuses. Nothing else is extern
// "C".

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "epx/epx.h"
#include "runtime/arguments.h"
#include "runtime/base/c_boundary.h"
#include "runtime/base/env.h"
#include "runtime/base/error.h"
#include "runtime/base/names.h"
#include "runtime/config.h"
#include "runtime/group.h"
#include "runtime/group_guard.h"
#include "runtime/memory/handle_memory.h"
#include "runtime/memory/planner.h"
#include "runtime/stages/slots.h"
#include "transport/bootstrap/file.h"

using namespace epx;

struct epx_group_s {
  explicit epx_group_s(std::unique_ptr<Group> created) : group(std::move(created)) {}

  std::unique_ptr<Group> group;
  GroupGuard guard;
};

namespace {

constexpr int64_t kDefaultTimeoutMs = 300000;
constexpr int32_t kDefaultMaxAlignment = 128; // rows of a tile of the usual grouped matrix products

thread_local std::string last_error;

Group& require_group(const char* function, epx_group group) {
  require_pointer(function, "group", group);
  group->guard.require_own_process(function);
  return *group->group;
}

// Sizes that output structs had in 0.1, bytes: none that a caller passes is smaller.
constexpr size_t kGroupInfoBytes01 = 88;

// Fills in a caller's output struct, which may be that of an older header, or of a newer one: as many bytes as both have, and
// zeroes beyond. struct_size stays as the caller set it.
template <typename Struct>
void fill_output(const char* name, Struct* out, size_t min_bytes, Struct values) {
  const size_t bytes = out->struct_size;
  if (bytes < min_bytes || bytes % sizeof(int64_t) != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "{}.struct_size is {}; it must be a multiple of {}, and {} or more: set it to sizeof({})", name, bytes,
         sizeof(int64_t), min_bytes, name);
  values.struct_size = bytes;
  std::memcpy(out, &values, std::min(bytes, sizeof(values)));
  if (bytes > sizeof(values)) std::memset(reinterpret_cast<std::byte*>(out) + sizeof(values), 0, bytes - sizeof(values));
}

// A call that takes part in the group's sequence of calls: two of them exclude each other.
template <typename Body>
epx_status in_call(const char* function, epx_group group, Body&& body) {
  return at_c_boundary([&] {
    Group& target = require_group(function, group);
    const GroupGuard::Call call(group->guard, function);
    body(target);
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

epx_status epx_bootstrap_file(const char* directory, const char* job_id, int32_t rank, int32_t num_ranks,
                              int64_t timeout_ms, epx_bootstrap* bootstrap) {
  return at_c_boundary([&] {
    require_pointer("epx_bootstrap_file", "directory", directory);
    require_pointer("epx_bootstrap_file", "job_id", job_id);
    require_pointer("epx_bootstrap_file", "bootstrap", bootstrap);
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
    config->timeout_ms = env.timeout_ms.value_or(kDefaultTimeoutMs);
  });
}

epx_status epx_group_create(const epx_bootstrap* bootstrap, const epx_group_config* config, epx_group* group) {
  return at_c_boundary([&] {
    require_pointer("epx_group_create", "bootstrap", bootstrap);
    require_pointer("epx_group_create", "config", config);
    require_pointer("epx_group_create", "group", group);
    *group = new epx_group_s(Group::create(*bootstrap, *config));
  });
}

void epx_group_destroy(epx_group group) {
  // In a child of fork() nothing of it is the child's: windows, their names and what is on a GPU are the parent's.
  if (group != nullptr && !group->guard.is_own_process()) return;
  delete group;
}

epx_status epx_group_abort(epx_group group) {
  return at_c_boundary([&] { require_group("epx_group_abort", group).backend().abort(); });
}

epx_status epx_group_query(epx_group group, epx_group_info* info) {
  return at_c_boundary([&] {
    const Group& target = require_group("epx_group_query", group);
    require_pointer("epx_group_query", "info", info);
    const GroupContext& context = target.context();
    const ExpertBlocks experts{context.shape.num_experts, context.shape.num_ranks};
    epx_group_info values = {};
    values.group_id = context.group_id;
    values.rank = context.rank;
    values.num_ranks = context.shape.num_ranks;
    values.num_experts = context.shape.num_experts;
    values.num_local_experts = experts.num_local_experts(context.rank);
    values.first_local_expert = experts.first_expert(context.rank);
    values.transport = target.backend().kind();
    values.max_recv_tokens_per_rank = context.shape.max_recv_tokens;
    values.window_bytes = context.layout.total_bytes;
    values.timeout_ms = context.timeout_ms;
    values.max_tokens_per_rank = context.shape.max_tokens_per_rank;
    values.hidden_dim = context.shape.hidden_dim;
    values.max_top_k = context.shape.max_top_k;
    values.max_alignment = context.shape.max_alignment;
    values.max_token_dtype = context.shape.max_token_dtype;
    values.combine_precision = context.shape.precision;
    values.num_comm_sms = target.backend().num_comm_sms();
    fill_output("epx_group_info", info, kGroupInfoBytes01, values);
  });
}

epx_status epx_group_memory_plan(const epx_group_config* config, int32_t num_ranks, epx_memory_plan* plan) {
  return at_c_boundary([&] {
    require_pointer("epx_group_memory_plan", "config", config);
    require_pointer("epx_group_memory_plan", "plan", plan);
    require_struct_size("epx_memory_plan", plan->struct_size, sizeof(*plan));
    if (num_ranks < 1 || num_ranks > kMaxRanks)
      fail(EPX_ERROR_INVALID_ARGUMENT, "epx_group_memory_plan: num_ranks is {}; it must be 1..{}", num_ranks, kMaxRanks);
    validate(*config);
    *plan = plan_memory(resolve(*config, num_ranks));
  });
}

epx_status epx_group_status(epx_group group, epx_group_report* report) {
  return at_c_boundary([&] {
    Group& target = require_group("epx_group_status", group);
    require_pointer("epx_group_status", "report", report);
    require_struct_size("epx_group_report", report->struct_size, sizeof(*report));
    target.backend().report(*report);
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

epx_status epx_handle_mem_size(epx_group group, const epx_layer* layer, size_t* bytes) {
  return at_c_boundary([&] {
    const Group& target = require_group("epx_handle_mem_size", group);
    require_pointer("epx_handle_mem_size", "layer", layer);
    require_pointer("epx_handle_mem_size", "bytes", bytes);
    require_layer(target.context(), *layer, "epx_handle_mem_size");
    *bytes = static_cast<size_t>(make_handle_layout(target.context().shape, layer->top_k).total_bytes);
  });
}

epx_status epx_prepare(epx_group group, const epx_prepare_args* args) {
  return in_call("epx_prepare", group,
                 [&](Group& target) { target.backend().stages().prepare(check(target.context(), args)); });
}

epx_status epx_dispatch(epx_group group, const epx_dispatch_args* args) {
  return in_call("epx_dispatch", group,
                 [&](Group& target) { target.backend().stages().dispatch(check(target.context(), args)); });
}

epx_status epx_combine(epx_group group, const epx_combine_args* args) {
  return in_call("epx_combine", group,
                 [&](Group& target) { target.backend().stages().combine(check(target.context(), args)); });
}

epx_status epx_combine_bwd(epx_group group, const epx_combine_bwd_args* args) {
  return in_call("epx_combine_bwd", group,
                 [&](Group& target) { target.backend().stages().combine_bwd(check(target.context(), args)); });
}

epx_status epx_dispatch_bwd(epx_group group, const epx_dispatch_bwd_args* args) {
  return in_call("epx_dispatch_bwd", group,
                 [&](Group& target) { target.backend().stages().dispatch_bwd(check(target.context(), args)); });
}
