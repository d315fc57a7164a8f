// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "base/env.h"

namespace epx::log {
namespace {

// The logger is not entered in spdlog's registry, which belongs to the application.
std::shared_ptr<spdlog::logger> make_logger(const std::string& name) {
  static const auto& kSink = *new std::shared_ptr<spdlog::sinks::sink>(std::make_shared<spdlog::sinks::stderr_sink_mt>());
  auto logger = std::make_shared<spdlog::logger>(name, kSink);
  logger->set_level(spdlog::level::from_str(environment().log_level));
  return logger;
}

spdlog::level::level_enum level_of(Level level) {
  switch (level) {
  case Level::kInfo:
    return spdlog::level::info;
  case Level::kWarn:
    return spdlog::level::warn;
  case Level::kError:
    break;
  }
  return spdlog::level::err;
}

} // namespace

Logger::Logger(const std::string& name) : logger_(make_logger(name)) {}

bool Logger::is_on(Level level) const {
  return logger_->should_log(level_of(level));
}

void Logger::write(Level level, const std::string& message) const {
  logger_->log(level_of(level), message);
}

// The loggers are never destroyed, since a thread may be in a call while the process exits.
const Logger& group() {
  static const Logger& logger = *new Logger("epx.group");
  return logger;
}

const Logger& transport() {
  static const Logger& logger = *new Logger("epx.transport");
  return logger;
}

} // namespace epx::log
