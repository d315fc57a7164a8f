#include "runtime/stages/cuda/rank_board.h"

#include <atomic>

#include "base/error.h"
#include "base/log.h"
#include "transport/host/host_transport.h"

namespace epx::cuda {
namespace {

static_assert(std::atomic_ref<uint64_t>::is_always_lock_free);

// False: somebody was there before; `word` then holds that record.
bool store_if_none(uint64_t& place, uint64_t& word) {
  uint64_t found = 0;
  if (std::atomic_ref(place).compare_exchange_strong(found, word, std::memory_order_acq_rel)) return true;
  word = found;
  return false;
}

} // namespace

RankBoard::RankBoard(int rank, int num_ranks, Exchange& exchange) : rank_(rank), shares_(static_cast<size_t>(num_ranks)) {
  try {
    open(num_ranks, exchange);
  } catch (const Error& error) { // on all ranks alike
    close();
    if (error.status() == EPX_ERROR_TIMEOUT) throw;
    log::transport().warn(
        "ranks cannot reach each other's host memory, and will learn of a peer whose GPU refuses its kernels "
        "only when a wait times out: {}",
        error.message());
    exchange.all_gather([&] { // the ranks that have memory do not wait for one that has none
      own_memory_ = make_mapped_memory<WorkPartition>();
      return int32_t{0};
    });
    shares_.assign(shares_.size(), nullptr);
    shares_[static_cast<size_t>(rank)] = own_memory_.get();
    abort_record_on_device_ = &own_memory_->abort_record_of_kernels;
  } catch (...) { // there will be no destructor
    close();
    throw;
  }
}

void RankBoard::open(int num_ranks, Exchange& exchange) {
  window_ = make_host_transport(rank_, num_ranks)->open_window(sizeof(WorkPartition), exchange);
  for (int peer = 0; peer < num_ranks; ++peer)
    shares_[static_cast<size_t>(peer)] = window_->view().at<WorkPartition>(peer, 0);
  exchange.all_gather([&] {
    WorkPartition& share = own();
    check_cuda(cudaHostRegister(&share, sizeof(share), cudaHostRegisterMapped | cudaHostRegisterPortable),
               "cudaHostRegister");
    is_registered_ = true;
    void* on_device = nullptr;
    check_cuda(cudaHostGetDevicePointer(&on_device, &share, 0), "cudaHostGetDevicePointer");
    abort_record_on_device_ = &static_cast<const WorkPartition*>(on_device)->abort_record_of_kernels;
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

// The lowest rank that can be reached and whose record is not damaged decides, so that all ranks name the same culprit.
AbortRecord RankBoard::end_group(const AbortRecord& abort_record) {
  uint64_t verdict = pack(abort_record);
  bool is_decided = false;
  for (WorkPartition* share : shares_) {
    if (share == nullptr) continue;
    uint64_t word = verdict;
    store_if_none(share->abort_record, word);
    if (!is_decided && is_sound(unpack_abort_record(word), static_cast<int>(shares_.size()))) {
      verdict = word;
      is_decided = true;
    }
    uint64_t for_kernels = verdict;
    store_if_none(share->abort_record_of_kernels, for_kernels);
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
  WorkPartition* const share =
      rank >= 0 && static_cast<size_t>(rank) < shares_.size() ? shares_[static_cast<size_t>(rank)] : nullptr;
  return share != nullptr ? std::atomic_ref(share->launched).load(std::memory_order_acquire) : kUnknown;
}

} // namespace epx::cuda
