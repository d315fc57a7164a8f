// SPDX-License-Identifier: Apache-2.0
#include "transport/topology/nodes.h"

#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "base/error.h"

namespace epx {
namespace {

template <size_t N>
std::string_view text_of(const std::array<char, N>& padded) {
  const std::string_view text(padded.data(), padded.size());
  return text.substr(0, text.find('\0'));
}

std::string name_of(const RankPlace& place) {
  if (place.fabric.is_known()) return fmt::format("the NVLink fabric of \"{}\"", text_of(place.host));
  if (place.host_id_hash != 0) return fmt::format("NCCL_HOSTID \"{}\"", text_of(place.host_id));
  return fmt::format("\"{}\"", text_of(place.host));
}

// Ranks of one machine have the same boot id, unless the system does not tell it.
bool are_of_different_boots(const RankPlace& a, const RankPlace& b) {
  return a.boot_id[0] != '\0' && b.boot_id[0] != '\0' && a.boot_id != b.boot_id;
}

// The ranks first .. first + size - 1 are on one node.
struct Node {
  size_t first;
  size_t size;
};

std::string describe(std::span<const RankPlace> places, const Node& node) {
  const std::string ranks = node.size == 1 ? fmt::format("rank {}", node.first)
                                           : fmt::format("ranks {}-{}", node.first, node.first + node.size - 1);
  return fmt::format("{} ({})", name_of(places[node.first]), ranks);
}

// Groups ranks that follow each other, and checks that no node has others elsewhere.
std::vector<Node> group_by_node(std::span<const RankPlace> places) {
  std::vector<Node> nodes;
  for (size_t rank = 0; rank < places.size(); ++rank) {
    if (!nodes.empty() && on_one_node(places[nodes.back().first], places[rank])) {
      ++nodes.back().size;
      continue;
    }
    for (const Node& node : nodes)
      if (on_one_node(places[node.first], places[rank]))
        fail(EPX_ERROR_UNSUPPORTED,
             "the ranks of a node must follow each other, but ranks {} and {} are on {} and rank {} between them is on {}: "
             "place ranks by node (mpirun --map-by slot), or order them by epx_group_config.key",
             node.first + node.size - 1, rank, name_of(places[node.first]), node.first + node.size,
             name_of(places[node.first + node.size]));
    nodes.push_back({rank, 1});
  }
  return nodes;
}

} // namespace

int find_ranks_per_node(std::span<const RankPlace> places) {
  const std::vector<Node> nodes = group_by_node(places);
  for (const Node& node : nodes)
    for (size_t rank = node.first + 1; rank < node.first + node.size; ++rank)
      if (places[rank].host_id_hash != 0 && !places[rank].fabric.is_known() &&
          are_of_different_boots(places[node.first], places[rank]))
        fail(EPX_ERROR_UNSUPPORTED,
             "ranks {} and {} have the same NCCL_HOSTID \"{}\", but run on two machines, \"{}\" and \"{}\": each machine "
             "needs "
             "another one",
             node.first, rank, text_of(places[rank].host_id), text_of(places[node.first].host), text_of(places[rank].host));
  for (const Node& node : nodes)
    if (node.size != nodes.front().size)
      fail(EPX_ERROR_UNSUPPORTED, "the nodes of a group must have the same number of ranks, but {} has {} and {} has {}",
           describe(places, nodes.front()), nodes.front().size, describe(places, node), node.size);
  return static_cast<int>(nodes.front().size);
}

std::string describe_nodes(std::span<const RankPlace> places, int ranks_per_node) {
  constexpr size_t kMaxNamed = 4;
  const auto size = static_cast<size_t>(ranks_per_node);
  const size_t num_nodes = places.size() / size;
  std::string text;
  for (size_t node = 0; node < num_nodes && node < kMaxNamed; ++node)
    text += (node == 0 ? "" : ", ") + describe(places, {node * size, size});
  if (num_nodes > kMaxNamed) text += fmt::format(" and {} more", num_nodes - kMaxNamed);
  return text;
}

void require_one_machine(std::span<const RankPlace> places) {
  for (size_t rank = 1; rank < places.size(); ++rank)
    if (are_of_different_boots(places[0], places[rank]))
      fail(EPX_ERROR_UNSUPPORTED,
           "transport host shares the memory of one machine, but rank 0 runs on \"{}\" and rank {} on another one, \"{}\"",
           text_of(places[0].host), rank, text_of(places[rank].host));
}

} // namespace epx
