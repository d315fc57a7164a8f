// SPDX-License-Identifier: Apache-2.0
// The args structs of epx's calls.
#pragma once

#include <cstddef>

#include "epx/epx.h"

namespace epx::test {

// Returns args that have what every call of a layer has, and no tensors.
template <typename Args>
Args make_call_args(epx_layer layer, decltype(Args::handle_mem) handle_mem, size_t handle_mem_bytes, void* stream) {
  Args args = {};
  args.struct_size = sizeof(args);
  args.layer = layer;
  args.handle_mem = handle_mem;
  args.handle_mem_bytes = handle_mem_bytes;
  args.stream = stream;
  return args;
}

} // namespace epx::test
