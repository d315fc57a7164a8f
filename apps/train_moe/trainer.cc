// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>

namespace train {
namespace {

constexpr int64_t kWarmUpSteps = 10;

// Returns the most tokens that a rank gets in a step.
int64_t most_tokens(const ModelOptions& model, int num_ranks) {
  int64_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank)
    most = std::max(most, Chunks(model.batch, rank, num_ranks).num_tokens());
  return most;
}

// RouterReport is what a rank sends to the others about one layer's router.
struct RouterReport {
  int64_t bad_tokens, first_bad_token;
};

Traffic traffic_of(const FsdpAxis* axis) {
  return axis != nullptr ? axis->traffic() : Traffic();
}

} // namespace

Trainer::Trainer(const World& world, const Mesh& mesh, Device& device, const Options& options, const Text& text, Path path)
    : world_(world), mesh_(mesh), device_(device), options_(options), text_(text), path_(path), parameters_(device),
      model_(device, options.model, parameters_, mesh, path == Path::replicated), chunk_grads_(device, parameters_) {
  if (mesh.fsdp.size > 1) {
    experts_axis_ = std::make_unique<FsdpAxis>(world, device, options, mesh.fsdp, mesh.ep.rank);
    shared_axis_ = std::make_unique<FsdpAxis>(world, device, options, mesh.all, 0);
  }
  parameters_.initialise(options.model.seed, shared_axis_.get());
  if (is_of_block(path)) {
    group_ = make_group(world, mesh, device, options, most_tokens(options.model, world.size()), options.capacity_factor);
    model_.set_layers(make_epx_layers(group_));
    return;
  }
  std::vector<std::unique_ptr<MoeLayer>> layers;
  for (const Experts& experts : model_.experts()) {
    if (path == Path::native)
      layers.push_back(make_alltoallv_layer(world, options.model, options.aux_loss, parameters_, experts));
    else if (path == Path::dense)
      layers.push_back(make_dense_layer(world, options.model, options.aux_loss, parameters_, experts));
    else
      layers.push_back(make_replicated_layer(world, options.model, options.aux_loss, parameters_, experts));
  }
  model_.set_layers(std::move(layers));
}

std::vector<std::unique_ptr<MoeLayer>> Trainer::make_epx_layers(epx::GroupView group) {
  std::vector<std::unique_ptr<MoeLayer>> layers;
  for (const Experts& experts : model_.experts())
    layers.push_back(make_epx_layer(
        group, world_, mesh_, device_, options_,
        std::make_unique<ExpertWeights>(experts_axis_.get(), device_, parameters_, options_, mesh_, experts)));
  return layers;
}

StepResult Trainer::step(int64_t step) {
  world_.barrier();
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<int64_t> positions = train_positions(text_, options_.model, step);
  const Chunks chunks(options_.model.batch, world_.rank(), world_.size());
  const Traffic experts_before = traffic_of(experts_axis_.get()), shared_before = traffic_of(shared_axis_.get());
  StepResult result;
  result.loss = forward(positions, chunks, "step", step, result.capacity);
  model_.backward(chunk_grads_);
  const std::span<const float> chunk_grads = chunk_grads_.on_host(chunk_grads_mirror_);
  for (const epx::Group* const group : {&group_, &full_group_})
    if (*group) require_no_events(*group); // a GPU has finished the backward by now
  for (const FsdpAxis* const axis : {experts_axis_.get(), shared_axis_.get()})
    if (axis != nullptr) require_no_events(axis->group());
  for (const auto& layer : model_.layers())
    layer->require_no_device_errors();
  world_.ordered_sum(chunk_grads, parameters_.shared_size(), parameters_.shared_parts(), summed_grads_);
  parameters_.shared().grads.assign(summed_grads_);
  const double warm = std::min(1.0, static_cast<double>(step) / kWarmUpSteps);
  parameters_.step(step, options_.learning_rate * warm, options_.weight_decay);
  device_.synchronize();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  result.seconds = world_.largest(seconds.count());
  for (const auto& layer : model_.layers())
    result.load.push_back(layer->load());
  result.experts = traffic_since(experts_before, experts_axis_.get());
  result.shared = traffic_since(shared_before, shared_axis_.get());
  end_rerun(result.capacity);
  return result;
}

std::vector<std::vector<FormatError>> Trainer::format_errors() {
  FormatMeter meter(group_, world_, device_, options_);
  std::vector<std::vector<FormatError>> by_layer;
  for (size_t l = 0; l < model_.layers().size(); ++l)
    by_layer.push_back(meter.measure(model_.moe_input(l), model_.layers()[l]->topk_idx()));
  require_no_events(group_);
  return by_layer;
}

double Trainer::held_out_loss() {
  const std::vector<int64_t> all = held_out_positions(text_, options_.model);
  double loss = 0;
  for (size_t first = 0; first < all.size(); first += options_.model.batch) {
    const size_t size = std::min<size_t>(options_.model.batch, all.size() - first);
    const std::vector<int64_t> positions(all.begin() + first, all.begin() + first + size);
    const Chunks chunks(static_cast<int64_t>(size), world_.rank(), world_.size());
    CapacityUse use;
    loss += forward(positions, chunks, "held-out batch", static_cast<int64_t>(first / options_.model.batch) + 1, use) *
            static_cast<double>(size);
    end_rerun(use);
  }
  return loss / static_cast<double>(all.size());
}

CapacityUse Trainer::capacity_use() const {
  const auto balanced = static_cast<double>(most_tokens(options_.model, world_.size()) * options_.model.top_k);
  CapacityUse use;
  for (const auto& layer : model_.layers()) {
    const epx_load_report load = layer->capacity_use();
    if (load.routes == 0) continue;
    use.dropped += load.dropped;
    use.required_factor = std::max(use.required_factor, static_cast<double>(load.rows_needed) / balanced);
    use.max_load = std::max(use.max_load, static_cast<double>(load.most_routes_of_rank * mesh_.ep.size) /
                                              static_cast<double>(load.routes));
  }
  return use;
}

Traffic Trainer::traffic_since(const Traffic& before, const FsdpAxis* axis) const {
  Traffic sum;
  if (axis == nullptr) return sum;
  const Traffic mine = {axis->traffic().gathered - before.gathered, axis->traffic().reduced - before.reduced};
  for (const Traffic& theirs : world_.gather(std::span<const Traffic>(&mine, 1))) {
    sum.gathered += theirs.gathered;
    sum.reduced += theirs.reduced;
  }
  return sum;
}

double Trainer::forward(const std::vector<int64_t>& positions, const Chunks& chunks, const char* when, int64_t step,
                        CapacityUse& use) {
  const double loss = mean_loss(positions, chunks, when, step);
  use = capacity_use();
  use.ran_again = use.dropped > 0 && options_.on_overflow == OnOverflow::rerun; // on all ranks, or on none
  if (!use.ran_again) return loss;
  if (full_layers_.empty()) {
    full_group_ = make_group(world_, mesh_, device_, options_, most_tokens(options_.model, world_.size()), 0);
    full_layers_ = make_epx_layers(full_group_);
  }
  model_.swap_layers(full_layers_);
  return mean_loss(positions, chunks, when, step);
}

void Trainer::end_rerun(const CapacityUse& use) {
  if (use.ran_again) model_.swap_layers(full_layers_);
}

double Trainer::mean_loss(const std::vector<int64_t>& positions, const Chunks& chunks, const char* when, int64_t number) {
  parameters_.gather();
  const std::vector<double> losses = world_.gather(std::span<const double>(model_.forward(text_, positions, chunks)));
  std::vector<RouterReport> reports;
  for (const auto& layer : model_.layers())
    reports.push_back({layer->bad_tokens(), layer->first_bad_token()});
  const std::vector<RouterReport> all = world_.gather(std::span<const RouterReport>(reports));
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i].bad_tokens > 0)
      throw AgreedError(
          kExitFailure,
          fmt::format("{} {}: the router of layer {} on rank {} got logits that are not numbers, for {} tokens "
                      "(the first is token {}); a smaller --lr may help",
                      when, number, i % reports.size(), i / reports.size(), all[i].bad_tokens, all[i].first_bad_token));
  double sum = 0;
  for (const double loss : losses) // in chunk order
    sum += loss;
  const double mean = sum / static_cast<double>(positions.size());
  if (!std::isfinite(mean))
    throw AgreedError(kExitFailure, fmt::format("{} {}: the loss is {}; a smaller --lr may help", when, number, mean));
  return mean;
}

} // namespace train
