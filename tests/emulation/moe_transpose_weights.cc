// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "moe/quantise/cuda/transpose_weights.cu"
