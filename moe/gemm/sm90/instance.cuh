// SPDX-License-Identifier: Apache-2.0
// A grouped GEMM of CUTLASS for compute capability 9.0 (wgmma and TMA).
#pragma once

#include <algorithm>
#include <array>

#include <cute/tensor.hpp>
#include <cutlass/bfloat16.h>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "moe/gemm/gemm_workspace.h"
#include "moe/gemm/sm90/cluster_launch.h"
#include "moe/gemm/sm90/instances.h"

namespace epx::moe::cuda::sm90 {

using KMajorA = cutlass::layout::RowMajor;
using MMajorA = cutlass::layout::ColumnMajor;
using KMajorB = cutlass::layout::ColumnMajor;
using NMajorB = cutlass::layout::RowMajor;

// Two consumer warp groups take the halves of a tile of 128 x 256. The blocks of a cluster share a tile of a and have
// neighbouring columns: a cluster along the rows would compute up to 128 rows that a zone does not have.
struct Cooperative {
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_2, cute::_1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative;
};

// Two consumer warp groups take tiles of 128 x 128 in turn, so that one multiplies while the other stores. This suits tiles
// whose inner size is short, as the rows of a zone often are.
struct Pingpong {
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Mainloop = cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong;
};

// LayoutA and LayoutB are those of bf16 operands; d has rows of T. With kCanAccumulate d is also read.
template <typename Schedule, typename LayoutA, typename LayoutB, typename T, bool kCanAccumulate>
class Instance {
  using Element = cutlass::bfloat16_t;
  using Rows = cutlass::layout::RowMajor;
  using Source = cute::conditional_t<kCanAccumulate, T, void>;
  static constexpr int kAlignment = 16 / sizeof(Element); // elements that TMA needs to be aligned
  static constexpr int kAlignmentOfD = 16 / sizeof(T);
  using Problem = cute::Shape<int, int, int>;
  using Problems = cutlass::gemm::GroupProblemShape<Problem>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Schedule::Tile, typename Schedule::Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, Rows*, kAlignmentOfD, T, Rows*, kAlignmentOfD,
      typename Schedule::Epilogue>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA*, kAlignment, Element, LayoutB*, kAlignment,
      float, typename Schedule::Tile, typename Schedule::Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Schedule::Mainloop>::CollectiveOp;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problems, Mainloop, Epilogue>;
  using Arguments = typename Kernel::Arguments;
  static constexpr int kClusterSize = cute::size(typename Schedule::Cluster{});

  // The kernel that fills the groups writes these types as integers.
  static_assert(sizeof(Problem) == sizeof(std::array<int, 3>) && alignof(Problem) == alignof(int));
  static_assert(sizeof(typename Kernel::InternalStrideA) == sizeof(int64_t));
  static_assert(sizeof(typename Kernel::InternalStrideB) == sizeof(int64_t));
  static_assert(sizeof(typename Kernel::InternalStrideD) == sizeof(int64_t));

public:
  static const void* kernel() { return reinterpret_cast<const void*>(&cutlass::device_kernel<Kernel>); }

  static cudaError_t launch(const Groups& groups, bool accumulate, const LaunchTarget& target) {
    Arguments args{};
    args.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    args.problem_shape = {groups.num_groups, reinterpret_cast<Problem*>(groups.sizes), nullptr};
    args.mainloop = {
        reinterpret_cast<const Element**>(groups.a), reinterpret_cast<typename Kernel::StrideA>(groups.a_strides),
        reinterpret_cast<const Element**>(groups.b), reinterpret_cast<typename Kernel::StrideB>(groups.b_strides)};
    args.epilogue.ptr_D = reinterpret_cast<T**>(groups.d);
    args.epilogue.dD = reinterpret_cast<typename Kernel::StrideD>(groups.d_strides);
    if constexpr (kCanAccumulate) {
      args.epilogue.ptr_C = reinterpret_cast<const T**>(const_cast<const void**>(groups.d));
      args.epilogue.dC = reinterpret_cast<typename Kernel::StrideC>(groups.d_strides);
    }
    args.epilogue.thread.alpha = 1.0f;
    args.epilogue.thread.beta = accumulate ? 1.0f : 0.0f;
    // SMs come in pairs that a cluster of two fills, so all clusters are resident.
    const int clusters = std::max(std::min(target.num_sms, kMaxSmsOfSm90) / kClusterSize, 1);
    args.hw_info.sm_count = clusters * kClusterSize;
    args.hw_info.max_active_clusters = clusters;
    if (const size_t bytes = Kernel::get_workspace_size(args); bytes > groups.tensormaps_bytes)
      refuse_tensormaps(bytes, groups.tensormaps_bytes);

    const auto params = Kernel::to_underlying_arguments(args, groups.tensormaps);
    using Cluster = typename Schedule::Cluster;
    const ClusterGrid grid = {Kernel::get_grid_shape(params), Kernel::get_block_shape(),
                              dim3(cute::size<0>(Cluster{}), cute::size<1>(Cluster{})), Kernel::SharedStorageSize};
    return launch_clusters(kernel(), grid, static_cast<cudaStream_t>(target.stream), params);
  }
};

} // namespace epx::moe::cuda::sm90
