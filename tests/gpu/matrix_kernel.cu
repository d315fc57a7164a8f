// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/matrix_kernel.h"

namespace epx::test {
namespace {

constexpr int kTile = 32;
constexpr int kRowsPerThread = 4;

// A block computes a tile of the product; each thread computes kRowsPerThread elements.
__global__ void __launch_bounds__(kTile* kTile / kRowsPerThread)
    matrix_kernel(const float* left, const float* right, float* product) {
  __shared__ float left_tile[kTile][kTile], right_tile[kTile][kTile];
  const int column = blockIdx.x * kTile + threadIdx.x, row = blockIdx.y * kTile + threadIdx.y;
  constexpr int kStep = kTile / kRowsPerThread;
  float sums[kRowsPerThread] = {};
  for (int first = 0; first < kMatrixSize; first += kTile) {
    for (int i = 0; i < kTile; i += kStep) {
      left_tile[threadIdx.y + i][threadIdx.x] = left[(row + i) * kMatrixSize + first + threadIdx.x];
      right_tile[threadIdx.y + i][threadIdx.x] = right[(first + threadIdx.y + i) * kMatrixSize + column];
    }
    __syncthreads();
    for (int k = 0; k < kTile; ++k)
      for (int i = 0; i < kRowsPerThread; ++i)
        sums[i] += left_tile[threadIdx.y + i * kStep][k] * right_tile[k][threadIdx.x];
    __syncthreads();
  }
  for (int i = 0; i < kRowsPerThread; ++i)
    product[(row + i * kStep) * kMatrixSize + column] = sums[i];
}

} // namespace

cudaError_t multiply_matrices(const float* left, const float* right, float* product, cudaStream_t stream) {
  constexpr int kTiles = kMatrixSize / kTile;
  matrix_kernel<<<dim3(kTiles, kTiles), dim3(kTile, kTile / kRowsPerThread), 0, stream>>>(left, right, product);
  return cudaGetLastError();
}

} // namespace epx::test
