// train_moe: trains a byte-level language model with MoE layers on epx. Wiring only.
#include <algorithm>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "examples/train_moe/checkpoint.h"
#include "examples/train_moe/errors.h"
#include "examples/train_moe/options.h"
#include "examples/train_moe/output.h"
#include "examples/train_moe/text.h"
#include "examples/train_moe/trainer.h"
#include "examples/train_moe/world.h"

namespace train {
namespace {

using json = nlohmann::ordered_json;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

std::vector<Exchange> exchanges_of(const Options& options) {
  if (options.exchange == Exchange::both) return {Exchange::epx, Exchange::alltoallv};
  return {options.exchange};
}

// The time per step of each exchange, side by side.
void print_times(const std::vector<std::unique_ptr<Trainer>>& trainers, const std::vector<std::vector<double>>& seconds) {
  fmt::print(stderr, "{:<12}{:>12}{:>12}{:>12}   ms per step of the slowest rank, {} steps\n", "exchange", "median", "min",
             "max", seconds[0].size());
  for (size_t i = 0; i < trainers.size(); ++i)
    fmt::print(stderr, "{:<12}{:>12.2f}{:>12.2f}{:>12.2f}\n", name_of(trainers[i]->exchange()), 1e3 * median(seconds[i]),
               1e3 * *std::min_element(seconds[i].begin(), seconds[i].end()),
               1e3 * *std::max_element(seconds[i].begin(), seconds[i].end()));
}

void train(const World& world, const Options& options) {
  Text text;
  std::unique_ptr<LineWriter> log; // rank 0's
  world.together([&] {
    text = read_text(options.text, options.model);
    if (world.rank() != 0) return;
    log = std::make_unique<LineWriter>("--log", options.log_file);
    if (!options.checkpoint_file.empty()) require_writable(options.checkpoint_file); // not only after hours of training
  });
  const auto write_line = [&](const json& line) {
    if (log != nullptr) log->write(line.dump());
  };

  std::vector<std::unique_ptr<Trainer>> trainers;
  for (const Exchange exchange : exchanges_of(options))
    trainers.push_back(std::make_unique<Trainer>(world, options, text, exchange));
  Trainer& first = *trainers.front();
  int64_t done = 0;
  if (!options.resume_file.empty())
    for (const auto& trainer : trainers)
      done = load_checkpoint(world, options.resume_file, options.model, text, trainer->parameters());
  if (done >= options.steps)
    throw AgreedError(kExitUsage,
                      fmt::format("--resume {}: it is at step {}; --steps is {}: there is nothing left to train",
                                  options.resume_file, done, options.steps));
  std::optional<RoutingRecord> routing;
  if (!options.routing_file.empty()) routing.emplace(world, options.model, options.routing_file);
  const auto save = [&](int64_t step) {
    save_checkpoint(world, options.checkpoint_file, step, options.model, text, first.parameters());
  };

  std::vector<std::vector<double>> seconds(trainers.size());
  {
    const bool has_bar = options.progress == "on" || (options.progress == "auto" && has_terminal());
    ProgressBar bar(world.rank() == 0 && has_bar, done + 1, options.steps);
    for (int64_t step = done + 1; step <= options.steps; ++step) {
      std::vector<StepResult> results;
      for (const auto& trainer : trainers)
        results.push_back(trainer->step(step));
      for (size_t i = 0; i < trainers.size(); ++i) {
        seconds[i].push_back(results[i].seconds);
        if (i > 0 && results[i].loss != results[0].loss)
          throw AgreedError(kExitFailure, fmt::format("step {}: the loss is {} with {} and {} with {}; they must be equal",
                                                      step, results[0].loss, name_of(first.exchange()), results[i].loss,
                                                      name_of(trainers[i]->exchange())));
      }
      write_line({{"step", step}, {"loss", results[0].loss}, {"load", results[0].load}});
      bar.update(step, results[0].loss);
      if (routing) routing->write(step, first.model());
      if (options.checkpoint_every > 0 && step % options.checkpoint_every == 0 && step != options.steps) save(step);
    }
  }
  if (!options.checkpoint_file.empty()) save(options.steps);

  const double held_out = first.held_out_loss();
  const double entropy = text.unigram_entropy();
  json times;
  for (size_t i = 0; i < trainers.size(); ++i) {
    times[name_of(trainers[i]->exchange())] = 1e3 * median(seconds[i]);
  }
  write_line({{"held_out_loss", held_out},
              {"unigram_entropy", entropy},
              {"ratio", held_out / entropy},
              {"steps", options.steps},
              {"ranks", world.size()},
              {"median_ms_per_step", times}});
  world.together([&] {
    if (log != nullptr) log->close();
  });
  if (routing) routing->close();
  if (world.rank() == 0) {
    fmt::print(stderr, "held-out loss {:.4f} nats per byte, {:.3f} of the text's unigram entropy, {:.4f}\n", held_out,
               held_out / entropy, entropy);
    print_times(trainers, seconds);
  }
}

int run(const World& world, const Options& options) {
  try {
    train(world, options);
    return 0;
  } catch (const AgreedError& error) {
    if (world.rank() == 0) fmt::print(stderr, "train_moe: {}\n", error.what());
    return error.exit_code();
  } catch (const std::exception& error) { // the other ranks may not know
    fmt::print(stderr, "train_moe: rank {}: {}\n", world.rank(), error.what());
    world.abort(kExitFailure);
  }
}

} // namespace
} // namespace train

int main(int argc, char** argv) {
  using namespace train;
  const World world;
  try {
    const auto parsed = parse_options(argc, argv);
    if (const auto* options = std::get_if<Options>(&parsed)) return run(world, *options);
    if (world.rank() == 0) fmt::print("{}", std::get<RequestedText>(parsed).text);
    return 0;
  } catch (const Error& error) {
    if (world.rank() == 0) fmt::print(stderr, "train_moe: {}\n", error.what());
    return error.exit_code();
  }
}
