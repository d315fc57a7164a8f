#include "tests/emulation/device.h"

#include "runtime/stages/cuda/scatter/scatter.cu"
