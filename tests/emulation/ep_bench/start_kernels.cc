// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "tools/ep_bench/gpu/start_kernels.cu"
