// SPDX-License-Identifier: Apache-2.0
// The MoE layer on epx has one block per layer, all of them on one group.
#include <cmath>
#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "apps/train_moe/errors.h"
#include "apps/train_moe/moe_layer.h"
#include "apps/train_moe/pieces.h"
#include "epx/epx_moe.hpp"
#include "epx/epx_mpi.hpp"

namespace train {
namespace {

epx_moe_path as_epx(Path path) {
  if (path == Path::ring) return EPX_MOE_PATH_RING;
  if (path == Path::ragged) return EPX_MOE_PATH_RAGGED;
  return EPX_MOE_PATH_DISPATCH; // of both, too
}

// Gives the block the model's float32 numbers in the block's dtype: for float32 their own memory, for bfloat16 a copy.
class Converted {
public:
  Converted(Device& device, Dtype dtype) : device_(device), is_float_(dtype == Dtype::fp32), copy_(device) {}

  // Returns x[size] for the block to read, until the next call of this object.
  const void* of(const float* x, int64_t size) {
    if (is_float_) return x;
    copy_.resize(size);
    device_.round(x, size, copy_.data());
    return copy_.data();
  }
  // Returns where the block is to write what write_back() gives to x[size].
  void* room_for(float* x, int64_t size) {
    if (is_float_) return x;
    copy_.resize(size);
    return copy_.data();
  }
  void write_back(float* x) {
    if (!is_float_) device_.widen(copy_.data(), copy_.size(), x);
  }

private:
  Device& device_;
  bool is_float_;
  Array<Bfloat16> copy_;
};

// The rows that zones are padded to. Products in FP8 want 16.
constexpr int zone_alignment(bool is_fp8) {
  return is_fp8 ? 16 : 1;
}

class EpxLayer final : public MoeLayer {
public:
  EpxLayer(epx::GroupView group, const World& world, const Mesh& mesh, Device& device, const Options& options,
           std::unique_ptr<ExpertWeights> experts)
      : MoeLayer(options.model, options.aux_loss), group_(group), world_(world), mesh_(mesh), device_(device),
        dtype_(as_epx(options.dtype)), is_fp8_(options.recipe != EPX_MOE_RECIPE_WIDE), experts_(std::move(experts)),
        tokens_(device, options.dtype), out_(device, options.dtype), grad_(device, options.dtype), device_topk_idx_(device),
        device_global_counts_(device), device_info_(device) {
    epx::moe::BlockConfig config;
    config.router.num_experts = model_.experts;
    config.router.top_k = model_.top_k;
    config.router.aux_loss_coeff = aux_loss_;
    config.ffn.hidden_dim = model_.hidden;
    config.ffn.ffn_dim = model_.ffn;
    config.dtype = dtype_;
    config.path = as_epx(options.path);
    if (config.path != EPX_MOE_PATH_DISPATCH) config.weighting = EPX_MOE_WEIGHT_EARLY; // the block refuses the other
    if (const epx::RowFormat format = epx::row_format(options.dispatch_format)) config.dispatch_format = format.get();
    if (is_fp8_) {
      config.recipe = options.recipe;
      config.weighting = EPX_MOE_WEIGHT_EARLY;
    }
    config.alignment = zone_alignment(is_fp8_);
    block_ = epx::moe::Block(group_, config);
    group_counts_.resize(static_cast<size_t>(mesh.ep.size) * model_.experts);
    device_global_counts_.resize(std::ssize(group_counts_));
    device_info_.resize(std::ssize(info_));
    cuda_.stream = device.stream();
  }
  ~EpxLayer() override {
    if (std::uncaught_exceptions() > 0) group_.abort(); // so that the other ranks do not wait for this one
  }

  void fetch_experts() override { experts_->fetch(); }
  void await_experts() override { experts_->await(); }

  void forward(const float* tokens, const float* logits, const Chunks& chunks, float* out) override {
    num_tokens_ = chunks.num_tokens();
    topk_idx_.resize(num_tokens_ * model_.top_k);
    device_topk_idx_.resize(num_tokens_ * model_.top_k);
    const int64_t size = num_tokens_ * model_.hidden;
    block_.fwd({.cuda = cuda(),
                .tokens = rows(tokens_.of(tokens, size), model_.hidden, dtype_),
                .logits = rows(logits, model_.experts, EPX_FLOAT32),
                .params = experts_->params(),
                .fp8_params = experts_->fp8_params(),
                .out = rows(out_.room_for(out, size), model_.hidden, dtype_),
                .topk_idx = {device_topk_idx_.data(), EPX_INT32, {num_tokens_, model_.top_k}},
                .global_counts = {device_global_counts_.data(), EPX_INT32, {mesh_.ep.size, model_.experts}},
                .info = {device_info_.data(), EPX_INT64, device_info_.size()}});
    out_.write_back(out);
    device_topk_idx_.copy_out(0, topk_idx_);
    device_global_counts_.copy_out(0, group_counts_);
    device_info_.copy_out(0, info_);
    require_no_device_errors(); // the copies have waited
    global_counts_ = group_counts_;
    if (mesh_.fsdp.size > 1) // there are other groups
      global_counts_ = world_.gather(std::span<const int32_t>(group_counts_)
                                         .subspan(static_cast<size_t>(mesh_.ep.rank) * model_.experts, model_.experts));
  }

  void backward(const float* grad_out, float* grad_tokens, float* grad_logits, ChunkGrads&) override {
    const int64_t size = num_tokens_ * model_.hidden;
    const ExpertWeights::Grads grads = experts_->room_for_grads();
    block_.bwd({.cuda = cuda(),
                .params = experts_->params(),
                .fp8_params = experts_->fp8_params(),
                .grad_out = rows(grad_.of(grad_out, size), model_.hidden, dtype_),
                .aux_loss_grad = 1.0 / mesh_.fsdp.size, // the mean of the groups' losses
                .grad_tokens = rows(out_.room_for(grad_tokens, size), model_.hidden, dtype_),
                .grad_logits = rows(grad_logits, model_.experts, EPX_FLOAT32),
                .grads = expert_grads(model_, experts_->count(), grads.gate_up, grads.down)});
    experts_->reduce(grads);
    out_.write_back(grad_tokens);
  }

  epx_load_report capacity_use() const override {
    return group_.load_of_counts({.top_k = model_.top_k, .alignment = zone_alignment(is_fp8_)},
                                 {group_counts_, {mesh_.ep.size, model_.experts}});
  }

  void require_no_device_errors() const override {
    if (device_.is_host()) return; // the calls have refused bad data
    const epx_moe_errors_report report = block_.errors();
    if (report.num_errors > 0) fail(kExitFailure, "epx_moe: {}", report.message);
  }

private:
  const epx_moe_cuda* cuda() const { return device_.is_host() ? nullptr : &cuda_; }
  epx::Tensor rows(void* data, int64_t width, epx_dtype dtype) const { return {data, dtype, {num_tokens_, width}}; }
  epx::ConstTensor rows(const void* data, int64_t width, epx_dtype dtype) const {
    return {data, dtype, {num_tokens_, width}};
  }

  epx::GroupView group_;
  const World& world_;
  Mesh mesh_;
  Device& device_;
  epx_dtype dtype_;
  bool is_fp8_;
  epx::moe::Cuda cuda_;
  std::unique_ptr<ExpertWeights> experts_;
  int64_t num_tokens_ = 0;
  Converted tokens_, out_, grad_;
  std::vector<int32_t> group_counts_; // [ranks of the EP axis, E]
  Array<int32_t> device_topk_idx_, device_global_counts_;
  Array<int64_t> device_info_;
  epx::moe::Block block_;
};

} // namespace

epx::Group make_group(const World& world, const Mesh& mesh, const Device& device, const Options& options,
                      int64_t max_tokens, double capacity_factor) {
  epx::GroupConfig config;
  config.num_experts = options.model.experts;
  config.max_tokens_per_rank = static_cast<int32_t>(max_tokens);
  config.hidden_dim = options.model.hidden;
  config.max_top_k = options.model.top_k;
  config.max_alignment = zone_alignment(options.recipe != EPX_MOE_RECIPE_WIDE);
  config.max_token_dtype = as_epx(options.dtype);
  config.transport = device.is_host() ? EPX_TRANSPORT_HOST : EPX_TRANSPORT_NCCL; // the experts compute where it ends
  if (capacity_factor < mesh.ep.size)                                            // else any routing has room
    config.max_recv_tokens_per_rank =
        static_cast<int64_t>(std::ceil(capacity_factor * static_cast<double>(max_tokens * options.model.top_k)));
  if (options.on_overflow != OnOverflow::error) config.overflow = EPX_OVERFLOW_DROP;
  config.combine_precision = EPX_COMBINE_EXACT; // the same bits for every number of ranks
  config.timeout_ms = options.timeout_ms;
  config.color = mesh.fsdp.rank;
  config.key = mesh.ep.rank;
  return {epx::bootstrap_mpi(world.comm(), std::chrono::milliseconds(options.timeout_ms)), config};
}

void require_no_events(epx::GroupView group) {
  const epx_group_report report = group.status();
  if (report.message[0] != '\0') fail(kExitFailure, "epx: {}", report.message);
}

std::unique_ptr<MoeLayer> make_epx_layer(epx::GroupView group, const World& world, const Mesh& mesh, Device& device,
                                         const Options& options, std::unique_ptr<ExpertWeights> experts) {
  return std::make_unique<EpxLayer>(group, world, mesh, device, options, std::move(experts));
}

} // namespace train
