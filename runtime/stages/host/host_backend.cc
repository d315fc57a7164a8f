// SPDX-License-Identifier: Apache-2.0
#include "runtime/stages/host/host_backend.h"

#include <utility>
#include <vector>

#include "base/error.h"
#include "runtime/allocations.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/host/host_stages.h"
#include "runtime/stages/host/protocol/call_protocol.h"
#include "runtime/status_board.h"

namespace epx::host {
namespace {

class HostBackend final : public Backend {
public:
  HostBackend(const GroupContext& context, std::unique_ptr<Transport> transport, std::unique_ptr<Window> window,
              std::unique_ptr<ControlConnection> control)
      : context_(context), transport_(std::move(transport)), window_(std::move(window)),
        protocol_(context_, window_->view(), status_), stages_(context_, window_->view(), allocations_, protocol_, status_),
        control_(std::move(control)) {
    if (control_ == nullptr) return;
    protocol_.use(*control_);
    control_->deliver_to([this](const Verdict& verdict) { protocol_.end(verdict); });
  }

  int num_comm_sms() const override { return 0; }
  Stages& stages() override { return stages_; }

  void* allocate(int64_t bytes) override {
    status_.require_healthy();
    CallExchange exchange(protocol_, context_, window_->view(), describe(EPX_OP_MEM_ALLOC));
    return allocations_.add(transport_->open_window(bytes, exchange));
  }

  void register_memory(std::byte* memory, int64_t bytes) override {
    CallExchange exchange(protocol_, context_, window_->view(), describe(EPX_OP_MEM_ALLOC));
    allocations_.add(transport_->adopt_window(memory, bytes, exchange));
  }

  void free(void* data) override {
    const int64_t allocation = allocations_.require_start(data);
    if (status_.is_healthy()) {
      try {
        protocol_.begin(EPX_OP_MEM_FREE);
        protocol_.arrive(describe(EPX_OP_MEM_FREE, allocation));
        protocol_.complete();
      } catch (const StatusError&) { // the group has failed, so freeing is local
        allocations_.remove(allocation);
        throw;
      }
    }
    allocations_.remove(allocation);
  }

  std::vector<GroupRecord> all_gather(const GroupRecord& mine, int64_t bytes) override {
    CallExchange exchange(protocol_, context_, window_->view(), describe(EPX_OP_ALL_GATHER));
    return gather_records(mine, bytes, exchange);
  }

  void abort() override { protocol_.abort(); }
  epx_group_report report() override { return status_.report(); }

private:
  const GroupContext& context_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<Window> window_;
  Allocations allocations_;
  StatusBoard status_;
  CallProtocol protocol_;
  HostStages stages_;
  std::unique_ptr<ControlConnection> control_; // last: its thread uses the others
};

} // namespace

std::unique_ptr<Backend> make_backend(const GroupContext& context, std::unique_ptr<Transport> transport,
                                      std::unique_ptr<ControlConnection> control, Exchange& exchange) {
  std::unique_ptr<Window> window = transport->open_window(context.layout.total_bytes, exchange);
  return std::make_unique<HostBackend>(context, std::move(transport), std::move(window), std::move(control));
}

} // namespace epx::host
