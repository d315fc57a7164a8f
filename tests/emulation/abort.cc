#include "tests/emulation/device.h"

#include "runtime/stages/cuda/protocol/abort.cu"
