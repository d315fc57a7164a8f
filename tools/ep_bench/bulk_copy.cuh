// Bulk copies between global and shared memory, which the copy hardware of an SM carries out. PTX, Hopper and later.
// Addresses and byte counts are multiples of 16. All verbs are for one thread, which waits for its own copies only.
#pragma once

#include <cstdint>

namespace epx::bench {

// An mbarrier in shared memory: each bulk load that is announced to it ends one of its phases.
using LoadBarrier = uint64_t;

__device__ inline uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

__device__ inline void init_barrier(LoadBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// The copy hardware sees what this thread has initialised.
__device__ inline void fence_barriers_for_loads() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Announces the load to the barrier and starts it.
__device__ inline void start_load(void* shared, const void* global, uint32_t bytes, LoadBarrier* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Phases alternate between parity 0 and 1. What was loaded in the phase may be read, by stores of this thread too.
__device__ inline void wait_for_load(LoadBarrier* barrier, uint32_t parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "again:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               "@!done bra again;\n"
               "}" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
}

__device__ inline void start_store(void* global, const void* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// Puts the stores since the last one into a group.
__device__ inline void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// All but the latest `kGroups` groups have read their shared memory, which may be written again.
template <int kGroups>
__device__ inline void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kGroups) : "memory");
}

// All stores have been written.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

} // namespace epx::bench
