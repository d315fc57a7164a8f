// SPDX-License-Identifier: Apache-2.0
// The conformance suite: one list of named scenarios that every transport and every way to start ranks has to pass.
#pragma once

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "tests/multiprocess/fault_rank.h"
#include "tests/support/launcher.h"
#include "tests/support/layer_run.h"

namespace epx::test {

// Returns how this process takes part; main sets it.
Launcher& launcher();

// Runs one scenario on every rank that lives in this process, and fails the test case when a check fails or none was made.
void on_every_rank(const std::function<void(const RankContext&)>& scenario);

// Returns whether the ranks are on the host transport.
bool is_on_host();

// Returns a case of medium size for all ranks: 2.5 experts per rank, T that differs by rank, top-3, weights everywhere.
Case base_case();

// Runs the case on every rank.
void run_everywhere(const Case& test_case);

// Runs base_case() after `change` has changed it.
void run_changed(const std::function<void(Case&)>& change);

// The last rank calls `its_operation` with fields that `change` has changed, where the others call `operation` with `common`
// ones: every rank reports it, in that call already.
void disagree(epx_operation operation, epx_operation its_operation, void (*change)(CallFields&), epx_status status,
              const std::vector<std::string>& words, bool has_fixed_rail_tokens = false, const CallFields& common = {});

// Returns whether this run has the variant `index` of a case whose variants differ in numbers only, and take long. With
// EPX_TEST_SHARES_VARIANTS a run of four ranks has a third of them and other runs of several ranks have the rest; a run of one
// rank has all.
bool has_variant(size_t index);

// Returns those of `variants` that this run has.
template <typename T>
std::vector<T> variants_of_this_run(std::initializer_list<T> variants) {
  std::vector<T> chosen;
  for (size_t i = 0; i < variants.size(); ++i)
    if (has_variant(i)) chosen.push_back(variants.begin()[i]);
  return chosen;
}

} // namespace epx::test
