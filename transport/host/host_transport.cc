// SPDX-License-Identifier: Apache-2.0
#include "transport/host/host_transport.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "transport/host/dead_segments.h"

namespace epx {
namespace {

using Segments = std::vector<std::shared_ptr<SharedSegment>>; // [num_ranks]

class HostWindow : public Window {
public:
  HostWindow(Segments segments, int rank) : segments_(std::move(segments)), rank_(rank) {
    for (const auto& segment : segments_)
      bases_.push_back(segment->data());
  }
  PeerWindow view() const override { return {bases_.data(), rank_, static_cast<int>(bases_.size())}; }
  int64_t bytes() const override { return segments_[static_cast<size_t>(rank_)]->bytes(); }

private:
  Segments segments_;
  std::vector<std::byte*> bases_; // by WindowIndex
  int rank_;
};

// Each rank contributes this record of its own segment.
struct SegmentInfo {
  int64_t bytes;
  SegmentAddress address; // zero if the rank could not make nameless memory
};

class HostTransport : public Transport {
public:
  HostTransport(int rank, int num_ranks, SegmentKind kind) : rank_(rank), num_ranks_(num_ranks), kind_(kind) {}

  WindowAccess window_access() const override { return WindowAccess::by_host; }
  Exchange* exchange() override { return nullptr; }

  std::unique_ptr<Window> open_window(int64_t bytes, Exchange& exchange) override {
    if (kind_ == SegmentKind::kNameless) {
      if (auto segments = open_nameless(bytes, exchange)) return std::make_unique<HostWindow>(std::move(*segments), rank_);
      kind_ = SegmentKind::kNamed; // on all ranks
    }
    return std::make_unique<HostWindow>(open_named(bytes, exchange), rank_);
  }

  std::unique_ptr<Window> adopt_window(std::byte* memory, int64_t bytes, Exchange&) override {
    fail(EPX_ERROR_UNSUPPORTED,
         "epx_mem_register: transport host cannot map the {} bytes at {} of this process into other processes; use "
         "epx_mem_alloc",
         bytes, static_cast<void*>(memory));
  }

private:
  // Returns none, on all ranks, if any rank could not make its segment or open a peer's.
  std::optional<Segments> open_nameless(int64_t bytes, Exchange& exchange) {
    std::shared_ptr<SharedSegment> own;
    std::string why_not;
    const std::vector<SegmentInfo> infos = exchange.all_gather([&] {
      own = num_ranks_ == 1 ? SharedSegment::create_private(bytes) : SharedSegment::create_nameless(bytes, why_not);
      return SegmentInfo{bytes, own == nullptr ? SegmentAddress{} : own->address()};
    });
    std::optional<Segments> segments;
    const bool all_have = exchange.all_of([&] {
      require_equal_bytes(infos);
      if (own != nullptr) segments = open_all(infos, own, why_not);
      return segments.has_value();
    });
    if (own != nullptr) own->withdraw();
    if (all_have) return segments;
    log::transport().info("windows get names in {} until all ranks have mapped them: {}", SharedSegment::kDirectory,
                          why_not.empty() ? "a peer cannot open nameless memory" : why_not);
    return std::nullopt;
  }

  // The names of all ranks are removed in any case: after a success all ranks have mapped all segments, after a failure nobody
  // needs them, and a peer may have been killed before it removed its own.
  Segments open_named(int64_t bytes, Exchange& exchange) {
    std::shared_ptr<SharedSegment> own;
    std::vector<SegmentInfo> infos;
    Segments segments;
    try {
      infos = exchange.all_gather([&] {
        own = num_ranks_ == 1 ? SharedSegment::create_private(bytes) : SharedSegment::create_named(bytes);
        return SegmentInfo{bytes, own->address()};
      });
      exchange.all_gather([&] {
        require_equal_bytes(infos);
        std::string why_not;
        std::optional<Segments> opened = open_all(infos, own, why_not);
        if (!opened)
          fail(EPX_ERROR_SYSTEM, "{}; ranks of the host transport must share one machine, and one PID namespace or one {}",
               why_not, SharedSegment::kDirectory);
        segments = std::move(*opened);
        return static_cast<int32_t>(segments.size());
      });
    } catch (...) {
      remove_names(infos);
      own.reset();
      remove_dead_segments(); // a peer may have been killed before the others knew its segment's name
      throw;
    }
    remove_names(infos);
    own->withdraw();
    return segments;
  }

  void require_equal_bytes(const std::vector<SegmentInfo>& infos) const {
    const int64_t bytes = infos[static_cast<size_t>(rank_)].bytes;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      const int64_t peers_bytes = infos[static_cast<size_t>(peer)].bytes;
      if (peers_bytes != bytes)
        fail(EPX_ERROR_MISMATCH, "bytes differ between ranks: rank {} asks for {}, rank {} for {}", rank_, bytes, peer,
             peers_bytes);
    }
  }

  std::optional<Segments> open_all(const std::vector<SegmentInfo>& infos, const std::shared_ptr<SharedSegment>& own,
                                   std::string& why_not) const {
    Segments segments;
    for (int peer = 0; peer < num_ranks_; ++peer) {
      segments.push_back(peer == rank_ ? own : SharedSegment::open(infos[static_cast<size_t>(peer)].address, why_not));
      if (segments.back() == nullptr) return std::nullopt;
    }
    return segments;
  }

  static void remove_names(const std::vector<SegmentInfo>& infos) {
    for (const SegmentInfo& info : infos)
      SharedSegment::remove_name(info.address);
  }

  int rank_;
  int num_ranks_;
  SegmentKind kind_; // the next window's, the same on all ranks
};

} // namespace

std::unique_ptr<Transport> make_host_transport(int rank, int num_ranks, SegmentKind kind) {
  if (num_ranks > 1) remove_dead_segments();
  return std::make_unique<HostTransport>(rank, num_ranks, kind);
}

} // namespace epx
