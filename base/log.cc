// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"

#include <memory>
#include <string>

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include "base/env.h"

namespace epx::log {
namespace {

// The logger is not entered in spdlog's registry, which belongs to the application.
spdlog::logger make_logger(const std::string& name) {
  static const auto kSink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  spdlog::logger logger(name, kSink);
  logger.set_level(spdlog::level::from_str(environment().log_level));
  return logger;
}

} // namespace

spdlog::logger& group() {
  static spdlog::logger logger = make_logger("epx.group");
  return logger;
}

spdlog::logger& transport() {
  static spdlog::logger logger = make_logger("epx.transport");
  return logger;
}

} // namespace epx::log
