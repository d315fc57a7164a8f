// SPDX-License-Identifier: Apache-2.0
// What the ranks of a group agree on when they create a block or an arena: every option, except those that may differ between
// ranks. agreement.cc has the table.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "epx/epx_moe.h"

namespace epx::moe {

// The options that one rank passes. The configs have passed require_struct, and nothing else of them has been checked.
class Options {
public:
  explicit Options(const epx_moe_block_config& block);
  explicit Options(const epx_moe_arena_config& arena);

  struct Option {
    std::string name;
    int64_t value;
    std::string (*format)(int64_t value); // for messages
  };
  const char* created() const { return is_arena_ ? "arena" : "block"; }
  bool is_arena() const { return is_arena_; }
  const std::vector<Option>& list() const { return list_; }

private:
  bool is_arena_;
  std::vector<Option> list_;
};

// Runs `make`, which is this rank's own part of the creation, and compares the options with those of the other ranks. Collective
// over the group, which may be NULL: then there is nothing to compare. All ranks succeed, or all throw, and the group lives on.
// Where options differ, it is MISMATCH by the same sentence. Else a rank throws the StatusError that its `make` has thrown, and
// the others the same status with the number of that rank.
void agree_after(epx_group group, const Options& options, const std::function<void()>& make);

} // namespace epx::moe
