// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "examples/train_moe/cuda/kernels.cu"
