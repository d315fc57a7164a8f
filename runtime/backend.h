// SPDX-License-Identifier: Apache-2.0
// A Backend runs a group on one kind of machine: it owns the windows, the operations on them, and their status. The group
// chooses one at creation and uses it only through this interface.
#pragma once

#include <cstddef>
#include <cstdint>

#include "epx/epx.h"
#include "runtime/stages/stages.h"

namespace epx {

class Backend {
public:
  virtual ~Backend() = default;

  virtual int num_comm_sms() const = 0; // SMs that calls use; 0 where there are none
  virtual Stages& stages() = 0;

  // These are collective; see epx_mem_alloc, epx_mem_register and epx_mem_free.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void register_memory(std::byte* memory, int64_t bytes) = 0;
  virtual void free(void* data) = 0;

  // Any thread may call these.
  virtual void abort() = 0;
  virtual epx_group_report report() = 0;
};

} // namespace epx
