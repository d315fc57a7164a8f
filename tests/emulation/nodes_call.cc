// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/device.h"

#include "runtime/nodes/multi_node_call.cu"
