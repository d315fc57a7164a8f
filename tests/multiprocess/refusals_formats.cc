// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/multiprocess/refusal_table.h"

namespace epx::test {

namespace {

constexpr auto kGiven = FormatWay::given, kAtSource = FormatWay::at_source, kOnWire = FormatWay::on_wire;
constexpr auto kBlock128 = EPX_SCALING_BLOCK128, kPow2 = EPX_SCALING_BLOCK128_POW2, kMx = EPX_SCALING_MX,
               kNv = EPX_SCALING_NV;
constexpr auto kColumns = EPX_SCALES_COLUMNS, kPacked = EPX_SCALES_PACKED, kTiles = EPX_SCALES_TILES;

constexpr FormatCase right_format(FormatWay way, epx_scaling scaling, epx_scale_layout layout = EPX_SCALES_ROWS) {
  FormatCase format{.way = way, .scaling = scaling, .amax_floor = 0.0F, .layouts = {layout, layout}};
  if (scaling == EPX_SCALING_MX) format.scales = EPX_FLOAT8_E8M0;
  if (scaling == EPX_SCALING_NV) {
    format.dtype = EPX_FLOAT4_E2M1;
    format.scales = EPX_FLOAT8_E4M3;
  }
  return format;
}

constexpr FormatCase kRight = right_format(kAtSource, kBlock128);

// Adds refusals of one call with a format.
class FormatTable {
public:
  FormatTable(RefusalTable& table, Op op, int num_tokens, int64_t rows, FormattedRows names)
      : table_(table), op_(op), num_tokens_(num_tokens), rows_(rows), names_(std::move(names)) {}

  void add_formats();
  void add_layouts();
  void add_dtypes();
  void add_sizes();
  void add_tensors();      // that are missing, or too many
  void add_memory();       // of tensors
  void add_plain_tokens(); // without a format
  void add_weights();      // of combine_bwd

private:
  bool is_rank_major() const { return op_ == Op::dispatch_rank_major || op_ == Op::combine_rank_major_bwd; }
  // The call is right until `spoil`.
  void add(const std::string& name, const FormatCase& format, std::function<void(Calls&)> spoil,
           std::vector<std::string> words) {
    const auto spoil_call = [op = op_, format, spoil_right = std::move(spoil)](Calls& c) {
      give_format(c, op, format);
      spoil_right(c);
    };
    table_.add("format " + name, spoil_call, std::move(words));
  }
  void add_size(const char* what, const FormatCase& format, epx_tensor Calls::*tensor, int dimension, int64_t size,
                std::vector<std::string> words) {
    words.push_back(text(size));
    add(
        what, format, [=](Calls& c) { (c.*tensor).sizes[dimension] = size; }, std::move(words));
  }
  void add_recv_scales(epx_scaling scaling, epx_dtype dtype, std::vector<std::string> words) {
    words.emplace_back("recv_scales");
    add(
        "with received scales of another dtype", right_format(kAtSource, scaling),
        [dtype](Calls& c) { c.recv_scales.dtype = dtype; }, std::move(words));
  }

  RefusalTable& table_;
  Op op_;
  int num_tokens_;
  int64_t rows_;
  FormattedRows names_;
};

void FormatTable::add_formats() {
  add("without a scaling", kRight, [](Calls& c) { c.format.scaling = EPX_SCALING_NONE; }, {"scaling", "0", "none"});
  add("of no scaling that there is", kRight, [](Calls& c) { c.format.scaling = static_cast<epx_scaling>(99); },
      {"scaling", "99", "EPX_SCALING_NV"});
  struct Elements {
    epx_scaling scaling;
    epx_dtype dtype;
    std::vector<std::string> words;
  };
  for (const Elements& wrong : {Elements{kBlock128, EPX_FLOAT8_E5M2, {"float8_e5m2", "block128", "float8_e4m3"}},
                                Elements{kPow2, EPX_FLOAT4_E2M1, {"float4_e2m1", "block128_pow2", "float8_e4m3"}},
                                Elements{kMx, EPX_FLOAT4_E2M1, {"float4_e2m1", "mx", "float8_e4m3 or float8_e5m2"}},
                                Elements{kMx, EPX_BFLOAT16, {"bfloat16", "mx", "float8_e4m3 or float8_e5m2"}},
                                Elements{kNv, EPX_FLOAT8_E4M3, {"float8_e4m3", "nv", "float4_e2m1"}},
                                Elements{kNv, EPX_DTYPE_UNSET, {"unset", "nv", "float4_e2m1"}}}) {
    std::vector<std::string> words = wrong.words;
    words.emplace_back("format");
    add(
        "of other elements", right_format(kAtSource, wrong.scaling),
        [dtype = wrong.dtype](Calls& c) { c.format.dtype = dtype; }, words);
  }
  add("with a negative floor", kRight, [](Calls& c) { c.format.amax_floor = -0.5F; }, {"amax_floor", "-0.5", "block128"});
  add("with a floor that is no number", kRight,
      [](Calls& c) { c.format.amax_floor = std::numeric_limits<float>::quiet_NaN(); }, {"amax_floor", "nan"});
  add("with an infinite floor", right_format(kOnWire, kPow2),
      [](Calls& c) { c.format.amax_floor = std::numeric_limits<float>::infinity(); }, {"amax_floor", "inf"});
  for (const epx_scaling scaling : {kMx, kNv})
    add("with a floor that the scaling has not", right_format(kAtSource, scaling),
        [](Calls& c) { c.format.amax_floor = 1e-4F; }, {"amax_floor", "0.0001", scaling == kMx ? "mx" : "nv", "0"});
  add("with reserved set", kRight, [](Calls& c) { c.format.reserved[3] = 1; }, {"format", "reserved"});
}

void FormatTable::add_layouts() {
  add("with a layout that is none", kRight, [](Calls& c) { c.format.scale_layout = static_cast<epx_scale_layout>(7); },
      {"scale_layout", "7", "EPX_SCALES_ROWS"});
  add("with columns of no scales", right_format(kOnWire, kMx), [=](Calls& c) { c.format.scale_layout = kColumns; },
      {"scale_layout", "1|columns"});
  add("with packed scales of float32", right_format(kAtSource, kBlock128, kPacked), [](Calls&) {},
      {"scale_layout", "packed", "float32", "float8_e8m0"});
  add("with packed scales of E4M3", right_format(kAtSource, kNv, kPacked), [](Calls&) {},
      {"scale_layout", "packed", "float8_e4m3", "float8_e8m0"});
  add("with packed scales by the byte", right_format(kAtSource, kMx, kPacked),
      [](Calls& c) { c.recv_scales.dtype = EPX_FLOAT8_E8M0; }, {"recv_scales", "float8_e8m0", "int32"});
  add("with tiles of float32", right_format(kAtSource, kBlock128, kTiles), [](Calls&) {},
      {"scale_layout", "tiles", "float32"});
  if (is_rank_major()) {
    add("with tiles without zones", right_format(kAtSource, kMx, kTiles), [](Calls&) {},
        {"scale_layout", "tiles", "rank-major"});
    return;
  }
  add("with tiles in zones of another alignment", right_format(kAtSource, kMx, kTiles), [](Calls&) {},
      {"scale_layout", "tiles", "alignment", text(kAlignment), "128"});
  add("with tiles without an alignment", right_format(kAtSource, kMx, kTiles), // 0 means 1
      [](Calls& c) { c.prepare.layer.alignment = c.dispatch.layer.alignment = c.combine_bwd.layer.alignment = 0; },
      {"scale_layout", "tiles", "alignment", "128"});
}

void FormatTable::add_dtypes() {
  add_recv_scales(kBlock128, EPX_FLOAT8_E8M0, {"float8_e8m0", "block128", "float32"});
  add_recv_scales(kPow2, EPX_BFLOAT16, {"bfloat16", "block128_pow2", "float32 or float8_e8m0"});
  add_recv_scales(kMx, EPX_FLOAT32, {"float32", "mx", "float8_e8m0"});
  add_recv_scales(kNv, EPX_FLOAT8_E8M0, {"float8_e8m0", "nv", "float8_e4m3"});
  const auto sent = names_.sent, received = names_.received;
  add("with scales of another dtype", right_format(kGiven, kMx), [](Calls& c) { c.scales.dtype = EPX_FLOAT32; },
      {"format.scales", "float32", "float8_e8m0"});
  add("with scales of another dtype than arrive", right_format(kGiven, kPow2),
      [](Calls& c) { c.scales.dtype = EPX_FLOAT8_E8M0; }, {"format.scales", "float8_e8m0", "float32"});
  add("with row scales of another dtype", right_format(kGiven, kNv), [](Calls& c) { c.row_scales.dtype = EPX_BFLOAT16; },
      {"format.row_scales", "bfloat16", "float32"});
  add("with an encode scale of another dtype", right_format(kOnWire, kNv),
      [](Calls& c) {
        c.format.encode_scale = &c.encode_scale;
        c.encode_scale.dtype = EPX_INT32;
      },
      {"format.encode_scale", "int32", "float32"});

  add("of other elements than the tokens", right_format(kGiven, kBlock128),
      [=](Calls& c) { (c.*sent).dtype = (c.*received).dtype = EPX_FLOAT8_E5M2; },
      {names_.sent_name, "float8_e5m2", "float8_e4m3"});
  add("of other elements than the received rows", kRight, [=](Calls& c) { (c.*received).dtype = EPX_FLOAT8_E5M2; },
      {names_.received_name, "float8_e5m2", "float8_e4m3", "bfloat16"});
  add("of rows that come quantised and arrive wide", right_format(kGiven, kMx),
      [=](Calls& c) { (c.*received).dtype = EPX_BFLOAT16; }, {names_.received_name, "bfloat16", "float8_e4m3"});
  add("of rows that arrive in another wide dtype", right_format(kOnWire, kMx),
      [=](Calls& c) { (c.*received).dtype = EPX_FLOAT16; }, {names_.received_name, "float16", "bfloat16"});
  const int hidden_dimension = is_rank_major() ? 2 : 1;
  for (const FormatCase& format : {right_format(kAtSource, kNv), right_format(kOnWire, kNv)})
    add("of two to a byte, and an odd H", format,
        [=](Calls& c) { (c.*sent).sizes[1] = (c.*received).sizes[hidden_dimension] = 7; }, {"H", "7", "even"});
}

void FormatTable::add_sizes() {
  add_size("with received scales of another N", kRight, &Calls::recv_scales, 0, rows_ - 1, {"recv_scales", text(rows_)});
  add_size("with received scales of another S", kRight, &Calls::recv_scales, 1, 2, {"recv_scales", "1"});
  const int64_t ld = (rows_ + 3) / 4 * 4;
  add_size("with columns of another length", right_format(kAtSource, kBlock128, kColumns), &Calls::recv_scales, 1, ld + 1,
           {"recv_scales", text(ld)});
  add_size("with too many packed columns", right_format(kAtSource, kMx, kPacked), &Calls::recv_scales, 0, 2,
           {"recv_scales", "1"});
  add("with received scales of one dimension", kRight, [](Calls& c) { c.recv_scales.ndim = 1; }, {"recv_scales", "1"});
  add_size("with received row scales of another N", right_format(kAtSource, kNv), &Calls::recv_row_scales, 0, rows_ + 1,
           {"recv_row_scales", text(rows_)});
  add_size("with scales of another T", right_format(kGiven, kMx), &Calls::scales, 0, num_tokens_ + 1,
           {"format.scales", text(num_tokens_)});
  add_size("with scales of another S", right_format(kGiven, kMx), &Calls::scales, 1, 3, {"format.scales", "1"});
  add_size("with row scales of another T", right_format(kGiven, kNv), &Calls::row_scales, 0, num_tokens_ + 1,
           {"format.row_scales", text(num_tokens_)});
  add("with several encode scales", right_format(kAtSource, kNv),
      [](Calls& c) {
        c.format.encode_scale = &c.encode_scale;
        c.encode_scale.sizes[0] = 2;
      },
      {"encode_scale", "2", "1"});

  add("with an encode scale without data", right_format(kOnWire, kNv),
      [](Calls& c) {
        c.format.encode_scale = &c.encode_scale;
        c.encode_scale.data = nullptr;
      },
      {"encode_scale", "NULL"});
}

void FormatTable::add_tensors() {
  add("without scales of rows that come quantised", right_format(kGiven, kMx), [](Calls& c) { c.format.scales = nullptr; },
      {"format.scales", "NULL"});
  add("without row scales of rows that come quantised", right_format(kGiven, kNv),
      [](Calls& c) { c.format.row_scales = nullptr; }, {"format.row_scales", "NULL"});
  add("without received scales", kRight, [](Calls& c) { c.format.recv_scales = nullptr; }, {"format.recv_scales", "NULL"});
  add("without received row scales", right_format(kGiven, kNv), [](Calls& c) { c.format.recv_row_scales = nullptr; },
      {"format.recv_row_scales", "NULL"});
  add("with scales of rows that come wide", kRight, [](Calls& c) { c.format.scales = &c.scales; },
      {"format.scales", "NULL"});
  add("with row scales where there are none", right_format(kGiven, kMx),
      [](Calls& c) { c.format.row_scales = &c.row_scales; }, {"format.row_scales", "NULL"});
  add("with received row scales where there are none", kRight,
      [](Calls& c) { c.format.recv_row_scales = &c.recv_row_scales; }, {"format.recv_row_scales", "NULL"});
  add("with received scales of rows that arrive wide", right_format(kOnWire, kBlock128),
      [](Calls& c) { c.format.recv_scales = &c.recv_scales; }, {"recv_scales", "NULL"});
  add("with an encode scale of another scaling", kRight, [](Calls& c) { c.format.encode_scale = &c.encode_scale; },
      {"format.encode_scale", "NULL", "nv"});
  add("with an encode scale of rows that come quantised", right_format(kGiven, kNv),
      [](Calls& c) { c.format.encode_scale = &c.encode_scale; }, {"format.encode_scale", "NULL"});
}

void FormatTable::add_memory() {
  const auto sent = names_.sent, received = names_.received;
  add("with received scales in recv_tokens", kRight, [=](Calls& c) { c.recv_scales.data = (c.*received).data; },
      {"recv_scales", names_.received_name, "overlap"});
  add("with received scales in the scales", right_format(kGiven, kBlock128),
      [](Calls& c) { c.recv_scales.data = c.scales.data; }, {"recv_scales", "scales", "overlap"});
  add("with received row scales in the tokens", right_format(kAtSource, kNv),
      [=](Calls& c) { c.recv_row_scales.data = (c.*sent).data; }, {"recv_row_scales", names_.sent_name, "overlap"});
  add("with received scales that are misaligned", kRight,
      [](Calls& c) { c.recv_scales.data = one_byte_on(c.recv_scales.data); }, {"recv_scales", "align"});
  add("with scales without data", right_format(kGiven, kNv), [](Calls& c) { c.scales.data = nullptr; },
      {"format.scales", "NULL"});
  add("with a sidecar of scales", right_format(kGiven, kMx),
      [](Calls& c) {
        c.scales.sidecar = c.tokens.sidecar;
        c.scales.sidecar_row_bytes = kSidecarBytes;
      },
      {"format.scales", "sidecar"});
}

void FormatTable::add_plain_tokens() {
  const auto sent = names_.sent, received = names_.received;
  const int hidden_dimension = is_rank_major() ? 2 : 1;
  table_.add("quantised tokens without a format, received wide", [=](Calls& c) { (c.*sent).dtype = EPX_FLOAT8_E4M3; },
             {names_.received_name, "bfloat16", "float8_e4m3"});
  table_.add("tokens of scales", [=](Calls& c) { (c.*sent).dtype = (c.*received).dtype = EPX_FLOAT8_E8M0; },
             {names_.sent_name, "float8_e8m0"});
  table_.add("tokens of two to a byte, and an odd H",
             [=](Calls& c) {
               (c.*sent).dtype = (c.*received).dtype = EPX_FLOAT4_E2M1;
               (c.*sent).sizes[1] = (c.*received).sizes[hidden_dimension] = 7;
             },
             {names_.sent_name, "7", "even"});
}

void FormatTable::add_weights() {
  for (const FormatWay way : {kGiven, kAtSource})
    for (const epx_scaling scaling : {kPow2, kMx, kNv}) {
      const char* name = scaling == kPow2 ? "block128_pow2" : scaling == kMx ? "mx" : "nv";
      add("whose scales take no weights", right_format(way, scaling),
          [](Calls& c) { c.combine_bwd.recv_weights = &c.recv_weights; },
          {"recv_weights", name, "block128", "weigh early"});
    }
  add("with expert_out that is quantised", kRight, [](Calls& c) { c.expert_out.dtype = EPX_FLOAT8_E4M3; },
      {"expert_out", "float8_e4m3", "bfloat16"});
}

} // namespace

std::vector<FormatCase> right_formats(FormatWay way) {
  std::vector<FormatCase> formats;
  for (const epx_scaling scaling : {EPX_SCALING_BLOCK128, EPX_SCALING_BLOCK128_POW2, EPX_SCALING_MX, EPX_SCALING_NV}) {
    formats.push_back(right_format(way, scaling));
    if (way == FormatWay::on_wire) continue;
    formats.push_back(right_format(way, scaling, EPX_SCALES_COLUMNS));
    if (scaling == EPX_SCALING_MX) formats.push_back(right_format(way, scaling, EPX_SCALES_PACKED));
  }
  return formats;
}

void add_format_refusals(RefusalTable& table, Op op, int num_tokens, int64_t rows, const FormattedRows& names) {
  FormatTable formats(table, op, num_tokens, rows, names);
  formats.add_formats();
  formats.add_layouts();
  formats.add_dtypes();
  formats.add_sizes();
  formats.add_tensors();
  formats.add_memory();
  if (op == Op::dispatch || op == Op::dispatch_rank_major) formats.add_plain_tokens();
  if (op == Op::combine_bwd) formats.add_weights();
}

void add_sum_format_refusals(RefusalTable& table, Op op, const FormattedRows& names) {
  const auto add = [&](const std::string& name, epx_scaling scaling, std::function<void(Calls&)> spoil,
                       std::vector<std::string> words) {
    const auto spoil_call = [op, scaling, spoil_right = std::move(spoil)](Calls& c) {
      give_format(c, op, right_format(kOnWire, scaling));
      spoil_right(c);
    };
    table.add("format " + name, spoil_call, std::move(words));
  };
  const auto sent = names.sent, received = names.received;
  add("in which sums do not travel", kNv, [](Calls&) {}, {"format.scaling", "nv", "block128 or mx"});
  add("in which sums do not travel", kPow2, [](Calls&) {}, {"format.scaling", "block128_pow2", "block128 or mx"});
  add("without a scaling", kMx, [](Calls& c) { c.format.scaling = EPX_SCALING_NONE; }, {"scaling", "0", "none"});
  add("of other elements", kBlock128, [](Calls& c) { c.format.dtype = EPX_FLOAT8_E5M2; },
      {"format", "float8_e5m2", "block128", "float8_e4m3"});
  add("with scales", kMx, [](Calls& c) { c.format.scales = &c.scales; }, {"format.scales", "NULL"});
  add("with received scales", kBlock128, [](Calls& c) { c.format.recv_scales = &c.recv_scales; },
      {"format.recv_scales", "NULL"});
  add("with columns of no scales", kMx, [](Calls& c) { c.format.scale_layout = kColumns; }, {"scale_layout", "1|columns"});
  add("of rows that come quantised", kMx, [=](Calls& c) { (c.*sent).dtype = EPX_FLOAT8_E4M3; },
      {names.sent_name, "float8_e4m3", "float32"});
  add("of sums that arrive quantised", kBlock128, [=](Calls& c) { (c.*received).dtype = EPX_FLOAT8_E4M3; },
      {names.received_name, "float8_e4m3", "bfloat16"});
}

} // namespace epx::test
