// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/progress.h"

#include <unistd.h>

#include <fmt/format.h>

namespace epx::bench {
namespace {

std::string time_left(size_t done, size_t all, double elapsed_s) {
  if (done == 0 || done == all) return {};
  return fmt::format(", {:.0f} s left", elapsed_s / static_cast<double>(done) * static_cast<double>(all - done));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

} // namespace

std::string progress_bar(size_t done, size_t all, double elapsed_s) {
  constexpr size_t kWidth = 30;
  const size_t filled = kWidth * done / all;
  return fmt::format("[{}{}] {} %{}", std::string(filled, '#'), std::string(kWidth - filled, '-'), 100 * done / all,
                     time_left(done, all, elapsed_s));
}

Progress::Progress(size_t num_points, bool tells)
    : num_points_(num_points), tells_(tells && num_points > 1), is_bar_(isatty(STDERR_FILENO) == 1),
      began_(std::chrono::steady_clock::now()) {}

void Progress::finish() {
  if (tells_ && is_bar_) fmt::print(stderr, "\n");
  tells_ = false;
}

double Progress::elapsed_s() const {
  return seconds_since(began_);
}

void Progress::draw() {
  constexpr const char* kClearLine = "\r\033[K";
  fmt::print(stderr, "{}{} {}", kClearLine, progress_bar(num_done_, num_points_, elapsed_s()), point_);
  std::fflush(stderr);
}

void Progress::begin(const std::string& point) {
  point_ = point;
  point_began_ = std::chrono::steady_clock::now();
  if (tells_ && is_bar_) draw();
}

void Progress::end(const std::string& error) {
  ++num_done_;
  if (!tells_) return;
  if (!error.empty())
    fmt::print(stderr, "{}ep_bench: point {} of {} ({}) failed: {}\n", is_bar_ ? "\n" : "", num_done_, num_points_, point_,
               error);
  else if (!is_bar_)
    fmt::print(stderr, "ep_bench: point {} of {} ({}): {:.1f} s{}\n", num_done_, num_points_, point_,
               seconds_since(point_began_), time_left(num_done_, num_points_, elapsed_s()));
  if (is_bar_) draw();
}

} // namespace epx::bench
