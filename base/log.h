// SPDX-License-Identifier: Apache-2.0
// Each subsystem has one logger, which writes to standard error at the level of EPX_LOG. No hot path uses one. This header does
// not include spdlog, which takes longer to compile than most of the files that log.
#pragma once

#include <memory>
#include <new>
#include <string>
#include <utility>

#include <fmt/format.h>

namespace spdlog {
class logger;
}

namespace epx::log {

enum class Level { kInfo, kWarn, kError };

class Logger {
public:
  // Formats only what the level lets through. A message for which there is no memory is lost, since destructors log.
  template <typename... Args>
  void log(Level level, fmt::format_string<Args...> format, Args&&... args) const noexcept {
    try {
      if (is_on(level)) write(level, fmt::format(format, std::forward<Args>(args)...));
    } catch (const std::bad_alloc&) {
    }
  }
  template <typename... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) const noexcept {
    log(Level::kInfo, format, std::forward<Args>(args)...);
  }
  template <typename... Args>
  void warn(fmt::format_string<Args...> format, Args&&... args) const noexcept {
    log(Level::kWarn, format, std::forward<Args>(args)...);
  }

private:
  friend const Logger& group();
  friend const Logger& transport();
  explicit Logger(const std::string& name);

  bool is_on(Level level) const;
  void write(Level level, const std::string& message) const;

  std::shared_ptr<spdlog::logger> logger_;
};

const Logger& group();     // creation and end of groups, sticky failures
const Logger& transport(); // windows; which transport was chosen and why

} // namespace epx::log
