// SPDX-License-Identifier: Apache-2.0
// The limits of a process and of its cgroup, for errors: a sentence names the limit that was met, and its value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>

#include <sys/resource.h>

#include "epx/epx.h"

namespace epx {

// Returns the soft limit, which is the one that counts; nothing where there is none.
inline std::optional<int64_t> soft_limit(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::nullopt;
  return static_cast<int64_t>(limit.rlim_cur);
}

// Says that there is no memory, and which limits there are, without allocating any.
class OutOfMemoryText {
public:
  OutOfMemoryText() {
    std::snprintf(text_, sizeof(text_), "out of host memory");
    append(RLIMIT_AS, "RLIMIT_AS (ulimit -v)");
    append(RLIMIT_DATA, "RLIMIT_DATA (ulimit -d)");
  }
  const char* get() const { return text_; }

private:
  void append(int resource, const char* name) {
    const std::optional<int64_t> limit = soft_limit(resource);
    const size_t length = std::string_view(text_).size();
    if (limit)
      std::snprintf(text_ + length, sizeof(text_) - length, "; %s is %lld bytes", name, static_cast<long long>(*limit));
  }

  char text_[160];
};

// Returns the system's words for an errno, with the limit that can be the reason of EMFILE, EFBIG and ENOMEM.
std::string describe_errno(int error);

// The same for a thread or a process that cannot be started.
std::string describe_thread_errno(int error);

// Throws `status` unless files of this process may have `bytes` bytes: beyond RLIMIT_FSIZE a write would end it by SIGXFSZ.
// `what`, "writing a file", begins the sentence.
void require_file_size(epx_status status, std::string_view what, int64_t bytes);

} // namespace epx
