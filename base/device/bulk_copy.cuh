// Copies that the copy engine of a multiprocessor makes on its own, between global and shared memory (PTX cp.async.bulk). The
// thread that begins a store also waits for it; for loads any may. Addresses and sizes are multiples of 16 bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace epx::cuda {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A barrier in shared memory that says when loads have come. Its uses alternate between parity 0 and 1.
using LoadBarrier = uint64_t;

__device__ inline void init_barrier(LoadBarrier* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

// What this thread has done in the order of ordinary accesses comes before the copies that begin from here on: in shared memory
// (barriers initialised, bytes written) ...
__device__ inline void fence_shared_before_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// ... and in global memory (flags acquired, and what they tell of).
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

// The stores that this thread has begun since the last time form a group.
__device__ inline void end_store_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until all groups but the last kPending have read their shared memory, which may be written again then.
template <int kPending>
__device__ inline void wait_for_store_reads() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Until all stores are complete: as if this thread had made them.
__device__ inline void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

} // namespace epx::cuda
