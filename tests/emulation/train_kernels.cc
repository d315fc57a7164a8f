// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "apps/train_moe/cuda/kernels.cu"
