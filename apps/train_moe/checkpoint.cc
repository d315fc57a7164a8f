// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/checkpoint.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include <nlohmann/json.hpp>

#include "apps/train_moe/crc32c.h"
#include "apps/train_moe/errors.h"
#include "apps/train_moe/files.h"
#include "apps/train_moe/replacement.h"

namespace train {
namespace {

using json = nlohmann::ordered_json;

constexpr const char* kFormat = "epx train_moe 2";
constexpr const char* kFormatFamily = "epx train_moe ";
constexpr const char* kOption = "--checkpoint";
constexpr size_t kMaxForeignHeaderBytes = 1 << 20; // the header of another model may be so much longer than this one's

// Returns the arrays of an area that a checkpoint holds.
std::array<Array<float>*, 3> saved_arrays(Area& area) {
  return {&area.values, &area.first_moments, &area.second_moments};
}

json header_of(int64_t step, const ModelOptions& model, const Text& text, const Parameters& parameters) {
  json tensors = json::array();
  for (const Tensor& tensor : parameters.tensors())
    tensors.push_back({{"name", tensor.name}, {"shape", tensor.shape}});
  return {{"format", kFormat},
          {"step", step},
          {"model",
           {{"context", model.context},
            {"embedding", model.embedding},
            {"hidden", model.hidden},
            {"ffn", model.ffn},
            {"layers", model.layers},
            {"experts", model.experts},
            {"top-k", model.top_k},
            {"batch", model.batch},
            {"seed", model.seed}}},
          {"text", {{"bytes", text.size()}, {"hash", fmt::format("{:016x}", text.hash())}}},
          {"tensors", tensors}};
}

void require_same(const std::string& file, const json& theirs, const json& ours, const char* what) {
  for (const auto& [name, value] : ours.items())
    if (!theirs.is_object() || !theirs.contains(name) || theirs[name] != value)
      fail(kExitUsage, "--resume {}: its {} has {} = {}; this run has {}", file, what, name,
           theirs.is_object() && theirs.contains(name) ? theirs[name].dump() : "nothing", value.dump());
}

// Returns a tensor, of which every rank has the elements `here`, on all ranks.
std::vector<float> whole_of(const World& world, const Tensor& tensor, const std::vector<float>& here) {
  const int64_t mine[] = {tensor.first, tensor.size};
  const std::vector<int64_t> parts = world.gather(std::span<const int64_t>(mine));
  const std::vector<float> all = world.gather(std::span<const float>(here)); // in rank order
  std::vector<float> whole(static_cast<size_t>(tensor.whole_size()));
  auto from = all.begin();
  for (size_t i = 0; i < parts.size(); i += 2) {
    std::copy_n(from, parts[i + 1], whole.begin() + parts[i]);
    from += parts[i + 1];
  }
  return whole;
}

// Returns the last line of a checkpoint.
std::string checksum_line(uint32_t checksum) {
  return fmt::format("crc32c {:08x}\n", checksum);
}

std::span<const char> bytes_of(const std::vector<float>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

void write_file(const std::string& file, const json& header, const std::vector<float>& values) {
  const std::string first_line = header.dump() + '\n';
  Replacement replacement(kOption, file);
  replacement.write(first_line);
  replacement.write(bytes_of(values));
  replacement.write(checksum_line(crc32c(crc32c(0, first_line), bytes_of(values))));
  replacement.commit();
}

struct Checkpoint {
  int64_t step = 0;
  std::vector<char> numbers; // the values of all tensors
};

// Throws unless `theirs` is the header of a checkpoint of this model and text.
void check_header(const std::string& file, const json& theirs, const json& ours) {
  const json format = theirs.is_object() ? theirs.value("format", json()) : json();
  if (!format.is_string() || !format.get<std::string>().starts_with(kFormatFamily))
    fail(kExitUsage, "--resume {}: this is not a checkpoint of train_moe (\"format\": \"{}\")", file, kFormat);
  if (format != kFormat)
    fail(kExitUsage, "--resume {}: its format is {}; this train_moe reads \"{}\"", file, format.dump(), kFormat);
  for (const char* part : {"model", "text"})
    require_same(file, theirs.value(part, json()), ours[part], part);
  if (!theirs.contains("tensors") || theirs["tensors"] != ours["tensors"])
    fail(kExitUsage, "--resume {}: its list of tensors is another than this program's", file);
  const json step = theirs.value("step", json());
  if (!step.is_number_unsigned() || step.get<uint64_t>() < 1 || step.get<uint64_t>() > std::numeric_limits<int32_t>::max())
    fail(kExitUsage, "--resume {}: its step is {}; it must be 1..{}", file, step.dump(),
         std::numeric_limits<int32_t>::max());
}

size_t numbers_bytes(const json& header) {
  size_t elements = 0;
  for (const auto& tensor : header["tensors"]) {
    size_t size = 3;
    for (const auto& dim : tensor["shape"])
      size *= dim.get<size_t>();
    elements += size;
  }
  return elements * sizeof(float);
}

// Reads only the header until it has found that the file is of this model, and so how long it must be.
Checkpoint read_checkpoint(const std::string& file, const json& ours) {
  InputFile input("--resume", file);
  std::vector<char> begin(std::min(static_cast<size_t>(input.size()), ours.dump().size() + kMaxForeignHeaderBytes));
  begin.resize(input.read(begin));
  const auto end_of_line = std::find(begin.begin(), begin.end(), '\n');
  const bool has_line = end_of_line != begin.end();
  const json theirs = has_line ? json::parse(begin.begin(), end_of_line, nullptr, false) : json();
  check_header(file, theirs, ours);

  const std::span<const char> first_line(begin.begin(), end_of_line + 1);
  const size_t checksum_bytes = checksum_line(0).size();
  Checkpoint checkpoint{theirs["step"].get<int64_t>(),
                        std::vector<char>(begin.begin() + std::ssize(first_line), begin.end())};
  const size_t rest_bytes = numbers_bytes(ours) + checksum_bytes;
  if (static_cast<size_t>(input.size()) != first_line.size() + rest_bytes)
    fail(kExitUsage, "--resume {}: it has {} bytes; its header promises {}", file, input.size(),
         first_line.size() + rest_bytes);
  std::vector<char>& rest = checkpoint.numbers;
  const size_t here = rest.size();
  rest.resize(rest_bytes);
  const size_t got = here + input.read(std::span(rest).subspan(here));
  const std::span<const char> numbers(rest.data(), rest_bytes - checksum_bytes);
  const std::string checksum = checksum_line(crc32c(crc32c(0, first_line), numbers));
  if (got != rest_bytes || !std::equal(checksum.begin(), checksum.end(), numbers.end()))
    fail(kExitUsage, "--resume {}: it is damaged: its last line is not the checksum of what is before, {}", file,
         checksum.substr(0, checksum.size() - 1));
  rest.resize(numbers.size());
  return checkpoint;
}

} // namespace

void require_writable(const std::string& file) {
  const Replacement trial(kOption, file);
}

void save_checkpoint(const World& world, const std::string& file, int64_t step, const ModelOptions& model, const Text& text,
                     Parameters& parameters) {
  std::vector<float> all; // only on rank 0
  for (const Tensor& tensor : parameters.tensors()) {
    for (const Array<float>* values : saved_arrays(parameters.area(tensor))) {
      std::vector<float> here(static_cast<size_t>(tensor.size));
      values->copy_out(tensor.offset, here);
      const std::vector<float> whole = parameters.is_split(tensor) ? whole_of(world, tensor, here) : std::move(here);
      if (world.rank() == 0) all.insert(all.end(), whole.begin(), whole.end());
    }
  }
  world.together([&] {
    if (world.rank() == 0) write_file(file, header_of(step, model, text, parameters), all);
  });
}

int64_t load_checkpoint(const World& world, const std::string& file, const ModelOptions& model, const Text& text,
                        Parameters& parameters) {
  Checkpoint checkpoint;
  world.together([&] {
    if (world.rank() == 0) checkpoint = read_checkpoint(file, header_of(0, model, text, parameters));
  });
  MPI_Bcast(&checkpoint.step, 1, MPI_INT64_T, 0, world.comm());
  world.broadcast(checkpoint.numbers);
  const char* from = checkpoint.numbers.data();
  for (const Tensor& tensor : parameters.tensors()) {
    for (Array<float>* values : saved_arrays(parameters.area(tensor))) {
      std::vector<float> here(static_cast<size_t>(tensor.size));
      if (!here.empty()) std::memcpy(here.data(), from + tensor.first * sizeof(float), here.size() * sizeof(float));
      values->copy_in(tensor.offset, here);
      from += tensor.whole_size() * sizeof(float);
    }
  }
  return checkpoint.step;
}

} // namespace train
