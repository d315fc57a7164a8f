// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "runtime/stages/cuda/gather/quantised_gather.cu"
