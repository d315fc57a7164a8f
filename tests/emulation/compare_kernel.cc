#include "tests/emulation/device.h"

#include "tests/gpu/compare_kernel.cu"
