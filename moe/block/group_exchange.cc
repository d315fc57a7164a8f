// SPDX-License-Identifier: Apache-2.0
#include "base/dtypes.h"
#include "base/error.h"
#include "moe/block/exchange.h"
#include "moe/block/group.h"
#include "moe/cuda/cuda_call.h"
#include "moe/tensors.h"

namespace epx::moe {
namespace {

class GroupExchange final : public Exchange {
public:
  GroupExchange(epx_group group, const epx_moe_block_config& config) : group_(group) {
    const epx_group_info info = query(group);
    require_fit(info, config);
    const epx_layer layer = {config.router->top_k, config.alignment};
    shape_ = {info.transport == EPX_TRANSPORT_HOST ? Place::host : Place::cuda, info.num_ranks, info.num_local_experts,
              info.max_tokens_per_rank, info.max_recv_tokens_per_rank};
    throw_if_failed(epx_handle_mem_size(group, &layer, &shape_.handle_mem_bytes));
  }

  void prepare(const epx_prepare_args& args) override { throw_if_failed(epx_prepare(group_, &args)); }
  void dispatch(const epx_dispatch_args& args) override { throw_if_failed(epx_dispatch(group_, &args)); }
  void combine(const epx_combine_args& args) override { throw_if_failed(epx_combine(group_, &args)); }
  void combine_bwd(const epx_combine_bwd_args& args) override { throw_if_failed(epx_combine_bwd(group_, &args)); }
  void dispatch_bwd(const epx_dispatch_bwd_args& args) override { throw_if_failed(epx_dispatch_bwd(group_, &args)); }

private:
  static void require_fit(const epx_group_info& info, const epx_moe_block_config& config) {
    const bool on_gpu = info.transport != EPX_TRANSPORT_HOST;
    if (on_gpu && !kWithCuda)
      fail(EPX_ERROR_UNSUPPORTED, "the group's tensors are in GPU memory, and this build of the library has no CUDA");
    if (on_gpu ? !is_token_dtype(config.dtype) : config.dtype != EPX_FLOAT32)
      fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}; with a group {}", name_of(config.dtype),
           on_gpu ? "on GPUs a block computes in float32, float16 or bfloat16"
                  : "on the host transport a block computes in float32");
    if (config.router->num_experts != info.num_experts)
      fail(EPX_ERROR_INVALID_ARGUMENT, "router.num_experts is {}; the group has {}", config.router->num_experts,
           info.num_experts);
    if (config.ffn->hidden_dim > info.hidden_dim)
      fail(EPX_ERROR_INVALID_ARGUMENT, "ffn.hidden_dim is {}; the group's hidden_dim is {}", config.ffn->hidden_dim,
           info.hidden_dim);
    if (config.router->top_k > info.max_top_k)
      fail(EPX_ERROR_INVALID_ARGUMENT, "router.top_k is {}; the group's max_top_k is {}", config.router->top_k,
           info.max_top_k);
    if (config.alignment > info.max_alignment)
      fail(EPX_ERROR_INVALID_ARGUMENT, "alignment is {}; the group's max_alignment is {}", config.alignment,
           info.max_alignment);
    if (single_element_bytes(config.dtype) > single_element_bytes(info.max_token_dtype))
      fail(EPX_ERROR_INVALID_ARGUMENT, "dtype is {}, which is wider than the group's max_token_dtype, {}",
           name_of(config.dtype), name_of(info.max_token_dtype));
  }

  epx_group group_;
};

} // namespace

std::unique_ptr<Exchange> make_group_exchange(epx_group group, const epx_moe_block_config& config) {
  return std::make_unique<GroupExchange>(group, config);
}

} // namespace epx::moe
