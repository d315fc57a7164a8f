// A group: the ranks that share the experts, and all that lives as long as they do.
#pragma once

#include <memory>

#include "epx/epx.h"
#include "runtime/group_context.h"
#include "runtime/memory/allocations.h"
#include "runtime/stages/host/call_protocol.h"
#include "runtime/stages/stages.h"
#include "runtime/status_board.h"
#include "transport/transport.h"

namespace epx {

class Group {
public:
  // Collective over the bootstrap; all ranks succeed or all throw.
  static std::unique_ptr<Group> create(const epx_bootstrap& bootstrap, const epx_group_config& config);

  const GroupContext& context() const { return context_; }
  Stages& stages() { return *stages_; }
  epx_transport transport_kind() const { return transport_->kind(); }

  // Collective. See epx_mem_alloc and epx_mem_free.
  void* allocate(int64_t bytes);
  void free(void* data);

  // From any thread.
  void abort() { protocol_.abort(); }
  void report(epx_group_report& report) { status_.report(report); }

private:
  Group(const GroupContext& context, std::unique_ptr<Transport> transport, std::unique_ptr<Window> window);

  GroupContext context_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Window> window_;
  Allocations allocations_;
  StatusBoard status_;
  host::CallProtocol protocol_;
  std::unique_ptr<Stages> stages_;
};

} // namespace epx
