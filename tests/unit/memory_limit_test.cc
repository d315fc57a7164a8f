// SPDX-License-Identifier: Apache-2.0
// These tests run transport/host/memory_limit.h on directories that look like a machine's /proc and /sys.
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "tests/support/system_state.h"
#include "transport/host/memory_limit.h"

namespace epx {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class Machine {
public:
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = root_.path().string() + path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text;
  }
  // Writes /proc/meminfo; `available` and `total` are in MiB.
  void set_memory(int64_t available, int64_t total) const {
    write("/proc/meminfo", "MemTotal:       " + std::to_string(total * 1024) +
                               " kB\nMemFree: 1 kB\nMemAvailable:   " + std::to_string(available * 1024) + " kB\n");
  }
  MemoryLimit limit() const { return tightest_memory_limit(root_.path().string()); }

private:
  test::TempDirectory root_;
};

std::string mib(int64_t count) {
  return std::to_string(count * kMiB) + "\n";
}

TEST_CASE("nothing to read: no limit") {
  const Machine machine;
  CHECK(machine.limit().usable_bytes() == std::numeric_limits<int64_t>::max());
}

TEST_CASE("the machine's memory, of which a little is left to others") {
  const Machine machine;
  machine.set_memory(3000, 16000);
  const MemoryLimit limit = machine.limit();
  CHECK(limit.free_bytes == 3000 * kMiB);
  CHECK(limit.spare_bytes == 64 * kMiB);
  CHECK(limit.of == "this machine");
  machine.set_memory(10, 16000);
  CHECK(machine.limit().usable_bytes() < 0);
}

TEST_CASE("cgroup version 2: the tightest from the process's own to the root; its page cache counts as free") {
  const Machine machine;
  machine.set_memory(3000, 16000);
  machine.write("/proc/self/cgroup", "0::/jobs/mine\n");
  const std::string mount = "/sys/fs/cgroup";
  machine.write(mount + "/jobs/mine/memory.max", "max\n");
  machine.write(mount + "/jobs/mine/memory.current", mib(100));
  CHECK(machine.limit().of == "this machine");

  machine.write(mount + "/jobs/memory.max", mib(512));
  machine.write(mount + "/jobs/memory.current", mib(400));
  machine.write(mount + "/jobs/memory.stat",
                "anon 1\ninactive_file " + mib(30) + "active_file " + mib(7) + "workingset_restore_file 9999999999\n");
  MemoryLimit limit = machine.limit();
  CHECK(limit.free_bytes == (512 - 400 + 30 + 7) * kMiB);
  CHECK(limit.spare_bytes == 32 * kMiB);
  CHECK(limit.of.find(std::to_string(512 * kMiB)) != std::string::npos);
  CHECK(limit.of.ends_with("/sys/fs/cgroup/jobs"));

  machine.write(mount + "/jobs/mine/memory.max", mib(128));
  limit = machine.limit();
  CHECK(limit.free_bytes == 28 * kMiB);
  CHECK(limit.of.ends_with("/jobs/mine"));

  machine.write(mount + "/jobs/mine/memory.current", mib(200)); // the limit was lowered
  CHECK(machine.limit().free_bytes == 0);
}

TEST_CASE("cgroup version 1, beside a version 2 that has no memory controller") {
  const Machine machine;
  machine.set_memory(3000, 16000);
  machine.write("/proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n");
  const std::string mount = "/sys/fs/cgroup/memory";
  machine.write(mount + "/memory.limit_in_bytes", "9223372036854771712\n"); // none
  machine.write(mount + "/memory.usage_in_bytes", mib(5000));
  CHECK(machine.limit().of == "this machine");
  machine.write(mount + "/a/b/memory.limit_in_bytes", mib(256));
  machine.write(mount + "/a/b/memory.usage_in_bytes", mib(56));
  machine.write(mount + "/a/b/memory.stat", "total_inactive_file " + mib(10) + "inactive_file " + mib(99));
  CHECK(machine.limit().free_bytes == 210 * kMiB);
}

TEST_CASE("a container whose own cgroup is mounted as the root, named by its path on the host") {
  const Machine machine;
  machine.set_memory(3000, 16000);
  machine.write("/proc/self/cgroup", "0::/../../kubepods/pod1/container\n");
  machine.write("/sys/fs/cgroup/memory.max", mib(64));
  machine.write("/sys/fs/cgroup/memory.current", mib(24));
  CHECK(machine.limit().free_bytes == 40 * kMiB);
  CHECK(machine.limit().spare_bytes == 4 * kMiB);
}

TEST_CASE("this machine has a limit") {
  CHECK(tightest_memory_limit().usable_bytes() < std::numeric_limits<int64_t>::max());
}

} // namespace
} // namespace epx
