// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "tests/gpu/compare_kernel.cu"
