// SPDX-License-Identifier: Apache-2.0
// Headers of the standard library come first: they use words to which device.h gives another meaning.
#include "tools/ep_bench/floor/floor_kernels.h"

#include "tests/emulation/device.h"

#include "tools/ep_bench/floor/floor_kernels.cu"
