// The contract's arithmetic in a thread whose floating-point environment the application has changed.
#pragma once

#include <cfenv>

namespace epx::host {

// Rounds to nearest and keeps subnormals while it lives, then puts back what was there.
class DefaultFloatEnvironment {
public:
  DefaultFloatEnvironment() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;
  ~DefaultFloatEnvironment() { std::fesetenv(&saved_); }

private:
  std::fenv_t saved_;
};

} // namespace epx::host
