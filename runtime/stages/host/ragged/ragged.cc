// SPDX-License-Identifier: Apache-2.0
// ragged_all_to_all on the host. Ranks store what they know of their slices in each other's windows, then the rows: into the
// output where they can reach it, else into the receiver's staging, from where the receiver copies them. Between the rounds
// that this takes they meet twice: when all rows of a round are stored, and when they have been copied.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "runtime/layout/slices.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/host/host_stages.h"
#include "runtime/stages/host/movement.h"
#include "runtime/stages/reports.h"

namespace epx::host {
namespace {

// One ragged_all_to_all in progress.
class RaggedAllToAll {
public:
  RaggedAllToAll(HostGroup& group, const RaggedAllToAllCall& call)
      : group_(group), call_(call), window_(group.window), layout_(group.context.layout), ranks_(window_.num_ranks),
        slices_per_rank_(call.num_slices / ranks_), image_bytes_(layout_.scatter_rows.bytes),
        own_(static_cast<size_t>(call.num_slices)), peers_(own_.size()) {}

  void run() {
    const CallDescriptor descriptor =
        describe(call_, group_.allocations.locate(call_.output, call_.output_rows * call_.row_bytes));
    group_.protocol.begin(EPX_OP_RAGGED_ALL_TO_ALL);
    tell();
    group_.protocol.arrive(descriptor);
    find_outputs();
    decide();
    move_own();
    for (int64_t round = 0; round < num_rounds_; ++round) {
      send(round);
      if (round + 1 == num_rounds_)
        group_.protocol.complete();
      else
        group_.protocol.meet(static_cast<uint64_t>(2 * round + 1));
      receive(round);
      if (round + 1 < num_rounds_) group_.protocol.meet(static_cast<uint64_t>(2 * round + 2));
    }
  }

private:
  int peer_of(int64_t slice) const { return static_cast<int>(slice / slices_per_rank_); }
  int32_t* record_at(int owner, int peer, SliceField field, int64_t j) const {
    return window_.at<int32_t>(owner, slice_record_offset(layout_, ranks_, peer, field, j, sizeof(int32_t)));
  }

  // The windows are written before peers arrive, and read before they may complete, as CallExchange does.
  void tell() {
    for (int64_t i = 0; i < call_.num_slices; ++i) {
      const SliceRecord mine = told_record(call_, i);
      const int64_t j = i % slices_per_rank_;
      *record_at(peer_of(i), window_.rank, SliceField::size, j) = mine.size;
      *record_at(peer_of(i), window_.rank, SliceField::input_offset, j) = mine.input_offset;
      *record_at(peer_of(i), window_.rank, SliceField::output_offset, j) = mine.output_offset;
      *record_at(peer_of(i), window_.rank, SliceField::recv_size, j) = mine.recv_size;
    }
  }

  // Finds each rank's output; NULL where its rows are staged.
  void find_outputs() {
    for (int rank = 0; rank < ranks_; ++rank) {
      const CallDescriptor& descriptor = group_.protocol.descriptor_of(rank);
      std::byte* const output = registered_address(group_, rank, {descriptor.rows_allocation, descriptor.rows_offset},
                                                   descriptor.recv_rows, call_.row_bytes);
      group_.scratch.rows_base[static_cast<size_t>(rank)] = output;
      if (output == nullptr && ranks_ > 1)
        num_rounds_ = std::max(num_rounds_, slice_rounds(descriptor.recv_rows * call_.row_bytes, image_bytes_));
    }
  }
  std::byte* output_of(int rank) const { return group_.scratch.rows_base[static_cast<size_t>(rank)]; }

  // Decides which slices move: this rank's own, and those whose authors are its peers.
  void decide() {
    BadSlices bad{};
    for (int64_t i = 0; i < call_.num_slices; ++i) {
      const int peer = peer_of(i);
      const int64_t j = i % slices_per_rank_;
      const auto told = [&](SliceField field) { return *record_at(window_.rank, peer, field, j); };
      const CallDescriptor& descriptor = group_.protocol.descriptor_of(peer);
      SliceRecord own = told_record(call_, i);
      const SliceRecord theirs = {told(SliceField::size), told(SliceField::input_offset), told(SliceField::output_offset),
                                  own.recv_size};
      own.recv_size = told(SliceField::recv_size);
      const SliceFault fault = fault_of(own, call_.is_transposed ? descriptor.num_tokens : descriptor.recv_rows);
      const SliceFault their_fault = fault_of(theirs, call_.is_transposed ? call_.operand_rows : call_.output_rows);
      own_[static_cast<size_t>(i)] = moving_slice(own, fault, call_.is_transposed);
      peers_[static_cast<size_t>(i)] = moving_slice(theirs, their_fault, call_.is_transposed);
      bad.add({i, true, fault, own});
      if (peer != window_.rank) bad.add({i, false, their_fault, theirs});
    }
    if (bad.count > 0) group_.status.record(bad_slices_event(group_.protocol.name(), bad, window_.rank, slices_per_rank_));
  }

  // Forward a rank sends its own slices, transposed those of its peers.
  const std::vector<MovingSlice>& sent() const { return call_.is_transposed ? peers_ : own_; }
  const std::vector<MovingSlice>& received() const { return call_.is_transposed ? own_ : peers_; }

  template <typename Copy> // copy(offset in the operand, offset in the output, bytes)
  void for_slices(const std::vector<MovingSlice>& slices, int peer, const SliceImage& image, const Copy& copy) const {
    for (int64_t i = peer * slices_per_rank_; i < (peer + 1) * slices_per_rank_; ++i) {
      const SliceBytes part = bytes_in(slices[static_cast<size_t>(i)], call_.row_bytes, image);
      if (part.bytes > 0) copy(part.from, part.to, static_cast<size_t>(part.bytes));
    }
  }

  void move_own() {
    for_slices(sent(), window_.rank, kWholeOutput, [&](int64_t from, int64_t to, size_t bytes) {
      std::memcpy(call_.output + to, call_.operand + from, bytes);
    });
  }

  void send(int64_t round) {
    for (int step = 1; step < ranks_; ++step) {
      const int peer = (window_.rank + step) % ranks_;
      std::byte* const output = output_of(peer);
      if (output != nullptr && round > 0) continue;
      const SliceImage image = output != nullptr ? kWholeOutput : slice_image(image_bytes_, round);
      std::byte* const begin =
          output != nullptr ? output : window_.at<std::byte>(peer, layout_.scatter_rows.offset) - image.begin;
      for_slices(sent(), peer, image,
                 [&](int64_t from, int64_t to, size_t bytes) { std::memcpy(begin + to, call_.operand + from, bytes); });
    }
  }

  void receive(int64_t round) {
    if (output_of(window_.rank) != nullptr) return;
    const SliceImage image = slice_image(image_bytes_, round);
    const std::byte* const staged = window_.local<std::byte>(layout_.scatter_rows.offset) - image.begin;
    for (int peer = 0; peer < ranks_; ++peer)
      if (peer != window_.rank)
        for_slices(received(), peer, image,
                   [&](int64_t, int64_t to, size_t bytes) { std::memcpy(call_.output + to, staged + to, bytes); });
  }

  HostGroup& group_;
  const RaggedAllToAllCall& call_;
  PeerWindow window_;
  const WindowLayout& layout_;
  int ranks_;
  int64_t slices_per_rank_;
  int64_t image_bytes_;
  int64_t num_rounds_ = 1;
  std::vector<MovingSlice> own_, peers_; // [K]: by the rank that they go to, and that they come from
};

} // namespace

void ragged_all_to_all(HostGroup& group, const RaggedAllToAllCall& call) {
  RaggedAllToAll(group, call).run();
}

} // namespace epx::host
