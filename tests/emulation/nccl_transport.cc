// SPDX-License-Identifier: Apache-2.0
// Implements transport/nccl/nccl_transport.h, gpu_identity.h and gpu_fabric.h without NCCL: windows are the host transport's,
// and small records and rails go through one of them.
#include "transport/nccl/nccl_transport.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <unistd.h>

#include "base/suspension_aware_deadline.h"
#include "tests/emulation/device_memory.h"
#include "tests/emulation/nodes.h"
#include "tests/emulation/rails.h"
#include "transport/host/host_transport.h"
#include "transport/nccl/gpu_fabric.h"
#include "transport/nccl/gpu_identity.h"

namespace {
thread_local int ranks_per_node = 0;
} // namespace

namespace epx {
namespace {

// Each rank has two entries for its record in every rank's window, used alternately by parity, so that a fast rank does not
// overwrite what a slow one reads.
class WindowExchange final : public Exchange {
public:
  // The window, which begins with the entries, is of more ranks: those of the exchange are num_ranks from first_rank on.
  WindowExchange(std::shared_ptr<Window> window, int first_rank, int num_ranks, int64_t timeout_ms)
      : timeout_(timeout_ms), window_(std::move(window)), first_rank_(first_rank), num_ranks_(num_ranks) {}
  static int64_t bytes(int num_ranks) { return 2 * num_ranks * static_cast<int64_t>(sizeof(Entry)); }
  static constexpr int64_t kAlignment = 64; // of bytes()

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override {
    const PeerWindow window = window_->view();
    mine.rank = window.rank;
    ++round_;
    for (int peer = first_rank_; peer < first_rank_ + num_ranks_; ++peer) {
      Entry& entry = entry_at(peer, window.rank);
      entry.record = mine;
      std::atomic_ref(entry.round).store(round_, std::memory_order_release);
    }
    SuspensionAwareDeadline deadline{timeout_};
    std::vector<ExchangeRecord> all;
    for (int peer = first_rank_; peer < first_rank_ + num_ranks_; ++peer) {
      Entry& entry = entry_at(window.rank, peer);
      while (std::atomic_ref(entry.round).load(std::memory_order_acquire) < round_) {
        if (deadline.passed()) fail(EPX_ERROR_TIMEOUT, "not all ranks came within {} ms", timeout_.count());
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      all.push_back(entry.record);
    }
    throw_peer_failure(mine, all);
    return all;
  }

private:
  struct alignas(kAlignment) Entry {
    ExchangeRecord record;
    uint64_t round;
  };
  Entry& entry_at(int owner, int source) const {
    const PeerWindow window = window_->view();
    return window.at<Entry>(owner,
                            0)[(round_ % 2) * static_cast<uint64_t>(window.num_ranks) + static_cast<uint64_t>(source)];
  }

  std::chrono::milliseconds timeout_;
  std::shared_ptr<Window> window_;
  int first_rank_, num_ranks_;
  uint64_t round_ = 0;
};

// A window that others of this process can be laid over. It is the only memory that peers can access, as NCCL can register only
// what it has allocated.
class KnownWindow final : public Window {
public:
  explicit KnownWindow(std::unique_ptr<Window> window) : window_(std::move(window)) {
    emulation::add_device_memory(window_->view().local<std::byte>(0), static_cast<size_t>(window_->bytes()));
    const std::scoped_lock lock(mutex);
    known.insert(this);
  }
  KnownWindow(const KnownWindow&) = delete;
  KnownWindow& operator=(const KnownWindow&) = delete;
  ~KnownWindow() override {
    emulation::remove_device_memory(window_->view().local<std::byte>(0));
    const std::scoped_lock lock(mutex);
    known.erase(this);
  }

  PeerWindow view() const override { return window_->view(); }
  int64_t bytes() const override { return window_->bytes(); }

  // Returns the window that contains [memory, memory + bytes), or NULL.
  static const KnownWindow* find(const std::byte* memory, int64_t bytes) {
    const std::scoped_lock lock(mutex);
    for (const KnownWindow* window : known) {
      const std::byte* const start = window->view().local<std::byte>(0);
      if (memory >= start && memory + bytes <= start + window->bytes()) return window;
    }
    return nullptr;
  }

private:
  static inline std::mutex mutex;
  static inline std::set<const KnownWindow*> known;
  std::unique_ptr<Window> window_;
};

class AdoptedWindow final : public Window {
public:
  AdoptedWindow(std::byte* memory, int64_t bytes, Exchange& exchange) : bytes_(bytes) {
    require_equal_bytes(bytes, exchange);
    const KnownWindow* below = nullptr;
    const std::vector<int64_t> offsets = exchange.all_gather([&] {
      below = KnownWindow::find(memory, bytes);
      if (below == nullptr)
        fail(EPX_ERROR_UNSUPPORTED, "no symmetric window over the {} bytes at {}", bytes, static_cast<void*>(memory));
      return memory - below->view().local<std::byte>(0);
    });
    rank_ = below->view().rank;
    for (size_t rank = 0; rank < offsets.size(); ++rank)
      bases_.push_back(below->view().at<std::byte>(static_cast<int>(rank), offsets[rank]));
  }

  PeerWindow view() const override { return {bases_.data(), rank_, static_cast<int>(bases_.size())}; }
  int64_t bytes() const override { return bytes_; }

private:
  int64_t bytes_;
  int rank_ = 0;
  std::vector<std::byte*> bases_;
};

class EmulatedTransport final : public Transport {
public:
  EmulatedTransport(int rank, int num_ranks, const WindowExchange& exchange)
      : host_(make_host_transport(rank, num_ranks)), exchange_(exchange) {}

  WindowAccess window_access() const override { return WindowAccess::by_kernels; }
  bool keeps_lines_whole() const override { return std::getenv("EPX_TEST_WITHOUT_NVLINK") == nullptr; }
  Exchange* exchange() override { return &exchange_; }
  std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) override {
    require_equal_bytes(bytes, exchange);
    return std::make_unique<KnownWindow>(host_->open_window(bytes, exchange));
  }
  std::unique_ptr<Window> adopt_window(std::byte* memory, int64_t bytes, Exchange& exchange) override {
    return std::make_unique<AdoptedWindow>(memory, bytes, exchange);
  }

private:
  std::unique_ptr<Transport> host_;
  WindowExchange exchange_;
};

} // namespace

GpuIdentity find_gpu() noexcept {
  GpuIdentity gpu;
  cudaGetDevice(&gpu.device);
  gpu.uuid[0] = static_cast<char>(gpu.device);
  return gpu;
}

// What epx_emulation_set_ranks_per_node says makes nodes of the ranks whose devices follow each other.
GpuFabric find_gpu_fabric() noexcept {
  GpuFabric fabric;
  if (ranks_per_node == 0) return fabric;
  int device = 0;
  cudaGetDevice(&device);
  fabric.cluster.fill(1);
  fabric.clique = static_cast<uint32_t>(device / ranks_per_node);
  return fabric;
}

std::string why_not_a_gpu_each(std::span<const GpuIdentity>) {
  return "";
}

std::string why_not_new_enough(std::span<const GpuIdentity>) {
  return "";
}

std::string why_no_nccl() {
  return "";
}

std::unique_ptr<Transport> make_nccl_transport(int rank, int num_ranks, int64_t timeout_ms, Exchange& exchange) {
  const std::shared_ptr<Window> shared =
      make_host_transport(rank, num_ranks)->open_window(WindowExchange::bytes(num_ranks), exchange);
  return std::make_unique<EmulatedTransport>(rank, num_ranks, WindowExchange(shared, 0, num_ranks, timeout_ms));
}

MultiNodeTransport make_nccl_multi_node_transport(int rank, int num_ranks, int ranks_per_node, int /*rail_ctas*/,
                                                  int64_t timeout_ms, Exchange& exchange) {
  const int64_t mailboxes = WindowExchange::bytes(num_ranks);
  const std::shared_ptr<Window> shared =
      make_host_transport(rank, num_ranks)->open_window(mailboxes + emulation::mailbox_bytes(num_ranks), exchange);
  const int index = rank % ranks_per_node;
  return {std::make_unique<EmulatedTransport>(index, ranks_per_node,
                                              WindowExchange(shared, rank - index, ranks_per_node, timeout_ms)),
          emulation::make_rails(shared, mailboxes, ranks_per_node)};
}

} // namespace epx

void epx_emulation_set_ranks_per_node(int ranks) {
  ranks_per_node = ranks;
}
