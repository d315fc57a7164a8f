// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/machines.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>

#include <unistd.h>

namespace epx::bench {

MachineName this_machine() {
  char host[256]{};
  if (::gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  MachineName name{};
  const std::string text = std::string(host) + ' ' + boot;
  std::strncpy(name.data(), text.c_str(), name.size() - 1);
  return name;
}

Machines::Machines(std::span<const MachineName> names, int rank)
    : num_ranks_(static_cast<int>(names.size())),
      num_ranks_here_(static_cast<int>(std::ranges::count(names, names[static_cast<size_t>(rank)]))) {}

} // namespace epx::bench
