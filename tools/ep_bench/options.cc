// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/lists.h"
#include "tools/ep_bench/options_check.h"
#include "tools/ep_bench/options_help.h"
#include "tools/named_paths.h"
#include "tools/named_recipes.h"

namespace epx::bench {
namespace {

template <typename Value>
using Names = std::span<const std::pair<const char*, Value>>;

constexpr std::array<std::pair<const char*, epx_dtype>, 3> kDtypes{
    {{"fp32", EPX_FLOAT32}, {"fp16", EPX_FLOAT16}, {"bf16", EPX_BFLOAT16}}};
constexpr std::array<std::pair<const char*, epx_transport>, 2> kTransports{
    {{"host", EPX_TRANSPORT_HOST}, {"nccl", EPX_TRANSPORT_NCCL}}};
constexpr std::array<std::pair<const char*, epx_combine_precision>, 3> kPrecisions{
    {{"wire", EPX_COMBINE_WIRE}, {"exact", EPX_COMBINE_EXACT}, {"node", EPX_COMBINE_NODE}}};
constexpr std::array<std::pair<const char*, epx_pads>, 2> kPads{
    {{"zero", EPX_PADS_ZERO}, {"untouched", EPX_PADS_UNTOUCHED}}};
constexpr std::array<std::pair<const char*, epx_scale_layout>, 4> kScaleLayouts{{{"rows", EPX_SCALES_ROWS},
                                                                                 {"columns", EPX_SCALES_COLUMNS},
                                                                                 {"packed", EPX_SCALES_PACKED},
                                                                                 {"tiles", EPX_SCALES_TILES}}};
constexpr std::array<std::pair<const char*, GatherForm>, 2> kGatherForms{
    {{"wide", GatherForm::Wide}, {"fp8", GatherForm::Fp8}}};
constexpr std::array<std::pair<const char*, Layout>, 3> kLayouts{{{"expert-major", Layout::ExpertMajor},
                                                                  {"rank-major", Layout::RankMajor},
                                                                  {"rank-major-compact", Layout::RankMajorCompact}}};

template <typename Value>
Value value_of(const char* option, const std::string& text, Names<Value> names) {
  std::string allowed;
  for (const auto& [name, value] : names) {
    if (text == name) return value;
    allowed += allowed.empty() ? name : fmt::format(", {}", name);
  }
  throw UsageError(fmt::format("{} is '{}'; it must be one of {}", option, text, allowed));
}

template <typename Value>
const char* name_of(Value value, Names<Value> names) {
  for (const auto& [name, candidate] : names)
    if (candidate == value) return name;
  return "unknown";
}

// Returns the number after a prefix; nothing where there is none.
std::optional<double> number_after(std::string_view prefix, const std::string& text) {
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + prefix.size(), end, number);
  return error == std::errc() && stop == end && std::isfinite(number) ? std::optional(number) : std::nullopt;
}

RoutingSpec parse_routing(const std::string& text) {
  constexpr std::string_view kZipf = "zipf:", kHot = "hot:", kText = "text:";
  RoutingSpec routing;
  if (text == "uniform") return routing;
  if (text.starts_with(kZipf)) {
    routing.kind = RoutingSpec::Kind::Zipf;
    const std::optional<double> exponent = number_after(kZipf, text);
    if (!exponent || *exponent < 0)
      throw UsageError(
          fmt::format("--routing is '{}'; the exponent after 'zipf:' must be a finite number of at least 0", text));
    routing.zipf_exponent = *exponent;
    return routing;
  }
  if (text.starts_with(kHot)) {
    routing.kind = RoutingSpec::Kind::Hot;
    const std::optional<double> fraction = number_after(kHot, text);
    if (!fraction || *fraction < 0 || *fraction > 1)
      throw UsageError(fmt::format("--routing is '{}'; the fraction after 'hot:' must be a number from 0 to 1", text));
    routing.hot_fraction = *fraction;
    return routing;
  }
  if (text.starts_with(kText)) {
    routing.kind = RoutingSpec::Kind::Text;
    routing.text_file = text.substr(kText.size());
    if (routing.text_file.empty()) throw UsageError("--routing is 'text:'; a file name must follow the colon");
    return routing;
  }
  throw UsageError(fmt::format("--routing is '{}'; it must be uniform, zipf:S, hot:F or text:FILE", text));
}

uint64_t parse_seed(const std::string& text) {
  uint64_t seed = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, seed);
  if (error != std::errc() || stop != end)
    throw UsageError(fmt::format("--seed is '{}'; it must be a whole number from 0 to 2^64 - 1", text));
  return seed;
}

// epx_bootstrap_file checks the same; here it is an error of the command line.
void check_job_id(const std::string& job_id) {
  constexpr size_t kMaxBytes = 64;
  constexpr const char* kAllowed = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  if (job_id.size() > kMaxBytes || job_id.find_first_not_of(kAllowed) != std::string::npos)
    throw UsageError(fmt::format("--job-id is '{}'; it must be 1 to {} characters of [A-Za-z0-9._-]", job_id, kMaxBytes));
}

// An option whose value is a whole number. CLI11's own sentence does not say what is wrong with one that the type cannot hold.
template <typename Number>
CLI::Option* add_number(CLI::App& app, const char* name, Number& number, const char* description) {
  return app.add_option(name, number, description)->check([](const std::string& text) -> std::string {
    Number value = 0;
    const char* const end = text.data() + text.size();
    const auto [stop, error] = std::from_chars(text.data(), end, value);
    if (text.empty() || (error == std::errc() && stop == end)) return {}; // that a text is empty is told for all options
    return fmt::format("it is '{}'; it must be a whole number of at most {}", text, std::numeric_limits<Number>::max());
  });
}

void check_ranks(Options& options, const std::string& bootstrap) {
  constexpr std::string_view kFile = "file:";
  if (bootstrap == "mpi") {
    if (!built_with_mpi()) throw UsageError("--bootstrap is 'mpi', but this ep_bench was built without MPI; use file:DIR");
    if (options.rank != kNotGiven || options.num_ranks != kNotGiven)
      throw UsageError("--rank or --ranks is given, but --bootstrap is 'mpi'; they belong to file:DIR");
    return;
  }
  if (!bootstrap.starts_with(kFile) || bootstrap.size() == kFile.size())
    throw UsageError(fmt::format("--bootstrap is '{}'; it must be mpi or file:DIR", bootstrap));
  options.bootstrap_directory = bootstrap.substr(kFile.size());
  const auto refuse = [&](const char* option, int32_t value, const std::string& wanted) {
    const std::string is = value == kNotGiven ? "is not given" : fmt::format("is {}", value);
    throw UsageError(fmt::format("--bootstrap is '{}' and {} {}; it must be {}", bootstrap, option, is, wanted));
  };
  if (options.num_ranks < 1) refuse("--ranks", options.num_ranks, "at least 1");
  if (options.rank < 0 || options.rank >= options.num_ranks)
    refuse("--rank", options.rank, fmt::format("between 0 and {} (--ranks - 1)", options.num_ranks - 1));
}

std::vector<Layout> parse_layouts(const std::string& text) {
  if (text == "both") return {Layout::ExpertMajor, Layout::RankMajor};
  std::vector<Layout> layouts;
  for (const std::string& layout : split_list(text))
    layouts.push_back(value_of<Layout>("--layout", layout, kLayouts));
  return layouts;
}

// TokenRange has -b, -e and -f.
struct TokenRange {
  int32_t first = kNotGiven, last = kNotGiven, factor = 2;
};

std::vector<int32_t> parse_tokens(const std::string& text, const TokenRange& range) {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  if (range.first == kNotGiven) return parse_numbers("--tokens", text, 0, kMax);
  check_range("-b", range.first, 1, kMax);
  check_range("-e", range.last, range.first, kMax);
  check_range("-f", range.factor, 2, kMax);
  return geometric(range.first, range.last, range.factor);
}

// `has_target`: --noise or --budget is given.
void check_noise(Options& options, const NoiseTarget& target, bool has_iterations, bool has_warmup, bool has_target) {
  if (has_iterations) {
    if (has_target)
      throw UsageError(fmt::format("--noise or --budget is given and --iters is {}; the iterations end by one or the other",
                                   options.iterations));
    return;
  }
  if (!(target.percent >= 0.01 && target.percent <= 100))
    throw UsageError(fmt::format("--noise is {}; it must be a percentage between 0.01 and 100", target.percent));
  if (!(target.budget_s >= 0.001 && target.budget_s <= 3600))
    throw UsageError(fmt::format("--budget is {}; it must be seconds between 0.001 and 3600", target.budget_s));
  options.noise = target;
  options.warms_up_until_stable = !has_warmup;
}

void check_runs(const Options& options, size_t num_points) {
  constexpr size_t kMaxPoints = 4096;
  if (num_points > kMaxPoints)
    throw UsageError(fmt::format("--tokens, --layout, --routing and --num-comm-sms have {} combinations; a run measures at "
                                 "most {}",
                                 num_points, kMaxPoints));
  check_range("--starts", options.starts, 1, 1000);
  if (options.json_file.empty() && (options.appends || options.starts > 1))
    throw UsageError(fmt::format("{} is given and --json is not; it must name the file of the starts",
                                 options.appends ? "--append" : "--starts"));
  const bool is_by_mpi = options.bootstrap_directory.empty();
  if (options.starts > 1 && is_by_mpi)
    throw UsageError(
        fmt::format("--starts is {} and --bootstrap is 'mpi', whose processes cannot start again; run the command "
                    "{} times, from the second time on with --append",
                    options.starts, options.starts));
  if (num_points > 1 && (options.is_paced || !options.block.dump_directory.empty()))
    throw UsageError(fmt::format("{} is given and there are {} points; it belongs to a run of one",
                                 options.is_paced ? "--paced" : "--dump", num_points));
}

} // namespace

bool built_with_cuda() {
#if defined(EPX_WITH_CUDA)
  return true;
#else
  return false;
#endif
}

bool built_with_moe() {
#if defined(EPX_BENCH_HAS_MOE)
  return true;
#else
  return false;
#endif
}

bool built_with_mpi() {
#if defined(EPX_BENCH_HAS_MPI)
  return true;
#else
  return false;
#endif
}

std::variant<Sweep, RequestedText> parse_options(int argc, const char* const* argv) {
  Options options;
  std::string transport = "host", dtype = "bf16", routing = "uniform", precision = "wire", pads = "zero", recipe = "wide",
              path = "dispatch", row_format = "none", wire_format = "none", sum_format = "none", scale_layout = "rows",
              layout = "expert-major", seed = "1", tokens = "512", num_comm_sms = "0", gather;
  TokenRange token_range;
  NoiseTarget noise;
  std::string bootstrap = built_with_mpi() ? "mpi" : "";

  CLI::App app("Measures the exchange of Mixture-of-Experts tokens: prepare, dispatch, combine and their backwards. "
               "'ep_bench compare A.json B.json' compares two files of --json; 'ep_bench compare --help' says how.",
               "ep_bench");
  app.footer(kFooter);
  app.set_version_flag("--version",
                       fmt::format("ep_bench {}.{}.{}", EPX_VERSION_MAJOR, EPX_VERSION_MINOR, EPX_VERSION_PATCH));
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  CLI::Option* const token_list = app.add_option(
      "--tokens", tokens, "Tokens per rank, T, may be 0; or a list such as 1,8,64..4096, whose ranges double");
  CLI::Option* const first =
      add_number(app, "-b", token_range.first, "Instead of --tokens: the fewest of a range of tokens")->default_str("");
  CLI::Option* const last = add_number(app, "-e", token_range.last, "The most of that range")->default_str("");
  CLI::Option* const factor =
      add_number(app, "-f", token_range.factor, "The factor between one number of that range and the next");
  first->excludes(token_list)->needs(last);
  last->needs(first);
  factor->needs(first);
  add_number(app, "--hidden", options.hidden, "Elements per token row, H");
  add_number(app, "--experts", options.experts, "Experts of all ranks together, E");
  add_number(app, "--top-k", options.top_k, "Routes per token, K, 1..64");
  app.add_option("--dtype", dtype, "Element type of token rows: fp32 (4 bytes), fp16 or bf16 (2 bytes)");
  app.add_option("--row-format", row_format,
                 "Rows of dispatch arrive quantised, with their scales: fp8-block128, fp8-block128-pow2, fp8-mx, "
                 "fp8-e5m2-mx or fp4-nv; "
                 "the call quantises them; none: they travel in --dtype");
  app.add_flag("--quantised-input", options.has_quantised_input,
               "--row-format: the rows come quantised, and the call copies them");
  app.add_option("--scale-layout", scale_layout,
                 "--row-format: where the scales of received rows lie: rows, columns, packed (E8M0 alone) or tiles (scales "
                 "of one byte, --alignment a multiple of 128)");
  app.add_option("--wire-format", wire_format,
                 "Rows of dispatch travel quantised, in a format as above, and arrive in --dtype; none: in --dtype");
  app.add_option("--sum-format", sum_format,
                 "Partial sums of combine and dispatch_bwd travel quantised: fp8-block128, fp8-mx or fp8-e5m2-mx; none: in "
                 "--dtype");
  app.add_option(
      "--routing", routing,
      "uniform: K distinct experts per token; zipf:S: K distinct experts, drawn by weight 1/n^S over one order of "
      "the experts; hot:F: one expert on the fraction F of the tokens, the other experts of each token uniform and "
      "distinct; text:FILE: each word of FILE, at most 64 MiB, is a token whose experts are K hashes of it (Hash Layers); "
      "or a "
      "list of these");
  app.add_option(
      "--layout", layout,
      "Of receive tensors: expert-major (a row per route, in the zone of its expert), or rank-major (a row per "
      "token and rank, [P, M, H], without prepare) or rank-major-compact (the same, without gaps between the rows of "
      "the source ranks); both (expert-major, rank-major), or a list");
  add_number(
      app, "--max-rows", options.max_rows,
      "--layout rank-major and rank-major-compact: rows for each source rank, M; those beyond it are dropped; 0: --tokens");
  add_number(app, "--alignment", options.alignment, "Rows that an expert's zone is padded to a multiple of; 0 means 1");
  add_number(app, "--zone-stride", options.zone_stride,
             "Rows from an expert's zone to the next, of which those beyond are dropped; 0: zones follow each other. What "
             "does not fit the worst case needs --capacity");
  app.add_option("--pads", pads, "What dispatch does with the pads of zones: zero or untouched");
  add_number(app, "--capacity", options.capacity, "Receive capacity, rows per rank; 0: enough for the worst case");
  app.add_option("--seed", seed, "Seed of routing, tokens and weights, a number from 0 to 2^64 - 1");
  app.add_option("--transport", transport, "host (shared memory) or nccl (a GPU for each rank, in builds with CUDA)");
  app.add_option(
      "--combine-precision", precision,
      "Rounding of sums: wire (one row per token and rank), exact, or node (wire with one more rounding for each node)");
  add_number(app, "--ranks-per-node", options.ranks_per_node,
             "Ranks of each node; 0: as found, which is all of them on transport host. The host takes any divisor of their "
             "number, for the sums of --combine-precision node");
  add_number(
      app, "--fixed-rail-tokens", options.fixed_rail_tokens,
      "nccl, several nodes: every call moves so many tokens to each other node, without a wait of the host; routes of "
      "tokens beyond are dropped; 0: what the routing needs, and with --graph --tokens");
  app.add_flag("--staged", options.staged, "Receive tensors in plain memory instead of memory from epx_mem_alloc");
  app.add_flag("--graph", options.graph,
               "nccl: each timed call is the replay of a CUDA graph, captured once per input set");
  app.add_option("--num-comm-sms", num_comm_sms,
                 "Streaming multiprocessors that a call may use on GPUs; 0: the library's default; or a list");
  add_number(app, "--timeout-ms", options.timeout_ms,
             "Longest wait for a rank, milliseconds; 0: EPX_TIMEOUT_MS if set, else 300000");
  CLI::Option* const iterations =
      add_number(app, "--iters", options.iterations,
                 "Timed iterations of all operations; without this option as many as --noise and --budget ask for")
          ->default_str("");
  CLI::Option* const warmup = add_number(app, "--warmup", options.warmup,
                                         "Untimed iterations before them; without this option and --iters until times are "
                                         "stable, else 5")
                                  ->default_str("");
  CLI::Option* const noise_percent = app.add_option(
      "--noise", noise.percent, "A point ends when the 95 % interval of each median lies within this of it, percent");
  CLI::Option* const budget = app.add_option(
      "--budget", noise.budget_s, "It ends at the latest after so much time for each line of the table, seconds");
  add_number(app, "--input-sets", options.input_sets, "Different inputs per rank that the iterations take in turn, sets");
  app.add_flag("--verify", options.verify, "First compare every output of two input sets with the serial reference");
  app.add_flag("--floor", options.floor,
               "nccl: also measure the speed-of-light bound of each operation, the time in which the GPUs move its rows "
               "alone, and print ratios to it");
  app.add_flag(
      "--native", options.native,
      "nccl: also measure dispatch and combine the native way, by counts to the host and ncclSend and ncclRecv of one "
      "row per route, and print ratios of its times to those of the library; see Figures below");
  CLI::Option* const block =
      app.add_flag("--block", options.block.is_measured,
                   "Also measure the whole MoE block, router to combine and back; on the host in fp32; see Figures below");
  add_number(app, "--ffn", options.block.ffn, "--block: elements of an expert's inner layer, F (SwiGLU)")->needs(block);
  app.add_flag("--biases", options.block.has_biases, "--block: the experts' projections have biases")->needs(block);
  app.add_option(
         "--recipe", recipe,
         "--block: also measure a block whose experts are in FP8, beside the first: fp8_activations or fp8; wide: do not. "
         "--hidden and --ffn are then multiples of 128, and --alignment is a multiple of 16")
      ->needs(block);
  app.add_option("--path", path,
                 "--block: also measure a block whose rows take this path, beside the first: ring (all-gather, and partial "
                 "sums home) or ragged (rows sorted by expert, by ragged all-to-all); dispatch: do not")
      ->needs(block);
  CLI::Option* const gather_forms =
      app.add_option(
             "--gather", gather,
             "--block: also measure the all-gather of a layer's expert weights, as FSDP over all ranks makes it, alone and "
             "beside each block: wide (in --dtype) or fp8 (codes, and scales of 128 x 128; --hidden and --ffn are then "
             "multiples of 128), or both in a list; without it: do not")
          ->needs(block);
  add_number(
      app, "--gather-sms", options.block.gather_sms,
      "--gather: streaming multiprocessors that a gather may use on GPUs, by epx_ragged_all_to_all; 0: none, by NCCL's "
      "copy engines")
      ->needs(gather_forms);
  add_number(app, "--pause-ms", options.block.pause_ms,
             "--block, nccl: measure again with this pause before each iteration, milliseconds; 0: do not")
      ->needs(block);
  add_number(app, "--rounds", options.block.rounds,
             "--block: the timed iterations are split into so many rounds, in each of which every line is measured")
      ->needs(block);
  app.add_flag("--paced", options.is_paced,
               "--block: every process waits for a line of standard input before the set-up and before each round, and "
               "prints 'phase N done' after it, so that a script can alternate this and other programs on the same GPUs")
      ->needs(block);
  CLI::Option* const dump =
      app.add_option("--dump", options.block.dump_directory,
                     "--block: existing directory for the outputs and gradients of one forward and backward of each layer "
                     "after the measurement, LAYER.TENSOR.RANK.npy in float32")
          ->needs(block);
  add_number(app, "--dump-rows", options.block.dump_rows,
             "--dump: only so many rows of each tensor, drawn by --seed, for large shapes; 0: all")
      ->needs(dump);
  app.add_option("--json", options.json_file,
                 "File for all figures and the configuration, written by rank 0 after each point, opened before the run");
  app.add_flag("--append", options.appends,
               "Add the run to the file of --json as another start; it must be of the same points and the same machine");
  add_number(
      app, "--starts", options.starts,
      "file:DIR: run so many times, each in new processes, into one file of --json; another start is another draw of "
      "addresses and clocks");
  app.add_option("--bootstrap", bootstrap,
                 "How ranks meet: mpi (started by mpirun), or file:DIR (a directory that all ranks share)");
  add_number(app, "--rank", options.rank, "With file:DIR: number of this process, from 0")->default_str("");
  add_number(app, "--ranks", options.num_ranks, "With file:DIR: number of processes")->default_str("");
  app.add_option("--job-id", options.job_id, "With file:DIR: name of the job, 1 to 64 of [A-Za-z0-9._-]");

  // An empty text would count as 0 or as not given, which is what a script with an unset variable would measure then.
  for (CLI::Option* option : app.get_options()) {
    if (option->get_expected_max() == 0) continue; // a flag
    option->check([option](const std::string& text) {
      return text.empty() ? fmt::format("the value is empty; expected: {}", option->get_description()) : std::string();
    });
  }

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    return RequestedText{app.help()};
  } catch (const CLI::CallForVersion& version) {
    return RequestedText{std::string(version.what()) + "\n"};
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }

  options.transport = value_of<epx_transport>("--transport", transport, kTransports);
  options.dtype = value_of<epx_dtype>("--dtype", dtype, kDtypes);
  options.row_format = value_of<NamedFormat>("--row-format", row_format, kNamedFormats);
  options.wire_format = value_of<NamedFormat>("--wire-format", wire_format, kNamedFormats);
  options.sum_format = value_of<NamedFormat>("--sum-format", sum_format, kNamedFormats);
  options.scale_layout = value_of<epx_scale_layout>("--scale-layout", scale_layout, kScaleLayouts);
  options.combine_precision = value_of<epx_combine_precision>("--combine-precision", precision, kPrecisions);
  options.pads = value_of<epx_pads>("--pads", pads, kPads);
  options.block.recipe = value_of<epx_moe_recipe>("--recipe", recipe, kNamedRecipes);
  options.block.path = value_of<epx_moe_path>("--path", path, kNamedPaths);
  if (gather_forms->count() > 0)
    for (const std::string& form : split_list(gather))
      options.block.gathers.push_back(value_of<GatherForm>("--gather", form, kGatherForms));
  options.seed = parse_seed(seed);
  check_noise(options, noise, iterations->count() > 0, warmup->count() > 0, noise_percent->count() + budget->count() > 0);
  check_ranks(options, bootstrap);
  check_job_id(options.job_id);

  const std::vector<Layout> layouts = parse_layouts(layout);
  const std::vector<int32_t> sms = parse_numbers("--num-comm-sms", num_comm_sms, 0, std::numeric_limits<int32_t>::max());
  const std::vector<int32_t> token_counts = parse_tokens(tokens, token_range);
  const std::vector<std::string> routings = split_routings(routing);
  check_runs(options, layouts.size() * sms.size() * token_counts.size() * routings.size());
  Sweep sweep;
  for (const std::string& of_point : routings)
    for (const Layout of_layout : layouts)
      for (const int32_t of_sms : sms)
        for (const int32_t of_tokens : token_counts) {
          Options& point = sweep.points.emplace_back(options);
          point.routing = parse_routing(of_point);
          point.layout = of_layout;
          point.num_comm_sms = of_sms;
          point.tokens = of_tokens;
          check_point(point);
        }
  return sweep;
}

std::string to_string(const RoutingSpec& routing) {
  switch (routing.kind) {
  case RoutingSpec::Kind::Zipf:
    return fmt::format("zipf:{}", routing.zipf_exponent);
  case RoutingSpec::Kind::Hot:
    return fmt::format("hot:{}", routing.hot_fraction);
  case RoutingSpec::Kind::Text:
    return "text:" + routing.text_file;
  case RoutingSpec::Kind::Uniform:
    break;
  }
  return "uniform";
}

const char* to_string(epx_dtype dtype) {
  return name_of<epx_dtype>(dtype, kDtypes);
}
const char* to_string(NamedFormat format) {
  return name_of<NamedFormat>(format, kNamedFormats);
}
const char* to_string(epx_scale_layout layout) {
  return name_of<epx_scale_layout>(layout, kScaleLayouts);
}
const char* to_string(epx_transport transport) {
  return name_of<epx_transport>(transport, kTransports);
}
const char* to_string(epx_combine_precision precision) {
  return name_of<epx_combine_precision>(precision, kPrecisions);
}
const char* to_string(Layout layout) {
  return name_of<Layout>(layout, kLayouts);
}
const char* to_string(epx_pads pads) {
  return name_of<epx_pads>(pads, kPads);
}
const char* to_string(epx_moe_path path) {
  return name_of<epx_moe_path>(path, kNamedPaths);
}
const char* to_string(GatherForm form) {
  return name_of<GatherForm>(form, kGatherForms);
}
const char* to_string(epx_moe_recipe recipe) {
  return name_of<epx_moe_recipe>(recipe, kNamedRecipes);
}

} // namespace epx::bench
