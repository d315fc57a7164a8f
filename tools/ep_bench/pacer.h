// SPDX-License-Identifier: Apache-2.0
// A Pacer divides a run into phases that a script starts (--paced), so that several programs can take turns on the same GPUs.
#pragma once

namespace epx::bench {

class Pacer {
public:
  explicit Pacer(bool is_paced) : is_paced_(is_paced) {}

  // Waits for a line of standard input. Throws RuntimeError at its end.
  void begin() const;
  // Prints "phase N done", N from 0, once the GPU is idle.
  void end();

private:
  bool is_paced_;
  int phase_ = 0;
};

} // namespace epx::bench
