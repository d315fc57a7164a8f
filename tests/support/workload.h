// SPDX-License-Identifier: Apache-2.0
// A Workload is the data of one iteration of a Case: what all ranks pass to each operation, and the oracle's results.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/reference/rank_major.h"
#include "runtime/reference/reference.h"
#include "tests/support/case.h"
#include "tests/support/format_data.h"
#include "tests/support/rng.h"

namespace epx::test {

// In the structs below a vector has one entry per rank, or none where the tensor is not passed. Outputs hold what a call
// must have written into scribbled tensors.

struct DispatchData {
  std::vector<reference::Matrix> tokens;         // [T, H]
  std::vector<reference::Sidecar> sidecars;      // [T]
  std::vector<std::vector<float>> topk_weights;  // [T, K]
  std::vector<reference::Matrix> recv_tokens;    // [N, H] out
  std::vector<reference::Sidecar> recv_sidecars; // [N] out
  std::vector<std::vector<float>> recv_weights;  // [N] out
  std::optional<FormatData> format;
};

struct CombineData {
  std::vector<reference::Matrix> expert_out;    // [N, H]
  std::vector<std::vector<float>> recv_weights; // [N]
  std::vector<reference::Matrix> out;           // [T, H] out
};

struct CombineBwdData {
  std::vector<reference::Matrix> grad_out;           // [T, H]
  std::vector<reference::Matrix> expert_out;         // [N, H]
  std::vector<std::vector<float>> recv_weights;      // [N]
  std::vector<reference::Matrix> grad_expert_out;    // [N, H] out
  std::vector<std::vector<float>> grad_recv_weights; // [N] out
  std::optional<FormatData> format;
};

struct DispatchBwdData {
  std::vector<reference::Matrix> grad_recv;          // [N, H]
  std::vector<std::vector<float>> grad_recv_weights; // [N]
  std::vector<reference::Matrix> grad_tokens;        // [T, H] out
  std::vector<std::vector<float>> grad_topk_weights; // [T, K] out
};

// Receive tensors have P * M rows.
struct RankMajorData {
  int64_t rows_per_source = 0; // M
  reference::RankMajorPlan plan;

  struct Dispatch {
    std::vector<reference::Matrix> tokens;           // [T, H]
    std::vector<reference::Sidecar> sidecars;        // [T]
    std::vector<std::vector<float>> topk_weights;    // [T, K]
    std::vector<reference::Matrix> recv_tokens;      // [P * M, H] out
    std::vector<reference::Sidecar> recv_sidecars;   // [P * M] out
    std::vector<std::vector<int64_t>> recv_topk_idx; // [P * M, K] out
    std::vector<std::vector<float>> recv_weights;    // [P * M, K] out
    std::vector<std::vector<int64_t>> counts;        // [P] out
    std::optional<FormatData> format;
  } dispatch;
  struct Combine {                             // none in groups of precision exact, and likewise below
    std::vector<reference::Matrix> expert_out; // [P * M, H]
    std::vector<reference::Matrix> out;        // [T, H] out
  } combine;
  struct CombineBwd {
    std::vector<reference::Matrix> grad_out;        // [T, H]
    std::vector<reference::Matrix> grad_expert_out; // [P * M, H] out
    std::optional<FormatData> format;
  } combine_bwd;
  struct DispatchBwd {
    std::vector<reference::Matrix> grad_recv;          // [P * M, H]
    std::vector<std::vector<float>> grad_recv_weights; // [P * M, K]
    std::vector<reference::Matrix> grad_tokens;        // [T, H] out
    std::vector<std::vector<float>> grad_topk_weights; // [T, K] out
  } dispatch_bwd;
};

// Integers that a call writes hold this where it must not write.
inline constexpr int64_t kScribbledInteger = static_cast<int32_t>(0xa5a5a5a5);

struct Workload {
  GroupCase group;
  LayerCase layer;
  std::vector<reference::Routing> routing;
  reference::Plan plan;
  DispatchData dispatch;
  CombineData combine;
  CombineBwdData combine_bwd;
  DispatchBwdData dispatch_bwd;
  std::optional<RankMajorData> rank_major; // if the layer makes such calls
};

// LostRank is a rank whose handle memory is wrong in each call after prepare, or after dispatch_rank_major.
struct LostRank {
  int rank = -1; // -1: none
  // true: it is from another prepare of the same routing, and the routes between this rank and the others are dropped.
  // false: no call can use it; this rank takes part without routes, and its outputs stay untouched.
  bool stale = false;
};

Workload make_workload(const GroupCase& group, const LayerCase& layer, uint64_t seed, LostRank lost = {});

// The workloads of a Case's iterations, each computed once and shared by all ranks that are threads of this process.
class Workloads {
public:
  explicit Workloads(const Case& test_case) : case_(test_case) {}

  const Case& test_case() const { return case_; }
  const Workload& operator[](int iteration);

private:
  Case case_;
  std::mutex mutex_;
  std::map<int, std::unique_ptr<Workload>> made_;
};

// Counts the routes to `rank` whose slot is at or above `rows`.
int64_t routes_beyond(const reference::RankPlan& plan, int64_t rows);

} // namespace epx::test
