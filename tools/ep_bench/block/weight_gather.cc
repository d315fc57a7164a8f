// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/weight_gather.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <span>
#include <utility>

#include <fmt/format.h>

#include "base/dtypes.h"
#include "tools/ep_bench/errors.h"
#include "tools/ep_bench/interrupt.h"
#include "tools/ep_bench/measured_group.h"

namespace epx::bench {
namespace {

constexpr int64_t kReadBytes = int64_t{1} << 20; // of a matrix at once, when it is compared

void write_row(std::span<std::byte> row, const BlockStream& stream) {
  for (size_t at = 0; at < row.size(); at += sizeof(uint32_t)) {
    const uint32_t word = stream.at(static_cast<uint32_t>(at));
    std::memcpy(row.data() + at, &word, std::min(sizeof(word), row.size() - at));
  }
}

int64_t differing_elements(std::span<const std::byte> row, std::span<const std::byte> expected, size_t element_bytes) {
  int64_t different = 0;
  for (size_t at = 0; at < row.size(); at += element_bytes)
    different += std::memcmp(row.data() + at, expected.data() + at, element_bytes) != 0;
  return different;
}

} // namespace

RowRange GatheredMatrix::part(int rank, int num_ranks) const {
  const int64_t units = rows / unit, first = units * rank / num_ranks, end = units * (rank + 1) / num_ranks;
  return {first * unit, (end - first) * unit};
}

int32_t gathered_experts(const Options& options, int num_ranks) {
  return (options.experts + num_ranks - 1) / num_ranks;
}

std::vector<GatheredMatrix> gathered_matrices(const Options& options, GatherForm form, int num_ranks) {
  const int64_t experts = gathered_experts(options, num_ranks), hidden = options.hidden, ffn = options.block.ffn;
  const int64_t gate_up = experts * 2 * ffn, down = experts * hidden;
  if (form == GatherForm::Wide)
    return {{BlockTensor::GatheredGateUp, options.dtype, gate_up, hidden, 1},
            {BlockTensor::GatheredDown, options.dtype, down, ffn, 1}};
  constexpr int64_t kBlock = kGatherFp8Block;
  return {{BlockTensor::GatheredGateUp, EPX_FLOAT8_E4M3, gate_up, hidden, kBlock},
          {BlockTensor::GatheredDown, EPX_FLOAT8_E4M3, down, ffn, kBlock},
          {BlockTensor::GatheredGateUpScales, EPX_FLOAT32, gate_up / kBlock, hidden / kBlock, 1},
          {BlockTensor::GatheredDownScales, EPX_FLOAT32, down / kBlock, ffn / kBlock, 1}};
}

void require_gather(const Options& options, int num_ranks) {
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  for (const GatherForm form : options.block.gathers)
    for (const GatheredMatrix& matrix : gathered_matrices(options, form, num_ranks)) {
      const int64_t least = matrix.unit * num_ranks;
      if (matrix.rows < least || matrix.rows > kMaxRows)
        throw UsageError(fmt::format(
            "--gather is '{}', --experts is {}, --hidden is {} and --ffn is {}, and {} ranks share a "
            "matrix of {} rows; it must have between {} and {}",
            to_string(form), options.experts, options.hidden, options.block.ffn, num_ranks, matrix.rows, least, kMaxRows));
    }
}

void require_equal_parts(const Options& options, int num_ranks) {
  for (const GatherForm form : options.block.gathers)
    for (const GatheredMatrix& matrix : gathered_matrices(options, form, num_ranks))
      if (matrix.part(0, num_ranks).count * num_ranks != matrix.rows) // that of the first rank is rounded down
        throw UsageError(
            fmt::format("--gather is '{}' by copy engines, and {} ranks do not share a matrix of {} rows evenly; "
                        "with --gather-sms 16 they need not",
                        to_string(form), num_ranks, matrix.rows));
}

GroupConfig gather_group_config(const Options& options) {
  GroupConfig config; // of a group that has no tokens
  config.num_experts = 1;
  config.max_tokens_per_rank = 1;
  config.hidden_dim = options.hidden;
  config.max_top_k = 1;
  config.max_alignment = 1;
  config.max_token_dtype = options.dtype;
  config.transport = options.transport;
  config.num_comm_sms = options.block.gather_sms;
  if (options.timeout_ms > 0) config.timeout_ms = options.timeout_ms;
  return config;
}

const char* gather_line(GatherForm form) {
  return form == GatherForm::Wide ? "gather" : "gather-fp8";
}

WeightGather::WeightGather(const epx_bootstrap& bootstrap, const Options& options, const Peers& peers, Memory& memory)
    : seed_(options.seed), memory_(memory), side_(memory.make_side_stream()), rank_(peers.rank()),
      num_ranks_(peers.num_ranks()) {
  if (options.block.gather_sms == 0)
    copy_engines_ = memory.make_copy_engine_gather(rank_, num_ranks_, [&](std::span<std::byte> bytes) {
      const std::vector<std::byte> of_ranks = peers.gather(std::span<const std::byte>(bytes));
      std::copy_n(of_ranks.begin(), bytes.size(), bytes.begin()); // rank 0's
    });
  if (!copy_engines_) {
    const KeepWaiting keep_waiting; // as in MeasuredGroup
    group_ = Group(bootstrap, gather_group_config(options));
  }
  for (const GatherForm form : options.block.gathers) {
    Form& made = forms_.emplace_back();
    made.form = form;
    for (const GatheredMatrix& shape : gathered_matrices(options, form, num_ranks_)) {
      made.wholes.push_back(make_whole(shape));
      made.matrices.push_back(make_matrix(shape, made.wholes.back()));
    }
  }
}

WeightGather::~WeightGather() {
  if (std::uncaught_exceptions() > 0 && group_)
    GroupView(group_).abort(); // this rank has failed, and its peers may wait for it
}

Buffer WeightGather::make_whole(const GatheredMatrix& shape) const {
  const auto bytes = static_cast<size_t>(shape.bytes());
  if (!copy_engines_) return Buffer::window(memory_, group_, bytes);
  return Buffer::lent(memory_, {copy_engines_->allocate(bytes), bytes});
}

WeightGather::Matrix WeightGather::make_matrix(const GatheredMatrix& shape, const Buffer& whole) const {
  const RowRange mine = shape.part(rank_, num_ranks_);
  std::vector<std::byte> rows(static_cast<size_t>(mine.count * shape.row_bytes()));
  const auto row_bytes = static_cast<size_t>(shape.row_bytes());
  for (int64_t row = 0; row < mine.count; ++row)
    write_row(std::span(rows).subspan(static_cast<size_t>(row) * row_bytes, row_bytes),
              {seed_, shape.tensor, static_cast<uint32_t>(mine.first + row)});

  const auto ranks = static_cast<size_t>(num_ranks_);
  std::vector<int32_t> integers(4 * ranks); // input_offsets are 0
  for (size_t peer = 0; peer < ranks; ++peer) {
    integers[ranks + peer] = static_cast<int32_t>(mine.count);
    integers[2 * ranks + peer] = static_cast<int32_t>(mine.first);
    integers[3 * ranks + peer] = static_cast<int32_t>(shape.part(static_cast<int>(peer), num_ranks_).count);
  }
  Buffer part = copy_engines_ ? Buffer::lent(memory_, whole.bytes().subspan(mine.first * row_bytes, rows.size()))
                              : Buffer::plain(memory_, rows.size());
  Matrix matrix{shape, std::move(part), Buffer::plain(memory_, integers.size() * sizeof(int32_t))};
  matrix.part.write(rows);
  matrix.integers.write(integers);
  return matrix;
}

void WeightGather::gather(const Matrix& matrix, const Buffer& whole) const {
  if (copy_engines_) return copy_engines_->gather(whole.data(), matrix.part.size(), side_->stream());
  const GatheredMatrix& shape = matrix.shape;
  const auto integers = [&](int64_t field) {
    return ConstTensor(matrix.integers.data() + field * num_ranks_ * static_cast<int64_t>(sizeof(int32_t)), EPX_INT32,
                       {num_ranks_});
  };
  group_.ragged_all_to_all(
      {.stream = side_->stream(),
       .operand = ConstTensor(matrix.part.data(), shape.dtype, {shape.part(rank_, num_ranks_).count, shape.columns}),
       .output = Tensor(whole.data(), shape.dtype, {shape.rows, shape.columns}),
       .input_offsets = integers(0),
       .send_sizes = integers(1),
       .output_offsets = integers(2),
       .recv_sizes = integers(3)});
}

const WeightGather::Form& WeightGather::find(GatherForm form) const {
  return *std::ranges::find(forms_, form, &Form::form);
}

void WeightGather::start(GatherForm form) {
  side_->begin();
  const Form& found = find(form);
  for (size_t i = 0; i < found.matrices.size(); ++i)
    gather(found.matrices[i], found.wholes[i]);
}

void WeightGather::join() {
  side_->end();
}

void WeightGather::check() const {
  if (!group_) return;
  const epx_group_report report = group_.status();
  if (report.status != EPX_SUCCESS || std::ranges::any_of(report.event_counts, [](uint64_t count) { return count > 0; }))
    throw RuntimeError(fmt::format("--gather: {}", report.message));
}

int64_t WeightGather::received_bytes(GatherForm form) const {
  int64_t bytes = 0;
  for (const Matrix& matrix : find(form).matrices)
    bytes += matrix.shape.bytes() - static_cast<int64_t>(matrix.part.size());
  return bytes;
}

const std::vector<Buffer>& WeightGather::wholes(GatherForm form) const {
  return find(form).wholes;
}

void WeightGather::scribble(GatherForm form) const {
  const Form& found = find(form);
  for (size_t i = 0; i < found.wholes.size(); ++i) {
    const Buffer& part = found.matrices[i].part;
    const std::span<std::byte> whole = found.wholes[i].bytes();
    const size_t begin = copy_engines_ ? static_cast<size_t>(part.data() - whole.data()) : 0; // of what is kept there
    const size_t kept = copy_engines_ ? part.size() : 0;
    for (const std::span<std::byte> rows : {whole.first(begin), whole.subspan(begin + kept)})
      if (!rows.empty()) memory_.fill(rows, kScribble);
  }
}

int64_t WeightGather::count_wrong(GatherForm form) const {
  const Form& found = find(form);
  int64_t wrong = 0;
  for (size_t i = 0; i < found.matrices.size(); ++i) {
    const GatheredMatrix& shape = found.matrices[i].shape;
    const auto row_bytes = static_cast<size_t>(shape.row_bytes());
    const int64_t at_once = std::max<int64_t>(kReadBytes / shape.row_bytes(), 1);
    std::vector<std::byte> rows, expected(row_bytes);
    for (int64_t first = 0; first < shape.rows; first += at_once) {
      const int64_t count = std::min(at_once, shape.rows - first);
      rows.resize(static_cast<size_t>(count) * row_bytes);
      memory_.read(rows, found.wholes[i].data() + first * shape.row_bytes());
      for (int64_t row = 0; row < count; ++row) {
        write_row(expected, {seed_, shape.tensor, static_cast<uint32_t>(first + row)});
        wrong += differing_elements(std::span(rows).subspan(static_cast<size_t>(row) * row_bytes, row_bytes), expected,
                                    static_cast<size_t>(single_element_bytes(shape.dtype)));
      }
    }
  }
  return wrong;
}

} // namespace epx::bench
