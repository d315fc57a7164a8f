// SPDX-License-Identifier: Apache-2.0
// Tests that the warps of a grid together send and receive each tile of the low-latency path exactly once.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/emulation/device.h"

#include "runtime/stages/cuda/ll_work_partition.cuh"

namespace epx::cuda {
namespace {

struct Case {
  uint32_t num_blocks;
  int first_block, num_warps;
  uint32_t tiles_to_send, tiles_to_receive;
  LlSenders senders;
  bool has_many;
};

std::string describe(const Case& c) {
  return fmt::format("{} blocks from {} on, {} warps, {} and {} tiles, {} sender blocks of {} tiles, {}", c.num_blocks,
                     c.first_block, c.num_warps, c.tiles_to_send, c.tiles_to_receive, c.senders.blocks, c.senders.min_tiles,
                     c.has_many);
}

void add(std::vector<int>& count, const LlWorkPartition::Tiles& tiles) {
  for (uint64_t tile = tiles.first; tile < tiles.end; tile += tiles.step)
    ++count.at(tile);
}

bool is_all_ones(const std::vector<int>& count) {
  return std::ranges::count(count, 1) == static_cast<std::ptrdiff_t>(count.size());
}

// Returns what is wrong; "": nothing.
std::string check(const Case& c) {
  std::vector<int> sent(c.tiles_to_send), received(c.tiles_to_receive), received_late(c.tiles_to_receive);
  std::vector<int> received_of_bound(c.tiles_to_receive); // the tiles are an upper bound, and half as many are expected
  bool takes_tiles = false;
  uint32_t sending_blocks = 0;
  for (uint32_t block = 0; block < c.num_blocks; ++block)
    for (int warp = 0; warp < c.num_warps; ++warp) {
      const LlWorkPartition partition({static_cast<uint32_t>(warp), block, c.num_blocks}, c.num_warps, c.first_block,
                                      c.tiles_to_send, c.senders, c.has_many);
      const bool is_helper = block < static_cast<uint32_t>(c.first_block);
      if (!is_helper || partition.has_helpers()) {
        add(received, partition.to_receive(c.tiles_to_receive));
        add(received_late, partition.to_receive_late(c.tiles_to_receive));
        add(received_of_bound, partition.to_receive_late(c.tiles_to_receive, c.tiles_to_receive / 2));
      }
      LlWorkPartition::Tiles own = partition.tiles_to_send(c.tiles_to_send);
      if (is_helper && own.first < own.end) return "a block before first_block sends";
      if (own.first < own.end && !partition.block_sends()) return "a warp sends of a block that does not";
      takes_tiles = partition.takes_tiles();
      if (warp == 0 && partition.block_sends()) ++sending_blocks;
      if (takes_tiles) { // the scheduler's numbers are those of the tiles from `step` on
        own.end = std::min(own.end, own.step);
        if (block == 0 && warp == 0 && own.step < c.tiles_to_send) std::fill(sent.begin() + own.step, sent.end(), 1);
      }
      add(sent, own);
    }
  if (sending_blocks != (takes_tiles ? c.senders.blocks : c.num_blocks - static_cast<uint32_t>(c.first_block)))
    return "block_sends() is true of other blocks than those that send";
  if (!is_all_ones(sent))
    return takes_tiles ? "not each tile is sent once, by the scheduler" : "not each tile is sent once";
  if (!is_all_ones(received)) return "not each tile is received once";
  if (!is_all_ones(received_late)) return "not each tile is received once where some come late";
  if (!is_all_ones(received_of_bound)) return "not each tile is received once where half of them are expected";
  return "";
}

TEST_CASE("the warps of a grid send and receive each tile of the low-latency path once") {
  int num_cases = 0, num_scheduled = 0;
  for (const uint32_t blocks : {1u, 2u, 3u, 5u, 8u, 17u, 57u, 64u, 112u, 132u})
    for (const int first_block : {0, 1, 2, 20})
      for (const int warps : {12, 16})
        for (const uint32_t tiles : {0u, 1u, 7u, 100u, 640u, 5'120u})
          for (const uint32_t sender_blocks : {0u, 1u, 20u, 66u}) {
            if (first_block >= static_cast<int>(blocks)) continue;
            const uint32_t movers = blocks - static_cast<uint32_t>(first_block);
            if (sender_blocks > movers / 2) continue; // the launch plan has no more
            for (const bool has_many : {false, true})
              for (const uint32_t to_receive : {tiles, 3 * tiles, 3 * tiles + 5}) {
                const Case c{blocks, first_block, warps, tiles, to_receive, {sender_blocks, 320}, has_many};
                ++num_cases;
                num_scheduled += tiles > 0 && sender_blocks > 0 && (tiles >= 320 || has_many) ? 1 : 0;
                const std::string wrong = check(c);
                if (!wrong.empty()) FAIL(describe(c) << ": " << wrong);
              }
          }
  CHECK(num_cases > 1000);
  CHECK(num_scheduled > 100);
}

} // namespace
} // namespace epx::cuda
