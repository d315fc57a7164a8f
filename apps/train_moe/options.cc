// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/options.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include <CLI/CLI.hpp>

#include "apps/train_moe/errors.h"
#include "epx/epx.h"
#include "tools/named_recipes.h"

namespace train {
namespace {

const std::map<std::string, Path> kPaths{{"dispatch", Path::dispatch},    {"ring", Path::ring},   {"ragged", Path::ragged},
                                         {"native", Path::native},        {"dense", Path::dense}, {"both", Path::both},
                                         {"replicated", Path::replicated}};

const std::map<std::string, DeviceKind> kDevices{{"host", DeviceKind::host}, {"cuda", DeviceKind::cuda}};
const std::map<std::string, Dtype> kDtypes{{"fp32", Dtype::fp32}, {"bf16", Dtype::bf16}};

const std::map<std::string, OnOverflow> kOnOverflow{
    {"error", OnOverflow::error}, {"drop", OnOverflow::drop}, {"rerun", OnOverflow::rerun}};

const char* const kFooter = "Trains a byte-level language model with Mixture-of-Experts layers. The curve does not depend "
                            "on the number of ranks: the\n"
                            "batch is split into chunks of 32 bytes, ranks take contiguous runs of chunks, and gradients "
                            "are summed chunk by chunk in\n"
                            "that order. Prints one JSON line per step {\"step\", \"loss\" (nats per byte), \"load\" (per "
                            "layer: the busiest expert's\n"
                            "routes over the mean)} and, at the end, one with the held-out loss.\n"
                            "\n"
                            "A tenth of the text, its end, is held out. Of an option that is repeated, the last counts. "
                            "Exit status: 0, 1 (a call\n"
                            "failed or training cannot go on), 2 (the command line or a file is no good).\n"
                            "\n"
                            "Example: mpirun -n 4 train_moe --text FILE --steps 200 --experts 8 --top-k 2";

std::map<std::string, epx_moe_recipe> recipes_by_name() {
  return {epx::kNamedRecipes.begin(), epx::kNamedRecipes.end()};
}

std::map<std::string, epx::NamedFormat> formats_by_name() {
  return {epx::kNamedFormats.begin(), epx::kNamedFormats.end()};
}

// CLI11 takes "-1" for 2^64 - 1.
uint64_t parse_seed(const std::string& text) {
  uint64_t seed = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, seed);
  if (error != std::errc() || stop != end)
    fail(kExitUsage, "--seed is '{}'; it must be a whole number from 0 to 2^64 - 1", text);
  return seed;
}

} // namespace

const char* name_of(Path path) {
  for (const auto& [name, value] : kPaths)
    if (value == path) return name.c_str();
  return "unknown";
}

bool is_of_block(Path path) {
  return path == Path::dispatch || path == Path::ring || path == Path::ragged;
}

std::variant<Options, RequestedText> parse_options(int argc, char** argv) {
  Options options;
  ModelOptions& model = options.model;
  std::string path_name = "dispatch", device_name = "host", dtype_name = "fp32", fsdp_grads_name = "fp32",
              format_name = "none", recipe_name = "wide", seed = std::to_string(model.seed);
  const std::map<std::string, epx::NamedFormat> formats = formats_by_name();
  const std::map<std::string, epx_moe_recipe> recipes = recipes_by_name();
  CLI::App app("train_moe: expert-parallel training on a text");
  app.footer(kFooter);
  app.set_version_flag("--version",
                       fmt::format("train_moe (epx {}.{}.{})", EPX_VERSION_MAJOR, EPX_VERSION_MINOR, EPX_VERSION_PATCH));
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  const CLI::Range positive(1, std::numeric_limits<int>::max());

  app.add_option("--text", options.text, "file to learn, of at most 1 GiB")->capture_default_str();
  app.add_option("--steps", options.steps, "number of the last step")->check(positive)->capture_default_str();
  app.add_option("--batch", model.batch, "bytes predicted per step, over all ranks")
      ->check(positive)
      ->capture_default_str();
  app.add_option("--experts", model.experts, "experts per layer")->check(positive)->capture_default_str();
  app.add_option("--top-k", model.top_k, "experts per token")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--layers", model.layers, "MoE layers")->check(positive)->capture_default_str();
  const CLI::Option* const hidden =
      app.add_option("--hidden", model.hidden, "hidden size; default 128 with a recipe in FP8")
          ->check(positive)
          ->capture_default_str();
  app.add_option("--ffn", model.ffn, "inner size of an expert")->check(positive)->capture_default_str();
  app.add_option("--context", model.context, "bytes that the model sees")->check(positive)->capture_default_str();
  app.add_option("--embedding", model.embedding, "size of a byte's embedding")->check(positive)->capture_default_str();
  app.add_option("--seed", seed, "of parameters and batches, from 0 to 2^64 - 1")->capture_default_str();
  app.add_option("--lr", options.learning_rate, "AdamW's learning rate, after 10 steps of warm-up")->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay, "of matrices")->capture_default_str();
  app.add_option("--aux-loss", options.aux_loss, "coefficient of the load-balance loss")->capture_default_str();
  app.add_option("--path", path_name,
                 "how tokens reach their experts: dispatch, ring, ragged (the paths of epx's block), native "
                 "(MPI_Alltoallv of permuted rows), dense (all tokens to all ranks, whose experts compute all of them), "
                 "both (dispatch and native side by side, with the time per step of "
                 "each), replicated (not at all: each rank computes all experts)")
      ->check(CLI::IsMember(&kPaths))
      ->capture_default_str();
  const CLI::Option* const ep =
      app.add_option("--ep", options.ep, "ranks that share the experts, with a path of epx; default: ranks / fsdp")
          ->check(positive);
  const CLI::Option* const fsdp =
      app.add_option("--fsdp", options.fsdp,
                     "ranks that compute with the same experts and keep a part of their parameters each, gathered before "
                     "use; above 1, all ranks keep a part of all other parameters, too; ep * fsdp is the number of ranks; "
                     "default: ranks / ep")
          ->check(positive);
  app.add_option("--device", device_name, "what computes: host, or cuda (a GPU for each rank, with a path of epx)")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->capture_default_str();
  app.add_option("--fsdp-grads", fsdp_grads_name,
                 "with --fsdp: dtype in which gradients of experts travel over the axis; they are added in fp32")
      ->check(CLI::IsMember(&kDtypes))
      ->capture_default_str();
  const CLI::Option* const dtype =
      app.add_option("--dtype", dtype_name,
                     "of the experts and their tokens: fp32, or bf16 (with --device cuda, where it is the default with a "
                     "recipe in FP8; AdamW keeps float32 parameters)")
          ->check(CLI::IsMember({"fp32", "bf16"}))
          ->capture_default_str();
  app.add_option("--dispatch-format", format_name,
                 "row format in which tokens travel to their experts, with --path dispatch; none: in --dtype "
                 "(docs/row-formats.md)")
      ->check(CLI::IsMember(&formats))
      ->capture_default_str();
  app.add_option(
         "--recipe", recipe_name,
         "which products of the experts are in FP8, with --path dispatch: wide (none), fp8_activations (forward and the "
         "gradients of rows), fp8 (those of weights too); --hidden and --ffn are then multiples of 128")
      ->check(CLI::IsMember(&recipes))
      ->capture_default_str();
  const CLI::Option* const capacity =
      app.add_option("--capacity-factor", options.capacity_factor,
                     "rows that a rank has room for, over batch / ranks * top-k, with --path dispatch; without it, or with "
                     "the number of ranks: any routing");
  const CLI::Option* const on_overflow =
      app.add_option("--on-overflow", options.on_overflow,
                     "what a step does that needs more rows: error, drop (go on without them), rerun (the step, with room "
                     "for any routing)")
          ->transform(CLI::Transformer(kOnOverflow))
          ->default_str("error");
  app.add_flag("--format-errors", options.measures_format_errors,
               "after training, write a JSON line with the relative error that each row format makes on the tokens of the "
               "last step, per layer");
  app.add_option("--checkpoint", options.checkpoint_file, "write a checkpoint here after the last step");
  app.add_option("--checkpoint-every", options.checkpoint_every, "and after every so many steps")->check(positive);
  app.add_option("--resume", options.resume_file, "go on from this checkpoint, on any number of ranks and any device");
  app.add_option("--record-routing", options.routing_file,
                 "write every step's top-k indices here (docs/routing-record.md)");
  app.add_option("--log", options.log_file, "write the JSON lines here instead of to standard output");
  app.add_option("--progress", options.progress, "bar on standard error: auto (on a terminal), on, off")
      ->check(CLI::IsMember({"auto", "on", "off"}))
      ->capture_default_str();
  app.add_option("--timeout-ms", options.timeout_ms, "longest wait for another rank")
      ->check(positive)
      ->capture_default_str();

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return RequestedText{app.help()};
  } catch (const CLI::CallForVersion&) {
    return RequestedText{app.version() + "\n"};
  } catch (const CLI::ParseError& error) {
    fail(kExitUsage, "{}", error.what());
  }
  for (const auto& [name, value] : {std::pair{"--lr", options.learning_rate},
                                    {"--weight-decay", options.weight_decay},
                                    {"--aux-loss", options.aux_loss}})
    if (!std::isfinite(value) || value < 0)
      fail(kExitUsage, "{} is {}; it must be a number that is not negative", name, value);
  model.seed = parse_seed(seed);
  options.path = kPaths.at(path_name);
  options.device = kDevices.at(device_name);
  options.recipe = recipes.at(recipe_name);
  const bool is_fp8 = options.recipe != EPX_MOE_RECIPE_WIDE;
  if (is_fp8 && options.device == DeviceKind::cuda && dtype->count() == 0) dtype_name = "bf16";
  if (is_fp8 && hidden->count() == 0) model.hidden = kFp8Block;
  options.dtype = kDtypes.at(dtype_name);
  options.fsdp_grads = kDtypes.at(fsdp_grads_name);
  options.dispatch_format = formats.at(format_name);
  if (options.device == DeviceKind::cuda && !is_of_block(options.path))
    fail(kExitUsage, "--path {} is for --device host; --device cuda computes with --path dispatch, ring or ragged",
         path_name);
  if (options.device == DeviceKind::host && options.dtype != Dtype::fp32)
    fail(kExitUsage, "--dtype {} is for --device cuda; --device host computes in fp32 only", dtype_name);
  if (options.path != Path::dispatch && options.dispatch_format != epx::NamedFormat::None)
    fail(kExitUsage, "--dispatch-format {} is for --path dispatch; with --path {} rows travel as they are", format_name,
         path_name);
  if (is_fp8 && options.path != Path::dispatch)
    fail(kExitUsage, "--recipe {} is for --path dispatch; --path {} is given", recipe_name, path_name);
  if (is_fp8 && options.dispatch_format != epx::NamedFormat::None)
    fail(kExitUsage, "--dispatch-format {} is given; with --recipe {} tokens travel as fp8-block128", format_name,
         recipe_name);
  if (is_fp8 && options.device == DeviceKind::cuda && options.dtype != Dtype::bf16)
    fail(kExitUsage, "--dtype is {}; with --recipe {} and --device cuda it must be bf16", dtype_name, recipe_name);
  for (const auto& [name, size] : {std::pair{"--hidden", model.hidden}, {"--ffn", model.ffn}})
    if (is_fp8 && size % kFp8Block != 0)
      fail(kExitUsage, "{} is {}; with --recipe {} it must be a multiple of {}", name, size, recipe_name, kFp8Block);
  if (capacity->count() > 0 && (!std::isfinite(options.capacity_factor) || options.capacity_factor <= 0))
    fail(kExitUsage, "--capacity-factor is {}; it must be a positive number", options.capacity_factor);
  if (capacity->count() > 0 && options.path != Path::dispatch)
    fail(kExitUsage, "--capacity-factor is for --path dispatch; --path {} is given", path_name);
  if (ep->count() + fsdp->count() > 0 && !is_of_block(options.path))
    fail(kExitUsage, "{} is for --path dispatch, ring or ragged; --path {} is given", ep->count() > 0 ? "--ep" : "--fsdp",
         path_name);
  if (capacity->count() > 0 && ep->count() + fsdp->count() > 0)
    fail(kExitUsage, "--capacity-factor is for experts that all ranks share; {} is given",
         ep->count() > 0 ? "--ep" : "--fsdp");
  if (on_overflow->count() > 0 && capacity->count() == 0)
    fail(kExitUsage, "--on-overflow is given without --capacity-factor; there is room for any routing");
  if (options.path != Path::dispatch && options.measures_format_errors)
    fail(kExitUsage, "--format-errors is for --path dispatch; --path {} is given", path_name);
  if ((options.measures_format_errors || options.dispatch_format == epx::NamedFormat::Fp4Nv) && model.hidden % 2 != 0)
    fail(kExitUsage, "--hidden is {}; with {} it must be even, since a byte has two elements of fp4-nv", model.hidden,
         options.measures_format_errors ? "--format-errors" : "--dispatch-format " + format_name);
  if (model.top_k > model.experts)
    fail(kExitUsage, "--top-k is {}; it must not exceed --experts, {}", model.top_k, model.experts);
  if (options.checkpoint_every > 0 && options.checkpoint_file.empty())
    fail(kExitUsage, "--checkpoint-every {} is given without --checkpoint FILE", options.checkpoint_every);
  if (options.path == Path::both && !(options.checkpoint_file + options.routing_file).empty())
    fail(kExitUsage, "--path both trains two models; --checkpoint and --record-routing are for one");
  return options;
}

} // namespace train
