// SPDX-License-Identifier: Apache-2.0
#include "transport/host/memory_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>

#include <fmt/format.h>

namespace epx {
namespace {

constexpr int64_t kKibibyte = 1024;
constexpr int64_t kMaxSpareBytes = 64 * kKibibyte * kKibibyte;
constexpr int64_t kSpareFraction = 16; // 1/16 of a small limit is left to others

// Returns the number after `key` at the start of a line.
std::optional<int64_t> number_after(const std::string& text, const std::string& key) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(key)) continue;
    std::istringstream rest(line.substr(key.size()));
    int64_t value = 0;
    if (rest >> value) return value;
  }
  return std::nullopt;
}

std::string content_of(const std::string& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t value = 0;
  if (file >> value) return value;
  return std::nullopt; // the file is absent, or says "max"
}

MemoryLimit make_limit(int64_t free_bytes, int64_t total_bytes, std::string of) {
  return {std::max<int64_t>(free_bytes, 0), std::min(kMaxSpareBytes, total_bytes / kSpareFraction), std::move(of)};
}

// CgroupFiles has the file names of one version of cgroups.
struct CgroupFiles {
  const char* mount;
  const char* limit;
  const char* usage;
  const char* inactive_file; // keys in memory.stat
  const char* active_file;
};

constexpr CgroupFiles kVersion1 = {"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                   "total_inactive_file ", "total_active_file "};
constexpr CgroupFiles kVersion2 = {"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file ", "active_file "};

std::optional<MemoryLimit> limit_of_cgroup(const std::string& directory, const CgroupFiles& files) {
  const std::optional<int64_t> limit = number_in(directory + "/" + files.limit);
  if (!limit) return std::nullopt;
  const std::optional<int64_t> usage = number_in(directory + "/" + files.usage);
  if (!usage) return std::nullopt;
  const std::string stat = content_of(directory + "/memory.stat");
  const int64_t cache =
      number_after(stat, files.inactive_file).value_or(0) + number_after(stat, files.active_file).value_or(0);
  return make_limit(*limit - *usage + cache, *limit, fmt::format("the limit of {} bytes of cgroup {}", *limit, directory));
}

void tighten(MemoryLimit& tightest, const std::optional<MemoryLimit>& limit) {
  if (limit && limit->usable_bytes() < tightest.usable_bytes()) tightest = *limit;
}

// A limit holds for a whole subtree, so the parents' count, too. A container may see its own cgroup as the mounted root while
// /proc names it by its path on the host: directories that do not exist are skipped on the way up.
void tighten_by_cgroups(MemoryLimit& tightest, const std::string& root, std::string path, const CgroupFiles& files) {
  while (true) {
    tighten(tightest, limit_of_cgroup(fmt::format("{}{}{}", root, files.mount, path), files));
    if (path.empty()) return;
    path.erase(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
  }
}

bool has_memory_controller(const std::string& controllers) {
  return ("," + controllers + ",").find(",memory,") != std::string::npos;
}

} // namespace

MemoryLimit tightest_memory_limit(const std::string& root) {
  MemoryLimit tightest{std::numeric_limits<int64_t>::max(), 0, "this machine"};
  const std::string meminfo = content_of(root + "/proc/meminfo");
  const std::optional<int64_t> available = number_after(meminfo, "MemAvailable:");
  const std::optional<int64_t> total = number_after(meminfo, "MemTotal:");
  if (available && total) tighten(tightest, make_limit(*available * kKibibyte, *total * kKibibyte, "this machine"));

  // Lines look like "4:memory:/path" (version 1) or "0::/path" (version 2).
  std::istringstream lines(content_of(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) tighten_by_cgroups(tightest, root, path, kVersion2);
    if (has_memory_controller(controllers)) tighten_by_cgroups(tightest, root, path, kVersion1);
  }
  return tightest;
}

} // namespace epx
