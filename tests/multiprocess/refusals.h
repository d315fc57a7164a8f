// SPDX-License-Identifier: Apache-2.0
// This table has the calls that have to be refused on the host.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "epx/epx.h"
#include "tests/multiprocess/layer_round.h"
#include "tests/support/case.h"

namespace epx::test {

struct Refusal {
  std::string name;
  Op op;
  std::function<void(Calls&)> spoil;
  std::vector<std::string> words; // names and values that the sentence has to contain
  epx_status status = EPX_ERROR_INVALID_ARGUMENT;
};

// Returns the refusals for the rank whose T is num_tokens, in a group of layer_round.h.
std::vector<Refusal> refusals(int num_tokens, int num_local_experts, int64_t num_rows, size_t handle_bytes);

// Returns formats of one way that a call may have, in each scaling and in each layout that the group of layer_round.h and
// the rank-major layout have.
std::vector<FormatCase> right_formats(FormatWay way);

} // namespace epx::test
