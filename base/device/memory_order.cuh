// SPDX-License-Identifier: Apache-2.0
// Loads, stores and fences on memory that other GPUs access too; each name says memory order and scope. Other inline PTX is in
// async_copy.cuh, bulk_copy.cuh and launch.h alone.
#pragma once

#include <cstdint>
#include <cstring>

namespace epx::cuda {

__device__ inline uint64_t load_acquire_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ inline uint32_t load_acquire_sys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline uint64_t load_relaxed_sys(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint32_t load_relaxed_sys(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_relaxed_sys(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline void store_relaxed_sys(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// A fence after a relaxed load makes an acquire pattern, and one before a relaxed store a release pattern.
__device__ inline void fence_acq_rel_sys() {
  asm volatile("fence.acq_rel.sys;" ::: "memory");
}
__device__ inline void fence_acq_rel_block() {
  asm volatile("fence.acq_rel.cta;" ::: "memory");
}

// LL packets of 8 or 16 aligned bytes, at system scope. Their loads and stores are single-copy atomic: no thread sees half of a
// packet. But ptxas (13.0) made two loads of 4 bytes of one of 16 whose first and last word alone were used. So whoever uses
// only two words of such a packet uses two that lie beside each other.
template <typename Word>
constexpr bool kIsSingleCopyAtomic = alignof(Word) == sizeof(Word) && (sizeof(Word) == 8 || sizeof(Word) == 16);

template <typename Word>
__device__ inline Word load_packet_relaxed_sys(const Word* word) {
  static_assert(kIsSingleCopyAtomic<Word>);
  uint64_t halves[sizeof(Word) / 8];
  if constexpr (sizeof(Word) == 16)
    asm volatile("{\n"
                 ".reg .b128 word;\n"
                 "ld.relaxed.sys.global.b128 word, [%2];\n"
                 "mov.b128 {%0, %1}, word;\n"
                 "}"
                 : "=l"(halves[0]), "=l"(halves[1])
                 : "l"(word)
                 : "memory");
  else
    halves[0] = load_relaxed_sys(reinterpret_cast<const uint64_t*>(word));
  Word result;
  memcpy(&result, halves, sizeof(result));
  return result;
}

template <typename Word>
__device__ inline Word load_packet_acquire_sys(const Word* word) {
  static_assert(kIsSingleCopyAtomic<Word> && sizeof(Word) == 16);
  uint64_t halves[2];
  asm volatile("{\n"
               ".reg .b128 word;\n"
               "ld.acquire.sys.global.b128 word, [%2];\n"
               "mov.b128 {%0, %1}, word;\n"
               "}"
               : "=l"(halves[0]), "=l"(halves[1])
               : "l"(word)
               : "memory");
  Word result;
  memcpy(&result, halves, sizeof(result));
  return result;
}

template <typename Word>
__device__ inline void store_packet_relaxed_sys(Word* word, const Word& value) {
  static_assert(kIsSingleCopyAtomic<Word>);
  uint64_t halves[sizeof(Word) / 8];
  memcpy(halves, &value, sizeof(value));
  if constexpr (sizeof(Word) == 16)
    asm volatile("{\n"
                 ".reg .b128 word;\n"
                 "mov.b128 word, {%1, %2};\n"
                 "st.relaxed.sys.global.b128 [%0], word;\n"
                 "}" ::"l"(word),
                 "l"(halves[0]), "l"(halves[1])
                 : "memory");
  else
    store_relaxed_sys(reinterpret_cast<uint64_t*>(word), halves[0]);
}

// LL lines, as in NCCL's LL128 protocol: eight neighbouring lanes store the 16-byte packets of a line of 128 aligned bytes in
// one instruction, and over NVLink whoever sees the flag in its last packet finds the other seven stored. PTX does not promise
// that; NCCL relies on it, on Volta and later. Where it is false, the last packet is stored behind the others.
constexpr bool kStoresLinesWhole = true;

__device__ inline uint64_t compare_and_swap_sys(uint64_t* word, uint64_t expected, uint64_t desired) {
  return atomicCAS_system(reinterpret_cast<unsigned long long*>(word), expected, desired);
}

// nanosleep: suspends the warp for about so long, so that other warps of the SM run.
__device__ inline void backoff(unsigned nanoseconds) {
  __nanosleep(nanoseconds);
}

__device__ inline uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

} // namespace epx::cuda
