// SPDX-License-Identifier: Apache-2.0
#include "tests/support/system_state.h"

#include <cstdlib>
#include <system_error>
#include <thread>

#include <linux/capability.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/support/check.h"

namespace epx::test {

namespace {

std::set<std::string> epx_segments() {
  std::set<std::string> names;
  std::error_code error; // an entry may be removed during the loop
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("epx")) names.insert(name);
  }
  return names;
}

} // namespace

TempDirectory::TempDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "epx-test-XXXXXX").string();
  check(::mkdtemp(name.data()) != nullptr, "no temporary directory {}", name);
  path_ = name;
}

TempDirectory::~TempDirectory() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::vector<std::string> TempDirectory::entries() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(path_))
    names.push_back(entry.path().filename().string());
  return names;
}

SharedMemoryWatch::SharedMemoryWatch() : before_(epx_segments()) {}

std::set<std::string> SharedMemoryWatch::leftovers(std::chrono::milliseconds grace) const {
  const auto deadline = std::chrono::steady_clock::now() + grace;
  std::set<std::string> suspects = epx_segments();
  std::erase_if(suspects, [&](const std::string& name) { return before_.contains(name); });
  while (!suspects.empty() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const std::set<std::string> now = epx_segments();
    std::erase_if(suspects, [&](const std::string& name) { return !now.contains(name); });
  }
  return suspects;
}

void hide_from_proc() {
  // Without root, other processes may then not open this one's files. With root, this process may then not open the files of
  // processes that still have the capability which it gives up.
  check(::prctl(PR_SET_DUMPABLE, 0) == 0, "PR_SET_DUMPABLE failed");
  __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3] = {};
  check(::syscall(SYS_capget, &header, sets) == 0, "capget failed");
  sets[CAP_TO_INDEX(CAP_SYS_PTRACE)].effective &= ~CAP_TO_MASK(CAP_SYS_PTRACE);
  check(::syscall(SYS_capset, &header, sets) == 0, "capset failed");
}

} // namespace epx::test
