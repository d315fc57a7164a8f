// SPDX-License-Identifier: Apache-2.0
// Replaces base/device/bulk_copy.cuh. Each copy is made as late as PTX allows, so that a missing wait shows: a load is made by
// the wait for it, a store's read by a wait for reads or for stores, and its write by a wait for stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <vector>

#include "tests/emulation/device.h"

namespace epx::cuda {

using LoadBarrier = uint64_t;

template <typename T>
T* in_register(T* shared) {
  return shared;
}

namespace bulk {

struct Load {
  std::byte* shared;
  const std::byte* global;
  uint32_t bytes;
};
struct Store {
  std::byte* global;
  const std::byte* shared;
  uint32_t bytes;
  std::vector<std::byte> data; // empty until read
};
struct Copies {
  std::vector<Store> open_group;
  std::vector<std::vector<Store>> groups; // not written yet
};

// Returns the stores of the running CUDA thread. They are by thread index, since a block's threads share one of the operating
// system's.
inline Copies& of_this_thread() {
  static thread_local std::vector<Copies> copies;
  if (copies.size() < blockDim.x) copies.resize(blockDim.x);
  return copies[threadIdx.x];
}
// Returns the running block's loads in flight.
inline std::deque<Load>& loads_of(LoadBarrier* barrier) {
  static thread_local std::map<LoadBarrier*, std::deque<Load>> loads;
  return loads[barrier];
}

inline void read(std::vector<Store>& group) {
  for (Store& store : group)
    if (store.data.empty()) store.data.assign(store.shared, store.shared + store.bytes);
}

inline void require(bool holds) {
  if (!holds) std::abort();
}

} // namespace bulk

inline void init_barrier(LoadBarrier* barrier) {
  *barrier = 0;
}
inline void fence_shared_before_bulk_copies() {}
inline void fence_global_before_bulk_copies() {}

inline void begin_load(std::byte* shared, const std::byte* global, uint32_t bytes, LoadBarrier* barrier) {
  bulk::require(reinterpret_cast<uintptr_t>(shared) % 16 == 0 && reinterpret_cast<uintptr_t>(global) % 16 == 0 &&
                bytes % 16 == 0 && bytes > 0);
  bulk::require(bulk::loads_of(barrier).empty()); // only one load at a time: the barrier counts to 1
  std::memset(shared, 0xee, bytes);               // undefined until the load completes
  bulk::loads_of(barrier).push_back({shared, global, bytes});
}

inline void wait_for_load(LoadBarrier* barrier, uint32_t parity) {
  std::deque<bulk::Load>& loads = bulk::loads_of(barrier);
  while (*barrier % 2 == parity && loads.empty())
    emulation::pause();               // another thread is about to begin the load
  if (*barrier % 2 != parity) return; // another thread has waited for the load
  std::memcpy(loads.front().shared, loads.front().global, loads.front().bytes);
  loads.pop_front();
  ++*barrier;
}

inline void begin_store(std::byte* global, const std::byte* shared, uint32_t bytes) {
  bulk::require(reinterpret_cast<uintptr_t>(shared) % 16 == 0 && reinterpret_cast<uintptr_t>(global) % 16 == 0 &&
                bytes % 16 == 0 && bytes > 0);
  bulk::of_this_thread().open_group.push_back({global, shared, bytes, {}});
}

inline void end_store_group() {
  bulk::Copies& copies = bulk::of_this_thread();
  copies.groups.push_back(std::move(copies.open_group));
  copies.open_group.clear();
}

template <int kPending>
void wait_for_store_reads() {
  std::vector<std::vector<bulk::Store>>& groups = bulk::of_this_thread().groups;
  for (size_t i = 0; i + kPending < groups.size(); ++i)
    bulk::read(groups[i]);
}

inline void wait_for_stores() {
  std::vector<std::vector<bulk::Store>>& groups = bulk::of_this_thread().groups;
  for (std::vector<bulk::Store>& group : groups) {
    bulk::read(group);
    for (const bulk::Store& store : group)
      std::memcpy(store.global, store.data.data(), store.bytes);
  }
  groups.clear();
}

} // namespace epx::cuda
