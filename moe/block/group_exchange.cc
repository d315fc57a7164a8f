// SPDX-License-Identifier: Apache-2.0
#include "moe/block/exchange.h"
#include "moe/block/group.h"

namespace epx::moe {
namespace {

class GroupExchange final : public Exchange {
public:
  GroupExchange(epx_group group, const epx_layer& layer) : group_(group) {
    throw_if_failed(epx_handle_mem_size(group, &layer, &handle_mem_bytes_));
  }

  size_t handle_mem_bytes() const override { return handle_mem_bytes_; }
  void prepare(const ExchangeCall&, const epx_prepare_args& args) override { throw_if_failed(epx_prepare(group_, &args)); }
  void dispatch(const ExchangeCall&, const epx_dispatch_args& args) override {
    throw_if_failed(epx_dispatch(group_, &args));
  }
  void combine(const ExchangeCall&, const epx_combine_args& args) override { throw_if_failed(epx_combine(group_, &args)); }
  void combine_bwd(const ExchangeCall&, const epx_combine_bwd_args& args) override {
    throw_if_failed(epx_combine_bwd(group_, &args));
  }
  void dispatch_bwd(const ExchangeCall&, const epx_dispatch_bwd_args& args) override {
    throw_if_failed(epx_dispatch_bwd(group_, &args));
  }

private:
  epx_group group_;
  size_t handle_mem_bytes_ = 0;
};

} // namespace

std::unique_ptr<Exchange> make_group_exchange(epx_group group, const BlockPlan& plan) {
  return std::make_unique<GroupExchange>(group, plan.layer);
}

} // namespace epx::moe
