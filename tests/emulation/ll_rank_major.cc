// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "runtime/stages/cuda/rank_major/ll_dispatch_rank_major.cu"
