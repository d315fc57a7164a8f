// SPDX-License-Identifier: Apache-2.0
// The one sender of rows from tokens to slots on the host, and the receiver's end.
//
// If a receiver's rows lie in registered memory, the sender stores each row at its slot. Otherwise the sender stages a token's
// row once per receiver, and the receiver makes the copies. A row that does not travel in its receive format is always staged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

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
  RowSender(const HostGroup& group, const MovementCall& call, const TokenRows& tokens, Format format)
      : group_(group), call_(call), staging_(group), tokens_(tokens), format_(std::move(format)), bytes_(row_bytes(call)) {}

  // Stores the row of `token` at its slot on `rank`, if it goes there in place.
  void store_in_place(int64_t token, int rank, int64_t slot) {
    if (std::byte* const rows = rows_in_place<Format>(group_, rank); rows != nullptr)
      format_.encode(rows + call_.row_of_slot(slot) * bytes_, row_of(token), token);
  }

  // Stages what `rank` takes from there: the sidecar of `token`, and its row, if that does not go in place.
  void stage(int64_t token, int rank, int64_t staging_row) {
    if (rows_in_place<Format>(group_, rank) == nullptr)
      format_.encode(staging_.row(rank, staging_row), row_of(token), token);
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
        bytes_(row_bytes(call)) {}

  // Returns what has travelled for a slot: the slot itself where the sender stored it in place.
  const std::byte* row(int64_t slot, int64_t staging_row) const {
    return in_place_ != nullptr ? in_place_ + call_.row_of_slot(slot) * bytes_ : staging_.row(rank_, staging_row);
  }
  const std::byte* sidecar(int64_t staging_row) const { return staging_.sidecar(rank_, staging_row); }

private:
  const MovementCall& call_;
  ScatterStaging staging_;
  int rank_;
  const std::byte* in_place_;
  int64_t bytes_;
};

// The receive rows of a dispatch, with their sidecars.
template <typename Format>
class ReceivedRows {
public:
  // The call must outlive this.
  explicit ReceivedRows(const DispatchCall& call)
      : call_(call), format_(call), bytes_(epx::row_bytes(call.recv_dtype, call.hidden)) {}

  // Stores what has travelled for the row of a slot, and its sidecar.
  void store(int64_t index, const std::byte* wire, const std::byte* sidecar) const {
    format_.store(call_.recv_tokens + index * bytes_, index, wire, nullptr);
    if (call_.sidecar_bytes > 0) std::memcpy(sidecar_at(index), sidecar, static_cast<size_t>(call_.sidecar_bytes));
  }
  void clear(int64_t index) const {
    format_.clear(call_.recv_tokens + index * bytes_, index);
    if (call_.sidecar_bytes > 0) std::memset(sidecar_at(index), 0, static_cast<size_t>(call_.sidecar_bytes));
  }

private:
  std::byte* sidecar_at(int64_t index) const { return call_.recv_sidecar + index * call_.sidecar_bytes; }

  const DispatchCall& call_;
  Format format_;
  int64_t bytes_;
};

} // namespace epx::host
