// SPDX-License-Identifier: Apache-2.0
#include "tests/support/slices.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "tests/support/check.h"

namespace epx::test {

namespace {

using Bytes = std::vector<std::byte>;

bool lies_in(int64_t offset, int64_t size, int64_t rows) {
  return offset >= 0 && size <= rows && offset <= rows - size;
}

Bytes random_bytes(int64_t size, Rng& rng) {
  Bytes bytes(static_cast<size_t>(size));
  for (size_t i = 0; i < bytes.size(); i += sizeof(uint64_t)) {
    const uint64_t word = rng.next();
    std::memcpy(bytes.data() + i, &word, std::min(sizeof(word), bytes.size() - i));
  }
  return bytes;
}

Bytes encoded(const std::vector<int64_t>& integers, epx_dtype dtype) {
  const size_t size = dtype == EPX_INT32 ? sizeof(int32_t) : sizeof(int64_t);
  Bytes bytes(integers.size() * size);
  for (size_t i = 0; i < integers.size(); ++i) {
    const auto narrow = static_cast<int32_t>(integers[i]);
    std::memcpy(bytes.data() + i * size, dtype == EPX_INT32 ? static_cast<const void*>(&narrow) : &integers[i], size);
  }
  return bytes;
}

} // namespace

Slices::Slices(int num_ranks, int slices_per_peer) : per_peer(slices_per_peer), ranks(static_cast<size_t>(num_ranks)) {
  for (RankSlices& rank : ranks)
    for (auto* const integers : {&rank.input_offsets, &rank.send_sizes, &rank.output_offsets, &rank.recv_sizes})
      integers->resize(num_slices());
}

int64_t& Slices::recv_size(Slice slice) {
  const auto each = static_cast<size_t>(per_peer);
  return ranks[receiver(slice.number)].recv_sizes[slice.sender * each + slice.number % each];
}

bool Slices::is_good(Slice slice) const {
  auto& all = const_cast<Slices&>(*this);
  const int64_t size = all.send_size(slice);
  if (size != all.recv_size(slice) || size < 0) return false;
  return size == 0 || (lies_in(all.input_offset(slice), size, all.near_rows(slice)) &&
                       lies_in(all.output_offset(slice), size, all.far_rows(slice)));
}

std::vector<Slice> Slices::in_random_order(Rng& rng) const {
  std::vector<Slice> all;
  for (size_t sender = 0; sender < ranks.size(); ++sender)
    for (size_t number = 0; number < num_slices(); ++number)
      all.push_back({sender, number});
  for (size_t i = all.size(); i > 1; --i)
    std::swap(all[i - 1], all[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
  return all;
}

void Slices::place(Rng& rng) {
  const auto append = [&](int64_t& rows, int64_t size) {
    constexpr int64_t kMin = std::numeric_limits<int32_t>::min(), kMax = std::numeric_limits<int32_t>::max();
    if (size == 0) return rng.pick({int64_t{0}, int64_t{-1}, int64_t{1000}, kMin, kMax});
    const int64_t offset = rows + rng.below(3);
    rows = offset + size;
    return offset;
  };
  for (const Slice slice : in_random_order(rng)) {
    recv_size(slice) = send_size(slice);
    input_offset(slice) = append(near_rows(slice), send_size(slice));
  }
  for (const Slice slice : in_random_order(rng))
    output_offset(slice) = append(far_rows(slice), send_size(slice));
  for (RankSlices& rank : ranks) {
    rank.near_rows += rank.near_rows > 0;
    rank.far_rows += rank.far_rows > 0;
  }
}

Slices random_slices(int num_ranks, int slices_per_peer, int64_t most_rows, Rng& rng) {
  Slices slices(num_ranks, slices_per_peer);
  for (RankSlices& rank : slices.ranks)
    for (int64_t& size : rank.send_sizes)
      size = rng.chance(20) ? 0 : rng.between(1, most_rows);
  slices.place(rng);
  return slices;
}

size_t RowShape::alignment() const {
  int64_t elements = 1;
  for (const int64_t size : sizes)
    elements *= size;
  return static_cast<size_t>(std::max<int64_t>(bytes / elements, 1)); // two elements may share a byte
}

epx_tensor RowShape::tensor(const void* data, int64_t num_rows) const {
  epx_tensor described = {};
  described.data = const_cast<void*>(data); // epx_tensor has no const
  described.dtype = dtype;
  described.ndim = static_cast<int32_t>(1 + sizes.size());
  described.sizes[0] = num_rows;
  std::ranges::copy(sizes, described.sizes + 1);
  return described;
}

SliceProblem::SliceProblem(Slices all_slices, epx_slice_direction to, RowShape one_row, Rng& rng)
    : slices(std::move(all_slices)), direction(to), row(std::move(one_row)) {
  for (size_t rank = 0; rank < slices.ranks.size(); ++rank) {
    operands.push_back(random_bytes(operand_rows(rank) * row.bytes, rng));
    before.push_back(random_bytes(output_rows(rank) * row.bytes, rng));
  }
}

SliceOutcome::SliceOutcome(const SliceProblem& problem) : outputs(problem.before), num_bad(problem.before.size()) {
  const Slices& slices = problem.slices;
  const auto row_bytes = static_cast<size_t>(problem.row.bytes);
  for (size_t sender = 0; sender < slices.ranks.size(); ++sender) {
    for (size_t number = 0; number < slices.num_slices(); ++number) {
      const size_t receiver = slices.receiver(number);
      if (!slices.is_good({sender, number})) {
        ++num_bad[sender];
        if (receiver != sender) ++num_bad[receiver];
        continue;
      }
      const RankSlices& senders = slices.ranks[sender];
      const size_t bytes = static_cast<size_t>(senders.send_sizes[number]) * row_bytes;
      if (bytes == 0) continue; // its offsets may be any
      const size_t near = static_cast<size_t>(senders.input_offsets[number]) * row_bytes;
      const size_t far = static_cast<size_t>(senders.output_offsets[number]) * row_bytes;
      if (problem.is_forward())
        std::memcpy(outputs[receiver].data() + far, problem.operands[sender].data() + near, bytes);
      else
        std::memcpy(outputs[sender].data() + near, problem.operands[receiver].data() + far, bytes);
    }
  }
}

SliceCalls::SliceCalls(GroupRun& group, Placement placement, Rng& rng)
    : group_(group), buffers_(group.device(), group.arenas(), placement, rng) {}

void* SliceCalls::make(const SliceProblem& problem, epx_dtype integers, void* operand) {
  const auto rank = static_cast<size_t>(group_.rank());
  const RankSlices& mine = problem.slices.ranks[rank];
  const size_t alignment = problem.row.alignment();
  if (operand == nullptr) operand = buffers_.input("operand", problem.operands[rank], alignment);
  void* const output = buffers_.in_out("output", problem.before[rank], alignment);
  const auto input = [&](const char* name, const std::vector<int64_t>& values) {
    const Bytes bytes = encoded(values, integers);
    return ConstTensor(buffers_.input(name, bytes, bytes.size() / values.size()), integers, values.size());
  };
  group_.view().ragged_all_to_all({.stream = group_.device().stream(),
                                   .operand = ConstTensor(problem.row.tensor(operand, problem.operand_rows(rank))),
                                   .output = Tensor(problem.row.tensor(output, problem.output_rows(rank))),
                                   .input_offsets = input("input_offsets", mine.input_offsets),
                                   .send_sizes = input("send_sizes", mine.send_sizes),
                                   .output_offsets = input("output_offsets", mine.output_offsets),
                                   .recv_sizes = input("recv_sizes", mine.recv_sizes),
                                   .direction = problem.direction});
  group_.count_call();
  SliceOutcome outcome(problem);
  group_.expect_event(EPX_EVENT_BAD_SLICE, EPX_OP_RAGGED_ALL_TO_ALL, outcome.num_bad[rank]);
  made_.push_back({&problem, std::move(outcome.outputs[rank])});
  return output;
}

void SliceCalls::check_results() {
  buffers_.check_surroundings();
  const auto rank = static_cast<size_t>(group_.rank());
  for (size_t i = 0; i < made_.size(); ++i) {
    const SliceProblem& problem = *made_[i].problem;
    const Bytes &expected = made_[i].expected, actual = buffers_.read_output(i);
    const auto at = static_cast<size_t>(std::ranges::mismatch(actual, expected).in1 - actual.begin());
    if (at == expected.size()) continue;
    const auto row_bytes = static_cast<size_t>(problem.row.bytes);
    const auto number_at = [&](const Bytes& bytes) { return std::to_integer<int>(bytes[at]); };
    fail_check("call {} of {}, {}, rows of {} bytes: byte {} of row {} of {} is {:#x}, expected {:#x}, before {:#x}", i,
               made_.size(), problem.is_forward() ? "forward" : "transposed", row_bytes, at % row_bytes, at / row_bytes,
               expected.size() / row_bytes, number_at(actual), number_at(expected), number_at(problem.before[rank]));
  }
  group_.check_status();
}

void run(GroupRun& group, const SliceProblem& problem, epx_dtype integers, Placement placement, Rng& rng) {
  SliceCalls calls(group, placement, rng);
  calls.make(problem, integers);
  calls.check_results();
}

} // namespace epx::test
