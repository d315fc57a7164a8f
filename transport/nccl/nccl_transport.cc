// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_transport.h"

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include <nccl.h>
#include <nccl_device.h>

#include "transport/nccl/communicator.h"
#include "transport/nccl/gpu_identity.h"
#include "transport/nccl/nccl_check.h"
#include "transport/nccl/nccl_exchange.h"
#include "transport/nccl/nccl_library.h"
#include "transport/nccl/nccl_versions.h"
#include "transport/nccl/nccl_window.h"

namespace epx {
namespace {

class NcclTransport final : public Transport {
public:
  NcclTransport(std::shared_ptr<Communicator> communicator, int rank, int num_ranks, std::chrono::milliseconds timeout)
      : communicator_(std::move(communicator)), rank_(rank), num_ranks_(num_ranks),
        exchange_(communicator_.get(), rank, num_ranks, timeout) {}

  WindowAccess window_access() const override { return WindowAccess::by_kernels; }
  Exchange* exchange() override { return &exchange_; }

  std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) override {
    return make_window(bytes, exchange, [&] {
      NcclMemory owner = allocate_nccl_memory(bytes);
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
  check_nccl(nccl().GetVersion(&version), "ncclGetVersion");
  return require_supported_nccl(version);
}

// Each rank contributes a hello before it has a communicator.
struct RankHello {
  GpuIdentity gpu;
  int nccl_code;
};

} // namespace

std::string why_no_nccl() {
  try {
    loaded_nccl();
    return "";
  } catch (const StatusError& error) {
    return error.message();
  }
}

std::unique_ptr<Transport> make_nccl_transport(int rank, int num_ranks, int64_t timeout_ms, Exchange& exchange) {
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
    if (const std::string why = why_not_new_enough(gpus); !why.empty())
      fail(EPX_ERROR_UNSUPPORTED, "transport nccl: {}", why);
    ncclUniqueId id{};
    if (rank == 0) check_nccl(nccl().GetUniqueId(&id), "ncclGetUniqueId");
    return id;
  });
  std::shared_ptr<Communicator> communicator;
  exchange.all_gather([&] {
    if (num_ranks == 1) return 1;
    log::transport().info("NCCL {}: a communicator of {} ranks begins", loaded_nccl().name, num_ranks);
    communicator = std::make_shared<Communicator>(loaded_nccl(), rank, num_ranks, ids.front(), timeout);
    log::transport().info("the communicator is there");
    const int lsa_ranks = nccl().TeamLsa(communicator->get()).nRanks;
    if (lsa_ranks < num_ranks)
      fail(EPX_ERROR_UNSUPPORTED,
           "the group has {} ranks, but only {} of them reach each other's memory over NVLink (rank {}'s "
           "LSA domain)",
           num_ranks, lsa_ranks, rank);
    return lsa_ranks;
  });
  return std::make_unique<NcclTransport>(std::move(communicator), rank, num_ranks, timeout);
}

} // namespace epx
