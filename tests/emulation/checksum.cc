#include "tests/emulation/device.h"

#include "runtime/stages/cuda/checksum.cu"
