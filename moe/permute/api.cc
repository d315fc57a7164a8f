// SPDX-License-Identifier: Apache-2.0
// The local permutation's part of the C API.
#include <initializer_list>
#include <limits>

#include "base/c_boundary.h"
#include "base/dtypes.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/permute/cuda/enqueue.h"
#include "moe/permute/cuda/kernels.h"
#include "moe/permute/permute.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

namespace {

// Sizes of [T, K], of which there is at least one route per token.
struct Routes {
  int64_t tokens, top_k;
};
Routes require_routes(const epx_tensor* tensor, const char* name, std::initializer_list<epx_dtype> dtypes) {
  require_tensor(tensor, name, dtypes, {{"T", kAnySize}, {"K", kAnySize}});
  if (tensor->sizes[1] < 1)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} has K = {}; it must be at least 1", name, tensor->sizes[1]);
  return {tensor->sizes[0], tensor->sizes[1]};
}

// Kernels number routes and experts in 32 bits.
void require_few_experts(int64_t num_experts, Place place) {
  if (place == Place::cuda && num_experts > std::numeric_limits<int32_t>::max())
    fail(EPX_ERROR_INVALID_ARGUMENT, "counts has {} experts, more than an int32 can count", num_experts);
}
void require_few_routes(const Routes& routes, Place place) {
  if (place == Place::cuda && routes.tokens * routes.top_k > std::numeric_limits<int32_t>::max())
    fail(EPX_ERROR_INVALID_ARGUMENT, "there are {} * {} routes, more than an int32 can count", routes.tokens, routes.top_k);
}

// Checks row_map[T, K] against rows whose first dimension has been checked. Kernels look at the entries themselves.
RowMap require_map(const epx_tensor* row_map, int64_t num_rows, Place place) {
  const Routes routes = require_routes(row_map, "row_map", {EPX_INT32});
  require_few_routes(routes, place);
  if (num_rows > std::numeric_limits<int32_t>::max())
    fail(EPX_ERROR_INVALID_ARGUMENT, "there are {} rows, more than an int32 can count", num_rows);
  const RowMap map{data_of<int32_t>(row_map), routes.tokens, routes.top_k, num_rows};
  if (place == Place::host) validate(map);
  return map;
}

std::initializer_list<epx_dtype> row_dtypes(Place place) {
  return place == Place::cuda ? kCudaRows : kReal;
}
// The dtype of weights beside rows.
epx_dtype weight_dtype(epx_dtype rows, Place place) {
  return place == Place::cuda ? EPX_FLOAT32 : rows;
}

// The H of a tensor of rows.
int64_t require_hidden(const epx_tensor& rows, const char* name) {
  if (rows.sizes[1] < 1) fail(EPX_ERROR_INVALID_ARGUMENT, "{} has H = {}; it must be at least 1", name, rows.sizes[1]);
  return rows.sizes[1];
}

Dim tokens_of(const RowMap& map) {
  return {"T", map.num_tokens};
}
Dim top_k_of(const RowMap& map) {
  return {"K", map.top_k};
}

// The N of a tensor of rows of which nothing has been checked.
int64_t rows_of_shape(const epx_tensor* rows, const char* name) {
  require_sizes(rows, name, {{"N", kAnySize}, {"H", kAnySize}});
  return rows->sizes[0];
}

} // namespace

epx_status epx_moe_row_map(const epx_moe_row_map_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const Routes routes = require_routes(args->topk_idx, "topk_idx", kInteger);
    require_few_routes(routes, place);
    if (args->alignment < 0) fail(EPX_ERROR_INVALID_ARGUMENT, "alignment is {}; it must not be negative", args->alignment);
    require_tensor(args->counts, "counts", kInteger, {{"E", kAnySize}});
    const int64_t experts = args->counts->sizes[0];
    require_few_experts(experts, place);
    require_tensor(args->offsets, "offsets", {args->counts->dtype}, {{"E + 1", experts + 1}});
    require_tensor(args->row_map, "row_map", {EPX_INT32}, {{"T", routes.tokens}, {"K", routes.top_k}});
    const int32_t alignment = args->alignment == 0 ? 1 : args->alignment;
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args); });
    make_row_map(Integers(args->topk_idx), routes.tokens, routes.top_k, experts, alignment, Integers(args->counts),
                 Integers(args->offsets), data_of<int32_t>(args->row_map));
  });
}

epx_status epx_moe_row_map_workspace(const epx_moe_row_map_args* args, size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_struct(args, "args");
    require_sizes(args->topk_idx, "topk_idx", {{"T", kAnySize}, {"K", kAnySize}});
    require_sizes(args->counts, "counts", {{"E", kAnySize}});
    require_few_experts(args->counts->sizes[0], Place::cuda);
    const int64_t num_routes = args->topk_idx->sizes[0] * args->topk_idx->sizes[1];
    write_workspace(bytes, moe::cuda::row_map_bytes(num_routes, args->counts->sizes[0]));
  });
}

epx_status epx_moe_permute(const epx_moe_permute_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const int64_t tokens = require_routes(args->row_map, "row_map", {EPX_INT32}).tokens;
    require_any_tensor(args->tokens, "tokens", {{"T", tokens}, {"H", kAnySize}});
    const int64_t hidden = require_hidden(*args->tokens, "tokens");
    require_tensor(args->rows, "rows", {args->tokens->dtype}, {{"N", kAnySize}, {"H", hidden}});
    const RowMap map = require_map(args->row_map, args->rows->sizes[0], place);
    if (args->pads != EPX_PADS_ZERO && args->pads != EPX_PADS_UNTOUCHED)
      fail(EPX_ERROR_INVALID_ARGUMENT, "pads is {}; it must be EPX_PADS_ZERO ({}) or EPX_PADS_UNTOUCHED ({})",
           static_cast<int>(args->pads), static_cast<int>(EPX_PADS_ZERO), static_cast<int>(EPX_PADS_UNTOUCHED));
    require_both_or_neither(args->topk_weights, "topk_weights", args->row_weights, "row_weights");
    if (args->topk_weights != nullptr) {
      require_any_tensor(args->topk_weights, "topk_weights", {tokens_of(map), top_k_of(map)});
      require_tensor(args->row_weights, "row_weights", {args->topk_weights->dtype}, {{"N", map.num_rows}});
    }
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args, map); });
    scatter_tokens(map, args->tokens->data, args->rows->data, row_bytes(args->tokens->dtype, hidden), args->pads);
    if (args->topk_weights != nullptr)
      scatter_routes(map, args->topk_weights->data, args->row_weights->data,
                     single_element_bytes(args->topk_weights->dtype), args->pads);
  });
}

epx_status epx_moe_permute_workspace(const epx_moe_permute_args* args, size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_struct(args, "args");
    write_workspace(bytes, moe::cuda::owners_bytes(rows_of_shape(args->rows, "rows")));
  });
}

epx_status epx_moe_permute_bwd(const epx_moe_permute_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    require_tensor(args->grad_rows, "grad_rows", row_dtypes(place), {{"N", kAnySize}, {"H", kAnySize}});
    const epx_dtype dtype = args->grad_rows->dtype;
    const epx_dtype weight = weight_dtype(dtype, place);
    const int64_t hidden = require_hidden(*args->grad_rows, "grad_rows");
    const RowMap map = require_map(args->row_map, args->grad_rows->sizes[0], place);
    require_tensor(args->grad_tokens, "grad_tokens", {dtype}, {tokens_of(map), {"H", hidden}});
    require_both_or_neither(args->grad_row_weights, "grad_row_weights", args->grad_topk_weights, "grad_topk_weights");
    allow_tensor(args->grad_row_weights, "grad_row_weights", {weight}, {{"N", map.num_rows}});
    allow_tensor(args->grad_topk_weights, "grad_topk_weights", {weight}, {tokens_of(map), top_k_of(map)});
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args, map); });
    with_real(dtype, [&]<typename T>(T) {
      sum_rows<T>(map, data_of<T>(args->grad_rows), nullptr, hidden, data_of<T>(args->grad_tokens));
      if (args->grad_row_weights != nullptr)
        gather_routes<T>(map, data_of<T>(args->grad_row_weights), data_of<T>(args->grad_topk_weights));
    });
  });
}

epx_status epx_moe_unpermute(const epx_moe_unpermute_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    require_tensor(args->rows, "rows", row_dtypes(place), {{"N", kAnySize}, {"H", kAnySize}});
    const epx_dtype dtype = args->rows->dtype;
    const int64_t hidden = require_hidden(*args->rows, "rows");
    const RowMap map = require_map(args->row_map, args->rows->sizes[0], place);
    allow_tensor(args->topk_weights, "topk_weights", {weight_dtype(dtype, place)}, {tokens_of(map), top_k_of(map)});
    require_tensor(args->tokens, "tokens", {dtype}, {tokens_of(map), {"H", hidden}});
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args, map); });
    with_real(dtype, [&]<typename T>(T) {
      sum_rows<T>(map, data_of<T>(args->rows), data_of<T>(args->topk_weights), hidden, data_of<T>(args->tokens));
    });
  });
}

epx_status epx_moe_unpermute_bwd(const epx_moe_unpermute_bwd_args* args) {
  return at_c_boundary(__func__, [&] {
    const Place place = require_args(args);
    const int64_t tokens = require_routes(args->row_map, "row_map", {EPX_INT32}).tokens;
    require_tensor(args->grad_tokens, "grad_tokens", row_dtypes(place), {{"T", tokens}, {"H", kAnySize}});
    const epx_dtype dtype = args->grad_tokens->dtype;
    const epx_dtype weight = weight_dtype(dtype, place);
    const Dim hidden{"H", require_hidden(*args->grad_tokens, "grad_tokens")};
    require_tensor(args->grad_rows, "grad_rows", {dtype}, {{"N", kAnySize}, hidden});
    const RowMap map = require_map(args->row_map, args->grad_rows->sizes[0], place);
    allow_tensor(args->topk_weights, "topk_weights", {weight}, {tokens_of(map), top_k_of(map)});
    require_both_or_neither(args->rows, "rows", args->grad_topk_weights, "grad_topk_weights");
    allow_tensor(args->rows, "rows", {dtype}, {{"N", map.num_rows}, hidden});
    allow_tensor(args->grad_topk_weights, "grad_topk_weights", {weight}, {tokens_of(map), top_k_of(map)});
    if (place == Place::cuda) return enqueue_on_cuda([&](auto) { moe::cuda::enqueue(*args, map); });
    with_real(dtype, [&]<typename T>(T) {
      const T* const grad_tokens = data_of<T>(args->grad_tokens);
      scatter_weighted<T>(map, grad_tokens, data_of<T>(args->topk_weights), hidden.size, data_of<T>(args->grad_rows));
      if (args->grad_topk_weights != nullptr)
        dot_rows<T>(map, grad_tokens, data_of<T>(args->rows), hidden.size, data_of<T>(args->grad_topk_weights));
    });
  });
}

epx_status epx_moe_unpermute_bwd_workspace(const epx_moe_unpermute_bwd_args* args, size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    require_struct(args, "args");
    write_workspace(bytes, moe::cuda::owners_bytes(rows_of_shape(args->grad_rows, "grad_rows")));
  });
}
