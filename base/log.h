// SPDX-License-Identifier: Apache-2.0
// Each subsystem has one logger, which writes to standard error at the level of EPX_LOG. No hot path uses one.
#pragma once

#include <spdlog/logger.h>

namespace epx::log {

spdlog::logger& group();     // creation and end of groups, sticky failures
spdlog::logger& transport(); // windows; which transport was chosen and why

} // namespace epx::log
