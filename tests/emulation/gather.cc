#include "tests/emulation/device.h"

#include "runtime/stages/cuda/gather/gather.cu"
