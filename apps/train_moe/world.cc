// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/world.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <utility>

namespace train {

int as_count(int64_t size) {
  if (size > std::numeric_limits<int>::max())
    fail(kExitFailure, "a message of {} elements is more than MPI's int can count", size);
  return static_cast<int>(size);
}

World::World() {
  MPI_Init(nullptr, nullptr);
  MPI_Comm_rank(comm(), &rank_);
  MPI_Comm_size(comm(), &size_);
}

int World::local_rank() const {
  MPI_Comm machine = MPI_COMM_NULL;
  MPI_Comm_split_type(comm(), MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
  int rank = 0;
  MPI_Comm_rank(machine, &rank);
  MPI_Comm_free(&machine);
  return rank;
}

World::~World() {
  MPI_Finalize();
}

void World::agree(int exit_code, const std::string& message) const {
  const int mine = exit_code != 0 ? rank_ : size_;
  int first = size_;
  MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, comm());
  if (first == size_) return;
  std::vector<char> words(message.begin(), message.end());
  int size = as_count(std::ssize(words));
  MPI_Bcast(&exit_code, 1, MPI_INT, first, comm());
  MPI_Bcast(&size, 1, MPI_INT, first, comm());
  words.resize(size);
  MPI_Bcast(words.data(), size, MPI_CHAR, first, comm());
  throw AgreedError(exit_code, std::string(words.begin(), words.end()));
}

void World::broadcast(std::vector<char>& bytes) const {
  uint64_t size = bytes.size();
  MPI_Bcast(&size, 1, MPI_UINT64_T, 0, comm());
  bytes.resize(size);
  constexpr size_t kMaxBroadcastBytes = 1u << 30; // below MPI's int
  for (size_t done = 0; done < bytes.size(); done += kMaxBroadcastBytes)
    MPI_Bcast(bytes.data() + done, as_count(static_cast<int64_t>(std::min(kMaxBroadcastBytes, bytes.size() - done))),
              MPI_CHAR, 0, comm());
}

std::vector<char> World::gather_bytes(std::span<const std::byte> part) const {
  const int mine = as_count(std::ssize(part));
  std::vector<int> sizes(size_), begins(size_);
  MPI_Allgather(&mine, 1, MPI_INT, sizes.data(), 1, MPI_INT, comm());
  const int64_t total = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  std::vector<char> all(as_count(total));
  std::exclusive_scan(sizes.begin(), sizes.end(), begins.begin(), 0);
  MPI_Allgatherv(part.data(), mine, MPI_BYTE, all.data(), sizes.data(), begins.data(), MPI_BYTE, comm());
  return all;
}

void World::ordered_sum(std::span<const float> parts, int64_t size, std::span<const int64_t> kept,
                        std::vector<float>& sum) const {
  const int count = as_count(size);
  sum.assign(static_cast<size_t>(size), 0.0f);
  if (rank_ > 0) MPI_Recv(sum.data(), count, MPI_FLOAT, rank_ - 1, 0, comm(), MPI_STATUS_IGNORE);
  for (; !parts.empty(); parts = parts.subspan(sum.size()))
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] += parts[i];
  const int last = size_ - 1;
  if (rank_ < last) MPI_Send(sum.data(), count, MPI_FLOAT, rank_ + 1, 0, comm());
  if (kept.empty()) {
    MPI_Bcast(sum.data(), count, MPI_FLOAT, last, comm());
    return;
  }
  std::vector<int> counts(kept.begin(), kept.end()), begins(kept.size());
  std::exclusive_scan(counts.begin(), counts.end(), begins.begin(), 0);
  std::vector<float> mine(static_cast<size_t>(kept[rank_]));
  MPI_Scatterv(sum.data(), counts.data(), begins.data(), MPI_FLOAT, mine.data(), counts[rank_], MPI_FLOAT, last, comm());
  sum = std::move(mine);
}

double World::largest(double value) const {
  double most = value;
  MPI_Allreduce(&value, &most, 1, MPI_DOUBLE, MPI_MAX, comm());
  return most;
}

void World::barrier() const {
  MPI_Barrier(comm());
}

void World::abort(int exit_code) const {
  MPI_Abort(comm(), exit_code);
  std::abort(); // MPI_Abort does not come back
}

} // namespace train
