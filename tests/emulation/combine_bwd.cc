// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "runtime/stages/cuda/scatter/combine_bwd.cu"
