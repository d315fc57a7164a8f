// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_transport.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nccl.h>
#include <nccl_device.h>

#include "transport/nccl/bootstrap_root.h"
#include "transport/nccl/communicator.h"
#include "transport/nccl/gpu_fabric.h"
#include "transport/nccl/gpu_identity.h"
#include "transport/nccl/nccl_check.h"
#include "transport/nccl/nccl_exchange.h"
#include "transport/nccl/nccl_library.h"
#include "transport/nccl/nccl_rails.h"
#include "transport/nccl/nccl_versions.h"
#include "transport/nccl/nccl_window.h"

namespace epx {
namespace {

constexpr int kWindowCtas = 1; // such a communicator carries small records only; channels cost time and memory

// Returns when the communicator of a node's ranks is made. Throws TIMEOUT, SYSTEM, UNSUPPORTED.
void wait_for_communicator(Communicator& communicator, int num_ranks) {
  if (communicator.is_made()) return;
  communicator.wait_until_made();
  log::transport().info("the communicator is there");
  const int lsa_ranks = nccl().TeamLsa(communicator.get()).nRanks;
  if (lsa_ranks < num_ranks)
    fail(EPX_ERROR_UNSUPPORTED,
         "the group has {} ranks on this node, but only {} of them reach each other's memory over NVLink (NCCL's LSA "
         "domain)",
         num_ranks, lsa_ranks);
}

class NcclTransport final : public Transport {
public:
  NcclTransport(std::shared_ptr<Communicator> communicator, int rank, int num_ranks, bool has_nvlink,
                std::chrono::milliseconds timeout)
      : communicator_(std::move(communicator)), rank_(rank), num_ranks_(num_ranks), has_nvlink_(has_nvlink),
        exchange_(communicator_.get(), rank, num_ranks, timeout) {}

  WindowAccess window_access() const override { return WindowAccess::by_kernels; }
  bool keeps_lines_whole() const override { return has_nvlink_; }
  bool reaches_peers() const override { return communicator_ == nullptr || communicator_->get() != nullptr; }
  void end_waits_when(const std::function<bool()>& has_ended) override {
    if (communicator_ != nullptr) communicator_->end_waits_when(has_ended);
  }
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
    require_equal_bytes(bytes, exchange);
    std::unique_ptr<NcclWindow> window;
    exchange.all_gather([&] {
      window = make();
      log::transport().info("the {} bytes of a window are there, and their registration begins", bytes);
      return bytes;
    });
    exchange.all_gather([&] {
      if (communicator_ != nullptr) wait_for_communicator(*communicator_, num_ranks_);
      window->register_everywhere();
      return bytes;
    });
    return window;
  }

  std::shared_ptr<Communicator> communicator_; // NULL where the node has one rank; it is made before the first window is
  int rank_;
  int num_ranks_;
  bool has_nvlink_;
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

// From such ids NCCL makes communicators; one without a maker is all zeros.
struct UniqueIds {
  ncclUniqueId group; // made by rank 0 of the group
  ncclUniqueId node;  // made by the first rank of a node
};

// The roots of the ids that this rank has made; NULL where it made none.
struct BootstrapRoots {
  std::unique_ptr<BootstrapRoot> group, node;
};

struct CheckedRanks {
  std::vector<UniqueIds> ids;    // what each rank has made
  std::vector<GpuIdentity> gpus; // of each rank
  BootstrapRoots own;
};

ncclUniqueId make_id(std::unique_ptr<BootstrapRoot>& root) {
  root = std::make_unique<BootstrapRoot>();
  return root->id();
}

// The call is collective. It returns once all ranks have been found to be able to use NCCL together. `first_of_node` is the
// first of the ranks_per_node ranks of this rank's node.
CheckedRanks check_ranks_and_make_ids(int rank, int first_of_node, int ranks_per_node, Exchange& exchange) {
  const std::vector<RankHello> hellos = exchange.all_gather([] {
    const NcclVersion& version = loaded_nccl();
    log::transport().info("NCCL {} is loaded", version.name);
    return RankHello{find_gpu(), version.code};
  });
  std::vector<GpuIdentity> gpus;
  std::vector<int> codes;
  for (const RankHello& hello : hellos) {
    gpus.push_back(hello.gpu);
    codes.push_back(hello.nccl_code);
  }
  BootstrapRoots own;
  std::vector<UniqueIds> all_ids = exchange.all_gather([&] { // the UID all-gather
    if (const std::string why = why_not_one_nccl(codes); !why.empty())
      fail(EPX_ERROR_UNSUPPORTED, "{}: all ranks of a group need the same one", why);
    if (const std::string why = why_not_a_gpu_each(gpus); !why.empty())
      fail(EPX_ERROR_UNSUPPORTED,
           "transport nccl needs a GPU of its own for every rank, but {}: call cudaSetDevice before epx_group_create", why);
    if (const std::string why = why_not_new_enough(gpus); !why.empty())
      fail(EPX_ERROR_UNSUPPORTED, "transport nccl: {}", why);
    const bool is_one_node = static_cast<size_t>(ranks_per_node) == gpus.size();
    UniqueIds ids{};
    // One rank needs no communicator.
    if (rank == 0 && gpus.size() > 1) ids.group = make_id(own.group);
    if (rank == first_of_node && ranks_per_node > 1 && !is_one_node) ids.node = make_id(own.node);
    return ids;
  });
  return {std::move(all_ids), std::move(gpus), std::move(own)};
}

// The call is collective: bring() returns whether this rank reaches all of its node over NVLink. Returns whether all ranks do;
// those of other groups do not count, as they would in Exchange::all_of().
template <typename Bring>
bool all_have_nvlink(Exchange& exchange, const Bring& bring) {
  const std::vector<int32_t> all = exchange.all_gather([&] { return int32_t{bring() ? 1 : 0}; });
  if (std::ranges::count(all, 0) == 0) return true;
  log::transport().info("not all ranks reach each other over NVLink: calls with few tokens take the high-throughput path");
  return false;
}

// Begins to make the communicator of the ranks that have `id`, which must reach each other's memory. `root` is as Communicator
// takes it.
std::shared_ptr<Communicator> begin_window_communicator(int rank, int num_ranks, const ncclUniqueId& id,
                                                        std::unique_ptr<BootstrapRoot> root,
                                                        std::chrono::milliseconds timeout) {
  log::transport().info("NCCL {}: a communicator of {} ranks begins", loaded_nccl().name, num_ranks);
  return std::make_shared<Communicator>(loaded_nccl(), rank, num_ranks, id, std::move(root), kWindowCtas, timeout);
}

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
  CheckedRanks ranks = check_ranks_and_make_ids(rank, 0, num_ranks, exchange);
  std::shared_ptr<Communicator> communicator;
  const bool has_nvlink = all_have_nvlink(exchange, [&] {
    if (num_ranks > 1)
      communicator =
          begin_window_communicator(rank, num_ranks, ranks.ids.front().group, std::move(ranks.own.group), timeout);
    return reaches_over_nvlink(ranks.gpus[static_cast<size_t>(rank)], ranks.gpus); // while NCCL makes the communicator
  });
  if (communicator != nullptr) communicator->all_ranks_have_begun();
  return std::make_unique<NcclTransport>(std::move(communicator), rank, num_ranks, has_nvlink, timeout);
}

MultiNodeTransport make_nccl_multi_node_transport(int rank, int num_ranks, int ranks_per_node, int rail_ctas,
                                                  int64_t timeout_ms, Exchange& exchange) {
  const std::chrono::milliseconds timeout(timeout_ms);
  const int index = rank % ranks_per_node;
  CheckedRanks ranks = check_ranks_and_make_ids(rank, rank - index, ranks_per_node, exchange);
  std::shared_ptr<Communicator> of_node;
  std::unique_ptr<NcclRails> rails;
  // The node's communicator is made in an exchange before that of the rails: a node that fails here fails all ranks, and no
  // other node begins to wait for it in the communicator of the rails.
  const bool has_nvlink = all_have_nvlink(exchange, [&] {
    const auto first = static_cast<size_t>(rank - index);
    if (ranks_per_node > 1)
      of_node = begin_window_communicator(index, ranks_per_node, ranks.ids[first].node, std::move(ranks.own.node), timeout);
    const bool reaches = reaches_over_nvlink(ranks.gpus[static_cast<size_t>(rank)],
                                             std::span(ranks.gpus).subspan(first, static_cast<size_t>(ranks_per_node)));
    if (of_node != nullptr) wait_for_communicator(*of_node, ranks_per_node);
    return reaches;
  });
  exchange.all_gather([&] {
    log::transport().info("NCCL {}: a communicator of {} ranks begins, for the rails of {} nodes", loaded_nccl().name,
                          num_ranks, num_ranks / ranks_per_node);
    auto communicator = std::make_unique<Communicator>(loaded_nccl(), rank, num_ranks, ranks.ids.front().group,
                                                       std::move(ranks.own.group), rail_ctas, timeout);
    communicator->wait_until_made();
    rails = std::make_unique<NcclRails>(std::move(communicator), rank, num_ranks, ranks_per_node, timeout);
    rails->connect();
    log::transport().info("the rails are there");
    return 0;
  });
  return {std::make_unique<NcclTransport>(std::move(of_node), index, ranks_per_node, has_nvlink, timeout),
          std::move(rails)};
}

} // namespace epx
