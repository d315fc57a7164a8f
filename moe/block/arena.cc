// SPDX-License-Identifier: Apache-2.0
// Each kind of memory is one allocation: the flights one after the other, then what they share.
#include "moe/block/arena.h"

#include <utility>

#include "base/error.h"
#include "moe/block/group.h"
#include "moe/cuda/cuda_call.h"

namespace epx::moe {
namespace {

int64_t total_bytes(int64_t of_flight, int64_t num_flights, int64_t shared) {
  int64_t bytes = 0;
  if (__builtin_mul_overflow(of_flight, num_flights, &bytes) || __builtin_add_overflow(bytes, shared, &bytes))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "{} flights of {} bytes, and {} bytes that they share, are more than an int64 can count", num_flights, of_flight,
         shared);
  return bytes;
}

void require_room(const char* what, int64_t wanted, int64_t there) {
  if (wanted > there)
    fail(EPX_ERROR_INVALID_ARGUMENT, "the block needs {} bytes of {}; its arena has {}", wanted, what, there);
}

} // namespace

ArenaBytes arena_bytes(const Footprint& footprint, int32_t num_flights) {
  const ArenaBytes bytes = {total_bytes(footprint.flight_window, num_flights, footprint.shared_window),
                            total_bytes(footprint.flight_local, num_flights, footprint.shared_local)};
  total_bytes(bytes.window, 1, bytes.local); // which info() adds up
  return bytes;
}

Arena::Arena(epx_group group, const BlockPath& path, int64_t num_rows, int32_t num_flights)
    : group_(group), footprint_(footprint_of(path, num_rows)), num_rows_(num_rows) {
  const ArenaBytes bytes = arena_bytes(footprint_, num_flights);
  if (group == nullptr) {
    host_window_ = make_host_memory(static_cast<size_t>(bytes.window));
    allocate_local(bytes.local, num_flights);
    return;
  }
  void* window_memory = nullptr;
  throw_if_failed(epx_mem_alloc(group, static_cast<size_t>(bytes.window), &window_memory));
  group_window_ = static_cast<std::byte*>(window_memory);
  try {
    if (path.plan().is_on_gpu())
      enqueue_on_cuda([&](auto) {
        device_ = cuda::device_of(window());
        order_ = cuda::make_stream_order(device_);
      });
    allocate_local(bytes.local, num_flights);
  } catch (...) {
    epx_group_abort(group); // the other ranks have their arenas, and would wait for this one
    epx_mem_free(group, group_window_);
    throw;
  }
}

void Arena::allocate_local(int64_t bytes, int32_t num_flights) {
  if (order_ != nullptr)
    enqueue_on_cuda([&](auto) { device_memory_ = cuda::make_device_memory(device_, static_cast<size_t>(bytes)); });
  else
    host_memory_ = make_host_memory(static_cast<size_t>(bytes));
  flights_.resize(static_cast<size_t>(num_flights)); // last: too many of them have found no memory by now
}

void Arena::release() {
  if (group_ != nullptr) throw_if_failed(epx_mem_free(group_, std::exchange(group_window_, nullptr)));
}

int64_t Arena::require_fit(epx_group group, const BlockPath& path) const {
  if (group != group_)
    fail(EPX_ERROR_INVALID_ARGUMENT, "config.arena belongs to {}; the block's group is at {}",
         group_ == nullptr ? "no group" : fmt::format("the group at {}", static_cast<void*>(group_)),
         static_cast<void*>(group));
  const int64_t num_rows = group != nullptr ? num_rows_ : path.plan().row_capacity;
  const Footprint needed = footprint_of(path, num_rows);
  require_room("rows that peers reach for a flight", needed.flight_window, footprint_.flight_window);
  require_room("rows that peers reach for all flights", needed.shared_window, footprint_.shared_window);
  require_room("memory for a flight", needed.flight_local, footprint_.flight_local);
  require_room("workspace", needed.shared_local, footprint_.shared_local);
  return num_rows;
}

epx_moe_arena_info Arena::info() const {
  epx_moe_arena_info info{};
  info.struct_size = sizeof(info);
  info.num_flights = num_flights();
  info.max_rows = num_rows_;
  info.flight_bytes = footprint_.flight_window + footprint_.flight_local;
  info.workspace_bytes = footprint_.shared_window + footprint_.shared_local;
  info.total_bytes = info.num_flights * info.flight_bytes + info.workspace_bytes;
  if (group_ != nullptr) info.window_bytes = info.num_flights * footprint_.flight_window + footprint_.shared_window;
  return info;
}

CallMemory Arena::memory(int32_t flight) const {
  return {Carver(window() + flight * footprint_.flight_window), Carver(local() + flight * footprint_.flight_local),
          Carver(window() + num_flights() * footprint_.flight_window),
          Carver(local() + num_flights() * footprint_.flight_local)};
}

bool Arena::begin_call(std::string_view call, epx_stream stream) {
  bool is_captured = false;
  if (order_ != nullptr) enqueue_on_cuda([&](auto) { is_captured = cuda::begin_call(*order_, call, stream); });
  return is_captured;
}

void Arena::end_call(epx_stream stream) {
  if (order_ != nullptr) enqueue_on_cuda([&](auto) { cuda::end_call(*order_, stream); });
}

} // namespace epx::moe
