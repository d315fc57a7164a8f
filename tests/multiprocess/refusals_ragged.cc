// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "tests/multiprocess/refusal_table.h"

namespace epx::test {

namespace {

// An address that nothing is near, for a tensor of more rows than there is memory.
void* far_from_all() {
  return reinterpret_cast<void*>(uintptr_t{1} << 56);
}

struct Member {
  const char* name;
  epx_tensor Calls::*tensor;
  const epx_tensor* epx_ragged_all_to_all_args::*argument;
};

constexpr Member kRows[] = {{"operand", &Calls::operand, &epx_ragged_all_to_all_args::operand},
                            {"output", &Calls::output, &epx_ragged_all_to_all_args::output}};
constexpr Member kIntegers[] = {{"input_offsets", &Calls::input_offsets, &epx_ragged_all_to_all_args::input_offsets},
                                {"send_sizes", &Calls::send_sizes, &epx_ragged_all_to_all_args::send_sizes},
                                {"output_offsets", &Calls::output_offsets, &epx_ragged_all_to_all_args::output_offsets},
                                {"recv_sizes", &Calls::recv_sizes, &epx_ragged_all_to_all_args::recv_sizes}};

void set_rows(Calls& c, epx_dtype dtype, int64_t size) {
  c.operand.dtype = c.output.dtype = dtype;
  c.operand.sizes[1] = c.output.sizes[1] = size;
}

void set_num_slices(Calls& c, int64_t num_slices) {
  for (const Member& integers : kIntegers)
    (c.*integers.tensor).sizes[0] = num_slices;
  c.output.sizes[0] = 0; // which cannot lie in longer tensors
}

void add_rows(RefusalTable& table) {
  for (const Member& rows : kRows) {
    const std::string name = rows.name;
    table.add_stray_sidecar(name, rows.tensor);
    table.add(name + " of 2^31 rows",
              [=](Calls& c) {
                (c.*rows.tensor).sizes[0] = int64_t{1} << 31;
                (c.*rows.tensor).data = far_from_all();
              },
              {name, text(int64_t{1} << 31)});
  }
  table.add_other_dtype("output", &Calls::output);
  table.add_size("output", "of another row", &Calls::output, 1, kHidden - 1, kHidden);
  table.add("output of another number of dimensions",
            [](Calls& c) {
              c.output.ndim = 3;
              c.output.sizes[1] = kHidden / 2;
              c.output.sizes[2] = 2;
            },
            {"output", "3", "2", "operand"});
  table.add("output of as many elements in other dimensions",
            [](Calls& c) {
              c.operand.ndim = c.output.ndim = 3;
              c.operand.sizes[1] = c.output.sizes[2] = 4;
              c.operand.sizes[2] = c.output.sizes[1] = 2;
            },
            {"output", "operand", "4", "2"});
  table.add("rows of a negative size", [](Calls& c) { set_rows(c, kDtype, -3); }, {"operand", "-3"});
  for (const int64_t size : {int64_t{0}, int64_t{1} << 30, int64_t{1} << 62})
    table.add("rows of " + text(size) + " elements", [=](Calls& c) { set_rows(c, kDtype, size); },
              {"operand", text(size), "2147483647"});
  table.add("rows of half a byte", [](Calls& c) { set_rows(c, EPX_FLOAT4_E2M1, 7); }, {"operand", "7", "float4_e2m1"});
  table.add("elements of half a byte as rows",
            [](Calls& c) {
              set_rows(c, EPX_FLOAT4_E2M1, 1);
              c.operand.ndim = c.output.ndim = 1;
            },
            {"operand", "float4_e2m1"});
  table.add("rows of half a byte, of an even number of odd rows",
            [](Calls& c) {
              set_rows(c, EPX_FLOAT4_E2M1, 3);
              c.operand.ndim = c.output.ndim = 3;
              c.operand.sizes[2] = c.output.sizes[2] = 5;
              c.operand.sizes[0] = c.output.sizes[0] = 2;
            },
            {"operand", "float4_e2m1"});
}

void add_integers(RefusalTable& table) {
  for (const Member& integers : kIntegers) {
    const std::string name = integers.name;
    table.add(name + " float32", [=](Calls& c) { (c.*integers.tensor).dtype = EPX_FLOAT32; }, {name, "float32"});
    table.add(name + " of two dimensions",
              [=](Calls& c) {
                (c.*integers.tensor).ndim = 2;
                (c.*integers.tensor).sizes[1] = 1;
              },
              {name, "2"});
    table.add_stray_sidecar(name, integers.tensor);
    table.add_overlap("output", &Calls::output, name, integers.tensor);
    if (integers.tensor == &Calls::input_offsets) continue; // the others have its dtype and its size
    table.add(name + " of another dtype", [=](Calls& c) { (c.*integers.tensor).dtype = EPX_INT64; },
              {name, "int64", "int32"});
    table.add_size(name, "of another K", integers.tensor, 0, kSlices - kRanks, kSlices);
  }
  table.add("input_offsets of another dtype than the rest", [](Calls& c) { c.input_offsets.dtype = EPX_INT64; },
            {"send_sizes", "int32", "int64"});
  const auto add_num_slices = [&](int64_t num_slices, std::vector<std::string> words) {
    words.insert(words.end(), {"input_offsets|slices", text(num_slices)});
    table.add(
        text(num_slices) + " slices", [=](Calls& c) { set_num_slices(c, num_slices); }, std::move(words));
  };
  add_num_slices(kSlices + 1, {"multiple", text(kRanks)});
  add_num_slices(1, {"multiple", text(kRanks)});
  add_num_slices(0, {"multiple", text(kRanks)});
  add_num_slices(EPX_MAX_SLICES + kRanks, {text(EPX_MAX_SLICES)});
}

} // namespace

void add_ragged_refusals(RefusalTable& table) {
  for (const auto& members : {std::vector<Member>(std::begin(kRows), std::end(kRows)),
                              std::vector<Member>(std::begin(kIntegers), std::end(kIntegers))}) {
    for (const Member& member : members) {
      const std::string name = member.name;
      table.add(name + " NULL", [=](Calls& c) { c.ragged_all_to_all.*member.argument = nullptr; }, {name, "NULL"});
      table.add_tensor(name, member.tensor);
    }
  }
  add_rows(table);
  add_integers(table);
  table.add_overlap("output", &Calls::output, "operand", &Calls::operand);
  table.add("output at the last row of operand",
            [](Calls& c) {
              c.output.data = static_cast<std::byte*>(c.operand.data) + (kOperandRows - 1) * kHidden * sizeof(uint16_t);
            },
            {"output", "operand", "overlap"});
  for (const int direction : {2, -1})
    table.add("an unknown direction",
              [=](Calls& c) { c.ragged_all_to_all.direction = static_cast<epx_slice_direction>(direction); },
              {"direction is " + text(direction), "EPX_SLICES_FORWARD", "EPX_SLICES_TRANSPOSED"});
  table.add("reserved0", [](Calls& c) { c.ragged_all_to_all.reserved0 = 7; }, {"reserved0 is 7"});
}

} // namespace epx::test
