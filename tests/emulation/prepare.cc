#include "tests/emulation/device.h"

#include "runtime/stages/cuda/prepare/prepare.cu"
