// SPDX-License-Identifier: Apache-2.0
// World is the ranks of MPI, which is initialised for as long as it lives. All ranks call collective functions in the same
// order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <new>
#include <span>
#include <string>
#include <vector>

#include <mpi.h>

#include "apps/train_moe/errors.h"

namespace train {

// Returns a number of elements as MPI counts them. Throws when it does not fit.
int as_count(int64_t size);

class World {
public:
  World();
  ~World(); // finalises MPI
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const; // among the ranks of this machine; collective
  MPI_Comm comm() const { return MPI_COMM_WORLD; }

  // Runs a local action on every rank; when it throws on one, AgreedError is thrown on all, with the message of the lowest
  // rank.
  template <typename Action>
  void together(Action&& action) const {
    int exit_code = 0;
    std::string message;
    try {
      action();
    } catch (const Error& error) {
      exit_code = error.exit_code();
      message = error.what();
    } catch (const std::bad_alloc&) {
      exit_code = kExitFailure;
      message = fmt::format("rank {}: out of memory", rank_);
    } catch (const std::exception& error) {
      exit_code = kExitFailure;
      message = describe(error);
    }
    agree(exit_code, message);
  }

  // Returns rank 0's bytes on all ranks.
  void broadcast(std::vector<char>& bytes) const;

  // Returns every rank's part, concatenated in rank order, on all ranks.
  template <typename T>
  std::vector<T> gather(std::span<const T> part) const {
    std::vector<char> bytes = gather_bytes(std::as_bytes(part));
    std::vector<T> all(bytes.size() / sizeof(T));
    if (!all.empty()) std::copy_n(bytes.data(), bytes.size(), reinterpret_cast<char*>(all.data()));
    return all;
  }

  // Computes the sum of all parts of all ranks, ((p0 + p1) + p2) + ..., in rank order and within a rank in order: the same bits
  // however the parts are split over the ranks. `parts` has any number of parts, one after the other, of `size` elements. The
  // sum is on all ranks; where `kept` [P] is not empty, a rank gets its next kept[rank] elements alone.
  void ordered_sum(std::span<const float> parts, int64_t size, std::span<const int64_t> kept,
                   std::vector<float>& sum) const;

  double largest(double value) const; // returns the largest value of all ranks
  void barrier() const;
  [[noreturn]] void abort(int exit_code) const; // ends all ranks

private:
  void agree(int exit_code, const std::string& message) const;
  std::vector<char> gather_bytes(std::span<const std::byte> part) const;

  int rank_ = 0;
  int size_ = 1;
};

} // namespace train
