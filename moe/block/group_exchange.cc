#include "moe/base/error.h"
#include "moe/base/tensors.h"
#include "moe/block/exchange.h"

namespace epx::moe {
namespace {

class GroupExchange final : public Exchange {
public:
  GroupExchange(epx_group group, const epx_moe_block_config& config) : group_(group) {
    epx_group_info info{};
    info.struct_size = sizeof(info);
    require_success(epx_group_query(group, &info));
    require_fit(info, config);
    const epx_layer layer{config.router.top_k, config.alignment};
    shape_ = {info.num_ranks, info.num_local_experts, info.max_tokens_per_rank, info.max_recv_tokens_per_rank, 0};
    require_success(epx_handle_mem_size(group, &layer, &shape_.handle_mem_bytes));
  }

  std::byte* allocate(size_t bytes) override {
    require_success(epx_mem_alloc(group_, bytes, &memory_));
    return static_cast<std::byte*>(memory_);
  }
  void release() override {
    if (memory_ != nullptr) require_success(epx_mem_free(group_, memory_));
    memory_ = nullptr;
  }

  void prepare(const epx_prepare_args& args) override { require_success(epx_prepare(group_, &args)); }
  void dispatch(const epx_dispatch_args& args) override { require_success(epx_dispatch(group_, &args)); }
  void combine(const epx_combine_args& args) override { require_success(epx_combine(group_, &args)); }
  void combine_bwd(const epx_combine_bwd_args& args) override { require_success(epx_combine_bwd(group_, &args)); }
  void dispatch_bwd(const epx_dispatch_bwd_args& args) override { require_success(epx_dispatch_bwd(group_, &args)); }

private:
  static void require_fit(const epx_group_info& info, const epx_moe_block_config& config) {
    if (info.transport != EPX_TRANSPORT_HOST)
      throw Error(EPX_ERROR_UNSUPPORTED, "the group's tensors are in GPU memory; the FFN computes on the host");
    if (config.dtype != EPX_FLOAT32) refuse("dtype is float64; a block with a group computes in float32");
    if (config.router.num_experts != info.num_experts)
      refuse("router.num_experts is {}; the group has {}", config.router.num_experts, info.num_experts);
    if (config.ffn.hidden_dim > info.hidden_dim)
      refuse("ffn.hidden_dim is {}; the group's hidden_dim is {}", config.ffn.hidden_dim, info.hidden_dim);
    if (config.router.top_k > info.max_top_k)
      refuse("router.top_k is {}; the group's max_top_k is {}", config.router.top_k, info.max_top_k);
    if (config.alignment > info.max_alignment)
      refuse("alignment is {}; the group's max_alignment is {}", config.alignment, info.max_alignment);
    if (info.max_token_dtype != EPX_FLOAT32)
      refuse("the group's max_token_dtype is {}; a block needs float32", name_of(info.max_token_dtype));
  }

  epx_group group_;
  void* memory_ = nullptr;
};

} // namespace

std::unique_ptr<Exchange> make_group_exchange(epx_group group, const epx_moe_block_config& config) {
  return std::make_unique<GroupExchange>(group, config);
}

} // namespace epx::moe
