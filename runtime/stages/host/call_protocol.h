// How the ranks of a group make one call together on the host transport.
//
//   begin      the call gets its sequence number
//   arrive     tells every peer what this rank offers; waits until all have; checks that they agree
//   ...        ranks store into each other's windows
//   complete   tells every peer that this rank's data is in place; waits until all have said so
//
// A rank that has arrived at call n has finished call n - 1, so whoever saw it arrive may store into its staging. Flags
// carry sequence numbers, which only grow; nothing is reset between calls. Every wait is bounded, and ends early when a
// peer has left a poison record in this rank's window.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "epx/epx.h"
#include "runtime/group_context.h"
#include "runtime/layout/window_layout.h"
#include "runtime/stages/reports.h"
#include "runtime/status_board.h"
#include "transport/exchange.h"
#include "transport/peer_window.h"

namespace epx::host {

class CallProtocol {
public:
  CallProtocol(const GroupContext& context, PeerWindow window, StatusBoard& status);

  // Throws the sticky failure if there is one. Returns the sequence number of the call, from 1.
  uint64_t begin(epx_operation operation);

  // `offer.operation` and `offer.sequence` are filled in here. Throws TIMEOUT, ABORTED, OUT_OF_SEQUENCE or MISMATCH
  // (sticky).
  void arrive(CallDescriptor descriptor);

  // What a rank offers in this call. After arrive.
  const CallDescriptor& descriptor_of(int rank) const { return descriptors_[static_cast<size_t>(rank)]; }

  // Throws TIMEOUT or ABORTED (sticky).
  void complete();

  CallName name() const { return {operation_, sequence_}; }
  uint64_t sequence() const { return sequence_; }

  // What peers store in this rank's window cannot have come from them; `what` says which word, and its value. Ends the group
  // with INTERNAL, here and for the peers.
  [[noreturn]] void fail_as_damaged(const std::string& what);

  // Ends the group here and tells the peers. From any thread.
  void abort();

private:
  void wait_for_peers(epx_phase phase);
  uint64_t progress_signaled(int owner, int peer, epx_phase phase) const;
  void require_not_aborted();
  void require_sound_descriptors();
  void require_agreed_fields();
  void time_out(epx_phase phase, std::chrono::milliseconds suspended); // throws unless the peers came after all
  int find_culprit(int missing) const;
  AbortRecord abort_all(const AbortRecord& abort_record);
  [[noreturn]] void fail_as_aborted(const AbortRecord& abort_record);

  const GroupContext& context_;
  PeerWindow window_;
  StatusBoard& status_;
  std::vector<CallDescriptor> descriptors_; // [P]
  uint64_t sequence_ = 0;
  epx_operation operation_ = EPX_OP_NONE;
};

// An exchange of small records as one call of the group.
class CallExchange : public Exchange {
public:
  // `terms` holds what ranks must agree on for this operation.
  CallExchange(CallProtocol& protocol, const GroupContext& context, PeerWindow window, epx_operation operation,
               const CallDescriptor& terms)
      : protocol_(protocol), context_(context), window_(window), operation_(operation), terms_(terms) {}

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override;

private:
  CallProtocol& protocol_;
  const GroupContext& context_;
  PeerWindow window_;
  epx_operation operation_;
  CallDescriptor terms_;
};

} // namespace epx::host
