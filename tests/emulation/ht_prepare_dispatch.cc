// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "runtime/stages/cuda/prepare_dispatch/ht_prepare_dispatch.cu"
