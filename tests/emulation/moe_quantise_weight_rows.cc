// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "moe/quantise/cuda/quantise_weight_rows.cu"
