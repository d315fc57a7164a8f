// SPDX-License-Identifier: Apache-2.0
// A Backend runs a group on one kind of machine: it owns the windows, the operations on them, and their status. The group
// chooses one at creation and uses it only through this interface.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "epx/epx.h"
#include "runtime/stages/stages.h"
#include "transport/transport.h"

namespace epx {

// What a rank brings to epx_group_all_gather, of which the call uses the first bytes.
using GroupRecord = std::array<std::byte, EPX_MAX_RECORD_BYTES>;

class Backend {
public:
  virtual ~Backend() = default;

  virtual int num_comm_sms() const = 0; // SMs that calls use; 0 where there are none
  virtual Stages& stages() = 0;

  // These are collective; see epx_mem_alloc, epx_mem_register and epx_mem_free.
  virtual void* allocate(int64_t bytes) = 0;
  virtual void register_memory(std::byte* memory, int64_t bytes) = 0;
  virtual void free(void* data) = 0;

  // This is collective; see epx_group_all_gather. Returns the records in rank order.
  virtual std::vector<GroupRecord> all_gather(const GroupRecord& mine, int64_t bytes) = 0;

  // Any thread may call these.
  virtual void abort() = 0;
  virtual epx_group_report report() = 0;

protected:
  // Throws MISMATCH on all ranks where their `bytes` differ.
  static std::vector<GroupRecord> gather_records(const GroupRecord& mine, int64_t bytes, Exchange& exchange) {
    require_equal_bytes(bytes, exchange);
    return exchange.all_gather_of_group(mine);
  }
};

} // namespace epx
