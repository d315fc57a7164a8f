// SPDX-License-Identifier: Apache-2.0
#include "groups.h"

#include <map>
#include <mutex>

namespace epx_ffi {
namespace {

struct Entry {
  epx_group group;
  bool is_on_host;
  int users;
  bool retired;
};

struct Registry {
  std::mutex mutex;
  std::map<int64_t, Entry> entries;
  int64_t last_id = 0;
};

// It is never destroyed: threads of XLA may be in a call when static objects are.
Registry& registry() {
  static Registry* const registry = new Registry;
  return *registry;
}

} // namespace

GroupUse::GroupUse(int64_t id) : id_(id), group_(nullptr), is_on_host_(false) {
  const std::scoped_lock lock(registry().mutex);
  const auto found = registry().entries.find(id);
  if (found == registry().entries.end() || found->second.retired) return;
  ++found->second.users;
  group_ = found->second.group;
  is_on_host_ = found->second.is_on_host;
}

GroupUse::~GroupUse() {
  if (group_ == nullptr) return;
  const std::scoped_lock lock(registry().mutex);
  --registry().entries.at(id_).users;
}

} // namespace epx_ffi

using epx_ffi::registry;

int64_t epx_ffi_register(epx_group group) {
  epx_group_info info{};
  info.struct_size = sizeof(info);
  if (epx_group_query(group, &info) != EPX_SUCCESS) return 0;
  const std::scoped_lock lock(registry().mutex);
  const int64_t id = ++registry().last_id;
  registry().entries[id] = {group, info.transport == EPX_TRANSPORT_HOST, 0, false};
  return id;
}

int32_t epx_ffi_retire(int64_t id) {
  const std::scoped_lock lock(registry().mutex);
  const auto found = registry().entries.find(id);
  if (found == registry().entries.end()) return 1;
  found->second.retired = true;
  if (found->second.users > 0) return 0;
  registry().entries.erase(found);
  return 1;
}
