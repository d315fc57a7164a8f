// SPDX-License-Identifier: Apache-2.0
// The grouped FFN's part of the C API.
#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/ffn/calls.h"
#include "moe/ffn/ffn.h"
#include "moe/ffn/fp8/calls.h"
#include "moe/ffn/fp8/fp8_ffn.h"
#include "moe/ffn/workspace.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

namespace {

FfnShape require_config(const epx_moe_ffn_config* config) {
  require_struct(config, "config");
  return make_ffn_shape(*config);
}

} // namespace

epx_status epx_moe_ffn_config_init(epx_moe_ffn_config* config, size_t struct_size) {
  return at_c_boundary(__func__, [&] { init_struct(config, struct_size, "config"); });
}

epx_status epx_moe_ffn(const epx_moe_ffn_config* config, const epx_moe_ffn_args* args) {
  return at_c_boundary(__func__, [&] { CheckedFfn(require_config(config), args).run(); });
}

epx_status epx_moe_ffn_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_args* args, size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    const FfnShape shape = require_config(config);
    require_struct(args, "args");
    require_rows(args->recv_tokens, shape, Place::cuda);
    write_workspace(bytes,
                    ffn_fwd_bytes(shape, args->recv_tokens->dtype, args->recv_tokens->sizes[0], args->pre_act != nullptr));
  });
}

epx_status epx_moe_ffn_bwd(const epx_moe_ffn_config* config, const epx_moe_ffn_bwd_args* args) {
  return at_c_boundary(__func__, [&] { CheckedFfnBwd(require_config(config), args).run(); });
}

epx_status epx_moe_ffn_bwd_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_bwd_args* args, size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    const FfnShape shape = require_config(config);
    require_struct(args, "args");
    require_rows(args->recv_tokens, shape, Place::cuda);
    write_workspace(bytes, ffn_bwd_bytes(shape, args->recv_tokens->dtype, args->recv_tokens->sizes[0]));
  });
}

epx_status epx_moe_ffn_fp8(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_args* args) {
  return at_c_boundary(__func__, [&] { CheckedFp8Ffn(require_config(config), args).run(); });
}

epx_status epx_moe_ffn_fp8_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_args* args, size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    const FfnShape shape = require_config(config);
    require_struct(args, "args");
    const int64_t rows = require_fp8_rows(args->recv_tokens, shape);
    write_workspace(bytes, fp8_fwd_bytes(shape, EPX_BFLOAT16, rows, args->pre_act != nullptr));
  });
}

epx_status epx_moe_ffn_fp8_bwd(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_bwd_args* args) {
  return at_c_boundary(__func__, [&] { CheckedFp8FfnBwd(require_config(config), args).run(); });
}

epx_status epx_moe_ffn_fp8_bwd_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_bwd_args* args,
                                         size_t* bytes) {
  return at_c_boundary(__func__, [&] {
    const FfnShape shape = require_config(config);
    require_struct(args, "args");
    require_fp8_recipe(args->recipe);
    const int64_t rows = require_fp8_rows(args->recv_tokens, shape);
    write_workspace(bytes, fp8_bwd_bytes(shape, EPX_BFLOAT16, rows, args->recipe));
  });
}
