// SPDX-License-Identifier: Apache-2.0
// These are the sizes in 0.1 of the C API's structs that may grow, and the first sizes of newer ones. The library's own table
// is not used, since it is under test.
#pragma once

#include <cstddef>

#include "epx/epx.h"

namespace epx::test {

template <typename Struct>
inline constexpr size_t kBytes01 = 0;
template <>
inline constexpr size_t kBytes01<epx_prepare_args> = 96;
template <>
inline constexpr size_t kBytes01<epx_dispatch_args> = 72;
template <>
inline constexpr size_t kBytes01<epx_combine_args> = 64;
template <>
inline constexpr size_t kBytes01<epx_combine_bwd_args> = 80;
template <>
inline constexpr size_t kBytes01<epx_dispatch_bwd_args> = 72;
template <>
inline constexpr size_t kBytes01<epx_dispatch_rank_major_args> = 96;
template <>
inline constexpr size_t kBytes01<epx_combine_rank_major_args> = 56;
template <>
inline constexpr size_t kBytes01<epx_combine_rank_major_bwd_args> = 56;
template <>
inline constexpr size_t kBytes01<epx_dispatch_rank_major_bwd_args> = 72;
template <>
inline constexpr size_t kBytes01<epx_prepare_dispatch_args> = 136;
template <>
inline constexpr size_t kBytes01<epx_ragged_all_to_all_args> = 72;
template <>
inline constexpr size_t kBytes01<epx_group_info> = 88;
template <>
inline constexpr size_t kBytes01<epx_memory_plan> = 104;
template <>
inline constexpr size_t kBytes01<epx_group_report> = 1480;

// This is the largest struct_size that the library takes.
inline constexpr size_t kMaxStructBytes = 4096;

} // namespace epx::test
