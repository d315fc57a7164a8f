// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_transport.h"

#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include <nccl.h>
#include <nccl_device.h>

#include "base/cuda.h"
#include "base/log.h"
#include "base/suspension_aware_deadline.h"
#include "transport/nccl/lsa_pointers.h"
#include "transport/nccl/nccl_versions.h"

namespace epx {
namespace {

[[noreturn]] void fail_nccl(ncclResult_t result, const char* call) {
  fail(EPX_ERROR_SYSTEM, "{}: {} ({})", call, ncclGetErrorString(result), ncclGetLastError(nullptr));
}

void check_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) fail_nccl(result, call);
}

// The communicator is non-blocking: this class polls operations in progress, and aborts the communicator at the deadline.
class Communicator {
public:
  Communicator(const NcclVersion& version, int rank, int num_ranks, const ncclUniqueId& id,
               std::chrono::milliseconds timeout)
      : version_(version), timeout_(timeout) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.minCTAs = config.maxCTAs = 1; // its collectives carry small records only; channels cost time and memory
    wait(ncclCommInitRankConfig(&comm_, num_ranks, id, rank, &config), "ncclCommInitRankConfig");
  }
  ~Communicator() {
    if (comm_ != nullptr) ncclCommAbort(comm_); // the abort is local, never waits for a peer, and frees what is left
  }
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ncclComm_t get() const { return comm_; }
  const NcclVersion& version() const { return version_; }

  // Waits until NCCL has completed what `call` began.
  void wait(ncclResult_t result, const char* call) {
    SuspensionAwareDeadline deadline{timeout_};
    if (result == ncclSuccess) result = ncclInProgress; // ncclSuccess may mean that it has only begun
    while (result == ncclInProgress) {
      if (deadline.passed()) {
        ncclCommAbort(std::exchange(comm_, nullptr));
        fail(EPX_ERROR_TIMEOUT, "{}: not all ranks came within {} ms", call, timeout_.count());
      }
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      check_nccl(ncclCommGetAsyncError(comm_, &result), "ncclCommGetAsyncError");
    }
    check_nccl(result, call);
  }

private:
  const NcclVersion& version_; // the loaded library's
  ncclComm_t comm_ = nullptr;
  std::chrono::milliseconds timeout_;
};

struct NcclFree {
  void operator()(std::byte* memory) const noexcept { ncclMemFree(memory); }
};

// Allocates zero bytes.
std::unique_ptr<std::byte, NcclFree> allocate(int64_t bytes) {
  void* memory = nullptr;
  const ncclResult_t result = ncclMemAlloc(&memory, static_cast<size_t>(bytes));
  std::unique_ptr<std::byte, NcclFree> owner(static_cast<std::byte*>(memory));
  if (result != ncclSuccess) {
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    cudaGetLastError();
    fail(EPX_ERROR_OUT_OF_MEMORY, "ncclMemAlloc of {} bytes: {} ({} bytes of {} are free on the GPU)", bytes,
         ncclGetErrorString(result), free_bytes, total_bytes);
  }
  check_cuda(cudaMemset(memory, 0, static_cast<size_t>(bytes)), "cudaMemset");
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  return owner;
}

// A window shares ownership of the communicator, which therefore outlives it.
class NcclWindow final : public Window {
public:
  // `owner` owns `memory`, or is empty.
  NcclWindow(std::shared_ptr<Communicator> communicator, int rank, int num_ranks, std::byte* memory, int64_t bytes,
             std::unique_ptr<std::byte, NcclFree> owner)
      : communicator_(std::move(communicator)), rank_(rank), num_ranks_(num_ranks), memory_(memory), bytes_(bytes),
        owner_(std::move(owner)) {
    if (reinterpret_cast<uintptr_t>(memory) % NCCL_WIN_REQUIRED_ALIGNMENT != 0)
      fail(EPX_ERROR_INVALID_ARGUMENT, "the memory at {} is not aligned to {} bytes, as NCCL needs it",
           static_cast<void*>(memory), NCCL_WIN_REQUIRED_ALIGNMENT);
  }
  ~NcclWindow() override {
    if (window_ != nullptr && communicator_->get() != nullptr) ncclCommWindowDeregister(communicator_->get(), window_);
  }

  // The call is collective in the communicator.
  void register_everywhere() {
    if (num_ranks_ == 1) { // NCCL has no symmetric memory for one rank, and none is needed
      bases_ = {memory_};
      return;
    }
    communicator_->wait(ncclCommWindowRegister(communicator_->get(), memory_, static_cast<size_t>(bytes_), &window_,
                                               NCCL_WIN_COLL_SYMMETRIC),
                        "ncclCommWindowRegister");
    if (window_ == nullptr)
      fail(EPX_ERROR_UNSUPPORTED,
           "NCCL has no symmetric window over the {} bytes at {} (ncclCommWindowRegister returned none): peer access over "
           "NVLink, CUDA's virtual memory management (NCCL_CUMEM_ENABLE) and memory from ncclMemAlloc are needed",
           bytes_, static_cast<void*>(memory_));
    bases_.resize(static_cast<size_t>(num_ranks_));
    find_lsa_pointers(communicator_->version(), window_, bases_);
    bases_[static_cast<size_t>(rank_)] = memory_; // the user knows this address
  }

  PeerWindow view() const override { return {bases_.data(), rank_, num_ranks_}; }
  int64_t bytes() const override { return bytes_; }

private:
  std::shared_ptr<Communicator> communicator_;
  int rank_;
  int num_ranks_;
  std::byte* memory_;
  int64_t bytes_;
  std::unique_ptr<std::byte, NcclFree> owner_;
  ncclWindow_t window_ = nullptr;
  std::vector<std::byte*> bases_;
};

// NcclExchange gathers records by ncclAllGather on the GPU.
class NcclExchange final : public Exchange {
public:
  // `communicator` may be NULL for one rank.
  NcclExchange(Communicator* communicator, int rank, int num_ranks, std::chrono::milliseconds timeout)
      : communicator_(communicator), rank_(rank), num_ranks_(num_ranks), timeout_(timeout),
        records_(make_device_memory<ExchangeRecord>(static_cast<size_t>(num_ranks) + 1)) {}

protected:
  std::vector<ExchangeRecord> gather(ExchangeRecord mine) override {
    mine.rank = rank_;
    if (num_ranks_ == 1) return {mine};
    ExchangeRecord* const own = records_.get() + num_ranks_;
    std::vector<ExchangeRecord> all(static_cast<size_t>(num_ranks_));
    check_cuda(cudaMemcpyAsync(own, &mine, sizeof(mine), cudaMemcpyHostToDevice, stream_.get()), "cudaMemcpyAsync");
    communicator_->wait(
        ncclAllGather(own, records_.get(), sizeof(ExchangeRecord), ncclChar, communicator_->get(), stream_.get()),
        "ncclAllGather");
    check_cuda(cudaMemcpyAsync(all.data(), records_.get(), all.size() * sizeof(ExchangeRecord), cudaMemcpyDeviceToHost,
                               stream_.get()),
               "cudaMemcpyAsync");
    SuspensionAwareDeadline deadline{timeout_};
    for (cudaError_t state = cudaErrorNotReady; state != cudaSuccess; state = cudaStreamQuery(stream_.get())) {
      if (state != cudaErrorNotReady) check_cuda(state, "cudaStreamQuery");
      if (deadline.passed()) fail(EPX_ERROR_TIMEOUT, "not all ranks came within {} ms", timeout_.count());
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    for (const ExchangeRecord& record : all)
      if (record.status != EPX_SUCCESS && mine.status == EPX_SUCCESS) throw_peer_failure(record);
    return all;
  }

private:
  Communicator* communicator_;
  int rank_;
  int num_ranks_;
  std::chrono::milliseconds timeout_;
  CudaStream stream_;
  DeviceMemory<ExchangeRecord> records_; // [num_ranks], then this rank's own
};

class NcclTransportImpl final : public NcclTransport {
public:
  NcclTransportImpl(std::shared_ptr<Communicator> communicator, int rank, int num_ranks, std::chrono::milliseconds timeout)
      : communicator_(std::move(communicator)), rank_(rank), num_ranks_(num_ranks),
        exchange_(communicator_.get(), rank, num_ranks, timeout) {}

  epx_transport kind() const override { return EPX_TRANSPORT_NCCL; }
  Exchange& exchange() override { return exchange_; }

  std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) override {
    return make_window(bytes, exchange, [&] {
      auto owner = allocate(bytes);
      std::byte* const memory = owner.get();
      return std::make_unique<NcclWindow>(communicator_, rank_, num_ranks_, memory, bytes, std::move(owner));
    });
  }
  std::unique_ptr<Window> adopt_window(std::byte* memory, int64_t bytes, Exchange& exchange) override {
    return make_window(bytes, exchange, [&] {
      return std::make_unique<NcclWindow>(communicator_, rank_, num_ranks_, memory, bytes, nullptr);
    });
  }

private:
  template <typename Make>
  std::unique_ptr<Window> make_window(int64_t bytes, Exchange& exchange, const Make& make) {
    std::unique_ptr<NcclWindow> window;
    const std::vector<int64_t> sizes = exchange.all_gather([&] {
      window = make();
      return bytes;
    });
    exchange.all_gather([&] {
      for (int peer = 0; peer < num_ranks_; ++peer)
        if (sizes[static_cast<size_t>(peer)] != bytes)
          fail(EPX_ERROR_MISMATCH, "bytes differ between ranks: rank {} asks for {}, rank {} for {}", rank_, bytes, peer,
               sizes[static_cast<size_t>(peer)]);
      return bytes;
    });
    exchange.all_gather([&] {
      window->register_everywhere();
      return bytes;
    });
    return window;
  }

  std::shared_ptr<Communicator> communicator_;
  int rank_;
  int num_ranks_;
  NcclExchange exchange_;
};

// Returns the release whose library is loaded.
const NcclVersion& loaded_nccl() {
  int version = 0;
  check_nccl(ncclGetVersion(&version), "ncclGetVersion");
  return require_supported_nccl(version);
}

// Each rank contributes a hello before it has a communicator.
struct RankHello {
  GpuIdentity gpu;
  int nccl_code;
};

} // namespace

GpuIdentity find_gpu() noexcept {
  GpuIdentity gpu;
  cudaDeviceProp properties;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
    cudaGetLastError();
    return gpu;
  }
  gpu.device = device;
  std::copy_n(properties.uuid.bytes, gpu.uuid.size(), gpu.uuid.begin());
  return gpu;
}

std::string why_not_a_gpu_each(std::span<const GpuIdentity> gpus) {
  for (size_t rank = 0; rank < gpus.size(); ++rank) {
    if (gpus[rank].device < 0) return fmt::format("rank {} has no GPU (no driver, or no device)", rank);
    for (size_t other = 0; other < rank; ++other)
      if (gpus[other].uuid == gpus[rank].uuid)
        return fmt::format("ranks {} and {} share a GPU (device {} of rank {})", other, rank, gpus[rank].device, rank);
  }
  return "";
}

std::unique_ptr<NcclTransport> make_nccl_transport(int rank, int num_ranks, int64_t timeout_ms, Exchange& exchange) {
  const std::chrono::milliseconds timeout(timeout_ms);
  const std::vector<RankHello> hellos = exchange.all_gather([] { return RankHello{find_gpu(), loaded_nccl().code}; });
  const std::vector<ncclUniqueId> ids = exchange.all_gather([&] { // the UID all-gather
    std::vector<GpuIdentity> gpus;
    std::vector<int> codes;
    for (const RankHello& hello : hellos) {
      gpus.push_back(hello.gpu);
      codes.push_back(hello.nccl_code);
    }
    if (const std::string why = why_not_one_nccl(codes); !why.empty())
      fail(EPX_ERROR_UNSUPPORTED, "{}: all ranks of a group need the same one", why);
    if (const std::string why = why_not_a_gpu_each(gpus); !why.empty())
      fail(EPX_ERROR_UNSUPPORTED,
           "transport nccl needs a GPU of its own for every rank, but {}: call cudaSetDevice before epx_group_create", why);
    ncclUniqueId id{};
    if (rank == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    return id;
  });
  std::shared_ptr<Communicator> communicator;
  exchange.all_gather([&] {
    if (num_ranks == 1) return 1;
    communicator = std::make_shared<Communicator>(loaded_nccl(), rank, num_ranks, ids.front(), timeout);
    const int lsa_ranks = ncclTeamLsa(communicator->get()).nRanks;
    if (lsa_ranks < num_ranks)
      fail(EPX_ERROR_UNSUPPORTED,
           "the group has {} ranks, but only {} of them reach each other's memory over NVLink (rank {}'s "
           "LSA domain)",
           num_ranks, lsa_ranks, rank);
    return lsa_ranks;
  });
  return std::make_unique<NcclTransportImpl>(std::move(communicator), rank, num_ranks, timeout);
}

} // namespace epx
