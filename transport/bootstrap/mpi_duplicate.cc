// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/mpi_duplicate.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/names.h"
#include "epx/epx_mpi.h"
#include "transport/bootstrap/mpi_check.h"

namespace epx {
namespace {

using std::chrono::milliseconds;

constexpr int kTimeoutsPerHello = 4; // hellos are sent after a quarter of the timeout
constexpr size_t kMaxMessageBytes = 1024;
constexpr char kInterrupted = 'i', kTooLate = 't'; // why a rank has given up

struct Message {
  int from = MPI_PROC_NULL;
  std::vector<char> bytes;
};

// ShortMessages sends and receives short messages between the ranks of a communicator, with EPX_MPI_TAG, and never waits. Its
// destructor does not free buffers that MPI may still use.
class ShortMessages {
public:
  explicit ShortMessages(MPI_Comm comm) : comm_(comm) {
    check_mpi(MPI_Comm_rank(comm, &rank_), "MPI_Comm_rank");
    check_mpi(MPI_Comm_size(comm, &num_ranks_), "MPI_Comm_size");
  }
  ~ShortMessages() {
    for (auto& outgoing : outgoing_)
      (void)outgoing.release();
    (void)incoming_.release();
  }
  ShortMessages(const ShortMessages&) = delete;
  ShortMessages& operator=(const ShortMessages&) = delete;

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  void send_to_others(std::string_view bytes) {
    outgoing_.push_back(std::make_unique<Outgoing>());
    Outgoing& outgoing = *outgoing_.back();
    outgoing.bytes.assign(bytes.begin(), bytes.end());
    outgoing.requests.assign(static_cast<size_t>(num_ranks_), MPI_REQUEST_NULL);
    for (int to = 0; to < num_ranks_; ++to)
      if (to != rank_)
        check_mpi(MPI_Isend(outgoing.bytes.data(), static_cast<int>(outgoing.bytes.size()), MPI_BYTE, to, EPX_MPI_TAG,
                            comm_, &outgoing.requests[static_cast<size_t>(to)]),
                  "MPI_Isend");
  }

  // Returns whether MPI has completed all sends.
  bool all_sent() {
    while (!outgoing_.empty()) {
      std::vector<MPI_Request>& requests = outgoing_.back()->requests;
      int done = 0;
      check_mpi(MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE), "MPI_Testall");
      if (done == 0) return false;
      outgoing_.pop_back();
    }
    return true;
  }

  // Returns the next message of `from`, which may be MPI_ANY_SOURCE; none when none has come.
  std::optional<Message> receive(int from) {
    if (incoming_ == nullptr) {
      int found = 0;
      MPI_Message message = MPI_MESSAGE_NULL;
      MPI_Status status;
      check_mpi(MPI_Improbe(from, EPX_MPI_TAG, comm_, &found, &message, &status), "MPI_Improbe");
      if (found == 0) return std::nullopt;
      int bytes = 0;
      check_mpi(MPI_Get_count(&status, MPI_BYTE, &bytes), "MPI_Get_count");
      incoming_ = std::make_unique<Incoming>();
      incoming_->message.from = status.MPI_SOURCE;
      incoming_->message.bytes.resize(static_cast<size_t>(std::max(bytes, 0)));
      check_mpi(MPI_Imrecv(incoming_->message.bytes.data(), bytes, MPI_BYTE, &message, &incoming_->request), "MPI_Imrecv");
    }
    int done = 0;
    check_mpi(MPI_Test(&incoming_->request, &done, MPI_STATUS_IGNORE), "MPI_Imrecv");
    if (done == 0) return std::nullopt;
    Message message = std::move(incoming_->message);
    incoming_.reset();
    return message;
  }

private:
  struct Outgoing {
    std::vector<char> bytes;
    std::vector<MPI_Request> requests; // [num_ranks]
  };
  struct Incoming {
    Message message;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  MPI_Comm comm_;
  int rank_ = 0;
  int num_ranks_ = 0;
  std::vector<std::unique_ptr<Outgoing>> outgoing_;
  std::unique_ptr<Incoming> incoming_; // MPI is writing it
};

// Hellos tracks which ranks have come, by messages in the caller's communicator. An empty message is a hello; any other is
// one byte, why its sender has given up, and the sentence for it.
class Hellos {
public:
  Hellos(MPI_Comm comm, milliseconds timeout)
      : messages_(comm), quiet_(timeout / kTimeoutsPerHello), heard_(static_cast<size_t>(messages_.num_ranks())) {
    heard_[static_cast<size_t>(messages_.rank())] = true;
  }

  int num_ranks() const { return messages_.num_ranks(); }
  bool is_said() const { return is_said_; }
  bool has_heard(int rank) const { return heard_[static_cast<size_t>(rank)]; }
  bool all_sent() { return messages_.all_sent(); }

  // Sends the hello once, after a quarter of the timeout, or when another rank has sent its own: a rank with a shorter timeout
  // has to receive this one in time.
  void say_if_due() {
    if (is_said_ || (!quiet_.passed() && std::count(heard_.begin(), heard_.end(), true) == 1)) return;
    is_said_ = true;
    messages_.send_to_others({});
  }

  // Receives the messages that have come from a rank, or from any of them. Throws the status and the sentence of a rank that
  // has given up.
  void poll(int from = MPI_ANY_SOURCE) {
    while (const std::optional<Message> message = messages_.receive(from)) {
      heard_[static_cast<size_t>(message->from)] = true;
      if (!message->bytes.empty())
        throw StatusError(message->bytes.front() == kInterrupted ? EPX_ERROR_ABORTED : EPX_ERROR_TIMEOUT,
                          std::string(message->bytes.begin() + 1, message->bytes.end()));
      if (from != MPI_ANY_SOURCE) return; // a second message may belong to a later call
    }
  }

  [[noreturn]] void give_up(const char* call, milliseconds timeout) {
    std::vector<int> missing;
    for (int rank = 0; rank < num_ranks(); ++rank)
      if (!has_heard(rank)) missing.push_back(rank);
    give_up(fmt::format("not all ranks of the communicator came to epx_bootstrap_mpi within {} ms: rank {} waited, and {}",
                        timeout.count(), messages_.rank(),
                        missing.empty() ? fmt::format("all came, but {} has not ended", call)
                                        : fmt::format("{} of {} never came", name_ranks(missing), num_ranks())));
  }

  // Throws ABORTED where epx_interrupt() or the thread's check says so; the other ranks get the sentence.
  void give_up_if_interrupted() {
    if (epx_interrupted() != 0)
      give_up(fmt::format("epx_bootstrap_mpi: rank {} was interrupted while it waited for the others", messages_.rank()),
              EPX_ERROR_ABORTED);
  }

  // Sends the sentence to the other ranks, so that they need not wait for their own deadlines.
  [[noreturn]] void give_up(const std::string& sentence, epx_status status = EPX_ERROR_TIMEOUT) {
    messages_.send_to_others((status == EPX_ERROR_ABORTED ? kInterrupted : kTooLate) +
                             sentence.substr(0, kMaxMessageBytes));
    (void)messages_.all_sent(); // MPI progresses the sends in this call
    throw StatusError(status, sentence);
  }

private:
  ShortMessages messages_;
  Deadline quiet_;
  std::vector<bool> heard_; // [num_ranks]
  bool is_said_ = false;
};

// Waits until MPI has completed the request, and receives the others' messages meanwhile.
void wait_for(MPI_Request& request, const char* call, Hellos& hellos, SuspensionAwareDeadline& deadline) {
  for (PollingPace pace(kFirstSleep, kLongestSleep);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    hellos.poll();
    int done = 0;
    check_mpi(MPI_Test(&request, &done, MPI_STATUS_IGNORE), call);
    if (done != 0) return;
    hellos.say_if_due();
    hellos.give_up_if_interrupted();
    if (last_look) hellos.give_up(call, deadline.timeout());
  }
}

// Neither MPI_Ibarrier nor MPI_Comm_idup can be cancelled. A barrier that never ends does no harm, but a duplicate that is
// never complete lets Open MPI's MPI_Finalize crash. So the duplicate is begun only when all ranks have come (the first
// barrier), and none of them had given up by then (the second).
void wait_for_all(MPI_Comm comm, Hellos& hellos, SuspensionAwareDeadline& deadline) {
  for (int barrier = 0; barrier < 2; ++barrier) {
    MPI_Request request = MPI_REQUEST_NULL;
    check_mpi(MPI_Ibarrier(comm, &request), "MPI_Ibarrier");
    wait_for(request, "MPI_Ibarrier", hellos, deadline);
  }
}

MPI_Comm duplicate(MPI_Comm comm, Hellos& hellos, SuspensionAwareDeadline& deadline) {
  struct Attempt {
    MPI_Comm comm = MPI_COMM_NULL;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  auto attempt = std::make_unique<Attempt>();
  check_mpi(MPI_Comm_idup(comm, &attempt->comm, &attempt->request), "MPI_Comm_idup");
  try {
    wait_for(attempt->request, "MPI_Comm_idup", hellos, deadline);
  } catch (...) { // MPI writes the communicator when the others come after all, so it is never freed
    (void)attempt.release();
    throw;
  }
  check_mpi(MPI_Comm_set_errhandler(attempt->comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  return attempt->comm;
}

// Each rank sends in the duplicate whether it has sent a hello, and every rank receives all hellos before the caller's
// communicator is left to the caller again.
void settle(MPI_Comm duplicate, Hellos& hellos, SuspensionAwareDeadline& deadline) {
  ShortMessages messages(duplicate);
  messages.send_to_others(hellos.is_said() ? "1" : "0");
  std::vector<int> open;  // ranks whose message in the duplicate has not come
  std::vector<int> owing; // ranks that have sent a hello, which has not come
  for (int rank = 0; rank < hellos.num_ranks(); ++rank)
    if (rank != messages.rank()) open.push_back(rank);
  for (PollingPace pace(kFirstSleep, kLongestSleep);; pace.sleep(deadline)) {
    const bool last_look = deadline.passed();
    while (const std::optional<Message> word = messages.receive(MPI_ANY_SOURCE)) {
      std::erase(open, word->from);
      if (word->bytes == std::vector{'1'}) owing.push_back(word->from);
    }
    std::erase_if(owing, [&](int rank) { return hellos.has_heard(rank); });
    for (const std::vector<int>* ranks : {&open, &owing})
      for (const int rank : *ranks)
        hellos.poll(rank);
    std::erase_if(owing, [&](int rank) { return hellos.has_heard(rank); });
    const bool sent = messages.all_sent() && hellos.all_sent();
    if (open.empty() && owing.empty() && sent) return;
    hellos.give_up_if_interrupted();
    if (last_look) {
      open.insert(open.end(), owing.begin(), owing.end());
      hellos.give_up(fmt::format("epx_bootstrap_mpi: rank {} waited {} ms; {} of {} came, but did not go on",
                                 messages.rank(), deadline.timeout().count(),
                                 open.empty() ? "the others" : name_ranks(open), hellos.num_ranks()));
    }
  }
}

} // namespace

MPI_Comm duplicate_within(MPI_Comm comm, SuspensionAwareDeadline deadline) {
  Hellos hellos(comm, deadline.timeout());
  wait_for_all(comm, hellos, deadline);
  MPI_Comm own = duplicate(comm, hellos, deadline);
  settle(own, hellos, deadline);
  return own;
}

} // namespace epx
