// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "runtime/stages/cuda/scatter/ll_rank_major_dispatch.cu"
