// SPDX-License-Identifier: Apache-2.0
// The experts of one layer on this rank, as an epx_moe_block takes them.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "apps/train_moe/array.h"
#include "apps/train_moe/device.h"
#include "apps/train_moe/fsdp.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/parameters.h"
#include "epx/epx_moe.hpp"

namespace train {

// Experts are the experts of one layer.
struct Experts {
  Parameters::Id gate_up; // [E, 2F, H]
  Parameters::Id down;    // [E, H, F]
};

// Their weights in the block's dtype, or in FP8. On an FSDP axis each rank rounds or quantises what it keeps, and that is
// gathered: the same bits as those of gathered parameters that are rounded or quantised, in fewer bytes.
class ExpertWeights {
public:
  // Collective over the axis, which may be NULL: then the parameters are whole. All but options, mesh and ids must outlive this.
  ExpertWeights(FsdpAxis* axis, Device& device, Parameters& parameters, const Options& options, const Mesh& mesh,
                const Experts& ids);
  ExpertWeights(const ExpertWeights&) = delete;
  ExpertWeights& operator=(const ExpertWeights&) = delete;

  int64_t count() const { return count_; }

  // fetch() begins to make the weights those of the parameters; what is gathered moves on the device's side stream. await() has
  // the device's stream wait for it. Collective over the axis.
  void fetch();
  void await();
  // By the recipe one of the two, as from await() to the next fetch().
  const epx::moe::FfnParams& params() const { return params_; }
  const std::optional<epx::moe::Fp8Params>& fp8_params() const { return fp8_params_; }

  // A backward takes room for its gradients, writes them, and has them reduced. Collective.
  struct Grads {
    float* gate_up;
    float* down;
  };
  Grads room_for_grads();
  void reduce(const Grads& grads);

private:
  // A matrix in the form that the block takes.
  struct Stored {
    SplitMatrix matrix;
    epx_dtype dtype;
    FsdpAxis::Memory memory; // without an axis the part is the whole
  };
  // A weight of all experts here: its elements are codes in FP8, which have scales.
  struct Weight {
    Parameters::Id id;
    Stored elements;
    std::optional<Stored> scales;
  };

  Weight weight(Parameters::Id id, int64_t rows, int64_t width, int64_t unit);
  Stored stored(epx_dtype dtype, SplitMatrix matrix);
  void* allocate(epx_dtype dtype, int64_t size); // of this rank alone
  void use_fp8();
  void convert_kept(const Weight& weight);
  void gather(const Stored& stored);
  const epx_moe_cuda* cuda() const { return device_.is_host() ? nullptr : &cuda_; }

  Device& device_;
  Parameters& parameters_;
  ModelOptions model_;
  epx_dtype dtype_; // of elements
  int64_t count_;
  FsdpAxis* axis_; // NULL also where there are no experts
  epx::moe::Cuda cuda_;
  std::vector<Array<uint8_t>> buffers_; // of allocate()
  Weight gate_up_, down_;
  epx::moe::FfnParams params_;
  std::optional<epx::moe::Fp8Tensors<epx::Tensor>> fp8_tensors_;
  std::optional<epx::moe::Fp8Params> fp8_params_;
};

} // namespace train
