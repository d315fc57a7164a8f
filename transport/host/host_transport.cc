#include "transport/host/host_transport.h"

#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "runtime/base/error.h"
#include "runtime/base/random.h"
#include "transport/host/shared_segment.h"

namespace epx {
namespace {

class HostWindow : public Window {
public:
  HostWindow(std::vector<std::shared_ptr<SharedSegment>> segments, int rank) : segments_(std::move(segments)), rank_(rank) {
    for (const auto& segment : segments_)
      bases_.push_back(segment->data());
  }
  PeerWindow view() const override { return {bases_.data(), rank_, static_cast<int>(bases_.size())}; }
  int64_t bytes() const override { return segments_[static_cast<size_t>(rank_)]->bytes(); }

private:
  std::vector<std::shared_ptr<SharedSegment>> segments_; // [num_ranks]
  std::vector<std::byte*> bases_;
  int rank_;
};

// What each rank tells the others of its share.
struct Share {
  int64_t bytes;
  std::array<char, 64> name;
};

class HostTransport : public Transport {
public:
  HostTransport(int rank, int num_ranks) : rank_(rank), num_ranks_(num_ranks) {}

  epx_transport kind() const override { return EPX_TRANSPORT_HOST; }

  std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) override {
    std::shared_ptr<SharedSegment> own;
    const std::vector<Share> shares = exchange.all_gather([&] {
      Share share{};
      share.bytes = bytes;
      own = create_share(bytes, share.name);
      return share;
    });
    std::vector<std::shared_ptr<SharedSegment>> segments;
    exchange.all_gather([&] {
      for (int peer = 0; peer < num_ranks_; ++peer) {
        const Share& share = shares[static_cast<size_t>(peer)];
        if (share.bytes != bytes)
          fail(EPX_ERROR_MISMATCH, "bytes differ between ranks: rank {} asks for {}, rank {} for {}", rank_, bytes, peer,
               share.bytes);
        segments.push_back(peer == rank_ ? own : SharedSegment::open(share.name.data(), bytes));
      }
      return static_cast<int32_t>(segments.size());
    });
    own->unlink(); // every rank has mapped it: from now on even SIGKILL leaves nothing behind
    return std::make_unique<HostWindow>(std::move(segments), rank_);
  }

private:
  std::shared_ptr<SharedSegment> create_share(int64_t bytes, std::array<char, 64>& name) const {
    if (num_ranks_ == 1) return SharedSegment::create_private(bytes);
    const std::string unique = fmt::format("/epx-{:016x}{:016x}", random_u64(), random_u64());
    unique.copy(name.data(), name.size() - 1);
    return SharedSegment::create(unique, bytes);
  }

  int rank_;
  int num_ranks_;
};

} // namespace

std::unique_ptr<Transport> make_host_transport(int rank, int num_ranks) {
  return std::make_unique<HostTransport>(rank, num_ranks);
}

} // namespace epx
