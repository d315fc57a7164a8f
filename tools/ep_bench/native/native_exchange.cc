// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/native/native_exchange.h"

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/native/native_kernels.h"

namespace epx::bench {
namespace {

template <typename T>
Buffer upload(Gpu& gpu, const std::vector<T>& values) {
  return Buffer::input(gpu, std::as_bytes(std::span(values)));
}

template <typename T>
T* data_of(const Buffer& buffer) {
  return reinterpret_cast<T*>(buffer.data());
}

size_t bytes_of_integers(int64_t count) {
  return static_cast<size_t>(count) * sizeof(int32_t);
}

} // namespace

NativeExchange::NativeExchange(std::span<const InputSet> sets, const std::vector<int32_t>& first_experts, int64_t max_rows,
                               const Options& options, const Peers& peers, Gpu& gpu)
    : gpu_(gpu), options_(options), rank_(static_cast<size_t>(peers.rank())), num_ranks_(peers.num_ranks()),
      first_experts_(first_experts), max_rows_(max_rows), communicator_(make_communicator(peers, gpu)) {
  first_experts_.push_back(options.experts);
  peers.together([&] {
    check_cuda(load_native_kernels(), "cudaFuncGetAttributes");
    for (const InputSet& set : sets)
      sets_.push_back(make_set(set.by_token));
    const int64_t row = row_bytes(options), tokens = options.tokens;
    home_rows_ = Buffer::plain(gpu, static_cast<size_t>(tokens * options.top_k * row));
    arrived_rows_ = Buffer::plain(gpu, static_cast<size_t>(max_rows * row));
    expert_rows_ = Buffer::plain(gpu, static_cast<size_t>(max_rows * row));
    out_ = Buffer::plain(gpu, static_cast<size_t>(tokens * row));
    pinned_counts_ = allocate_pinned(options.experts + num_arriving());
    pinned_arrival_ = allocate_pinned(max_rows);
    counts_event_ = make_copy_event();
  });
}

NativeExchange::Set NativeExchange::make_set(const TokenInputs& inputs) const {
  const SourceOrder order = source_order(inputs.topk_idx, options_.top_k, options_.experts);
  Set set{.tokens = upload(gpu_, inputs.tokens),
          .topk_weights = upload(gpu_, inputs.topk_weights),
          .packed_from = upload(gpu_, order.packed_from),
          .packed_row = upload(gpu_, order.packed_row),
          .counts = Buffer::plain(gpu_, bytes_of_integers(options_.experts + num_arriving())),
          .arrival = Buffer::plain(gpu_, bytes_of_integers(max_rows_)),
          .rows = {}};
  set.counts.write(order.counts);
  return set;
}

void NativeExchange::dispatch(size_t set) {
  exchange_counts(sets_[set]);
  pack(sets_[set]); // while the host waits for the counts
  plan(sets_[set]);
  exchange_rows(home_rows_, sets_[set].rows.sent, arrived_rows_, sets_[set].rows.received);
  const std::span<int32_t> arrival(pinned_arrival_.get(), static_cast<size_t>(sets_[set].rows.num_received()));
  const std::span<const int32_t> arriving(pinned_counts_.get() + options_.experts, static_cast<size_t>(num_arriving()));
  fill_arrival_order(arriving, static_cast<int>(num_ranks_), arrival); // while rows travel
  check_cuda(cudaMemcpyAsync(sets_[set].arrival.data(), arrival.data(), arrival.size_bytes(), cudaMemcpyHostToDevice,
                             gpu_.cuda_stream()),
             "cudaMemcpyAsync");
  permute(sets_[set]);
}

void NativeExchange::dispatch_rows(size_t set) {
  pack(sets_[set]);
  exchange_rows(home_rows_, sets_[set].rows.sent, arrived_rows_, sets_[set].rows.received);
  permute(sets_[set]);
}

void NativeExchange::combine(size_t set) {
  const Set& routes = sets_[set];
  check_cuda(launch_scatter_rows({.source = expert_rows_.data(),
                                  .target = arrived_rows_.data(),
                                  .index = data_of<int32_t>(routes.arrival),
                                  .rows = routes.rows.num_received(),
                                  .row_bytes = row_bytes(options_)},
                                 gpu_.num_sms(), gpu_.cuda_stream()),
             "launch of the permutation");
  exchange_rows(arrived_rows_, routes.rows.received, home_rows_, routes.rows.sent);
  check_cuda(launch_sum_rows({.source = home_rows_.data(),
                              .index = data_of<int32_t>(routes.packed_row),
                              .weights = data_of<float>(routes.topk_weights),
                              .out = out_.data(),
                              .tokens = options_.tokens,
                              .hidden = options_.hidden,
                              .top_k = options_.top_k},
                             options_.dtype, gpu_.num_sms(), gpu_.cuda_stream()),
             "launch of the sum");
}

void NativeExchange::exchange_counts(const Set& set) {
  auto* const counts = data_of<int32_t>(set.counts);
  std::vector<Transfer> transfers;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    const int32_t first = first_experts_[static_cast<size_t>(peer)], end = first_experts_[static_cast<size_t>(peer) + 1];
    const int32_t* const send = counts + first;
    int32_t* const receive = counts + options_.experts + peer * num_local_experts();
    transfers.push_back({.peer = peer,
                         .send = reinterpret_cast<const std::byte*>(send),
                         .send_bytes = static_cast<int64_t>(bytes_of_integers(end - first)),
                         .receive = reinterpret_cast<std::byte*>(receive),
                         .receive_bytes = static_cast<int64_t>(bytes_of_integers(num_local_experts()))});
  }
  communicator_->exchange(transfers, gpu_.cuda_stream());
  check_cuda(cudaMemcpyAsync(pinned_counts_.get(), set.counts.data(), set.counts.size(), cudaMemcpyDeviceToHost,
                             gpu_.cuda_stream()),
             "cudaMemcpyAsync");
  check_cuda(cudaEventRecord(counts_event_.get(), gpu_.cuda_stream()), "cudaEventRecord");
}

void NativeExchange::pack(const Set& set) {
  check_cuda(launch_gather_rows({.source = set.tokens.data(),
                                 .target = home_rows_.data(),
                                 .index = data_of<int32_t>(set.packed_from),
                                 .rows = int64_t{options_.tokens} * options_.top_k,
                                 .row_bytes = row_bytes(options_)},
                                gpu_.num_sms(), gpu_.cuda_stream()),
             "launch of the packing");
}

void NativeExchange::plan(Set& set) {
  check_cuda(cudaEventSynchronize(counts_event_.get()), "cudaEventSynchronize");
  const std::span<const int32_t> counts(pinned_counts_.get(), static_cast<size_t>(options_.experts + num_arriving()));
  const auto experts = static_cast<size_t>(options_.experts);
  set.rows = rows_by_peer(counts.first(experts), counts.subspan(experts), first_experts_);
  if (set.rows.num_received() > max_rows_)
    throw RuntimeError(
        fmt::format("the native way receives {} rows and has room for {}", set.rows.num_received(), max_rows_));
}

void NativeExchange::permute(const Set& set) {
  check_cuda(launch_gather_rows({.source = arrived_rows_.data(),
                                 .target = expert_rows_.data(),
                                 .index = data_of<int32_t>(set.arrival),
                                 .rows = set.rows.num_received(),
                                 .row_bytes = row_bytes(options_)},
                                gpu_.num_sms(), gpu_.cuda_stream()),
             "launch of the permutation");
}

void NativeExchange::exchange_rows(const Buffer& send, std::span<const int64_t> sent, const Buffer& receive,
                                   std::span<const int64_t> received) {
  const std::byte* from = send.data();
  std::byte* to = receive.data();
  std::vector<Transfer> transfers;
  for (size_t peer = 0; peer < sent.size(); ++peer) {
    transfers.push_back({.peer = static_cast<int>(peer),
                         .send = from,
                         .send_bytes = sent[peer] * row_bytes(options_),
                         .receive = to,
                         .receive_bytes = received[peer] * row_bytes(options_)});
    from += transfers.back().send_bytes;
    to += transfers.back().receive_bytes;
  }
  communicator_->exchange(transfers, gpu_.cuda_stream());
}

} // namespace epx::bench
