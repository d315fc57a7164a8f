// SPDX-License-Identifier: Apache-2.0
#include "transport/topology/rank_place.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace epx {
namespace {

// FNV-1a; never 0.
uint64_t hash_of(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : text)
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash == 0 ? 1 : hash;
}

} // namespace

bool on_one_node(const RankPlace& a, const RankPlace& b) {
  if (a.fabric.is_known() || b.fabric.is_known()) return a.fabric == b.fabric;
  if (a.host_id_hash != 0 || b.host_id_hash != 0) return a.host_id_hash == b.host_id_hash && a.host_id == b.host_id;
  return a.host == b.host && a.boot_id == b.boot_id;
}

RankPlace this_rank_place() {
  const ProcessOrigin origin = this_process_origin();
  RankPlace place;
  std::copy_n(origin.host, std::min(sizeof(origin.host), place.host.size()), place.host.begin());
  std::copy_n(origin.boot_id, std::min(sizeof(origin.boot_id), place.boot_id.size()), place.boot_id.begin());
  if (const char* const host_id = std::getenv("NCCL_HOSTID"); host_id != nullptr) {
    const std::string_view text(host_id);
    std::copy_n(text.begin(), std::min(text.size(), place.host_id.size()), place.host_id.begin());
    place.host_id_hash = hash_of(text);
  }
  return place;
}

} // namespace epx
