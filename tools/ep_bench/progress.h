// SPDX-License-Identifier: Apache-2.0
// Progress tells on standard error how far a sweep is: a bar on a terminal, a line for each point in a pipe.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string>

namespace epx::bench {

class Progress {
public:
  // On a rank that is not to tell, and for a run of one point, nothing is printed.
  Progress(size_t num_points, bool tells);
  ~Progress() { finish(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void begin(const std::string& point);
  void end(const std::string& error); // empty: the point is complete
  void finish();                      // ends the line of a bar; nothing is printed any more

private:
  void draw();
  double elapsed_s() const;

  size_t num_points_, num_done_ = 0;
  bool tells_, is_bar_;
  std::string point_;
  std::chrono::steady_clock::time_point began_, point_began_;
};

// Returns "[####------] 40 %, 12 s left": `done` of `all` took so many seconds; without a time while nothing is done.
std::string progress_bar(size_t done, size_t all, double elapsed_s);

} // namespace epx::bench
