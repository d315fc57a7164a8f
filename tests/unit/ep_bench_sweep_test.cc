// SPDX-License-Identifier: Apache-2.0
// These tests check the lists of ep_bench's options, when its iterations end, and what a sweep does with points that fail.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "tests/unit/ep_bench_support.h"
#include "tools/ep_bench/document.h"
#include "tools/ep_bench/environment.h"
#include "tools/ep_bench/interrupt.h"
#include "tools/ep_bench/lists.h"
#include "tools/ep_bench/progress.h"
#include "tools/ep_bench/sampler.h"
#include "tools/ep_bench/sweep.h"

namespace epx::bench {
namespace {

using Times = std::vector<std::vector<double>>; // [line][iteration]

Sweep sweep_of(std::vector<const char*> arguments) {
  return std::get<Sweep>(parse(std::move(arguments)));
}

std::vector<int32_t> tokens_of(const Sweep& sweep) {
  std::vector<int32_t> tokens;
  for (const Options& point : sweep.points)
    tokens.push_back(point.tokens);
  return tokens;
}

std::string refusal_of_options(std::vector<const char*> arguments) {
  return refusal_of([&] { parse(std::move(arguments)); });
}

TEST_CASE("ep_bench lists: values once, ranges that double") {
  CHECK(tokens_of(sweep_of({"--tokens", "1,8,64..512"})) == std::vector<int32_t>{1, 8, 64, 128, 256, 512});
  CHECK(tokens_of(sweep_of({"--tokens", "3..20,12,0"})) == std::vector<int32_t>{3, 6, 12, 0});
  CHECK(tokens_of(sweep_of({"--tokens", "7..7"})) == std::vector<int32_t>{7});
  CHECK(tokens_of(sweep_of({"--tokens", "1073741824..2147483647"})) == std::vector<int32_t>{1073741824});
  CHECK(tokens_of(sweep_of({"-b", "1", "-e", "100", "-f", "10"})) == std::vector<int32_t>{1, 10, 100});
  CHECK(tokens_of(sweep_of({"-b", "6", "-e", "13"})) == std::vector<int32_t>{6, 12});
  CHECK(tokens_of(sweep_of({})) == std::vector<int32_t>{512});
}

TEST_CASE("ep_bench lists: every combination is a point") {
  const Sweep sweep = sweep_of(
      {"--tokens", "1,2", "--layout", "both", "--routing", "uniform,zipf:1.2", "--num-comm-sms", "0,16", "--hidden", "64"});
  REQUIRE(sweep.points.size() == 16);
  CHECK(point_name(sweep.points.front(), sweep) == "uniform, expert-major, default SMs, 1 tokens");
  CHECK(point_name(sweep.points.back(), sweep) == "zipf:1.2, rank-major, 16 SMs, 2 tokens");
  CHECK(sweep.points[7].hidden == 64);
  const Sweep layouts = sweep_of({"--layout", "rank-major,expert-major"});
  REQUIRE(layouts.points.size() == 2);
  CHECK(point_name(layouts.points[0], layouts) == "rank-major");
  CHECK(point_name(sweep_of({}).common(), sweep_of({})) == "512 tokens");
}

TEST_CASE("ep_bench lists: a file name of text: may have commas") {
  CHECK(split_routings("uniform,text:a,b.txt,hot:0.5") == std::vector<std::string>{"uniform", "text:a,b.txt", "hot:0.5"});
  CHECK(split_routings("text:a,b") == std::vector<std::string>{"text:a,b"});
  CHECK(split_routings("uniform,uniform") == std::vector<std::string>{"uniform"});
}

TEST_CASE("ep_bench lists: a bad one is refused with its option and value") {
  const auto check = [](const std::vector<const char*>& arguments, const std::vector<const char*>& words) {
    const std::string sentence = refusal_of_options(arguments);
    for (const char* word : words)
      CHECK_MESSAGE(contains(sentence, word), sentence, " | lacks ", word);
  };
  check({"--tokens", "1,,2"}, {"--tokens is '1,,2'", "whole number"});
  check({"--tokens", "1,"}, {"--tokens is '1,'"});
  check({"--tokens", "8..4"}, {"--tokens", "8..4"});
  check({"--tokens", "0..4"}, {"--tokens", "0..4"});
  check({"--tokens", "1..x"}, {"--tokens is '1..x'"});
  check({"--tokens", "1,-1"}, {"--tokens is -1"});
  check({"--num-comm-sms", "1,two"}, {"--num-comm-sms is '1,two'"});
  check({"--layout", "both,flat"}, {"--layout is 'both'", "rank-major"});
  check({"--routing", "uniform,"}, {"--routing is ''"});
  check({"--layout", "both", "--alignment", "16"}, {"--alignment is 16", "rank-major"});
  check({"-b", "8"}, {"-b requires -e"});
  check({"-e", "8"}, {"-e requires -b"});
  check({"-f", "8"}, {"-f requires -b"});
  check({"-b", "8", "-e", "4"}, {"-e is 4", "between 8"});
  check({"-b", "0", "-e", "4"}, {"-b is 0"});
  check({"-b", "1", "-e", "4", "-f", "1"}, {"-f is 1"});
  check({"-b", "1", "-e", "4", "--tokens", "4"}, {"--tokens"});
  check({"--noise", "0"}, {"--noise is 0"});
  check({"--noise", "nan"}, {"--noise is nan"});
  check({"--noise", "101"}, {"--noise is 101"});
  check({"--budget", "0"}, {"--budget is 0"});
  check({"--budget", "4000"}, {"--budget is 4000"});
  check({"--noise", "2", "--iters", "4"}, {"--noise", "--iters is 4"});
  check({"--budget", "2", "--iters", "4"}, {"--budget", "--iters is 4"});
  check({"--starts", "0"}, {"--starts is 0"});
  check({"--starts", "2"}, {"--starts", "--json"});
  check({"--append"}, {"--append", "--json"});
  check(
      {"--tokens", "1..1000000000", "--num-comm-sms", "1..1000000000", "--routing", "uniform,zipf:1,zipf:2,zipf:3,zipf:4"},
      {"4500 combinations", "4096"});
  if (built_with_mpi())
    check({"--bootstrap", "mpi", "--rank", "-2147483648", "--ranks", "-2147483648", "--starts", "2", "--json", "x"},
          {"--starts is 2", "mpi", "--append"});
}

TEST_CASE("ep_bench options: --iters is exact, and without it a point stops by noise") {
  CHECK_FALSE(sweep_of({"--iters", "20"}).common().noise);
  CHECK_FALSE(sweep_of({"--iters", "20"}).common().warms_up_until_stable);
  CHECK(sweep_of({"--iters", "20"}).common().warmup == 5);
  const Options by_noise = sweep_of({"--noise", "3", "--budget", "0.5"}).common();
  CHECK(by_noise.noise->percent == 3);
  CHECK(by_noise.noise->budget_s == 0.5);
  CHECK(by_noise.warms_up_until_stable);
  CHECK_FALSE(sweep_of({"--warmup", "7"}).common().warms_up_until_stable);
}

// Runs a rule on lines whose times `time` (line, iteration) makes; each iteration takes `iteration_s`. Returns all iterations.
int run_rule(StoppingRule& rule, size_t lines, double iteration_s, const std::function<double(size_t, int)>& time) {
  int iteration = 0;
  while (!rule.is_done()) {
    Times times(lines);
    const int batch = rule.batch();
    REQUIRE(batch > 0);
    for (int i = 0; i < batch; ++i, ++iteration)
      for (size_t line = 0; line < lines; ++line)
        times[line].push_back(time(line, iteration));
    rule.add(times, batch * iteration_s);
  }
  return iteration;
}

Options by_noise(double percent, double budget_s) {
  Options options;
  options.noise = NoiseTarget{percent, budget_s};
  options.warms_up_until_stable = true;
  return options;
}

TEST_CASE("ep_bench stops after exactly --iters iterations") {
  Options options;
  options.iterations = 7;
  options.warmup = 3;
  StoppingRule rule(options, 2);
  CHECK_FALSE(rule.needs_times());
  CHECK(run_rule(rule, 2, 1, [](size_t, int i) { return i; }) == 10);
  CHECK(rule.warmup() == 3);
  CHECK(rule.num_timed() == 7);
  options.warmup = 0;
  StoppingRule without(options, 2);
  CHECK(without.is_timed());
}

TEST_CASE("ep_bench stops by noise when every line's median is known") {
  StoppingRule steady(by_noise(1, 100), 2);
  run_rule(steady, 2, 1e-6, [](size_t line, int) { return 10.0 + static_cast<double>(line); });
  CHECK(steady.warmup() == 10);
  CHECK(steady.num_timed() == 20);

  // Uniform noise of +-10 %: the interval's half is about 10 % * 2 / sqrt(n), so hundreds of times are needed.
  std::mt19937 random(1);
  std::uniform_real_distribution<double> noise(90, 110);
  StoppingRule noisy(by_noise(1, 100), 2);
  std::vector<double> timed;
  run_rule(noisy, 2, 1e-6, [&](size_t line, int) {
    const double time = line == 0 ? 10 : noise(random);
    if (line == 1 && noisy.is_timed()) timed.push_back(time);
    return time;
  });
  CHECK(noisy.num_timed() > 100);
  CHECK(noisy.num_timed() < 2000);
  CHECK(static_cast<int>(timed.size()) == noisy.num_timed());
  CHECK(is_converged(timed, 1));
  CHECK_FALSE(is_converged({timed.begin(), timed.begin() + 20}, 1));
}

TEST_CASE("ep_bench stops by noise when the budget of all lines ends") {
  std::mt19937 random(2);
  std::bernoulli_distribution coin(0.5);
  const auto bimodal = [&](size_t, int) { return coin(random) ? 10.0 : 20.0; };
  StoppingRule rule(by_noise(1, 0.5), 4); // 2 s of iterations of 10 ms
  run_rule(rule, 4, 0.01, bimodal);
  CHECK(rule.num_timed() == 200);

  StoppingRule slow(by_noise(1, 0.5), 4); // one batch takes longer than the budget
  run_rule(slow, 4, 10, bimodal);
  CHECK(slow.warmup() == 5);
  CHECK(slow.num_timed() == 20);
}

TEST_CASE("ep_bench warms up until times are stable, and no longer than 50 iterations") {
  StoppingRule falling(by_noise(1, 1000), 1); // stable from iteration 20 on
  run_rule(falling, 1, 1e-6, [](size_t, int i) { return i < 20 ? 100.0 - 4 * i : 10.0; });
  CHECK(falling.warmup() == 30);
  StoppingRule never(by_noise(1, 1e-3), 1);
  run_rule(never, 1, 1e-9, [](size_t, int i) { return std::pow(1.1, i); });
  CHECK(never.warmup() == 50);
}

TEST_CASE("ep_bench: six equal times are the fewest that are known") {
  CHECK_FALSE(is_converged({5, 5, 5, 5, 5}, 1));
  CHECK(is_converged({5, 5, 5, 5, 5, 5}, 1));
  CHECK_FALSE(is_converged({5, 5, 5, 5, 5, 5.2}, 1));
  CHECK(is_converged({5, 5, 5, 5, 5, 5.2}, 4.1));
}

TEST_CASE("ep_bench sums up what was read of the GPUs") {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  // Two ranks, three iterations.
  const std::vector<GpuReading> readings{{1980, 300, 40, 0, 0}, {1970, kUnknown, kUnknown, 1, 0}, {1980, 310, 42, 1, 0},
                                         {1500, 500, 60, 0, 0}, {1600, kUnknown, kUnknown, 1, 0}, {1980, 400, 50, 0, 0}};
  const Environment environment = summarise(readings, 2);
  CHECK(environment.throttled_samples == 2);
  CHECK(environment.sm_clock_mhz->min == 1500);
  CHECK(environment.sm_clock_mhz->median == 1975);
  CHECK(environment.sm_clock_mhz->max == 1980);
  CHECK(environment.power_w->min == 300);
  CHECK(environment.temperature_c->max == 60);
  const std::vector<GpuReading> nothing(4, {kUnknown, kUnknown, kUnknown, -1, 0});
  CHECK_FALSE(summarise(nothing, 2).throttled_samples);
  CHECK_FALSE(summarise(nothing, 2).power_w);
}

TEST_CASE("ep_bench progress bar") {
  CHECK(progress_bar(0, 4, 0) == "[------------------------------] 0 %");
  CHECK(progress_bar(1, 3, 10) == "[##########--------------------] 33 %, 20 s left");
  CHECK(progress_bar(3, 3, 10) == "[##############################] 100 %");
}

// One rank by itself.
epx_bootstrap alone() {
  epx_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.num_ranks = 1;
  bootstrap.all_gather = [](void*, const void* send, void* recv, size_t bytes, int64_t, char*, size_t) {
    std::memcpy(recv, send, bytes);
    return EPX_SUCCESS;
  };
  return bootstrap;
}

Results results_of(const Options& options) {
  Results results;
  results.options = options;
  results.group.num_ranks = results.group.ranks_per_node = 1;
  results.group.transport = EPX_TRANSPORT_HOST;
  Measurements measurements(lines_of(options).size());
  for (OperationSeries& series : measurements)
    series.call = {Series(8, {1000, 9000})};
  const Survey survey{.sets = {{.tokens = 20, .routes = 80}}};
  Options counted = options;
  counted.iterations = 8;
  results.figures = compute_figures(measurements, {}, survey, counted);
  return results;
}

struct SweepRun {
  std::vector<PointResult> points;
  std::string error; // of the exception that ended it
};

nlohmann::json document_of(const Sweep& sweep) {
  std::ifstream stream(sweep.common().json_file);
  return nlohmann::json::parse(stream, nullptr, false);
}

// Runs a sweep of one rank whose points `measure` makes, into `file`.
SweepRun run(const Sweep& sweep, const MeasurePoint& measure) {
  const Peers peers(alone(), 1);
  Progress progress(sweep.points.size(), false);
  Document document(sweep, {{"ep_bench"}, utc_now(), 1, this_machine_facts(), ""});
  SweepRun result;
  try {
    run_sweep(
        sweep, peers, measure,
        [&](std::span<const PointResult> points, bool is_last) {
          result.points.assign(points.begin(), points.end());
          document.write(points, is_last);
        },
        progress);
  } catch (const std::exception& error) {
    result.error = error.what();
  }
  return result;
}

std::vector<std::string> statuses(const nlohmann::json& start) {
  std::vector<std::string> all;
  for (const nlohmann::json& point : start.at("points"))
    all.push_back(point.at("status"));
  return all;
}

TEST_CASE("ep_bench sweep: a point that fails is marked, and the next one runs") {
  const TemporaryFile file("");
  const Sweep sweep = sweep_of({"--tokens", "1,2,3", "--json", file.name()});
  const SweepRun all = run(sweep, [](const Options& options) {
    if (options.tokens == 2) throw AgreedError(kExitUsage, "two is too many");
    return results_of(options);
  });
  CHECK(all.error.empty());
  CHECK(exit_status(all.points) == kExitFailure);
  const nlohmann::json document = document_of(sweep);
  CHECK(document["status"] == "partial");
  CHECK(statuses(document["starts"][0]) == std::vector<std::string>{"complete", "failed", "complete"});
  CHECK(document["starts"][0]["points"][1]["error"] == "two is too many");
  CHECK(document["starts"][0]["points"][1]["config"]["tokens"] == 2);
  CHECK(document["starts"][0]["points"][2]["operations"]["combine"]["samples"] == 8);
  const std::string table = to_table(sweep, all.points);
  CHECK_MESSAGE(contains(table, "failed: two is too many"), table);
  CHECK_MESSAGE(contains(table, "3 tokens  dispatch_bwd"), table);
}

TEST_CASE("ep_bench sweep: a signal, or the loss of a rank, while the file is written ends the run with its table") {
  struct Peer {
    bool is_written = false; // the file of a point
    bool is_lost = false;    // else it has got a signal
  };
  const auto all_gather = [](void* context, const void* send, void* recv, size_t bytes, int64_t, char*, size_t) {
    const Peer& peer = *static_cast<const Peer*>(context);
    std::memcpy(recv, send, bytes);
    if (!peer.is_written) return EPX_SUCCESS;
    if (peer.is_lost) return EPX_ERROR_TIMEOUT;
    constexpr int32_t kExitCode = kExitSignal + 2;
    if (bytes == sizeof(kExitCode)) std::memcpy(recv, &kExitCode, bytes);
    return EPX_SUCCESS;
  };
  for (const bool is_lost : {false, true}) {
    Peer peer{.is_lost = is_lost};
    epx_bootstrap bootstrap = alone();
    bootstrap.context = &peer;
    bootstrap.all_gather = all_gather;
    const Sweep sweep = sweep_of({"--tokens", "1,2,3"});
    const Peers peers(bootstrap, 1);
    Progress progress(sweep.points.size(), false);
    std::vector<bool> reports; // whether each was the last, which prints the table
    const auto report = [&](std::span<const PointResult>, bool is_last) {
      reports.push_back(is_last);
      peer.is_written = true;
    };
    CHECK_THROWS_AS(run_sweep(sweep, peers, results_of, report, progress), Error);
    CHECK(reports == std::vector<bool>{false, true});
  }
}

TEST_CASE("ep_bench sweep: a file that cannot be written ends the run, and is not tried again") {
  const Sweep sweep = sweep_of({"--tokens", "1,2,3"});
  const Peers peers(alone(), 1);
  Progress progress(sweep.points.size(), false);
  int reports = 0;
  const auto report = [&](std::span<const PointResult>, bool) {
    ++reports;
    throw RuntimeError("no space");
  };
  CHECK_THROWS_AS(run_sweep(sweep, peers, results_of, report, progress), AgreedError);
  CHECK(reports == 1);
}

TEST_CASE("ep_bench sweep: a rank that dies or a signal leaves the finished points") {
  const TemporaryFile file("");
  const Sweep sweep = sweep_of({"--tokens", "1,2,3", "--json", file.name()});
  const std::vector<std::string> expected{"complete", "failed", "not run"};
  const SweepRun dead = run(sweep, [](const Options& options) {
    if (options.tokens == 2) throw RuntimeError("rank 1 does not answer");
    return results_of(options);
  });
  CHECK(dead.error == "rank 1 does not answer");
  const nlohmann::json document = document_of(sweep);
  CHECK(document["status"] == "partial");
  CHECK(statuses(document["starts"][0]) == expected);
  const SweepRun interrupted = run(sweep, [](const Options& options) {
    if (options.tokens == 2) throw AgreedError(kExitSignal + 2, "interrupted");
    return results_of(options);
  });
  CHECK(interrupted.error == "interrupted");
  CHECK(statuses(document_of(sweep)["starts"][0]) == expected);
}

TEST_CASE("ep_bench sweep: where no point is complete, the file stays as it was") {
  const TemporaryFile file("earlier");
  const auto fails = [](const Options&) -> Results { throw AgreedError(kExitUsage, "no"); };
  const SweepRun all = run(sweep_of({"--tokens", "1,2", "--json", file.name()}), fails);
  CHECK(exit_status(all.points) == kExitUsage);
  const SweepRun one = run(sweep_of({"--tokens", "1", "--json", file.name()}), fails);
  CHECK(one.error == "no"); // the only point fails as the run does
  std::ifstream stream(file.name());
  CHECK(std::string(std::istreambuf_iterator<char>(stream), {}) == "earlier");
}

TEST_CASE("ep_bench --append adds a start of the same points, and refuses all else") {
  const TemporaryFile file("");
  const auto append = [&](const char* tokens) {
    const Sweep sweep = sweep_of({"--tokens", tokens, "--json", file.name(), "--append"});
    run(sweep, results_of);
    return document_of(sweep);
  };
  CHECK(append("1,2")["starts"].size() == 1); // the file was empty
  const nlohmann::json two = append("1,2");
  REQUIRE(two["starts"].size() == 2);
  CHECK(two["starts"][1]["start"] == 1);
  CHECK(two["status"] == "complete");
  const auto refusal = [&](const char* tokens) { return refusal_of([&] { append(tokens); }); };
  CHECK(contains(refusal("1"), "number of points is 2 and that of this run is 1"));
  CHECK(contains(refusal("1,3"), "tokens of point 1 is 2 and that of this run is 3"));
  for (const auto& [content, word] :
       {std::pair("{", "it is not JSON"), std::pair("[]", "version 2 of its schema"),
        std::pair(R"({"schema": {"name": "ep_bench", "version": 1}})", "version 2 of its schema"),
        std::pair(R"({"schema": {"name": "ep_bench", "version": 2}})", "lacks")}) {
    std::ofstream(file.name()) << content;
    CHECK_MESSAGE(contains(refusal("1,2"), word), refusal("1,2"));
    std::ifstream stream(file.name());
    CHECK(std::string(std::istreambuf_iterator<char>(stream), {}) == content);
  }
  nlohmann::json elsewhere = two;
  elsewhere["machine"]["cpu"] = "another";
  std::ofstream(file.name()) << elsewhere;
  CHECK(contains(refusal("1,2"), "its cpu is \"another\""));
}

} // namespace
} // namespace epx::bench
