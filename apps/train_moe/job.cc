// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/job.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/train_moe/checkpoint.h"
#include "apps/train_moe/errors.h"
#include "apps/train_moe/memory.h"

namespace train {
namespace {

using json = nlohmann::ordered_json;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void write_line(LineWriter* log, const json& line) {
  if (log != nullptr) log->write(line.dump());
}

} // namespace

Job::Job(const World& world, const Options& options) : world_(world), options_(options) {
  const int local_rank = world.local_rank();
  world.together([&] {
    text_ = read_text(options.text, options.model);
    device_ = options.device == DeviceKind::host ? make_host_device() : make_cuda_device(local_rank);
    mesh_ = make_mesh(world, options);
    require_memory(world, mesh_, options, *device_);
    if (world.rank() == 0 && !options.checkpoint_file.empty()) require_writable(options.checkpoint_file);
  });
  const std::vector<Path> paths =
      options.path == Path::both ? std::vector{Path::dispatch, Path::native} : std::vector{options.path};
  for (const Path path : paths)
    trainers_.push_back(std::make_unique<Trainer>(world, mesh_, *device_, options, text_, path));
  seconds_.resize(trainers_.size());
  if (!options.resume_file.empty()) resume();
  // Files of an earlier run are overwritten only now that nothing can be refused any more.
  world.together([&] {
    if (world.rank() == 0) log_ = std::make_unique<LineWriter>("--log", options.log_file);
  });
  if (!options.routing_file.empty()) routing_.emplace(world, options.model, options.routing_file);
}

void Job::train() {
  const bool has_bar = options_.progress == "on" || (options_.progress == "auto" && has_terminal());
  ProgressBar bar(world_.rank() == 0 && has_bar, done_ + 1, options_.steps);
  for (int64_t step = done_ + 1; step <= options_.steps; ++step) {
    const StepResult result = last_ = train_step(step);
    json line = {{"step", step}, {"loss", result.loss}, {"load", result.load}};
    if (options_.capacity_factor > 0) {
      line["required_capacity_factor"] = result.capacity.required_factor;
      line["max_load_of_rank"] = result.capacity.max_load;
      line["dropped_routes"] = result.capacity.dropped;
      line["ran_again"] = result.capacity.ran_again;
    }
    write_line(log_.get(), line);
    bar.update(step, result.loss);
    if (routing_) routing_->write(step, trainers_[0]->model());
    const bool is_due = options_.checkpoint_every > 0 && step % options_.checkpoint_every == 0;
    if (!options_.checkpoint_file.empty() && (is_due || step == options_.steps)) save(step);
  }
}

void Job::finish() {
  if (options_.measures_format_errors) write_format_errors();
  const double held_out = trainers_[0]->held_out_loss();
  const double entropy = text_.unigram_entropy();
  const double peak_memory = world_.largest(device_->peak_memory());
  const double rank_seconds = median(seconds_[0]) * world_.size();
  json times;
  for (size_t i = 0; i < trainers_.size(); ++i)
    times[name_of(trainers_[i]->path())] = 1e3 * median(seconds_[i]);
  write_line(log_.get(), {{"held_out_loss", held_out},
                          {"unigram_entropy", entropy},
                          {"ratio", held_out / entropy},
                          {"steps", options_.steps},
                          {"ranks", world_.size()},
                          {"ep", mesh_.ep.size},
                          {"fsdp", mesh_.fsdp.size},
                          {"last_loss", last_.loss},
                          {"perplexity", std::exp(last_.loss)},
                          {"tokens_per_second_per_rank", options_.model.batch / rank_seconds},
                          {"peak_memory_bytes", static_cast<int64_t>(peak_memory)},
                          {"fsdp_bytes_per_step",
                           {{"experts_gathered", last_.experts.gathered},
                            {"experts_reduced", last_.experts.reduced},
                            {"shared_gathered", last_.shared.gathered}}},
                          {"median_ms_per_step", times}});
  world_.together([&] {
    if (log_ != nullptr) log_->close();
  });
  if (routing_) routing_->close();
  if (world_.rank() != 0) return;
  fmt::print(stderr, "held-out loss {:.4f} nats per byte, {:.3f} of the text's unigram entropy, {:.4f}\n", held_out,
             held_out / entropy, entropy);
  print_times();
}

void Job::resume() {
  for (const auto& trainer : trainers_)
    done_ = load_checkpoint(world_, options_.resume_file, options_.model, text_, trainer->parameters());
  if (done_ >= options_.steps)
    throw AgreedError(kExitUsage,
                      fmt::format("--resume {}: it is at step {}; --steps is {}: there is nothing left to train",
                                  options_.resume_file, done_, options_.steps));
}

void Job::save(int64_t step) {
  save_checkpoint(world_, options_.checkpoint_file, step, options_.model, text_, trainers_[0]->parameters());
}

StepResult Job::train_step(int64_t step) {
  StepResult first = trainers_[0]->step(step);
  seconds_[0].push_back(first.seconds);
  for (size_t i = 1; i < trainers_.size(); ++i) {
    const StepResult other = trainers_[i]->step(step);
    seconds_[i].push_back(other.seconds);
    if (other.loss != first.loss)
      throw AgreedError(kExitFailure,
                        fmt::format("step {}: the loss is {} with {} and {} with {}; they must be equal", step, first.loss,
                                    name_of(trainers_[0]->path()), other.loss, name_of(trainers_[i]->path())));
  }
  return first;
}

void Job::write_format_errors() {
  json errors;
  for (const std::vector<FormatError>& of_layer : trainers_[0]->format_errors())
    for (const FormatError& format : of_layer)
      errors[format.name].push_back(format.error);
  write_line(log_.get(), {{"format_errors", errors}});
}

// Returns the time per step of each path as a table.
void Job::print_times() const {
  fmt::print(stderr, "{:<12}{:>12}{:>12}{:>12}   ms per step of the slowest rank, {} steps\n", "path", "median", "min",
             "max", seconds_[0].size());
  for (size_t i = 0; i < trainers_.size(); ++i) {
    const auto [least, most] = std::minmax_element(seconds_[i].begin(), seconds_[i].end());
    fmt::print(stderr, "{:<12}{:>12.2f}{:>12.2f}{:>12.2f}\n", name_of(trainers_[i]->path()), 1e3 * median(seconds_[i]),
               1e3 * *least, 1e3 * *most);
  }
}

} // namespace train
