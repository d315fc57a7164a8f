// SPDX-License-Identifier: Apache-2.0
#include "registry.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "failure.h"

namespace epx_torch {
namespace {

// Entries by number, from 1. Numbers are not used again, so the place of an entry that is removed stays empty.
template <typename T>
class Numbered {
public:
  int64_t add(std::shared_ptr<T> entry) {
    const std::lock_guard lock(mutex_);
    entries_.push_back(std::move(entry));
    return static_cast<int64_t>(entries_.size());
  }

  std::shared_ptr<T> find(int64_t id) {
    const std::lock_guard lock(mutex_);
    return has_added(id) ? entries_[static_cast<size_t>(id - 1)] : nullptr;
  }

  bool was_added(int64_t id) {
    const std::lock_guard lock(mutex_);
    return has_added(id);
  }

  void remove(int64_t id) {
    std::shared_ptr<T> entry; // destroyed without the lock
    const std::lock_guard lock(mutex_);
    if (has_added(id)) entry.swap(entries_[static_cast<size_t>(id - 1)]);
  }

private:
  bool has_added(int64_t id) const { return id >= 1 && id <= static_cast<int64_t>(entries_.size()); }

  std::mutex mutex_;
  std::vector<std::shared_ptr<T>> entries_;
};

// Never destroyed, since tensors that name flights may die while the process ends.
Numbered<Group>& groups() {
  static auto* const instance = new Numbered<Group>;
  return *instance;
}

Numbered<Flights>& flights() {
  static auto* const instance = new Numbered<Flights>;
  return *instance;
}

Numbered<Block>& blocks() {
  static auto* const instance = new Numbered<Block>;
  return *instance;
}

// What `add` returns, or 0 with the sentence of its exception, which must not leave a function of C.
template <typename Add>
int64_t number_or_zero(const Add& add) noexcept {
  try {
    return add();
  } catch (const std::exception& error) {
    epx_set_last_error(error.what());
    return 0;
  }
}

} // namespace

Flights::Ticket Flights::take() {
  const std::lock_guard lock(mutex_);
  const auto flight = std::ranges::find(flights_, false, &Flight::is_busy);
  if (flight == flights_.end())
    refuse("the flights, ", flights_.size(),
           ", all have a forward whose backward is still to come: create the layer with a larger "
           "max_in_flight or the arena with more flights, or call it under torch.no_grad() where no backward follows");
  flight->is_busy = true;
  return {flight - flights_.begin(), ++flight->generation};
}

void Flights::release(const Ticket& ticket) {
  const std::lock_guard lock(mutex_);
  Flight& flight = flights_[static_cast<size_t>(ticket.index)];
  if (flight.generation == ticket.generation) flight.is_busy = false;
}

void Flights::verify(const Ticket& ticket) {
  const std::lock_guard lock(mutex_);
  if (ticket.index >= 0 && ticket.index < static_cast<int64_t>(flights_.size())) {
    const Flight& flight = flights_[static_cast<size_t>(ticket.index)];
    if (flight.is_busy && flight.generation == ticket.generation) return;
  }
  refuse("flight ", ticket.index,
         " of the layer no longer has the forward of this backward: the tensor that names it must be saved as it "
         "is, and not as a copy");
}

GroupUse::GroupUse(int64_t id) : group_(groups().find(id)) {
  if (group_ == nullptr) {
    if (groups().was_added(id)) refuse("the group has been destroyed");
    refuse("there is no group with the number ", id);
  }
  enter();
}

GroupUse::GroupUse(std::shared_ptr<Group> group) : group_(std::move(group)) {
  enter();
}

void GroupUse::enter() {
  group_->num_calls.fetch_add(1);
  if (group_->is_retired.load()) {
    group_->num_calls.fetch_sub(1);
    refuse("the group has been destroyed");
  }
}

std::shared_ptr<Block> find_block(int64_t id) {
  std::shared_ptr<Block> block = blocks().find(id);
  if (block == nullptr && !blocks().was_added(id)) refuse("there is no layer with the number ", id);
  if (block == nullptr || block->is_retired.load()) refuse("the layer has been destroyed");
  return block;
}

} // namespace epx_torch

using namespace epx_torch;

int64_t epx_torch_register_group(epx_group group, int32_t device_index) {
  return number_or_zero([&]() -> int64_t {
    auto entry = std::make_shared<Group>();
    entry->group = group;
    entry->info.struct_size = sizeof(entry->info);
    if (epx_group_query(group, &entry->info) != EPX_SUCCESS) return 0;
    entry->place = {device_index >= 0, device_index};
    return groups().add(std::move(entry));
  });
}

int32_t epx_torch_retire_group(int64_t id) {
  const std::shared_ptr<Group> group = groups().find(id);
  if (group == nullptr) return 1;
  group->is_retired.store(true);
  if (group->num_calls.load() != 0) return 0;
  groups().remove(id);
  return 1;
}

int64_t epx_torch_register_flights(int32_t count) {
  return number_or_zero([&] { return flights().add(std::make_shared<Flights>(count)); });
}

int64_t epx_torch_register_block(int64_t group_id, int64_t flights_id, epx_moe_block block,
                                 const epx_moe_router_config* router, int32_t hidden_dim, int32_t dtype, int32_t has_gate) {
  return number_or_zero([&] {
    auto entry = std::make_shared<Block>();
    entry->group = groups().find(group_id);
    entry->block = block;
    entry->router = *router;
    entry->hidden_dim = hidden_dim;
    entry->dtype = static_cast<epx_dtype>(dtype);
    entry->has_gate = has_gate != 0;
    entry->flights = flights().find(flights_id);
    return blocks().add(std::move(entry));
  });
}

void epx_torch_retire_flights(int64_t id) {
  flights().remove(id);
}

int32_t epx_torch_block_is_idle(int64_t id) {
  const std::shared_ptr<Block> block = blocks().find(id);
  return block == nullptr || block->num_in_flight.load() == 0 ? 1 : 0;
}

void epx_torch_retire_block(int64_t id) {
  const std::shared_ptr<Block> block = blocks().find(id);
  if (block == nullptr) return;
  block->is_retired.store(true);
  blocks().remove(id);
}
