// One logger per subsystem, to standard error, level from EPX_LOG. Never used in a hot path.
#pragma once

#include <spdlog/logger.h>

namespace epx::log {

spdlog::logger& group();     // creation and end of groups, sticky failures
spdlog::logger& transport(); // windows, what was chosen and why

} // namespace epx::log
