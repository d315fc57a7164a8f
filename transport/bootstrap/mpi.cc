// SPDX-License-Identifier: Apache-2.0
// The MPI bootstrap all-gathers over a communicator. Every rank sends its contribution to every other and polls for theirs,
// because MPI's own collectives have no deadline and cannot name who is missing.
#include "epx/epx_mpi.h"

#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/c_boundary.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/home_process.h"
#include "base/names.h"
#include "base/suspension_aware_deadline.h"
#include "transport/bootstrap/bootstrap_callback.h"
#include "transport/bootstrap/mpi_check.h"
#include "transport/bootstrap/mpi_duplicate.h"

namespace epx {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kNumTags = 32767; // the MPI standard guarantees so many

bool is_active() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

void check_timeout(int64_t timeout_ms) {
  if (timeout_ms <= 0) fail(EPX_ERROR_INVALID_ARGUMENT, "timeout_ms is {}; it must be > 0", timeout_ms);
}

// While an ErrorsReturn lives, MPI returns the errors of the caller's communicator instead of ending the process.
class ErrorsReturn {
public:
  explicit ErrorsReturn(MPI_Comm comm) : comm_(comm) {
    check_mpi(MPI_Comm_get_errhandler(comm, &before_), "MPI_Comm_get_errhandler");
    check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  }
  ~ErrorsReturn() {
    MPI_Comm_set_errhandler(comm_, before_);
    MPI_Errhandler_free(&before_);
  }
  ErrorsReturn(const ErrorsReturn&) = delete;
  ErrorsReturn& operator=(const ErrorsReturn&) = delete;

private:
  MPI_Comm comm_;
  MPI_Errhandler before_{};
};

class MpiSession {
public:
  explicit MpiSession(MPI_Comm own_comm) : comm_(own_comm) {
    check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm_, &num_ranks_), "MPI_Comm_size");
  }
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  bool is_own_process() const { return creator_.is_here(); }
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  void all_gather(const void* send, void* recv, size_t bytes_per_rank, milliseconds timeout);

private:
  // The header precedes the data, or the sentence of a rank that has failed an earlier round.
  struct Header {
    epx_status status;
    int32_t reserved;
    uint64_t body_bytes;
  };
  struct Outgoing { // one message to all others
    std::vector<char> message;
    std::vector<MPI_Request> requests;
  };
  struct Incoming {
    enum class State { kExpected, kArriving, kHere };
    State state = State::kExpected;
    std::vector<char> message;
    MPI_Request request = MPI_REQUEST_NULL;

    Header header() const;
    const char* body() const { return message.data() + sizeof(Header); }
  };

  void gather(const void* send, char* recv, size_t bytes, SuspensionAwareDeadline deadline);
  void post(epx_status status, const void* body, size_t bytes);
  bool has_been_sent(Outgoing& outgoing) const;
  void receive(int from, Incoming& incoming) const;
  void check_sizes(size_t bytes, const std::vector<std::unique_ptr<Incoming>>& incoming) const;
  void notify_others(const StatusError& error) noexcept;
  int tag() const { return static_cast<int>(round_ % kNumTags); }

  const HomeProcess creator_{};
  MPI_Comm comm_;
  int rank_ = 0;
  int num_ranks_ = 0;
  uint64_t round_ = 1;
  std::optional<StatusError> failure_; // that of an earlier round, after which the ranks are no longer in step
  // MPI may still use these buffers, so they stay allocated.
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::vector<std::unique_ptr<Incoming>> incoming_; // [num_ranks], the current round's
};

MpiSession::~MpiSession() {
  const bool active = is_active();
  bool all_sent = active;
  for (const auto& outgoing : outgoing_)
    try {
      all_sent = all_sent && has_been_sent(*outgoing);
    } catch (const StatusError&) {
      all_sent = false;
    }
  if (active && all_sent && !failure_) {
    MPI_Comm_free(&comm_);
    return;
  }
  // MPI_Comm_free is collective, and after a failure a rank may never call it. MPI may also still read from, or write to, the
  // buffers of requests that are not complete: these are never freed.
  for (auto& outgoing : outgoing_)
    (void)outgoing.release();
  for (auto& incoming : incoming_)
    if (incoming && incoming->state == Incoming::State::kArriving) (void)incoming.release();
}

void MpiSession::all_gather(const void* send, void* recv, size_t bytes_per_rank, milliseconds timeout) {
  check_timeout(timeout.count());
  constexpr size_t kMaxBytes = INT_MAX - sizeof(Header); // MPI counts with int
  if (bytes_per_rank > kMaxBytes)
    fail(EPX_ERROR_INVALID_ARGUMENT, "bytes_per_rank is {}; over MPI it must be at most {}", bytes_per_rank, kMaxBytes);
  if (bytes_per_rank > 0 && (send == nullptr || recv == nullptr))
    fail(EPX_ERROR_INVALID_ARGUMENT, "send or recv is NULL, and bytes_per_rank is {}", bytes_per_rank);
  if (!is_active()) fail(EPX_ERROR_INVALID_ARGUMENT, "MPI has been finalised");
  if (failure_) throw StatusError(*failure_);
  try {
    gather(send, static_cast<char*>(recv), bytes_per_rank, SuspensionAwareDeadline(timeout));
    ++round_;
  } catch (const StatusError& error) {
    failure_ = error;
    notify_others(error);
    throw;
  } catch (const std::exception& error) { // such as bad_alloc; the state of the round is unknown
    failure_ = StatusError(EPX_ERROR_INTERNAL, fmt::format("all-gather {} over MPI: {}", round_, error.what()));
    throw;
  }
}

void MpiSession::gather(const void* send, char* recv, size_t bytes, SuspensionAwareDeadline deadline) {
  incoming_.clear();
  for (int from = 0; from < num_ranks_; ++from)
    incoming_.push_back(std::make_unique<Incoming>());
  incoming_[static_cast<size_t>(rank_)]->state = Incoming::State::kHere;
  post(EPX_SUCCESS, send, bytes);

  for (PollingPace pace(kFirstSleep, kLongestSleep);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    std::vector<int> missing;
    for (int from = 0; from < num_ranks_; ++from) {
      Incoming& incoming = *incoming_[static_cast<size_t>(from)];
      if (incoming.state != Incoming::State::kHere) receive(from, incoming);
      if (incoming.state != Incoming::State::kHere) {
        missing.push_back(from);
      } else if (from != rank_ && incoming.header().status != EPX_SUCCESS) {
        throw StatusError(incoming.header().status, std::string(incoming.body(), incoming.header().body_bytes));
      }
    }
    // A message that is not sent yet progresses only while this rank polls.
    const bool sent = has_been_sent(*outgoing_.back());
    if (missing.empty() && sent) break;
    if (epx_interrupted() != 0)
      fail(EPX_ERROR_ABORTED, "all-gather {} over MPI: rank {} was interrupted while it waited for the others", round_,
           rank_);
    if (last_look && missing.empty())
      fail(EPX_ERROR_TIMEOUT, "all-gather {} over MPI: rank {} could not send its part within {} ms", round_, rank_,
           deadline.timeout().count());
    if (last_look)
      fail(EPX_ERROR_TIMEOUT, "all-gather {} over MPI: rank {} waited {} ms for the others to come; {} of {} never came",
           round_, rank_, deadline.timeout().count(), name_ranks(missing), num_ranks_);
  }
  outgoing_.pop_back();

  check_sizes(bytes, incoming_);
  if (bytes == 0) return;
  for (int from = 0; from < num_ranks_; ++from)
    std::memcpy(recv + static_cast<size_t>(from) * bytes,
                from == rank_ ? send : incoming_[static_cast<size_t>(from)]->body(), bytes);
}

void MpiSession::post(epx_status status, const void* body, size_t bytes) {
  const Header header{status, 0, bytes};
  auto outgoing = std::make_unique<Outgoing>();
  outgoing->message.resize(sizeof(Header) + bytes);
  std::memcpy(outgoing->message.data(), &header, sizeof(Header));
  if (bytes > 0) std::memcpy(outgoing->message.data() + sizeof(Header), body, bytes);
  outgoing->requests.assign(static_cast<size_t>(num_ranks_), MPI_REQUEST_NULL);
  outgoing_.push_back(std::move(outgoing)); // its owner must be in place before MPI knows the buffer
  Outgoing& posted = *outgoing_.back();
  for (int to = 0; to < num_ranks_; ++to)
    if (to != rank_)
      check_mpi(MPI_Isend(posted.message.data(), static_cast<int>(posted.message.size()), MPI_BYTE, to, tag(), comm_,
                          &posted.requests[static_cast<size_t>(to)]),
                "MPI_Isend");
}

bool MpiSession::has_been_sent(Outgoing& outgoing) const {
  int done = 0;
  check_mpi(MPI_Testall(static_cast<int>(outgoing.requests.size()), outgoing.requests.data(), &done, MPI_STATUSES_IGNORE),
            "MPI_Testall");
  return done != 0;
}

// MPI_Improbe finds a message before its receive is posted, so that a round that fails leaves no receive behind that could take
// a later message, and so that a message of the wrong size is noticed.
void MpiSession::receive(int from, Incoming& incoming) const {
  if (incoming.state == Incoming::State::kExpected) {
    int found = 0;
    MPI_Message message = MPI_MESSAGE_NULL;
    MPI_Status status;
    check_mpi(MPI_Improbe(from, tag(), comm_, &found, &message, &status), "MPI_Improbe");
    if (found == 0) return;
    int bytes = 0;
    check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
    incoming.message.resize(static_cast<size_t>(bytes));
    check_mpi(MPI_Imrecv(incoming.message.data(), bytes, MPI_BYTE, &message, &incoming.request), "MPI_Imrecv");
    incoming.state = Incoming::State::kArriving;
  }
  int done = 0;
  check_mpi(MPI_Test(&incoming.request, &done, MPI_STATUS_IGNORE), "MPI_Imrecv");
  if (done == 0) return;
  incoming.state = Incoming::State::kHere;
  if (incoming.message.size() < sizeof(Header) || incoming.header().body_bytes != incoming.message.size() - sizeof(Header))
    fail(EPX_ERROR_INTERNAL, "all-gather {} over MPI: rank {} sent {} bytes that are no part of it", round_, from,
         incoming.message.size());
}

MpiSession::Header MpiSession::Incoming::header() const {
  Header header;
  std::memcpy(&header, message.data(), sizeof(Header));
  return header;
}

// All ranks have all sizes here, so all of them report the same mismatch.
void MpiSession::check_sizes(size_t bytes, const std::vector<std::unique_ptr<Incoming>>& incoming) const {
  const auto bytes_of = [&](int rank) {
    return rank == rank_ ? bytes : incoming[static_cast<size_t>(rank)]->header().body_bytes;
  };
  for (int rank = 1; rank < num_ranks_; ++rank)
    if (bytes_of(rank) != bytes_of(0))
      fail(EPX_ERROR_MISMATCH, "all-gather {} over MPI: rank 0 passes {} bytes per rank, and rank {} passes {}", round_,
           bytes_of(0), rank, bytes_of(rank));
}

// A rank that comes to this round late finds every contribution and succeeds; the next round delivers the failure to it.
void MpiSession::notify_others(const StatusError& error) noexcept {
  try {
    ++round_;
    post(error.status(), error.message().data(), error.message().size());
  } catch (...) { // then the others fail by their own deadlines
  }
}

// ---- epx_bootstrap ------------------------------------------------------------------------------------------------------

epx_status all_gather_callback(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                               char* message, size_t message_bytes) {
  return run_callback(message, message_bytes, [&] {
    static_cast<MpiSession*>(context)->all_gather(send, recv, bytes_per_rank, milliseconds(timeout_ms));
  });
}

// In a child of fork() the communicator belongs to the parent, and MPI must not be called.
void release_callback(void* context) {
  auto* const session = static_cast<MpiSession*>(context);
  if (session->is_own_process()) delete session;
}

epx_bootstrap make_mpi_bootstrap(MPI_Comm comm, milliseconds timeout) {
  check_timeout(timeout.count());
  if (!is_active()) fail(EPX_ERROR_INVALID_ARGUMENT, "MPI is not initialised, or already finalised");
  if (comm == MPI_COMM_NULL) fail(EPX_ERROR_INVALID_ARGUMENT, "comm is MPI_COMM_NULL");
  const ErrorsReturn errors_return(comm);
  int is_inter = 0;
  check_mpi(MPI_Comm_test_inter(comm, &is_inter), "MPI_Comm_test_inter");
  if (is_inter != 0) fail(EPX_ERROR_INVALID_ARGUMENT, "comm is an intercommunicator; an intracommunicator is needed");

  auto session = std::make_unique<MpiSession>(duplicate_within(comm, SuspensionAwareDeadline(timeout)));
  epx_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.rank = session->rank();
  bootstrap.num_ranks = session->num_ranks();
  bootstrap.all_gather = all_gather_callback;
  bootstrap.release = release_callback;
  bootstrap.context = session.release();
  return bootstrap;
}

} // namespace
} // namespace epx

epx_status epx_bootstrap_mpi(MPI_Comm comm, int64_t timeout_ms, epx_bootstrap* bootstrap) {
  return epx::at_c_boundary([&] {
    if (bootstrap == nullptr) epx::fail(EPX_ERROR_INVALID_ARGUMENT, "bootstrap is NULL");
    *bootstrap = {}; // the caller may free it whatever happens
    *bootstrap = epx::make_mpi_bootstrap(comm, epx::milliseconds(timeout_ms));
  });
}
