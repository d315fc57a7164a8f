// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/output.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <span>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "apps/train_moe/errors.h"

namespace train {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace

LineWriter::LineWriter(const std::string& option, const std::string& file) : option_(option), file_(file) {
  if (file.empty()) return;
  errno = 0;
  stream_.open(file);
  if (!stream_) fail(kExitUsage, "{} {}: {}", option, file, errno != 0 ? std::strerror(errno) : "cannot be written");
}

void LineWriter::write(const std::string& line) {
  if (!file_.empty()) {
    stream_ << line << '\n';
    return;
  }
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

void LineWriter::close() {
  if (file_.empty()) return;
  stream_.close();
  if (!stream_) fail(kExitFailure, "{} {}: not everything could be written", option_, file_);
}

RoutingRecord::RoutingRecord(const World& world, const ModelOptions& model, const std::string& file)
    : world_(world), options_(model) {
  world.together([&] {
    if (world.rank() == 0) writer_ = std::make_unique<LineWriter>("--record-routing", file);
  });
}

void RoutingRecord::write(int64_t step, const Model& model) {
  for (size_t l = 0; l < model.layers().size(); ++l) {
    const std::vector<int32_t> all = world_.gather(std::span<const int32_t>(model.layers()[l]->topk_idx()));
    if (writer_ == nullptr) continue;
    for (int rank = 0; rank < world_.size(); ++rank) {
      const Chunks chunks(options_.batch, rank, world_.size());
      auto rows = nlohmann::ordered_json::array();
      for (int64_t t = chunks.first_token(); t < chunks.first_token() + chunks.num_tokens(); ++t)
        rows.push_back(std::vector<int32_t>(all.begin() + t * options_.top_k, all.begin() + (t + 1) * options_.top_k));
      const nlohmann::ordered_json line = {{"step", step},
                                           {"layer", l},
                                           {"rank", rank},
                                           {"num_ranks", world_.size()},
                                           {"num_experts", options_.experts},
                                           {"top_k", options_.top_k},
                                           {"topk_idx", rows}};
      writer_->write(line.dump());
    }
  }
}

void RoutingRecord::close() {
  world_.together([&] {
    if (writer_ != nullptr) writer_->close();
  });
}

ProgressBar::ProgressBar(bool is_shown, int64_t first_step, int64_t last_step)
    : is_shown_(is_shown), first_step_(first_step), last_step_(last_step), begin_(now()) {}

ProgressBar::~ProgressBar() {
  if (is_shown_) fmt::print(stderr, "\n");
}

void ProgressBar::update(int64_t step, double loss) {
  if (!is_shown_) return;
  constexpr int64_t kWidth = 40;
  const int64_t done = step - first_step_ + 1;
  const int64_t all = last_step_ - first_step_ + 1;
  const int64_t filled = kWidth * done / all;
  const double left = (now() - begin_) / static_cast<double>(done) * static_cast<double>(all - done);
  fmt::print(stderr, "\r[{:#<{}}{:.<{}}] step {}/{}  loss {:.4f}  {:.0f} s left ", "", filled, "", kWidth - filled, step,
             last_step_, loss, left);
  std::fflush(stderr);
}

bool has_terminal() {
  if (isatty(STDERR_FILENO) == 1) return true;
  std::error_code error;
  const auto launchers = std::filesystem::read_symlink(fmt::format("/proc/{}/fd/2", getppid()), error);
  return !error && (launchers.string().starts_with("/dev/pts/") || launchers.string().starts_with("/dev/tty"));
}

} // namespace train
