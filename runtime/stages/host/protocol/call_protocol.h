// SPDX-License-Identifier: Apache-2.0
// The CallProtocol synchronises the ranks of a group in one call on the host transport.
//
//   begin      gives the call its sequence number
//   arrive     is the entry barrier: it stores this rank's call descriptor into every rank's window, waits for those of all
//              ranks, and checks that their agreed fields are equal
//   ...        ranks store into each other's windows
//   meet       is a barrier inside a call that moves rows in several rounds (ragged_all_to_all)
//   complete   is the exit barrier: it signals every peer that this rank's data is in place, and waits for the signals of all
//              peers
//
// A rank that has arrived at call n has finished call n - 1, so a peer that saw it arrive may store into its staging. Flags
// hold sequence numbers, which only grow; nothing is reset between calls. Every wait is bounded, and ends early when a
// peer has stored an abort record in this rank's window.
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
#include "transport/control/control_connection.h"
#include "transport/exchange.h"
#include "transport/peer_window.h"

namespace epx::host {

class CallProtocol {
public:
  CallProtocol(const GroupContext& context, PeerWindow window, StatusBoard& status);

  // Groups of several nodes: `control` learns of this rank's calls from now on, and is asked who is to blame when a wait runs
  // out. It must outlive all calls.
  void use(ControlConnection& control) { control_ = &control; }

  // Throws the sticky error if there is one, and the error of an abort record that a peer has stored. Returns the sequence
  // number of the call, from 1.
  uint64_t begin(epx_operation operation);

  // Fills in the operation, that of begin, and the sequence number. Throws TIMEOUT, ABORTED, OUT_OF_SEQUENCE, MISMATCH or
  // INTERNAL (sticky).
  void arrive(CallDescriptor descriptor);

  // Returns a rank's descriptor of this call. It is valid after arrive.
  const CallDescriptor& descriptor_of(int rank) const { return descriptors_[static_cast<size_t>(rank)]; }

  // Throws TIMEOUT, ABORTED or INTERNAL (sticky), as complete does. `step` grows from 1 within a call.
  void meet(uint64_t step);
  void complete();

  CallName name() const { return {operation_, sequence_}; }
  uint64_t sequence() const { return sequence_; }

  // Ends the group with INTERNAL, here and for the peers, because of a word in this rank's window that no peer can have stored;
  // `what` says which word, and its value.
  [[noreturn]] void fail_as_damaged(const std::string& what);

  // Ends the group here and stores abort records for the peers. Any thread may call it.
  void abort();

  // Ends the group because of a verdict of the control connection. Any thread may call it.
  void end(const Verdict& verdict);

private:
  // Waits until progress_of(peer) is at least `target` for every peer, none of which can be further than `most`.
  template <typename ProgressOf>
  void wait_for_peers(epx_phase phase, uint64_t target, uint64_t most, const ProgressOf& progress_of);
  void wait_for_peers(epx_phase phase);
  uint64_t progress_signaled(int owner, int peer, epx_phase phase) const;
  void require_not_aborted();
  void require_sound_descriptors();
  void require_agreed_fields();
  void time_out(epx_phase phase, std::chrono::milliseconds suspended, std::vector<int> missing);
  int find_culprit(int missing) const;
  AbortRecord abort_all(const AbortRecord& abort_record);
  [[noreturn]] void fail_as_aborted(const AbortRecord& abort_record);

  const GroupContext& context_;
  PeerWindow window_;
  StatusBoard& status_;
  ControlConnection* control_ = nullptr;    // of groups of several nodes
  std::vector<CallDescriptor> descriptors_; // [P]
  uint64_t sequence_ = 0;
  epx_operation operation_ = EPX_OP_NONE;
};

// A CallExchange exchanges small records as one call of the group.
class CallExchange : public Exchange {
public:
  CallExchange(CallProtocol& protocol, const GroupContext& context, PeerWindow window, const CallDescriptor& descriptor)
      : protocol_(protocol), context_(context), window_(window), descriptor_(descriptor) {}

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override;

private:
  CallProtocol& protocol_;
  const GroupContext& context_;
  PeerWindow window_;
  CallDescriptor descriptor_;
};

} // namespace epx::host
