// SPDX-License-Identifier: Apache-2.0
// These tests check which ranks form nodes, and what is refused.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "transport/topology/nodes.h"
#include "transport/topology/rank_place.h"

namespace epx {
namespace {

RankPlace on_host(std::string_view host, std::string_view boot_id = "", std::string_view host_id = "") {
  RankPlace place;
  std::ranges::copy(host, place.host.begin());
  std::ranges::copy(boot_id, place.boot_id.begin());
  std::ranges::copy(host_id, place.host_id.begin());
  place.host_id_hash = host_id.empty() ? 0 : std::hash<std::string_view>()(host_id);
  return place;
}

RankPlace on_fabric(std::string_view host, unsigned char cluster, uint32_t clique) {
  RankPlace place = on_host(host);
  place.fabric.cluster[0] = cluster;
  place.fabric.clique = clique;
  return place;
}

// Returns the sentence of the refusal; "" when the nodes are accepted.
template <typename Check>
std::string refusal(const Check& check) {
  try {
    check();
    return "";
  } catch (const StatusError& error) {
    CHECK(error.status() == EPX_ERROR_UNSUPPORTED);
    return error.message();
  }
}

std::string nodes_refusal(const std::vector<RankPlace>& places) {
  return refusal([&] { find_ranks_per_node(places); });
}

TEST_CASE("ranks of one host name and boot are a node") {
  CHECK(find_ranks_per_node(std::vector{on_host("a")}) == 1);
  CHECK(find_ranks_per_node(std::vector{on_host("a", "1"), on_host("a", "1"), on_host("a", "1")}) == 3);
  CHECK(find_ranks_per_node(std::vector{on_host("a", "1"), on_host("a", "2")}) == 1); // two machines of one name
  CHECK(find_ranks_per_node(std::vector{on_host("a", "1"), on_host("b", "1")}) == 1); // containers, as NCCL has it
  CHECK(find_ranks_per_node(std::vector{on_host("a"), on_host("a"), on_host("b"), on_host("b")}) == 2);
}

TEST_CASE("NCCL_HOSTID takes the place of host name and boot") {
  CHECK(find_ranks_per_node(std::vector{on_host("a", "1", "x"), on_host("a", "1", "x"), on_host("a", "1", "y"),
                                        on_host("a", "1", "y")}) == 2);
  CHECK(find_ranks_per_node(std::vector{on_host("a", "1", "x"), on_host("a", "1")}) == 1);
  CHECK(find_ranks_per_node(std::vector{on_host("a", "1", "x"), on_host("b", "1", "x")}) == 2); // containers
  CHECK(find_ranks_per_node(std::vector{on_host("a", "", "x"), on_host("b", "2", "x")}) == 2);  // a boot is not known
  CHECK(
      nodes_refusal({on_host("a", "1", "x"), on_host("b", "2", "x")}) ==
      "ranks 0 and 1 have the same NCCL_HOSTID \"x\", but run on two machines, \"a\" and \"b\": each machine needs another "
      "one");
}

TEST_CASE("GPUs of one NVLink fabric and clique are a node, whatever their machines are") {
  CHECK(find_ranks_per_node(std::vector{on_fabric("a", 1, 7), on_fabric("b", 1, 7)}) == 2);
  CHECK(find_ranks_per_node(std::vector{on_fabric("a", 1, 7), on_fabric("b", 1, 8)}) == 1);
  CHECK(find_ranks_per_node(std::vector{on_fabric("a", 1, 7), on_fabric("a", 2, 7)}) == 1);
  CHECK(find_ranks_per_node(std::vector{on_fabric("a", 1, 7), on_host("a")}) == 1);
  CHECK(describe_nodes(std::vector{on_fabric("a", 1, 7), on_fabric("b", 1, 7)}, 2) ==
        "the NVLink fabric of \"a\" (ranks 0-1)");
}

TEST_CASE("nodes of different sizes are refused with both") {
  CHECK(nodes_refusal({on_host("a"), on_host("a"), on_host("a"), on_host("b")}) ==
        "the nodes of a group must have the same number of ranks, but \"a\" (ranks 0-2) has 3 and \"b\" (rank 3) has 1");
  CHECK(nodes_refusal({on_host("a"), on_host("b"), on_host("b")}) ==
        "the nodes of a group must have the same number of ranks, but \"a\" (rank 0) has 1 and \"b\" (ranks 1-2) has 2");
}

TEST_CASE("ranks of a node that do not follow each other are refused with the one between them") {
  CHECK(nodes_refusal({on_host("a"), on_host("b"), on_host("a"), on_host("b")}) ==
        "the ranks of a node must follow each other, but ranks 0 and 2 are on \"a\" and rank 1 between them is on \"b\": "
        "place "
        "ranks by node (mpirun --map-by slot), or order them by epx_group_config.key");
  CHECK(nodes_refusal({on_host("a"), on_host("a"), on_host("b"), on_host("c"), on_host("a")})
            .starts_with("the ranks of a node must follow each other, but ranks 1 and 4 are on \"a\" and rank 2 between"));
}

TEST_CASE("nodes are described by name and ranks") {
  const std::vector two{on_host("a"), on_host("a"), on_host("", "", "x"), on_host("", "", "x")};
  CHECK(describe_nodes(two, 2) == "\"a\" (ranks 0-1), NCCL_HOSTID \"x\" (ranks 2-3)");
  std::vector<RankPlace> many;
  for (const char* name : {"a", "b", "c", "d", "e", "f"})
    many.push_back(on_host(name));
  CHECK(describe_nodes(many, 1) == "\"a\" (rank 0), \"b\" (rank 1), \"c\" (rank 2), \"d\" (rank 3) and 2 more");
}

TEST_CASE("a thousand ranks") {
  std::vector<RankPlace> places;
  for (int rank = 0; rank < 1024; ++rank)
    places.push_back(on_host("node-" + std::to_string(rank / 8), std::to_string(rank / 8)));
  CHECK(find_ranks_per_node(places) == 8);
  std::swap(places[8], places[1016]);
  CHECK(nodes_refusal(places).find("ranks 8 and 1016") == std::string::npos);
  CHECK(nodes_refusal(places).starts_with("the ranks of a node must follow each other"));
}

TEST_CASE("memory is shared on one machine only") {
  CHECK(refusal([] { require_one_machine(std::vector{on_host("a", "1"), on_host("b", "1"), on_host("c")}); }).empty());
  CHECK(refusal([] {
          require_one_machine(std::vector{on_host("a", "1"), on_host("a", "1"), on_host("b", "2")});
        }) == "transport host shares the memory of one machine, but rank 0 runs on \"a\" and rank 2 on another one, \"b\"");
}

TEST_CASE("this process's place has its host, its boot and NCCL_HOSTID") {
  ::unsetenv("NCCL_HOSTID");
  const RankPlace place = this_rank_place();
  CHECK(place.host[0] != '\0');
  CHECK(place.host_id_hash == 0);
  CHECK_FALSE(place.fabric.is_known());
  CHECK(on_one_node(place, this_rank_place()));
  const std::string long_id(200, 'x');
  ::setenv("NCCL_HOSTID", long_id.c_str(), 1);
  const RankPlace named = this_rank_place();
  ::setenv("NCCL_HOSTID", (long_id + "y").c_str(), 1);
  const RankPlace other = this_rank_place();
  ::unsetenv("NCCL_HOSTID");
  CHECK(std::string_view(named.host_id.data(), named.host_id.size()) == long_id.substr(0, 64));
  CHECK_FALSE(on_one_node(place, named));
  CHECK_FALSE(on_one_node(named, other)); // which differ behind what is kept of them
}

} // namespace
} // namespace epx
