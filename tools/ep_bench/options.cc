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
constexpr std::array<std::pair<const char*, Layout>, 2> kLayouts{
    {{"expert-major", Layout::ExpertMajor}, {"rank-major", Layout::RankMajor}}};

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

void check_range(const char* option, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    throw UsageError(fmt::format("{} is {}; it must be between {} and {}", option, value, low, high));
}

void check_shape(const Options& options) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  check_range("--tokens", options.tokens, 0, kMax);
  check_range("--hidden", options.hidden, 1, kMax);
  check_range("--experts", options.experts, 1, kMax);
  check_range("--top-k", options.top_k, 1, 64);
  check_range("--alignment", options.alignment, 0, kMax);
  check_range("--capacity", options.capacity, 0, kMax);
  check_range("--num-comm-sms", options.num_comm_sms, 0, kMax);
  check_range("--ranks-per-node", options.ranks_per_node, 0, kMax);
  check_range("--fixed-rail-tokens", options.fixed_rail_tokens, 0, std::max(options.tokens, 1));
  check_range("--iters", options.iterations, 1, 1'000'000);
  check_range("--warmup", options.warmup, 0, 1'000'000);
  check_range("--input-sets", options.input_sets, 1, 1024);
  check_range("--timeout-ms", options.timeout_ms, 0, std::numeric_limits<int64_t>::max());
  if (options.routing.kind != RoutingSpec::Kind::Text && options.top_k > options.experts)
    throw UsageError(
        fmt::format("--top-k is {} and --experts is {}; with --routing {} the experts of a token are distinct, "
                    "so there must be as many",
                    options.top_k, options.experts, to_string(options.routing)));
  if (options.routing.kind == RoutingSpec::Kind::Hot && options.top_k == options.experts)
    throw UsageError(
        fmt::format("--top-k and --experts are {}; with --routing {} there must be more experts, so that a token "
                    "can do without the hot one",
                    options.top_k, to_string(options.routing)));
}

void check_transport(const Options& options) {
  if (options.transport == EPX_TRANSPORT_NCCL) {
    if (!built_with_cuda()) throw UsageError("--transport is 'nccl', but this ep_bench was built without CUDA; use host");
    return;
  }
  for (const auto& [option, is_given] :
       {std::pair("--graph", options.graph), std::pair("--floor", options.floor), std::pair("--native", options.native),
        std::pair("--fixed-rail-tokens", options.fixed_rail_tokens != 0)})
    if (is_given)
      throw UsageError(
          fmt::format("{} is given, but --transport is '{}'; it belongs to nccl", option, to_string(options.transport)));
}

void check_layout(const Options& options) {
  check_range("--max-rows", options.max_rows, 0, std::numeric_limits<int32_t>::max());
  if (!options.is_rank_major()) {
    if (options.max_rows > 0)
      throw UsageError(
          fmt::format("--max-rows is {} and --layout is 'expert-major'; it belongs to rank-major", options.max_rows));
    return;
  }
  const auto refuse = [](const char* option, const auto& value, const char* reason) {
    throw UsageError(fmt::format("{} is {} and --layout is 'rank-major'; {}", option, value, reason));
  };
  if (options.alignment > 1) refuse("--alignment", options.alignment, "that layout has no zones to align");
  if (options.pads != EPX_PADS_ZERO) refuse("--pads", to_string(options.pads), "that layout has no pads");
  if (options.capacity > 0) refuse("--capacity", options.capacity, "--max-rows bounds the rows of that layout");
  if (options.combine_precision != EPX_COMBINE_WIRE)
    refuse("--combine-precision", to_string(options.combine_precision), "that layout has combine in 'wire' only");
  if (options.block.is_measured)
    throw UsageError("--block is given and --layout is 'rank-major'; the block is expert-major");
  if (options.native) throw UsageError("--native is given and --layout is 'rank-major'; the native way is expert-major");
}

void refuse_with_block(const char* option, const std::string& value, const char* reason) {
  throw UsageError(fmt::format("{} is '{}' and --block is given; {}", option, value, reason));
}

void check_block(const Options& options) {
  if (!options.block.is_measured) return;
  if (!built_with_moe()) throw UsageError("--block is given, but this ep_bench was built without libepx_moe");
  check_range("--ffn", options.block.ffn, 1, std::numeric_limits<int32_t>::max() / 2);
  check_range("--pause-ms", options.block.pause_ms, 0, 60'000);
  check_range("--rounds", options.block.rounds, 1, options.iterations);
  check_range("--dump-rows", options.block.dump_rows, 0, std::numeric_limits<int32_t>::max());
  check_range("--experts", options.experts, 1, 4096); // so many have distinct logits, see block_logits()
  const bool is_on_host = options.transport == EPX_TRANSPORT_HOST;
  if (is_on_host && options.dtype != EPX_FLOAT32)
    refuse_with_block("--dtype", to_string(options.dtype), "on the host the block computes in fp32");
  if (options.dtype == EPX_FLOAT16) refuse_with_block("--dtype", "fp16", "the block is measured in bf16 and fp32");
  if (is_on_host && options.block.pause_ms > 0)
    refuse_with_block("--pause-ms", fmt::format("{}", options.block.pause_ms), "pauses belong to --transport nccl");
  if (options.routing.kind != RoutingSpec::Kind::Uniform && options.routing.kind != RoutingSpec::Kind::Zipf)
    refuse_with_block("--routing", to_string(options.routing), "a router makes the block's routing: uniform or zipf:S");
  if (options.capacity > 0)
    refuse_with_block("--capacity", fmt::format("{}", options.capacity), "the native layer beside it drops no routes");
  if (options.tokens == 0) refuse_with_block("--tokens", "0", "there must be a token, or nothing is computed");
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

constexpr const char* kFooter = R"(Figures
  A time is that of one call, in microseconds, on the slowest rank of an iteration; all ranks start together. 'slowest' is
  the rank that was that most often. Timed are prepare (counts and offsets only), dispatch with weights, combine with
  weights, combine_bwd with weights and their gradients, and dispatch_bwd with weights; on nccl also combine_bwd-nograd
  (with weights, without their gradients), prepare, dispatch and combine in a row as one, prepare_dispatch, and
  prepare_dispatch and combine in a row as one. With --layout rank-major there is no prepare, combine and combine_bwd have
  no weights, a row is one of a (token, rank) instead of one of a route, and on nccl dispatch and combine in a row are timed
  as one.
  On nccl a time is that between two CUDA events around the call on its stream, or with --graph around its replay: from
  before its first kernel to the last byte in place. Before it comes a barrier of all ranks' streams; the whole iteration
  is enqueued before any of it runs, so that the host's speed is in no time.
  A row is --hidden elements of --dtype; 1 GB is 1e9 bytes; rows are means over the ranks, and times are medians.
  logical GB/s   rows that a rank receives in dispatch (combine, dispatch_bwd: sends back) x row bytes / time
  wire GB/s      rows that must reach another rank x row bytes / time: one per (token, remote rank), and for the combine
                 and dispatch_bwd of --combine-precision exact one per remote route
  memcpy ratio   host transport: (rows that the operation must write x row bytes / time) / (bytes/s of a plain memcpy of as
                 many rows of the operation's input, by all ranks at once, timed beside the operation in the same
                 iteration, from the first rank's start to the last rank's end). dispatch and combine_bwd write one row per
                 route, their memcpy goes to scattered places; combine and dispatch_bwd write one row per (token, expert
                 rank), with exact one per route, and one per token, and their memcpy comes from scattered places
  floor us       --floor: the speed-of-light bound, the larger of two times, measured after the iterations by all ranks
                 at once, with the same input sets, barrier and events; each is the median of 24 runs on the slowest
                 rank, and the best of several kernels. Wire bound: each row is read once and stored once to each
                 distinct rank that it must reach, the own one too (dispatch and combine_bwd: one per (token, expert
                 rank); combine and dispatch_bwd: the same back, with exact one per route), by 16, 32, 64, 96, 128 and
                 as many blocks as the GPU has SMs, with plain and with bulk stores. HBM bound: as many rows read and
                 written locally as the operation must, each once, by all SMs, with plain and with bulk stores, reads
                 among the writes and after them:
                 dispatch reads the tokens and what arrived for several slots, and writes the rows in use (with --pads
                 untouched without their pads); combine_bwd reads the tokens, what arrived and (with gradients)
                 expert_out, and writes what arrives and the rows in use; combine and dispatch_bwd read their slots and
                 what came back, and write what comes back and the tokens. Rank-major: dispatch and combine_bwd read the
                 tokens and write their rows, own ones too.
                 With --num-comm-sms the bound on no more SMs than that is printed beside it, and the ratio to it
                 Several nodes: the time that NCCL alone needs, for one group of ncclSend and ncclRecv between all rail peers,
                 for the distinct rows that must cross between nodes, also where a call sends more ('rails' above the table
                 has the bytes of both): dispatch and combine_bwd one row for each (token, other node), combine and
                 dispatch_bwd the same with node, with wire one for each (token, rank of another node), with exact one for
                 each route there. Calls made one by one are then enqueued while the stream runs, since they may wait on the
                 host, which is in their times
  ratio          --floor: median time / speed-of-light bound
  native/epx     --native, a table of its own: median time of the native call / median time of the line that it is compared
                 with, in the same run, with the same input sets, iterations, barrier and events. The native dispatch sends
                 each expert's count of routes to its rank by ncclSend and ncclRecv, copies the counts to the host, which
                 waits for them once, packs one row per route by expert, sends them in one group of ncclSend and ncclRecv
                 between all ranks, the own one too, and permutes what arrives into expert-major order. It is compared with
                 dispatch, and with prepare_dispatch, which begins with the counts too. dispatch-nocounts is the same without
                 the exchange of counts. The native combine goes the way back, and sums each token's rows in fp32 with their
                 weights. The communicator has NCCL's defaults. In favour of the native way, its routes are sorted beforehand,
                 weights do not travel, and calls that do not wait on the host are enqueued while the stream is blocked. It is
                 never replayed from a graph, and has no backward. --verify compares it with the serial reference
  wrong          elements that differ from the serial reference, all ranks together (--verify)
  With --block the router selects the routing, the same for the exchange, its floor and the block, and a second table has
  the whole block of libepx_moe, the pieces of it that are no exchange, and beside it on nccl the same layer on collectives
  only (native: counts to the host, ncclSend and ncclRecv of permuted rows, the same grouped FFN), and the dense bound: one
  cuBLAS product for each grouped one, of T * K rows. fwd+bwd writes the experts' gradients too, in --dtype. Times are those
  between events after a barrier of the streams, as above; whole layers (block, native) are enqueued while the stream runs,
  so that the host's work is in them where the GPU waits for it.
  TFLOP/s        of a rank: (forward 6, forward and backward 18) x T x K x H x F / time
  paused us      --pause-ms: the median of a quarter of the iterations, 5 at least, each after a pause of all ranks
  iqr us         the distance between the quartiles of the times that 'median us' is of
  dense us       the dense bound of the same products, in the same run
  wire us        --floor: the sum of the wire bounds of the operations that the line contains
  ratio          median / (dense us + wire us); max ratio: median / the larger of the two
Of an option that is repeated, the last counts.
Exit status: 0; 1 when a call failed or a result is wrong; 2 when the command line is.)";

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

std::variant<Options, RequestedText> parse_options(int argc, const char* const* argv) {
  Options options;
  std::string transport = "host", dtype = "bf16", routing = "uniform", precision = "wire", pads = "zero",
              layout = "expert-major", seed = "1";
  std::string bootstrap = built_with_mpi() ? "mpi" : "";

  CLI::App app("Measures the exchange of Mixture-of-Experts tokens: prepare, dispatch, combine and their backwards.",
               "ep_bench");
  app.footer(kFooter);
  app.set_version_flag("--version",
                       fmt::format("ep_bench {}.{}.{}", EPX_VERSION_MAJOR, EPX_VERSION_MINOR, EPX_VERSION_PATCH));
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  add_number(app, "--tokens", options.tokens, "Tokens per rank, T; may be 0");
  add_number(app, "--hidden", options.hidden, "Elements per token row, H");
  add_number(app, "--experts", options.experts, "Experts of all ranks together, E");
  add_number(app, "--top-k", options.top_k, "Routes per token, K, 1..64");
  app.add_option("--dtype", dtype, "Element type of token rows: fp32 (4 bytes), fp16 or bf16 (2 bytes)");
  app.add_option(
      "--routing", routing,
      "uniform: K distinct experts per token; zipf:S: K distinct experts, drawn by weight 1/n^S over one order of "
      "the experts; hot:F: one expert on the fraction F of the tokens, the other experts of each token uniform and "
      "distinct; text:FILE: each word of FILE, at most 64 MiB, is a token whose experts are K hashes of it (Hash Layers)");
  app.add_option("--layout", layout,
                 "Of receive tensors: expert-major (a row per route, in the zone of its expert), or rank-major (a row per "
                 "token and rank, [P, M, H], without prepare)");
  add_number(app, "--max-rows", options.max_rows,
             "--layout rank-major: rows for each source rank, M; those beyond it are dropped; 0: --tokens");
  add_number(app, "--alignment", options.alignment, "Rows that an expert's zone is padded to a multiple of; 0 means 1");
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
  add_number(app, "--num-comm-sms", options.num_comm_sms,
             "Streaming multiprocessors that a call may use on GPUs; 0: the library's default");
  add_number(app, "--timeout-ms", options.timeout_ms,
             "Longest wait for a rank, milliseconds; 0: EPX_TIMEOUT_MS if set, else 300000");
  add_number(app, "--iters", options.iterations, "Timed iterations of all operations");
  add_number(app, "--warmup", options.warmup, "Untimed iterations before them");
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
                 "File for all figures and the configuration, written by rank 0 after the run, opened before it");
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
  options.combine_precision = value_of<epx_combine_precision>("--combine-precision", precision, kPrecisions);
  options.layout = value_of<Layout>("--layout", layout, kLayouts);
  options.pads = value_of<epx_pads>("--pads", pads, kPads);
  options.routing = parse_routing(routing);
  options.seed = parse_seed(seed);
  check_transport(options);
  check_shape(options);
  check_layout(options);
  check_block(options);
  check_ranks(options, bootstrap);
  check_job_id(options.job_id);
  return options;
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

} // namespace epx::bench
