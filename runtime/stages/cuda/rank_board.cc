// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/cuda/rank_board.h"

#include <atomic>

#include "base/error.h"
#include "base/log.h"
#include "runtime/stages/cuda/protocol/test_hooks.h"
#include "transport/host/host_transport.h"

namespace epx::cuda {
namespace {

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

// Returns false when a record is there already; `word` then holds that one.
bool store_if_none(uint64_t& place, uint64_t& word) {
  uint64_t found = 0;
  if (std::atomic_ref(place).compare_exchange_strong(found, word, std::memory_order_acq_rel)) return true;
  word = found;
  return false;
}

} // namespace

RankBoard::RankBoard(int rank, int num_ranks, Exchange& exchange) : rank_(rank), entries_(static_cast<size_t>(num_ranks)) {
  try {
    open(num_ranks, exchange);
  } catch (const StatusError& error) { // all ranks get here, or none
    close();
    if (error.status() == EPX_ERROR_TIMEOUT) throw;
    log::transport().warn(
        "ranks cannot reach each other's host memory, and will learn of a peer whose GPU refuses its kernels "
        "only when a wait times out: {}",
        error.message());
    exchange.all_gather([&] { // if a rank gets no memory, the other ranks do not wait for it
      own_memory_ = make_mapped_memory<Entry>();
      return int32_t{0};
    });
    entries_.assign(entries_.size(), nullptr);
    entries_[static_cast<size_t>(rank)] = own_memory_.get();
    abort_record_on_device_ = &own_memory_->abort_record_of_kernels;
  } catch (...) { // the destructor does not run
    close();
    throw;
  }
}

void RankBoard::open(int num_ranks, Exchange& exchange) {
  if (is_without_board()) fail(EPX_ERROR_UNSUPPORTED, "EPX_TEST_WITHOUT_BOARD is set"); // on all ranks
  window_ = make_host_transport(rank_, num_ranks)->open_window(sizeof(Entry), exchange);
  for (int peer = 0; peer < num_ranks; ++peer)
    entries_[static_cast<size_t>(peer)] = window_->view().at<Entry>(peer, 0);
  exchange.all_gather([&] {
    Entry& entry = own();
    check_cuda(cudaHostRegister(&entry, sizeof(entry), cudaHostRegisterMapped | cudaHostRegisterPortable),
               "cudaHostRegister");
    is_registered_ = true;
    void* on_device = nullptr;
    check_cuda(cudaHostGetDevicePointer(&on_device, &entry, 0), "cudaHostGetDevicePointer");
    abort_record_on_device_ = &static_cast<const Entry*>(on_device)->abort_record_of_kernels;
    return int32_t{0};
  });
}

RankBoard::~RankBoard() {
  close();
}

void RankBoard::close() {
  if (is_registered_) log_cuda(cudaHostUnregister(&own()), "cudaHostUnregister");
  is_registered_ = false;
  window_.reset();
}

uint64_t RankBoard::abort_record() const {
  return std::atomic_ref(own().abort_record).load(std::memory_order_acquire);
}

// The record of the lowest rank whose entry can be accessed and is not damaged counts, so that all ranks name the same culprit.
AbortRecord RankBoard::end_group(const AbortRecord& abort_record) {
  uint64_t verdict = pack(abort_record);
  bool is_decided = false;
  for (Entry* entry : entries_) {
    if (entry == nullptr) continue;
    uint64_t word = verdict;
    store_if_none(entry->abort_record, word);
    if (!is_decided && is_sound(unpack_abort_record(word), static_cast<int>(entries_.size()))) {
      verdict = word;
      is_decided = true;
    }
    uint64_t for_kernels = verdict;
    store_if_none(entry->abort_record_of_kernels, for_kernels);
  }
  return unpack_abort_record(verdict);
}

void RankBoard::end_own_kernels() {
  uint64_t word = pack(AbortRecord{EPX_ERROR_ABORTED, EPX_OP_NONE, rank_, 0});
  store_if_none(own().abort_record_of_kernels, word);
}

void RankBoard::set_launched(uint64_t sequence) {
  std::atomic_ref(own().launched).store(sequence, std::memory_order_release);
}

uint64_t RankBoard::launched(int rank) const {
  Entry* const entry =
      rank >= 0 && static_cast<size_t>(rank) < entries_.size() ? entries_[static_cast<size_t>(rank)] : nullptr;
  return entry != nullptr ? std::atomic_ref(entry->launched).load(std::memory_order_acquire) : kUnknown;
}

void RankBoard::post(const Post& post, uint64_t round) {
  Round& place = own().rounds[round % 2];
  place.post = post;
  std::atomic_ref(place.number).store(round, std::memory_order_release);
}

std::optional<RankBoard::Post> RankBoard::posted(int rank, uint64_t round) const {
  Round& place = entries_[static_cast<size_t>(rank)]->rounds[round % 2];
  if (std::atomic_ref(place.number).load(std::memory_order_acquire) != round) return {};
  return place.post;
}

} // namespace epx::cuda
