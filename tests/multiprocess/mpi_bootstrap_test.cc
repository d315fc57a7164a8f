// SPDX-License-Identifier: Apache-2.0
// The MPI bootstrap. Runs under mpirun with 1 to 4 ranks; every test case is collective.
#include "epx/epx_mpi.h"

#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <signal.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/support/run_test_cases.h"
#include "tests/support/time_limit.h"

namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using epx::test::TimeLimit;
using std::chrono::milliseconds;

constexpr milliseconds kPatient = 30s; // a test that has to wait this long has failed
constexpr milliseconds kShort = 600ms;
constexpr milliseconds kSlack = 5s; // what a loaded machine may add to a bounded wait

int rank_in(MPI_Comm comm) {
  int rank = -1;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

int size_of(MPI_Comm comm) {
  int size = -1;
  MPI_Comm_size(comm, &size);
  return size;
}

class Bootstrap {
public:
  explicit Bootstrap(MPI_Comm comm) {
    const epx_status status = epx_bootstrap_mpi(comm, kPatient.count(), &bootstrap_);
    REQUIRE_MESSAGE(status == EPX_SUCCESS, epx_last_error());
  }
  ~Bootstrap() { epx_bootstrap_free(&bootstrap_); }
  Bootstrap(const Bootstrap&) = delete;
  Bootstrap& operator=(const Bootstrap&) = delete;

  const epx_bootstrap& get() const { return bootstrap_; }

  epx_status all_gather(const std::vector<uint8_t>& mine, milliseconds timeout) {
    all.assign(mine.size() * static_cast<size_t>(bootstrap_.num_ranks), 0);
    char text[1024] = "";
    const epx_status status = bootstrap_.all_gather(bootstrap_.context, mine.data(), all.data(), mine.size(),
                                                    timeout.count(), text, sizeof(text));
    message = text;
    return status;
  }

  std::vector<uint8_t> all; // of the last all_gather
  std::string message;

private:
  epx_bootstrap bootstrap_{};
};

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

std::vector<uint8_t> part_of(int rank, int round, size_t bytes) {
  std::vector<uint8_t> part(bytes);
  for (size_t i = 0; i < bytes; ++i)
    part[i] = static_cast<uint8_t>(rank * 7 + round * 31 + static_cast<int>(i) * 3 + 1);
  return part;
}

void check_round(Bootstrap& bootstrap, int round, size_t bytes) {
  CAPTURE(round);
  CAPTURE(bytes);
  std::vector<uint8_t> expected;
  for (int rank = 0; rank < bootstrap.get().num_ranks; ++rank) {
    const std::vector<uint8_t> part = part_of(rank, round, bytes);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  CHECK(bootstrap.all_gather(part_of(bootstrap.get().rank, round, bytes), kPatient) == EPX_SUCCESS);
  CHECK(bootstrap.message == "");
  CHECK((bootstrap.all == expected));
}

} // namespace

TEST_CASE("ranks are those of the communicator, and gather") {
  const TimeLimit limit(60);
  Bootstrap bootstrap(MPI_COMM_WORLD);
  CHECK(bootstrap.get().struct_size == sizeof(epx_bootstrap));
  CHECK(bootstrap.get().rank == rank_in(MPI_COMM_WORLD));
  CHECK(bootstrap.get().num_ranks == size_of(MPI_COMM_WORLD));
  int round = 0;
  for (const size_t bytes : {1, 0, 464, 3, 300'000, 0, 5'000'000, 16})
    check_round(bootstrap, round++, bytes);
  for (; round < 100; ++round)
    check_round(bootstrap, round, 8);
}

TEST_CASE("communicators that were split are apart from each other") {
  const TimeLimit limit(60);
  const int rank = rank_in(MPI_COMM_WORLD);
  const int size = size_of(MPI_COMM_WORLD);
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half); // the ranks of a half in descending order
  Bootstrap bootstrap(half);
  CHECK(bootstrap.get().num_ranks == (rank % 2 == 0 ? (size + 1) / 2 : size / 2));
  CHECK(bootstrap.get().rank == rank_in(half));
  for (int round = 0; round < (rank % 2 == 0 ? 20 : 7); ++round) {
    CHECK(bootstrap.all_gather({static_cast<uint8_t>(rank)}, kPatient) == EPX_SUCCESS);
    std::vector<uint8_t> expected;
    for (int other = size - 1; other >= 0; --other)
      if (other % 2 == rank % 2) expected.push_back(static_cast<uint8_t>(other));
    CHECK((bootstrap.all == expected));
  }
  MPI_Comm_free(&half);
}

TEST_CASE("a communicator may be freed right after") {
  const TimeLimit limit(60);
  for (int repeat = 0; repeat < 10; ++repeat) {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Comm_dup(MPI_COMM_WORLD, &comm);
    Bootstrap bootstrap(comm);
    MPI_Comm_free(&comm);
    for (int round = 0; round < 3; ++round)
      check_round(bootstrap, round, 1000);
  }
}

TEST_CASE("several bootstraps of one communicator do not meet each other, nor the caller's messages") {
  const TimeLimit limit(60);
  const int rank = rank_in(MPI_COMM_WORLD);
  const int size = size_of(MPI_COMM_WORLD);
  int received = -1;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Irecv(&received, 1, MPI_INT, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &request);
  {
    Bootstrap a(MPI_COMM_WORLD);
    Bootstrap b(MPI_COMM_WORLD);
    for (int round = 0; round < 10; ++round) {
      check_round(a, round, 4);
      if (round % 3 == 0) check_round(b, 100 + round, 4);
    }
  }
  MPI_Send(&rank, 1, MPI_INT, (rank + 1) % size, 1, MPI_COMM_WORLD);
  MPI_Wait(&request, MPI_STATUS_IGNORE);
  CHECK(received == (rank + size - 1) % size);
}

TEST_CASE("arguments are checked") {
  const TimeLimit limit(60);
  epx_bootstrap bootstrap{};
  CHECK(epx_bootstrap_mpi(MPI_COMM_NULL, 1000, &bootstrap) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(contains(epx_last_error(), "MPI_COMM_NULL"));
  CHECK(epx_bootstrap_mpi(MPI_COMM_WORLD, 0, &bootstrap) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(contains(epx_last_error(), "timeout_ms is 0"));
  CHECK(epx_bootstrap_mpi(MPI_COMM_WORLD, 1000, nullptr) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(contains(epx_last_error(), "bootstrap is NULL"));
  CHECK(bootstrap.context == nullptr);

  Bootstrap good(MPI_COMM_WORLD);
  const epx_bootstrap& c = good.get();
  char message[200] = "";
  uint8_t byte = 0;
  CHECK(c.all_gather(c.context, &byte, &byte, size_t{INT_MAX} + 1, 1000, message, sizeof(message)) ==
        EPX_ERROR_INVALID_ARGUMENT);
  CHECK(contains(message, "bytes_per_rank is 2147483648"));
  CHECK(c.all_gather(c.context, &byte, &byte, 1, -1, message, sizeof(message)) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(c.all_gather(c.context, nullptr, &byte, 1, 1000, message, sizeof(message)) == EPX_ERROR_INVALID_ARGUMENT);
  check_round(good, 1, 10); // what is refused has done nothing
}

TEST_CASE("an intercommunicator is refused") {
  const TimeLimit limit(60);
  const int rank = rank_in(MPI_COMM_WORLD);
  if (size_of(MPI_COMM_WORLD) < 2) return;
  MPI_Comm half = MPI_COMM_NULL;
  MPI_Comm inter = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
  MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, 1 - rank % 2, 5, &inter);
  epx_bootstrap bootstrap{};
  CHECK(epx_bootstrap_mpi(inter, 1000, &bootstrap) == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(contains(epx_last_error(), "intercommunicator"));
  MPI_Comm_free(&inter);
  MPI_Comm_free(&half);
}

TEST_CASE("the caller's error handler is as it was") {
  const TimeLimit limit(60);
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  Bootstrap bootstrap(comm);
  MPI_Errhandler handler{};
  MPI_Comm_get_errhandler(comm, &handler);
  CHECK(handler == MPI_ERRORS_ARE_FATAL);
  MPI_Errhandler_free(&handler);
  MPI_Comm_free(&comm);
}

TEST_CASE("ranks that pass different sizes all learn of it") {
  const TimeLimit limit(60);
  const int last = size_of(MPI_COMM_WORLD) - 1;
  if (last == 0) return;
  for (const size_t bytes : {size_t{8}, size_t{1'000'000}}) {
    Bootstrap bootstrap(MPI_COMM_WORLD);
    const bool other = bootstrap.get().rank == last;
    CHECK(bootstrap.all_gather(std::vector<uint8_t>(other ? 2 * bytes : bytes), kPatient) == EPX_ERROR_MISMATCH);
    CAPTURE(bootstrap.message);
    CHECK(contains(bootstrap.message, "rank 0 passes " + std::to_string(bytes) + " bytes"));
    CHECK(contains(bootstrap.message, "rank " + std::to_string(last) + " passes " + std::to_string(2 * bytes)));
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

TEST_CASE("a rank that does not come is named by all, and hears of it when it comes") {
  const TimeLimit limit(60);
  const int size = size_of(MPI_COMM_WORLD);
  if (size < 2) return;
  for (const int late : {0, size - 1}) {
    Bootstrap bootstrap(MPI_COMM_WORLD);
    const int rank = bootstrap.get().rank;
    // Before any rank begins the round that times out, since the first rank whose time is up ends it for all.
    const Clock::time_point begin = Clock::now();
    check_round(bootstrap, 0, 100);
    const std::string named = "rank " + std::to_string(late) + " of " + std::to_string(size) + " never came";
    CAPTURE(named);
    if (rank == late) {
      std::this_thread::sleep_for(4 * kShort);
      // The contributions of the others are here, so that this round succeeds; they have not waited, as the next round shows.
      check_round(bootstrap, 1, 64);
      CHECK(bootstrap.all_gather({1, 2, 3}, kPatient) == EPX_ERROR_TIMEOUT);
    } else {
      CHECK(bootstrap.all_gather(part_of(rank, 1, 64), kShort) == EPX_ERROR_TIMEOUT);
      CHECK(Clock::now() - begin >= kShort);
      CHECK(Clock::now() - begin < kShort + kSlack);
    }
    const std::string message = bootstrap.message;
    CAPTURE(message);
    CHECK(contains(message, "all-gather 2"));
    CHECK(contains(message, named));
    CHECK(bootstrap.all_gather({1, 2, 3}, kPatient) == EPX_ERROR_TIMEOUT); // at once: the ranks are out of step
    CHECK(bootstrap.message == message);
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

// A communicator of all ranks, for one test case: after a call that timed out it is of no further use.
MPI_Comm another_world() {
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Comm_dup(MPI_COMM_WORLD, &comm);
  MPI_Barrier(MPI_COMM_WORLD); // so that they come at the same time where a test does not say otherwise
  return comm;
}

// Calls epx_bootstrap_mpi, which must time out before `limit`, and returns its sentence.
std::string timed_out(MPI_Comm comm, milliseconds timeout, milliseconds limit) {
  epx_bootstrap bootstrap{};
  const Clock::time_point begin = Clock::now();
  CHECK(epx_bootstrap_mpi(comm, timeout.count(), &bootstrap) == EPX_ERROR_TIMEOUT);
  CHECK(Clock::now() - begin < limit);
  CHECK(bootstrap.context == nullptr);
  return epx_last_error();
}

constexpr milliseconds kMeeting = 5 * kShort; // long enough for ranks that are there to say so on a loaded machine

TEST_CASE("a rank that is late for epx_bootstrap_mpi is named by all, and hears of it when it comes") {
  const TimeLimit limit(60);
  const int size = size_of(MPI_COMM_WORLD);
  if (size < 2) return;
  for (const int late : {0, size - 1}) {
    // Before any rank calls epx_bootstrap_mpi, since the first rank whose time is up ends the call for all.
    const Clock::time_point begin = Clock::now();
    MPI_Comm comm = another_world();
    std::string message;
    if (rank_in(comm) == late) {
      std::this_thread::sleep_for(2 * kMeeting);
      message = timed_out(comm, kPatient, kSlack); // it does not wait: the others have gone
    } else {
      message = timed_out(comm, kMeeting, kMeeting + kSlack);
      CHECK(Clock::now() - begin >= kMeeting);
    }
    CAPTURE(message);
    CHECK(contains(message, "within " + std::to_string(kMeeting.count()) + " ms"));
    CHECK(contains(message, "rank " + std::to_string(late) + " of " + std::to_string(size) + " never came"));
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

// While it lives, the waits of this thread end.
struct Interrupted {
  Interrupted() {
    epx_set_interrupt_check([] { return int32_t{1}; });
  }
  ~Interrupted() {
    epx_set_interrupt_check(nullptr);
    epx_interrupted();
  }
};

TEST_CASE("a rank that is interrupted returns at once, and the others are told") {
  const TimeLimit limit(60);
  const int size = size_of(MPI_COMM_WORLD);
  if (size < 2) return;
  for (const int interrupted : {0, size - 1}) {
    CAPTURE(interrupted);
    const std::string named = "rank " + std::to_string(interrupted) + " was interrupted";
    MPI_Comm comm = another_world();
    const bool is_it = rank_in(comm) == interrupted;
    if (!is_it) std::this_thread::sleep_for(kShort); // it would not wait for ranks that are there
    {
      const std::optional<Interrupted> interrupt = is_it ? std::optional<Interrupted>(std::in_place) : std::nullopt;
      epx_bootstrap bootstrap{};
      const Clock::time_point begin = Clock::now();
      CHECK(epx_bootstrap_mpi(comm, kPatient.count(), &bootstrap) == EPX_ERROR_ABORTED);
      CHECK(Clock::now() - begin < kSlack);
      CHECK_MESSAGE(contains(epx_last_error(), named), epx_last_error());
    }
    MPI_Barrier(MPI_COMM_WORLD);

    Bootstrap bootstrap(MPI_COMM_WORLD);
    check_round(bootstrap, 0, 100);
    if (!is_it) std::this_thread::sleep_for(kShort);
    {
      const std::optional<Interrupted> interrupt = is_it ? std::optional<Interrupted>(std::in_place) : std::nullopt;
      epx_status status = bootstrap.all_gather({1, 2, 3}, kPatient);
      // The contribution of the rank is there, so that this round may succeed for a late one; the next one tells.
      if (status == EPX_SUCCESS) status = bootstrap.all_gather({1, 2, 3}, kPatient);
      CHECK(status == EPX_ERROR_ABORTED);
      CHECK_MESSAGE(contains(bootstrap.message, named), bootstrap.message);
    }
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

TEST_CASE("all ranks that do not come to epx_bootstrap_mpi are named") {
  const TimeLimit limit(60);
  const int size = size_of(MPI_COMM_WORLD);
  if (size < 3) return;
  MPI_Comm comm = another_world();
  if (rank_in(comm) % 2 == 0) {
    const std::string message = timed_out(comm, kMeeting, kMeeting + kSlack);
    CAPTURE(message);
    CHECK(contains(message, size == 3 ? "rank 1 of 3 never came" : "ranks 1, 3 of 4 never came"));
  }
  MPI_Barrier(MPI_COMM_WORLD); // the odd ones never call it
}

TEST_CASE("a rank that waits less than the others names the right one, and they stop with it") {
  const TimeLimit limit(60);
  const int size = size_of(MPI_COMM_WORLD);
  if (size < 3) return;
  MPI_Comm comm = another_world();
  if (rank_in(comm) != size - 1) {
    const std::string message = timed_out(comm, rank_in(comm) == 0 ? kMeeting : kPatient, kMeeting + kSlack);
    CAPTURE(message);
    CHECK(contains(message, "rank 0 waited"));
    CHECK(contains(message, "rank " + std::to_string(size - 1) + " of " + std::to_string(size) + " never came"));
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

// A rank that comes late, but in time, leaves nothing in the communicator.
void check_leaves_nothing(MPI_Comm comm, int late) {
  if (rank_in(comm) == late) std::this_thread::sleep_for(kMeeting);
  epx_bootstrap bootstrap{};
  // The others send their hellos after a quarter of the timeout, which is before the late rank comes.
  const epx_status status = epx_bootstrap_mpi(comm, 3 * kMeeting.count(), &bootstrap);
  REQUIRE_MESSAGE(status == EPX_SUCCESS, epx_last_error());
  epx_bootstrap_free(&bootstrap);
  for (int repeat = 0; repeat < 10; ++repeat) { // MPI may be slow to show what is there
    int found = 0;
    MPI_Iprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, comm, &found, MPI_STATUS_IGNORE);
    CHECK(found == 0);
    MPI_Barrier(comm);
  }
}

// In this communicator MPI shows a message only to who asks for those of its sender.
MPI_Comm slow_comm = MPI_COMM_NULL;

// epx calls this one: MPI's profiling interface lets a program replace each function of MPI.
int MPI_Improbe(int source, int tag, MPI_Comm comm, int* found, MPI_Message* message, MPI_Status* status) {
  if (comm != slow_comm || source != MPI_ANY_SOURCE) return PMPI_Improbe(source, tag, comm, found, message, status);
  *found = 0;
  return MPI_SUCCESS;
}

TEST_CASE("a rank that is late, but in time, leaves nothing in the communicator") {
  const TimeLimit limit(60);
  const int size = size_of(MPI_COMM_WORLD);
  for (int late = 0; late < size; ++late) {
    MPI_Comm comm = another_world();
    check_leaves_nothing(comm, late);
    MPI_Comm_free(&comm);
  }
}

TEST_CASE("a hello that MPI is slow to show is received before epx_bootstrap_mpi returns") {
  const TimeLimit limit(60);
  slow_comm = another_world();
  check_leaves_nothing(slow_comm, size_of(slow_comm) - 1);
  MPI_Comm_free(&slow_comm); // which becomes MPI_COMM_NULL again
}

int main(int argc, char** argv) {
  doctest::Context context(argc, argv);
  epx_bootstrap early{};
  bool ok = epx_bootstrap_mpi(MPI_COMM_WORLD, 1000, &early) == EPX_ERROR_INVALID_ARGUMENT;

  MPI_Init(&argc, &argv);
  epx_bootstrap outlives_mpi{};
  ok = ok && epx_bootstrap_mpi(MPI_COMM_WORLD, kPatient.count(), &outlives_mpi) == EPX_SUCCESS;
  const int result = epx::test::run_test_cases(context, argc, argv);
  {
    const TimeLimit limit(60);
    MPI_Finalize();
  }

  uint8_t byte = 0;
  char message[100] = "";
  ok = ok && epx_bootstrap_mpi(MPI_COMM_WORLD, 1000, &early) == EPX_ERROR_INVALID_ARGUMENT;
  ok = ok && outlives_mpi.all_gather(outlives_mpi.context, &byte, &byte, 0, 1000, message, sizeof(message)) ==
                 EPX_ERROR_INVALID_ARGUMENT;
  epx_bootstrap_free(&outlives_mpi);
  if (!ok) std::fprintf(stderr, "mpi_bootstrap_test: FAILED outside MPI_Init and MPI_Finalize\n");
  return ok ? result : 1;
}
