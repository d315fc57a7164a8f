// SPDX-License-Identifier: Apache-2.0
#include "base/resource_limits.h"

#include <cerrno>
#include <fstream>
#include <system_error>

#include <fmt/format.h>

#include "base/error.h"

namespace epx {
namespace {

std::string name_limit(int resource, const char* name, const char* unit = "") {
  const std::optional<int64_t> limit = soft_limit(resource);
  return limit ? fmt::format("; {} is {}{}", name, *limit, unit) : "";
}

// Returns the limit of tasks of the cgroup or, on the way up, of the nearest parent that has one.
std::string name_cgroup_limit() {
  std::ifstream lines("/proc/self/cgroup");
  for (std::string line; std::getline(lines, line);) { // "8:pids:/path" (version 1) or "0::/path" (version 2)
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controller = line.substr(first + 1, second - first - 1);
    if (!controller.empty() && controller != "pids") continue;
    std::string path = "/sys/fs/cgroup" + (controller.empty() ? "" : "/" + controller) + line.substr(second + 1);
    for (; path.size() > std::string_view("/sys/fs/cgroup").size(); path.erase(path.rfind('/'))) {
      std::ifstream file(path + "/pids.max");
      if (int64_t limit = 0; file >> limit) return fmt::format("; pids.max of cgroup {} is {}", path, limit);
    }
  }
  return "";
}

} // namespace

std::string describe_errno(int error) {
  std::string words = std::generic_category().message(error);
  if (error == EMFILE) return words + name_limit(RLIMIT_NOFILE, "RLIMIT_NOFILE (ulimit -n)");
  if (error == EFBIG) return words + name_limit(RLIMIT_FSIZE, "RLIMIT_FSIZE (ulimit -f)", " bytes");
  if (error == ENOMEM)
    return words + name_limit(RLIMIT_AS, "RLIMIT_AS (ulimit -v)", " bytes") +
           name_limit(RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)", " bytes");
  return words;
}

std::string describe_thread_errno(int error) {
  if (error != EAGAIN) return describe_errno(error);
  return std::generic_category().message(error) + name_limit(RLIMIT_NPROC, "RLIMIT_NPROC (ulimit -u)") +
         name_cgroup_limit() + name_limit(RLIMIT_AS, "RLIMIT_AS (ulimit -v)", " bytes");
}

void require_file_size(epx_status status, std::string_view what, int64_t bytes) {
  const std::optional<int64_t> limit = soft_limit(RLIMIT_FSIZE);
  if (limit && bytes > *limit)
    fail(status, "{} failed: files of this process may have {} bytes, RLIMIT_FSIZE (ulimit -f), and this one needs {}",
         what, *limit, bytes);
}

} // namespace epx
