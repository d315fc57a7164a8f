#include "examples/train_moe/checkpoint.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

#include <nlohmann/json.hpp>

#include "examples/train_moe/errors.h"
#include "examples/train_moe/files.h"

namespace train {
namespace {

using json = nlohmann::ordered_json;

constexpr const char* kFormat = "epx train_moe 1";

// The vectors of an area that a checkpoint holds.
std::array<std::vector<float>*, 3> saved_vectors(Area& area) {
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

int64_t whole_size(const Tensor& tensor) {
  return tensor.shape[0] * tensor.row_size();
}

void write_file(const std::string& file, const json& header, const std::vector<float>& values) {
  const std::string temporary = file + ".tmp";
  errno = 0;
  std::ofstream stream(temporary, std::ios::binary);
  stream << header.dump() << '\n';
  stream.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(float)));
  stream.close();
  std::error_code error;
  if (stream) std::filesystem::rename(temporary, file, error);
  if (stream && !error) return;
  const std::string reason = error ? error.message() : errno != 0 ? std::strerror(errno) : "it could not be written";
  std::filesystem::remove(temporary, error);
  fail(kExitUsage, "--checkpoint {}: {}", file, reason);
}

// Checks the whole file, and returns its header and where the numbers begin.
json check_file(const std::string& file, const std::vector<char>& bytes, const json& ours, size_t& begin) {
  const auto end_of_line = std::find(bytes.begin(), bytes.end(), '\n');
  const json theirs = json::parse(bytes.begin(), end_of_line, nullptr, false);
  if (!theirs.is_object() || !theirs.contains("format") || theirs["format"] != kFormat)
    fail(kExitUsage, "--resume {}: this is not a checkpoint of train_moe (\"format\": \"{}\")", file, kFormat);
  for (const char* part : {"model", "text"})
    require_same(file, theirs.value(part, json()), ours[part], part);
  if (!theirs.contains("tensors") || theirs["tensors"] != ours["tensors"])
    fail(kExitUsage, "--resume {}: its list of tensors is another than this program's", file);
  const json step = theirs.value("step", json());
  if (!step.is_number_unsigned() || step.get<uint64_t>() < 1 || step.get<uint64_t>() > std::numeric_limits<int32_t>::max())
    fail(kExitUsage, "--resume {}: its step is {}; it must be 1..{}", file, step.dump(),
         std::numeric_limits<int32_t>::max());
  size_t elements = 0;
  for (const auto& tensor : ours["tensors"]) {
    size_t size = 3;
    for (const auto& dim : tensor["shape"])
      size *= dim.get<size_t>();
    elements += size;
  }
  begin = static_cast<size_t>(end_of_line - bytes.begin()) + 1;
  if (bytes.size() != begin + elements * sizeof(float))
    fail(kExitUsage, "--resume {}: it has {} bytes; its header promises {}", file, bytes.size(),
         begin + elements * sizeof(float));
  return theirs;
}

} // namespace

void require_writable(const std::string& file) {
  errno = 0;
  const std::string temporary = file + ".tmp";
  const bool is_writable = std::ofstream(temporary).good();
  std::error_code error;
  if (is_writable) std::filesystem::remove(temporary, error);
  if (is_writable && std::filesystem::is_directory(file, error)) errno = EISDIR;
  if (!is_writable || errno == EISDIR)
    fail(kExitUsage, "--checkpoint {}: {}", file, errno != 0 ? std::strerror(errno) : "it cannot be written");
}

void save_checkpoint(const World& world, const std::string& file, int64_t step, const ModelOptions& model, const Text& text,
                     Parameters& parameters) {
  std::vector<float> all; // rank 0's
  for (const Tensor& tensor : parameters.tensors()) {
    for (const std::vector<float>* values : saved_vectors(parameters.area(tensor))) {
      const std::span<const float> here(values->data() + tensor.offset, static_cast<size_t>(tensor.size()));
      const std::vector<float> whole =
          tensor.is_sharded ? world.gather(here) : std::vector<float>(here.begin(), here.end());
      if (world.rank() == 0) all.insert(all.end(), whole.begin(), whole.end());
    }
  }
  world.together([&] {
    if (world.rank() == 0) write_file(file, header_of(step, model, text, parameters), all);
  });
}

int64_t load_checkpoint(const World& world, const std::string& file, const ModelOptions& model, const Text& text,
                        Parameters& parameters) {
  std::vector<char> bytes;
  world.together([&] {
    if (world.rank() == 0) bytes = read_file<char>("--resume", file);
  });
  world.broadcast(bytes);
  int64_t step = 0;
  world.together([&] {
    size_t begin = 0;
    const json header = check_file(file, bytes, header_of(0, model, text, parameters), begin);
    step = header["step"].get<int64_t>();
    const char* from = bytes.data() + begin;
    for (const Tensor& tensor : parameters.tensors()) {
      for (std::vector<float>* values : saved_vectors(parameters.area(tensor))) {
        std::memcpy(values->data() + tensor.offset, from + tensor.first * tensor.row_size() * sizeof(float),
                    static_cast<size_t>(tensor.size()) * sizeof(float));
        from += whole_size(tensor) * sizeof(float);
      }
    }
  });
  return step;
}

} // namespace train
