// SPDX-License-Identifier: Apache-2.0
// In these tests the rendezvous directory lies beside other users' files, and other users change it.
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>
#include <fmt/format.h>

#include "tests/unit/file_bootstrap_support.h"
#include "transport/bootstrap/file_messages.h"
#include "transport/bootstrap/rendezvous_directory.h"
#include "transport/bootstrap/rendezvous_names.h"

namespace {

using namespace epx::test::files;

constexpr uid_t kOtherUser = 65534;

// Returns a message as this process would write it.
std::string message() {
  return epx::encode({epx::MessageKind::kHello, 1, 3, EPX_SUCCESS, kNonce, "", {}}, epx::this_process_origin());
}

void put(const fs::path& path, const std::string& content) {
  std::ofstream(path.string(), std::ios::binary) << content;
}

std::string content_of(const fs::path& path) {
  std::ifstream in(path.string(), std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

void make_private_directory(const fs::path& path) {
  REQUIRE(::mkdir(path.c_str(), 0700) == 0);
}

// Checks that neither a rank that is alone nor one that has peers uses the directory, and that both report why.
void check_refused(const TempDirectory& directory, const std::vector<std::string>& parts) {
  for (const int num_ranks : {1, 2}) {
    CAPTURE(num_ranks);
    const Outcome outcome = outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", 0, num_ranks, kShort); });
    check_outcome(outcome, EPX_ERROR_SYSTEM, {directory.job("job").string()});
    check_outcome(outcome, EPX_ERROR_SYSTEM, parts);
    CHECK(outcome.elapsed < kShort); // at once
  }
}

} // namespace

TEST_SUITE_BEGIN("file_bootstrap");

TEST_CASE("a directory of that name with other files in it is refused, and the files stay") {
  const TempDirectory directory;
  const fs::path job = directory.job("moe");
  make_private_directory(job);
  const std::vector<std::string> names = {"main.c", "hello.c", "hello.1", "in.0.1.ab"};
  for (const std::string& name : names) {
    put(job / name, "int main() {}\n");
    fs::last_write_time(job / name, fs::file_time_type::clock::now() - 11min);
  }
  const auto meet = [&] {
    return run_ranks(all_ranks(2), [&](int rank) { Bootstrap bootstrap(directory.path(), "moe", rank, 2, kShort); });
  };
  for (const Outcome& outcome : meet())
    check_outcome(outcome, EPX_ERROR_SYSTEM, {job.string(), "'hello.1'"}); // the first that is not epx's
  for (const std::string& name : names)
    CHECK(content_of(job / name) == "int main() {}\n");
  for (const char* name : {"hello.1", "hello.c", "in.0.1.ab"})
    fs::remove(job / name);
  for (const Outcome& outcome : meet())
    check_outcome(outcome, EPX_ERROR_SYSTEM, {job.string(), "'main.c'", "which epx did not write"});
  CHECK(content_of(job / "main.c") == "int main() {}\n");
  CHECK(names_in(job) == std::set<std::string>{"main.c"});
}

TEST_CASE("only names and contents that are both epx's own are taken for epx's") {
  const TempDirectory directory;
  const fs::path job = directory.job("job");
  make_private_directory(job);
  const auto refuse = [&](const std::string& name, const std::string& content) {
    CAPTURE(name);
    put(job / name, content);
    fs::last_write_time(job / name, fs::file_time_type::clock::now() - 11min);
    check_refused(directory, {"'" + name + "'", "which epx did not write"});
    CHECK(content_of(job / name) == content);
    CHECK(names_in(job) == std::set<std::string>{name});
    fs::remove(job / name);
  };
  const std::vector<std::string> epx_names = {"hello.0",
                                              "hello.7",
                                              "alive.1." + kNonce,
                                              "welcome.1." + kNonce,
                                              "reject.1." + kNonce,
                                              "in.0.1." + kNonce,
                                              "quit.0.1." + kNonce,
                                              "out.12.3." + kNonce,
                                              epx::temporary_name(1, kNonce, 0)};
  for (const std::string& name : epx_names)
    for (const char* content : {"x", "epxmeet3", "#!/bin/sh\n"})
      refuse(name, content);
  const std::vector<std::string> foreign_names = {"hello",
                                                  "hello.",
                                                  "hello.x",
                                                  "hello.-1",
                                                  "hello.01",
                                                  "hello.1.bak",
                                                  "Hello.1",
                                                  "tmp.1",
                                                  "in.0." + kNonce,
                                                  "in.0.1." + kNonce + "0",
                                                  "out.0.1." + kNonce.substr(1),
                                                  "welcome.1.0123456789ABCDEF0123456789abcdef",
                                                  ".hidden",
                                                  "nfs0001"};
  for (const std::string& name : foreign_names)
    refuse(name, message());
}

// Their writer may be a rank of this job that has loaded another libepx, which this rank cannot know.
TEST_CASE("files in the format of an older epx are refused with what to do about them, and they stay") {
  const TempDirectory directory;
  const fs::path job = directory.job("job");
  make_private_directory(job);
  put(job / "hello.1", "epxmeet1 and so on");
  fs::last_write_time(job / "hello.1", fs::file_time_type::clock::now() - 11min);
  check_refused(directory, {"'hello.1'", "which an older epx wrote", "remove the directory"});
  CHECK(names_in(job) == std::set<std::string>{"hello.1"});
  fs::remove_all(job);
  Bootstrap bootstrap(directory.path(), "job", 0, 1, kShort);
}

TEST_CASE("what is not a plain file of this user is refused") {
  const TempDirectory directory;
  const fs::path job = directory.job("job");
  make_private_directory(job);
  const fs::path hello = job / "hello.1";
  const fs::path outside = fs::path(directory.path()) / "outside";
  put(outside, message());

  fs::create_directory(hello);
  check_refused(directory, {"'hello.1'", "not a plain file"});
  fs::remove(hello);
  fs::create_symlink(outside, hello);
  check_refused(directory, {"'hello.1'", "not a plain file"});
  fs::remove(hello);
  REQUIRE(::mkfifo(hello.c_str(), 0600) == 0);
  check_refused(directory, {"'hello.1'", "not a plain file"});
  fs::remove(hello);
  fs::create_hard_link(outside, hello);
  check_refused(directory, {"'hello.1'", "another name"});
  fs::remove(hello);
  if (::geteuid() == 0) {
    put(hello, message());
    REQUIRE(::chown(hello.c_str(), kOtherUser, kOtherUser) == 0);
    check_refused(directory, {"'hello.1'", "user 65534"});
    fs::remove(hello);
  }
  CHECK(content_of(outside) == message());
  run_job(directory.path(), "job", 2);
}

TEST_CASE("files that a network file system keeps are ignored and not removed") {
  const TempDirectory directory;
  const fs::path job = directory.job("job");
  make_private_directory(job);
  const std::set<std::string> names = {".nfs000000000123", ".nfs"};
  for (const std::string& name : names) {
    put(job / name, message());
    fs::last_write_time(job / name, fs::file_time_type::clock::now() - 100h);
  }
  run_job(directory.path(), "job", 3);
  CHECK(names_in(job) == names);
}

TEST_CASE("a directory with another mode or owner, a file, and a link are refused as they are") {
  const TempDirectory directory;
  const fs::path job = directory.job("job");
  const fs::path elsewhere = fs::path(directory.path()) / "elsewhere";

  make_private_directory(elsewhere);
  fs::create_directory_symlink(elsewhere, job);
  check_refused(directory, {"Not a directory"});
  CHECK(names_in(elsewhere).empty());
  fs::remove(job);

  put(job, "a file");
  check_refused(directory, {"Not a directory"});
  CHECK(content_of(job) == "a file");
  fs::remove(job);

  make_private_directory(job);
  for (const mode_t mode : {0777, 0755, 0770, 0710, 0500}) {
    REQUIRE(::chmod(job.c_str(), mode) == 0);
    check_refused(directory, {fmt::format("mode {:04o}", mode), "0700"});
    struct stat info {};
    REQUIRE(::stat(job.c_str(), &info) == 0);
    CHECK((info.st_mode & 07777) == mode);
  }

  if (::geteuid() == 0) {
    REQUIRE(::chmod(job.c_str(), 0700) == 0);
    REQUIRE(::chown(job.c_str(), kOtherUser, kOtherUser) == 0);
    check_refused(directory, {"user 65534"});
  }
}

TEST_CASE("a message is read only when it is this user's and has one name") {
  const TempDirectory directory;
  epx::RendezvousDirectory rendezvous(directory.path(), "job", kNonce);
  const fs::path file = directory.job("job") / "hello.1";
  rendezvous.write("hello.1", message());
  CHECK(rendezvous.read("hello.1", 1000) == message());
  CHECK_FALSE(rendezvous.read("hello.1", 10).has_value());
  CHECK(rendezvous.read_start("hello.1", 10) == message().substr(0, 10));
  fs::create_hard_link(file, directory.path() + "/second");
  CHECK_FALSE(rendezvous.read("hello.1", 1000).has_value());
  fs::remove(directory.path() + "/second");
  CHECK(rendezvous.read("hello.1", 1000).has_value());
  if (::geteuid() == 0) {
    REQUIRE(::chown(file.c_str(), kOtherUser, kOtherUser) == 0);
    CHECK_FALSE(rendezvous.read("hello.1", 1000).has_value());
  }
}

TEST_CASE("when the directory is swapped while ranks use it, they fail and write no file to the new one") {
  const TimeLimit limit(60);
  struct Swap {
    std::string name;
    std::function<void(const fs::path& job, const fs::path& trap)> put; // something else at `job`
    std::string word;                                                   // a word of the sentence
  };
  const std::vector<Swap> swaps = {
      {"a link to a directory of this user",
       [](const auto& job, const auto& trap) { fs::create_directory_symlink(trap, job); }, "Not a directory"},
      {"a directory with foreign files",
       [](const auto& job, const auto& trap) {
         put(trap / "precious", "data");
         fs::rename(trap, job);
       },
       "precious"},
      {"a directory that others can read",
       [](const auto& job, const auto& trap) {
         fs::permissions(trap, fs::perms(0755));
         fs::rename(trap, job);
       },
       "mode 0755"},
  };
  for (const Swap& swap : swaps) {
    CAPTURE(swap.name);
    const TempDirectory directory;
    const fs::path job = directory.job("job");
    const fs::path trap = fs::path(directory.path()) / "trap";
    const fs::path away = fs::path(directory.path()) / "away";
    make_private_directory(trap);
    RankThread rank0([&] { Bootstrap bootstrap(directory.path(), "job", 0, 2, kPatient); });
    REQUIRE(wait_until([&] { return fs::exists(job / "hello.0"); }));
    fs::rename(job, away);
    swap.put(job, trap);
    const std::set<std::string> before = names_in(job);
    check_outcome(rank0.join(), EPX_ERROR_SYSTEM, {job.string(), swap.word});
    check_refused(directory, {swap.word});
    CHECK(names_in(job) == before);
    CHECK(fs::exists(job));
    CHECK(names_in(away).empty()); // the rank has removed its files, wherever the directory is now
  }
}

// Ranks of root join below a directory in which another user may write and rename.
TEST_CASE("another user who swaps the directory gets no file of root's" * doctest::skip(::geteuid() != 0)) {
  const TempDirectory directory(60);
  const fs::path job = directory.job("job");
  const fs::path trap = fs::path(directory.path()) / "trap";
  REQUIRE(::chmod(directory.path().c_str(), 0777) == 0); // no sticky bit
  for (const bool link : {true, false}) {
    CAPTURE(link);
    RankProcess rank0([&] {
      const Outcome outcome = outcome_of([&] { Bootstrap bootstrap(directory.path(), "job", 0, 2, kPatient); });
      require(outcome.status == EPX_ERROR_SYSTEM, outcome.message);
    });
    REQUIRE(wait_until([&] { return fs::exists(job / "hello.0"); }));
    RankProcess attacker([&] {
      require(::setresgid(kOtherUser, kOtherUser, kOtherUser) == 0 && ::setresuid(kOtherUser, kOtherUser, kOtherUser) == 0,
              "setresuid");
      require(::mkdir(trap.c_str(), 0700) == 0, "mkdir");
      require(::rename(job.c_str(), (directory.path() + "/away").c_str()) == 0, "rename");
      const int swapped = link ? ::symlink(trap.c_str(), job.c_str()) : ::rename(trap.c_str(), job.c_str());
      require(swapped == 0, "swap");
    });
    CHECK(attacker.join() == 0);
    CHECK(rank0.join() == 0);
    check_refused(directory, {link ? "Not a directory" : "user 65534"});
    CHECK(names_in(link ? trap : job).empty());
    for (const fs::path& path : {job, trap, fs::path(directory.path()) / "away"})
      fs::remove(path);
  }
}

TEST_SUITE_END();
