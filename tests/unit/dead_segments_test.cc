// SPDX-License-Identifier: Apache-2.0
// These tests check which names transport/host/dead_segments.h removes from /dev/shm. Other processes of this user may use epx
// at the same time and remove dead segments, too: a file that has to stay is one that none of them may remove.
#include <doctest/doctest.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <system_error>

#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/check.h"
#include "tests/support/run_ranks.h"
#include "tests/support/system_state.h"
#include "transport/host/dead_segments.h"
#include "transport/host/host_transport.h"
#include "transport/host/shared_segment.h"

namespace epx {
namespace {

using namespace std::chrono_literals;
using test::check;
namespace fs = std::filesystem;

constexpr int64_t kWindowBytes = 5'000; // not whole pages
constexpr uid_t kNobody = 65'534;

fs::path path_of(const std::string& name) {
  return fs::path(SharedSegment::kDirectory) / name;
}

bool is_there(const fs::path& path) {
  return fs::symlink_status(path).type() != fs::file_type::not_found;
}

// Maker is a process that makes a named segment and reports it; then it lives until it is killed.
class Maker {
public:
  explicit Maker(const std::function<void()>& before = [] {}) {
    int ends[2];
    check(::pipe2(ends, O_CLOEXEC) == 0, "pipe2 failed");
    pid_ = ::fork();
    check(pid_ >= 0, "fork failed");
    if (pid_ == 0) {
      try {
        before();
        const auto segment = SharedSegment::create_named(kWindowBytes);
        const SegmentAddress address = segment->address();
        if (::write(ends[1], &address, sizeof(address)) != sizeof(address)) ::_exit(1);
        while (true)
          ::pause();
      } catch (...) {
        ::_exit(1);
      }
    }
    ::close(ends[1]);
    made_ = ::read(ends[0], &address_, sizeof(address_)) == sizeof(address_);
    ::close(ends[0]);
  }
  Maker(const Maker&) = delete;
  Maker& operator=(const Maker&) = delete;
  ~Maker() {
    kill();
    if (made_) ::unlink(path().c_str());
  }

  bool made() const { return made_; }
  void stop() {
    ::kill(pid_, SIGSTOP);
    ::waitpid(pid_, nullptr, WUNTRACED);
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }
  const SegmentAddress& address() const { return address_; }
  std::string name() const { return segment_name(address_.record); }
  fs::path path() const { return path_of(name()); }

private:
  pid_t pid_ = -1;
  bool made_ = false;
  SegmentAddress address_{};
};

// Runs fn as another user in a process of its own.
void as_nobody(const std::function<void()>& fn) {
  test::check_all_succeeded(test::run_processes(1, 20s, [&](int) {
    check(::setuid(kNobody) == 0, "setuid failed");
    fn();
  }));
}

// Writes the file of a segment with a changed record, under the name that the record asks for; it looks dead when `finish` has
// returned.
fs::path plant(
    const std::function<void(SegmentRecord&)>& change,
    const std::function<void(const fs::path&)>& finish = [](const fs::path&) {}) {
  SegmentRecord record = make_segment_record(kWindowBytes);
  change(record);
  const fs::path path = path_of(segment_name(record));
  const FileDescriptor file(::open(path.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600));
  check(file && ::flock(file.get(), LOCK_EX) == 0 && ::ftruncate(file.get(), segment_file_bytes(record.bytes)) == 0 &&
            write_segment_record(file.get(), record),
        "planting {} failed", path.string());
  finish(path);
  return path;
}

TEST_CASE("a dead process's name is removed, a live one's is not") {
  Maker dead;
  Maker live;
  REQUIRE(dead.made());
  REQUIRE(live.made());
  dead.kill();
  remove_dead_segments();
  CHECK_FALSE(is_there(dead.path()));
  CHECK(is_there(live.path()));
  struct stat file {};
  CHECK(::stat(live.path().c_str(), &file) == 0);
  CHECK((file.st_mode & 07777) == 0600);
  live.kill();
  make_host_transport(0, 2); // each transport does it when it starts
  CHECK_FALSE(is_there(live.path()));
}

TEST_CASE("a process that is stopped is not dead") {
  Maker maker;
  REQUIRE(maker.made());
  maker.stop();
  remove_dead_segments();
  CHECK(is_there(maker.path()));
  std::string why;
  CHECK(SharedSegment::open(maker.address(), why) != nullptr);
  SharedSegment::remove_name(maker.address()); // what the ranks of its group do
  CHECK_FALSE(is_there(maker.path()));
}

TEST_CASE("another user's name stays, whichever of the two users looks" * doctest::skip(::geteuid() != 0)) {
  Maker others([] { check(::setuid(kNobody) == 0, "setuid failed"); });
  Maker own;
  REQUIRE(others.made());
  REQUIRE(own.made());
  others.kill();
  own.kill();
  remove_dead_segments();
  CHECK(is_there(others.path()));
  CHECK_FALSE(is_there(own.path()));
  const fs::path given =
      plant([](SegmentRecord&) {},
            [](const fs::path& path) {
              check(::chown(path.c_str(), kNobody, kNobody) == 0, "chown failed"); // its record still names root
            });
  remove_dead_segments();
  CHECK(is_there(given));
  ::unlink(given.c_str());
  const fs::path roots = plant([](SegmentRecord& record) { record.uid = kNobody; });
  CHECK_NOTHROW(as_nobody([] { remove_dead_segments(); }));
  CHECK_FALSE(is_there(others.path()));
  CHECK(is_there(roots));
  ::unlink(roots.c_str());
}

TEST_CASE("a name of another PID namespace stays" * doctest::skip(::geteuid() != 0)) {
  SegmentAddress address{};
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  test::check_all_succeeded(test::run_processes(1, 20s, [&](int) {
    check(::unshare(CLONE_NEWPID) == 0, "no PID namespace: {}", std::strerror(errno));
    const pid_t child = ::fork();
    if (child == 0) {
      const auto segment = SharedSegment::create_named(kWindowBytes);
      const bool written = ::write(ends[1], &segment->address(), sizeof(SegmentAddress)) == sizeof(SegmentAddress);
      ::raise(written ? SIGKILL : SIGABRT); // the first process of a namespace survives its own SIGKILL
      ::_exit(0);                           // leaves the name, as no destructor runs
    }
    check(::waitpid(child, nullptr, 0) == child, "waitpid failed");
  }));
  REQUIRE(::read(ends[0], &address, sizeof(address)) == sizeof(address));
  ::close(ends[0]);
  ::close(ends[1]);
  const fs::path path = path_of(segment_name(address.record));
  remove_dead_segments();
  CHECK(is_there(path));
  ::unlink(path.c_str());
}

TEST_CASE("a record of another machine, boot, PID namespace or user, or with another magic, keeps its file") {
  struct Case {
    const char* name;
    std::function<void(SegmentRecord&)> change;
    bool stays;
  };
  const Case table[] = {
      {"as it is", [](SegmentRecord&) {}, false},
      {"boot", [](SegmentRecord& record) { record.boot_id[3] ^= 1; }, true},
      {"no boot", [](SegmentRecord& record) { std::memset(record.boot_id, 0, sizeof(record.boot_id)); }, true},
      {"PID namespace", [](SegmentRecord& record) { ++record.pid_namespace; }, true},
      {"no PID namespace", [](SegmentRecord& record) { record.pid_namespace = 0; }, true},
      {"user", [](SegmentRecord& record) { ++record.uid; }, true},
      {"magic", [](SegmentRecord& record) { record.magic[0] = 'E'; }, true},
      {"version", [](SegmentRecord& record) { record.magic[12] = '2'; }, true},
  };
  for (const Case& planted : table) {
    CAPTURE(planted.name);
    const fs::path path = plant(planted.change);
    remove_dead_segments();
    CHECK(is_there(path) == planted.stays);
    ::unlink(path.c_str());
  }
}

TEST_CASE("other files with similar names stay as they are") {
  const test::TempDirectory elsewhere;
  const std::string alike = "epx-0123456789abcdef0123456789abcdef";
  const fs::path path = path_of(alike);
  REQUIRE_FALSE(is_there(path));
  const auto nothing = [](SegmentRecord&) {};
  struct Case {
    const char* name;
    std::function<void()> make;
  };
  const Case table[] = {
      {"empty", [&] { std::ofstream(path).close(); }},
      {"text", [&] { std::ofstream(path) << std::string(8192, 'e'); }},
      {"a segment of another name", [&] { plant(nothing, [&](const fs::path& made) { fs::rename(made, path); }); }},
      {"a directory", [&] { fs::create_directory(path); }},
      {"a pipe", [&] { CHECK(::mkfifo(path.c_str(), 0600) == 0); }},
      {"a link to nothing", [&] { fs::create_symlink(elsewhere.path() / "nothing", path); }},
      {"a link to itself", [&] { fs::create_symlink(path, path); }},
  };
  for (const Case& foreign : table) {
    CAPTURE(foreign.name);
    foreign.make();
    std::error_code unreadable;
    if (fs::is_regular_file(path, unreadable)) ::chmod(path.c_str(), 0600);
    remove_dead_segments();
    CHECK(is_there(path));
    fs::remove(path);
  }
}

TEST_CASE("a segment with a second name or with other permissions stays") {
  const auto nothing = [](SegmentRecord&) {};
  fs::path second;
  const fs::path linked = plant(nothing, [&](const fs::path& path) {
    second = path.string() + "-second";
    fs::create_hard_link(path, second);
  });
  const fs::path readable = plant(nothing, [](const fs::path& path) { ::chmod(path.c_str(), 0644); });
  remove_dead_segments();
  for (const fs::path& path : {second, linked, readable}) {
    CHECK(is_there(path));
    ::unlink(path.c_str());
  }
}

TEST_CASE("a rank removes no name that is not the peer's segment") {
  Maker peer;
  REQUIRE(peer.made());
  SegmentAddress address = peer.address();
  ++address.inode;
  SharedSegment::remove_name(address);
  CHECK(is_there(peer.path()));
  SharedSegment::remove_name(peer.address());
  CHECK_FALSE(is_there(peer.path()));
}

} // namespace
} // namespace epx
