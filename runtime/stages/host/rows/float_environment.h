// SPDX-License-Identifier: Apache-2.0
// The contract's arithmetic needs the default floating-point environment, which the application may have changed in its thread.
#pragma once

#include <cfenv>

namespace epx::host {

// While a DefaultFloatEnvironment lives, the thread rounds to nearest and keeps subnormals; its destructor restores the
// application's environment.
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
