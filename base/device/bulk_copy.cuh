// SPDX-License-Identifier: Apache-2.0
// TMA bulk copies between global and shared memory (PTX cp.async.bulk). The thread that begins a store must also wait for it;
// any thread may wait for a load. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epx::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Returns the same address in shared memory, which the compiler then keeps in a register: otherwise it computes the address of
// dynamic shared memory anew in each iteration of a loop.
template <typename T>
__device__ inline T* in_register(T* shared) {
  uint32_t address = shared_address(shared);
  asm("" : "+r"(address));
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

// An mbarrier in shared memory that completes a phase when the bytes of a load are there. The phase parity alternates between 0
// and 1 from load to load.
using LoadBarrier = uint64_t;

__device__ inline void init_barrier(LoadBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// fence.proxy.async orders this thread's earlier generic-proxy accesses before the bulk copies that begin after it. This one
// covers shared memory: barriers initialised, bytes written.
__device__ inline void fence_shared_before_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// This one covers global memory: flags acquired, and the data that they guard.
__device__ inline void fence_global_before_bulk_copies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

__device__ inline void begin_load(std::byte* shared, const std::byte* global, uint32_t bytes, LoadBarrier* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ inline void wait_for_load(LoadBarrier* barrier, uint32_t parity) {
  asm volatile("{\n"
               ".reg .pred loaded;\n"
               "WAIT_FOR_LOAD:\n"
               "mbarrier.try_wait.parity.shared::cta.b64 loaded, [%0], %1;\n"
               "@!loaded bra WAIT_FOR_LOAD;\n"
               "}" ::"r"(shared_address(barrier)),
               "r"(parity)
               : "memory");
}

__device__ inline void begin_store(std::byte* global, const std::byte* shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)),
               "r"(bytes)
               : "memory");
}

// The stores that this thread has begun since its last commit_group form one bulk group.
__device__ inline void end_store_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all bulk groups but the last kPending have read their shared memory, which may then be written again.
template <int kPending>
__device__ inline void wait_for_store_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all stores are complete; they then count as stores of this thread.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

} // namespace epx::cuda
