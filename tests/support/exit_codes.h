// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace epx::test {

inline constexpr int kSkippedExitCode = 77; // a test that Meson takes for skipped

} // namespace epx::test
