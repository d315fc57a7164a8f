// SPDX-License-Identifier: Apache-2.0
// Takes the place of NCCL for ep_bench itself: bytes travel through the ranks' bootstrap, on the stream's thread. The thread
// that enqueues must wait for the stream before it uses the bootstrap again.
#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/gpu/communicator.h"

namespace epx::bench {
namespace {

void enqueue(std::function<void()> task, cudaStream_t stream) {
  const cudaHostFn_t run = [](void* owned) {
    (*std::unique_ptr<std::function<void()>>(static_cast<std::function<void()>*>(owned)))();
  };
  check_cuda(cudaLaunchHostFunc(stream, run, new std::function<void()>(std::move(task))), "cudaLaunchHostFunc");
}

class BootstrapCommunicator final : public Communicator {
public:
  explicit BootstrapCommunicator(const Peers& peers) : peers_(peers) {}

  void exchange(std::span<const Transfer> transfers, cudaStream_t stream) override {
    enqueue([this, parts = std::vector<Transfer>(transfers.begin(), transfers.end())] { run(parts); }, stream);
  }
  void all_gather(const std::byte* mine, std::byte* all, int64_t bytes, cudaStream_t stream) override {
    enqueue(
        [this, mine, all, bytes] {
          std::ranges::copy(peers_.gather(std::span<const std::byte>(mine, static_cast<size_t>(bytes))), all);
        },
        stream);
  }
  void barrier(cudaStream_t stream) override {
    enqueue([this] { peers_.barrier(); }, stream);
  }

private:
  void run(const std::vector<Transfer>& transfers) const {
    const auto num_ranks = static_cast<size_t>(peers_.num_ranks()), me = static_cast<size_t>(peers_.rank());
    std::vector<int64_t> bytes_to(num_ranks); // by rank; the bytes lie one after the other in that order
    std::vector<const std::byte*> from(num_ranks);
    for (const Transfer& transfer : transfers) {
      bytes_to[static_cast<size_t>(transfer.peer)] = transfer.send_bytes;
      from[static_cast<size_t>(transfer.peer)] = transfer.send;
    }
    const std::vector<int64_t> all_bytes = peers_.gather(std::span<const int64_t>(bytes_to)); // [source, peer]
    int64_t most = 0;
    const auto begin_of = [&](size_t source) { return all_bytes.begin() + static_cast<ptrdiff_t>(source * num_ranks); };
    for (size_t source = 0; source < num_ranks; ++source)
      most = std::max(most, std::reduce(begin_of(source), begin_of(source + 1)));
    std::vector<std::byte> mine(static_cast<size_t>(most));
    for (size_t peer = 0, at = 0; peer < num_ranks; at += static_cast<size_t>(bytes_to[peer++]))
      std::copy_n(from[peer], bytes_to[peer], mine.begin() + static_cast<ptrdiff_t>(at));
    const std::vector<std::byte> all = peers_.gather(std::span<const std::byte>(mine));
    for (const Transfer& transfer : transfers) {
      const auto source = static_cast<size_t>(transfer.peer);
      const auto of_source = begin_of(source);
      if (of_source[static_cast<ptrdiff_t>(me)] != transfer.receive_bytes)
        throw RuntimeError("the emulation: a rank sends another number of bytes than its peer expects");
      const int64_t before = std::reduce(of_source, of_source + static_cast<ptrdiff_t>(me));
      std::copy_n(all.begin() + static_cast<int64_t>(source) * most + before, transfer.receive_bytes, transfer.receive);
    }
  }

  const Peers& peers_;
};

} // namespace

std::unique_ptr<Communicator> make_communicator(const Peers& peers, Gpu&) {
  return std::make_unique<BootstrapCommunicator>(peers);
}

std::string nccl_version() {
  return "emulation";
}

} // namespace epx::bench
