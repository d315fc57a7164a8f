// SPDX-License-Identifier: Apache-2.0
// The one sender of rows from tokens to slots on the host, and the receiver's end.
//
// If a receiver's rows lie in registered memory, the sender stores each row at its slot. Otherwise the sender stages a token's
// row once per receiver, and the receiver makes the copies. A row that does not travel in its receive format is always staged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "runtime/stages/host/movement.h"
#include "runtime/stages/host/protocol/host_group.h"
#include "runtime/stages/host/rows/row_format.h"
#include "runtime/stages/host/rows/staging.h"

namespace epx::host {

// Returns a rank's receive rows where senders store them in place; NULL where rows are staged for it.
template <typename Format>
std::byte* rows_in_place(const HostGroup& group, int rank) {
  return Format::kIsReceiveFormat ? group.scratch.rows_base[static_cast<size_t>(rank)] : nullptr;
}

// The rows of this rank's tokens.
struct TokenRows {
  const std::byte* rows;    // [T, H]
  const std::byte* sidecar; // [T, sidecar_bytes]
  int64_t sidecar_bytes;    // 0: none
};

template <typename Format>
class RowSender {
public:
  // find_rows() has been called. All arguments but `tokens` must outlive the sender.
  RowSender(const HostGroup& group, const MovementCall& call, const TokenRows& tokens)
      : group_(group), call_(call), staging_(group), tokens_(tokens), format_(call), bytes_(row_bytes(call)) {}

  // Stores the row of `token` at its slot on `rank`, if it goes there in place.
  void store_in_place(int64_t token, int rank, int64_t slot) const {
    if (std::byte* const rows = rows_in_place<Format>(group_, rank); rows != nullptr)
      format_.encode(rows + call_.row_of_slot(slot) * bytes_, row_of(token));
  }

  // Stages what `rank` takes from there: the sidecar of `token`, and its row, if that does not go in place.
  void stage(int64_t token, int rank, int64_t staging_row) const {
    if (rows_in_place<Format>(group_, rank) == nullptr) format_.encode(staging_.row(rank, staging_row), row_of(token));
    if (tokens_.sidecar_bytes > 0)
      std::memcpy(staging_.sidecar(rank, staging_row), tokens_.sidecar + token * tokens_.sidecar_bytes,
                  static_cast<size_t>(tokens_.sidecar_bytes));
  }

private:
  const std::byte* row_of(int64_t token) const { return tokens_.rows + token * bytes_; }

  const HostGroup& group_;
  const MovementCall& call_;
  ScatterStaging staging_;
  TokenRows tokens_;
  Format format_;
  int64_t bytes_;
};

// What has come for the slots of this rank.
template <typename Format>
class RowReceiver {
public:
  // find_rows() has been called. All arguments must outlive the receiver.
  RowReceiver(const HostGroup& group, const MovementCall& call)
      : call_(call), staging_(group), rank_(group.window.rank), in_place_(rows_in_place<Format>(group, rank_)),
        format_(call), bytes_(row_bytes(call)) {}

  // Returns the row of a slot: the slot itself where the sender stored it in place. Valid until the next call.
  const std::byte* row(int64_t slot, int64_t staging_row) {
    return in_place_ != nullptr ? in_place_ + call_.row_of_slot(slot) * bytes_
                                : format_.decode(staging_.row(rank_, staging_row));
  }
  const std::byte* sidecar(int64_t staging_row) const { return staging_.sidecar(rank_, staging_row); }

private:
  const MovementCall& call_;
  ScatterStaging staging_;
  int rank_;
  const std::byte* in_place_;
  Format format_;
  int64_t bytes_;
};

// Copies a row of a dispatch, and its sidecar, into the receive tensors, unless the row is there.
inline void store_received(const DispatchCall& call, int64_t slot, const std::byte* row, const std::byte* sidecar) {
  const int64_t bytes = row_bytes(call);
  const int64_t index = call.row_of_slot(slot);
  if (std::byte* const to = call.recv_tokens + index * bytes; to != row) std::memcpy(to, row, static_cast<size_t>(bytes));
  if (call.sidecar_bytes > 0)
    std::memcpy(call.recv_sidecar + index * call.sidecar_bytes, sidecar, static_cast<size_t>(call.sidecar_bytes));
}

} // namespace epx::host
