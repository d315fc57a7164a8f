// SPDX-License-Identifier: Apache-2.0
// A Device is where a rank keeps its numbers and computes: the host, or a GPU. Model, parameters and layers are written once on
// this interface. On a GPU the pieces are enqueued on stream(), in the order of the calls; copies wait for them.
//
// Matrices are row-major; weights are [out, in]. Pointers are memory of the device, from allocate() (array.h owns it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "apps/train_moe/adamw.h"
#include "apps/train_moe/network.h"
#include "epx/epx.h"
#include "tools/copy_engine_gather.h"

namespace train {

using Bfloat16 = uint16_t; // its bits

class Device {
public:
  virtual ~Device() = default;

  virtual bool is_host() const = 0;
  virtual epx_stream stream() const = 0;        // for the calls of epx; NULL on the host
  virtual epx_stream side_stream() const = 0;   // for what moves while stream() computes; NULL on the host, which has none
  virtual double available_memory() const = 0;  // bytes that this process can have there
  virtual double peak_memory() const = 0;       // bytes in use there, the most so far; on a GPU all processes', now
  virtual void* allocate(size_t bytes) = 0;     // throws Error
  virtual void free(void* memory) noexcept = 0; // accepts NULL
  virtual void clear(void* to, size_t bytes) = 0; // sets all bytes to 0
  virtual void copy_in(void* to, const void* from_host, size_t bytes) = 0;
  virtual void copy_out(void* to_host, const void* from, size_t bytes) = 0;
  virtual void copy(void* to, const void* from, size_t bytes) = 0; // within the device
  virtual void synchronize() = 0;                                  // waits for everything that was enqueued on stream()

  virtual void fork() = 0; // side_stream() waits for what stream() has been given
  virtual void join() = 0; // stream() waits for what side_stream() has been given

  // Returns what gathers in memory of this device without its SMs, or NULL where there is nothing like that. Collective.
  virtual std::unique_ptr<epx::CopyEngineGather> make_copy_engine_gather(int rank, int num_ranks,
                                                                         const epx::ShareBytes& share) = 0;

  // out[i, :] = table[bytes[i], :]
  virtual void embed(const float* table, const unsigned char* bytes, int64_t count, int64_t width, float* out) = 0;
  // grad_table[bytes[i], :] += grad_out[i, :], for one i after the other
  virtual void embed_bwd(const float* grad_out, const unsigned char* bytes, int64_t count, int64_t width,
                         float* grad_table) = 0;
  // out = a + b
  virtual void add(const float* a, const float* b, int64_t size, float* out) = 0;

  // These are the functions of network.h.
  virtual void linear(const float* x, const float* weight, const float* bias, int64_t rows, int64_t in, int64_t out,
                      float* y) = 0;
  virtual void linear_bwd(const float* x, const float* weight, const float* grad_y, int64_t rows, int64_t in, int64_t out,
                          const LinearGrads<float>& grads) = 0;
  virtual void rms_norm(const float* x, int64_t rows, int64_t width, float* y) = 0;
  virtual void rms_norm_bwd(const float* x, const float* grad_y, int64_t rows, int64_t width, float* grad_x) = 0;
  virtual void cross_entropy(float* logits, const unsigned char* targets, int64_t rows, int64_t classes, float scale,
                             double* losses) = 0;

  // Applies adamw_update() to every element.
  virtual void adamw(const AdamWStep& step, int64_t size, const AdamWVectors& vectors) = 0;

  // Rounds to the nearest bfloat16, ties to even, and back.
  virtual void round(const float* from, int64_t size, Bfloat16* to) = 0;
  virtual void widen(const Bfloat16* from, int64_t size, float* to) = 0;
};

std::unique_ptr<Device> make_host_device();

// Makes a GPU of this machine the calling thread's current device, that of its rank number among the ranks of the machine.
// Throws Error when there is no GPU, or this program was built without CUDA.
std::unique_ptr<Device> make_cuda_device(int local_rank);

} // namespace train
