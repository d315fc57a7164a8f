// SPDX-License-Identifier: Apache-2.0
// Grouped matrix products on a GPU: one product for each local expert, over the rows of its zone. Their sizes are in device
// memory, so the host does not wait for them. Which library or kernel multiplies is known behind this header only.
#pragma once

#include <cstdint>
#include <vector>

#include <cuda_runtime_api.h>

#include "epx/epx.h"
#include "moe/cuda/launch_target.h"
#include "moe/integers.h"
#include "moe/quantise/block.h"

namespace epx::moe::cuda {

// The zones of the local experts as epx_prepare writes them, in device memory. Values that do not fit num_rows are clamped, so
// a product never leaves its tensors.
struct DeviceZones {
  Integers counts;  // [num_experts]
  Integers offsets; // [num_experts + 1]
  int num_experts = 0;
  int64_t num_rows = 0; // N: the rows that the tensors have
};

// R is a row of expert e's zone. Elements are summed in fp32 and rounded once. The order of the sum follows from the kernel,
// and the kernel from the dtype, the lengths of the rows, the GPU's compute capability and the build alone: an element's bits
// do not depend on the zones (but for what a weight gradient sums), on where a row lies or on the number of SMs.
//
//   kernel          order over the inner index                                        where
//   sm90/           by stages of 64 from 0, or the zone's first row; then as wgmma    BFLOAT16 on capability 9.0
//   sm90/           by blocks of 128 from 0, or the zone's first row; each as wgmma   FLOAT8_E4M3 on capability 9.0
//   generic_gemm.h  ascending, in one accumulator by fma                              elsewhere
//
// Operands of FLOAT8_E4M3 have a scale for each of these blocks. The codes of a block are multiplied and added up by themselves;
// then the sum, times both scales, is added to the sum of the blocks before it (promotion).
//
//   product                  a and b                                          d                              accumulate
//   kRowsByWeight            any                                              as a; of E4M3 BFLOAT16         no
//   kRowsByTransposedWeight  FLOAT32, FLOAT16, BFLOAT16                       as a                           yes
//   kWeightGradient          any; of E4M3 columns of the zones instead of     as a, of E4M3 BFLOAT16;        of FLOAT32
//                            rows                                             or FLOAT32
enum class Product {
  kRowsByWeight,           // d[R, n] = sum over k of a[R, k] * b[e, n, k]
  kRowsByTransposedWeight, // d[R, n] = sum over k of a[R, k] * b[e, k, n]
  kWeightGradient          // d[e, m, n] = sum over the rows R of e of a[R, m] * b[R, n]; zero without rows
};

struct GroupedGemm {
  Product product;
  DeviceZones zones;
  int64_t m = 0; // kWeightGradient only
  int64_t n = 0;
  int64_t k = 0;       // not kWeightGradient
  epx_dtype in_dtype;  // of a and b: FLOAT32, FLOAT16, BFLOAT16 or FLOAT8_E4M3
  epx_dtype out_dtype; // of d
  const void* a = nullptr;
  const void* b = nullptr;
  void* d = nullptr;
  // Of FLOAT8_E4M3, whose m, n and k are multiples of kQuantiseBlock, as epx_moe_quantise_rows and _weights write them: a_scales
  // [N, k / 128] and b_scales [E, n / 128, k / 128]; of kWeightGradient, where a is [m, N] and b [n, N], a_scales
  // [N / 128 + E, m] and b_scales [N / 128 + E, n].
  const float* a_scales = nullptr;
  const float* b_scales = nullptr;
  // Elements from one row to the next of a tensor of rows or of columns, and from one expert to the next of one of weights.
  int64_t a_stride = 0;
  int64_t b_stride = 0;
  int64_t d_stride = 0;
  bool accumulate = false; // adds to d
  // tensor_core_workspace_bytes() of device memory where fits_tensor_cores() is true and all tensors are aligned to
  // kTmaAlignment, and so are the first rows of zones in kWeightGradient of FLOAT8_E4M3 (a zone that begins elsewhere counts as
  // empty); NULL elsewhere. Products in one stream may share it.
  void* tensor_core_workspace = nullptr;
};

// The kernels that the products of in_dtype may need on the current device. Throws when the device cannot be asked.
std::vector<const void*> grouped_gemm_kernels(epx_dtype in_dtype);

// Enqueues the products on the target's stream, on at most target.num_sms SMs, but on two at least with tensor cores, whose
// clusters have two blocks. Neither waits for the device nor allocates memory. Returns cudaErrorInvalidValue for what is not in
// the table of Product.
cudaError_t launch_grouped_gemm(const GroupedGemm& gemm, const LaunchTarget& target);

} // namespace epx::moe::cuda
