// SPDX-License-Identifier: Apache-2.0
// train_moe: trains a byte-level language model with MoE layers on epx. Wiring only.
#include <new>
#include <variant>

#include <fmt/format.h>

#include "apps/train_moe/errors.h"
#include "apps/train_moe/job.h"
#include "apps/train_moe/options.h"
#include "apps/train_moe/world.h"

namespace train {
namespace {

int run(const World& world, const Options& options) {
  try {
    Job job(world, options);
    job.train();
    job.finish();
    return 0;
  } catch (const AgreedError& error) {
    if (world.rank() == 0) fmt::print(stderr, "train_moe: {}\n", error.what());
    return error.exit_code();
  } catch (const std::bad_alloc&) { // the other ranks may not know
    fmt::print(stderr, "train_moe: rank {}: out of memory\n", world.rank());
  } catch (const std::exception& error) {
    fmt::print(stderr, "train_moe: rank {}: {}\n", world.rank(), describe(error));
  }
  world.abort(kExitFailure);
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
