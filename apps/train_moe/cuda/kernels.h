// SPDX-License-Identifier: Apache-2.0
// The kernels of train_moe, but for matrix products: each function enqueues one kernel on a stream, and does nothing where
// there is nothing to compute. Sums are taken in an order that depends on the shape alone. device.h says what each computes.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "apps/train_moe/adamw.h"

namespace train::cuda {

cudaError_t embed(const float* table, const unsigned char* bytes, int64_t count, int64_t width, float* out,
                  cudaStream_t stream);
cudaError_t embed_bwd(const float* grad_out, const unsigned char* bytes, int64_t count, int64_t width, float* grad_table,
                      cudaStream_t stream);
cudaError_t add(const float* a, const float* b, int64_t size, float* out, cudaStream_t stream);

// out[r, :] = row[:]
cudaError_t repeat_row(const float* row, int64_t rows, int64_t width, float* out, cudaStream_t stream);
// sum[i] = the sum over r of x[r, i], in the order of r
cudaError_t sum_rows(const float* x, int64_t rows, int64_t width, float* sum, cudaStream_t stream);

cudaError_t rms_norm(const float* x, int64_t rows, int64_t width, float* y, cudaStream_t stream);
cudaError_t rms_norm_bwd(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x,
                         cudaStream_t stream);
cudaError_t cross_entropy(float* logits, const unsigned char* targets, int64_t rows, int64_t classes, float scale,
                          double* losses, cudaStream_t stream);
cudaError_t adamw(const AdamWStep& step, int64_t size, const AdamWVectors& vectors, cudaStream_t stream);
// The bits of bfloat16.
cudaError_t round(const float* from, int64_t size, uint16_t* to, cudaStream_t stream);
cudaError_t widen(const uint16_t* from, int64_t size, float* to, cudaStream_t stream);

} // namespace train::cuda
