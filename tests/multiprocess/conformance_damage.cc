// SPDX-License-Identifier: Apache-2.0
// In these scenarios the control words of a window are overwritten. The windows are found among the mappings of the process,
// on the host transport and where the kernels are emulated, and must be there. On GPUs, and in a group of one rank, there are
// none to find.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <unistd.h>

#include "runtime/layout/window_layout.h"
#include "tests/emulation/nodes.h"
#include "tests/multiprocess/conformance.h"
#include "tests/multiprocess/fault_rank.h"
#include "tests/support/check.h"

namespace epx::test {

namespace {

constexpr int64_t kAbortRecord = 0; // the first region of a window, and the second
constexpr int64_t kWaiting = kRegionAlignment;
constexpr int64_t kShortMs = 4'000; // enough for a rank that is there, however busy the machine is
constexpr int64_t kLongMs = 60'000;

// Returns the addresses at which this process has mapped shared memory of epx of `bytes` bytes.
std::vector<std::byte*> find_windows(int64_t bytes) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  const int64_t mapped = (bytes + page - 1) / page * page;
  std::vector<std::byte*> windows;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin = 0;
    unsigned long end = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx", &begin, &end) != 2 || static_cast<int64_t>(end - begin) != mapped) continue;
    // MPI maps files too, whose directory may have epx in its name.
    const bool is_window = contains(line, "/memfd:epx") || contains(line, "/dev/shm/epx");
    if (is_window && contains(line, " rw-s ")) windows.push_back(reinterpret_cast<std::byte*>(begin));
  }
  return windows;
}

// Rank 0 stores the word in the windows of all ranks, between two calls. Returns false when there are none to find.
bool overwrite(const RankContext& context, const FaultRank& rank, int64_t offset, uint64_t word) {
  const epx_group_info info = GroupView(rank.group()).query();
  context.gather(0); // the call before has ended everywhere
  uint64_t found = 0;
  if (context.rank == 0) {
    const std::vector<std::byte*> windows = find_windows(info.window_bytes);
    found = windows.size() >= static_cast<size_t>(context.num_ranks) ? 1 : 0;
    for (std::byte* window : windows)
      std::atomic_ref(*reinterpret_cast<uint64_t*>(window + offset)).store(word);
  }
  const bool overwritten = context.gather(found)[0] != 0;
  const bool has_windows = context.device->transport() == EPX_TRANSPORT_HOST || epx_emulation_set_ranks_per_node != nullptr;
  check(overwritten || !has_windows || context.num_ranks == 1,
        "rank 0 does not find the {} windows of {} bytes that it has mapped", context.num_ranks, info.window_bytes);
  return overwritten;
}

} // namespace

TEST_CASE("an abort record that no rank stored ends the group with a sentence about damage") {
  for (const uint64_t word : {uint64_t{1}, ~uint64_t{0}, pack(AbortRecord{EPX_ERROR_TIMEOUT, EPX_OP_COMBINE, 35032, 3}),
                              pack(AbortRecord{static_cast<epx_status>(12), EPX_OP_COMBINE, 0, 3})}) {
    on_every_rank([&](const RankContext& context) {
      FaultRank rank(context, kLongMs);
      if (!overwrite(context, rank, kAbortRecord, word)) return;
      rank.call(EPX_OP_DISPATCH); // on the host transport this call finds the damage itself
      const epx_group_report report = GroupView(rank.group()).status();
      check(report.status == EPX_ERROR_INTERNAL, "word {:#x}: the report says {}: \"{}\"", word,
            epx_status_string(report.status), report.message);
      check(report.culprit >= 0 && report.culprit < context.num_ranks, "word {:#x}: culprit is {}", word, report.culprit);
      check(contains(report.message, "control words") && contains(report.message, "damaged"),
            "word {:#x}: \"{}\" says nothing of damage", word, report.message);
      context.gather(0);
    });
  }
}

TEST_CASE("a missing rank is named, whatever its window says that it has waited for") {
  if (launcher().num_ranks() == 1) return;
  for (const uint64_t word :
       {~uint64_t{0}, pack(Waiting{2, EPX_PHASE_ARRIVE, 35032}), pack(Waiting{2, static_cast<epx_phase>(7), 0})}) {
    on_every_rank([&](const RankContext& context) {
      const int missing = context.num_ranks - 1;
      FaultRank rank(context, context.rank == missing ? kLongMs : kShortMs);
      const bool overwritten = overwrite(context, rank, kWaiting, word);
      if (overwritten && context.rank != missing) {
        rank.call(EPX_OP_DISPATCH);
        const epx_group_report report = GroupView(rank.group()).status();
        check(report.status == EPX_ERROR_TIMEOUT && report.culprit == missing, "word {:#x}: {}, culprit {}: \"{}\"", word,
              epx_status_string(report.status), report.culprit, report.message);
      }
      context.gather(0);
    });
  }
}

} // namespace epx::test
