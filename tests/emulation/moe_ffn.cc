// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "moe/ffn/cuda/ffn_kernels.cu"
