// SPDX-License-Identifier: Apache-2.0
// epx_moe_errors of the C API.
#include <algorithm>
#include <atomic>
#include <memory>
#include <string>

#include "base/c_boundary.h"
#include "epx/epx_moe.h"
#include "moe/cuda/cuda_call.h"
#include "moe/tensors.h"

using namespace epx;
using namespace epx::moe;

namespace {

const char* name_of(epx_moe_op op) {
  switch (op) {
  case EPX_MOE_OP_NONE:
    break;
  case EPX_MOE_OP_ROUTER_BWD:
    return "epx_moe_router_bwd";
  case EPX_MOE_OP_AUX_LOSS:
    return "epx_moe_aux_loss";
  case EPX_MOE_OP_BIAS_UPDATE:
    return "epx_moe_bias_update";
  case EPX_MOE_OP_ROW_MAP:
    return "epx_moe_row_map";
  case EPX_MOE_OP_PERMUTE:
    return "epx_moe_permute";
  case EPX_MOE_OP_PERMUTE_BWD:
    return "epx_moe_permute_bwd";
  case EPX_MOE_OP_UNPERMUTE:
    return "epx_moe_unpermute";
  case EPX_MOE_OP_UNPERMUTE_BWD:
    return "epx_moe_unpermute_bwd";
  case EPX_MOE_OP_FFN:
    return "epx_moe_ffn";
  case EPX_MOE_OP_FFN_BWD:
    return "epx_moe_ffn_bwd";
  case EPX_MOE_OP_QUANTISE_ROWS:
    return "epx_moe_quantise_rows";
  case EPX_MOE_OP_QUANTISE_SWIGLU:
    return "epx_moe_quantise_swiglu";
  case EPX_MOE_OP_QUANTISE_SWIGLU_BWD:
    return "epx_moe_quantise_swiglu_bwd";
  case EPX_MOE_OP_FFN_FP8:
    return "epx_moe_ffn_fp8";
  case EPX_MOE_OP_FFN_FP8_BWD:
    return "epx_moe_ffn_fp8_bwd";
  }
  return "a call";
}

// The sentences are those of the host's checks, where it has the same.
std::string describe(const ErrorRecord& record) {
  const int64_t i = record.i;
  const int64_t j = record.j;
  const int64_t value = record.value;
  switch (record.kind) {
  case EPX_MOE_ERROR_NONE:
    break;
  case EPX_MOE_ERROR_EXPERT:
    return fmt::format("topk_idx[{}, {}] is {}; it must be an expert, 0..{}, or -1 as the whole row", i, j, value,
                       record.limit - 1);
  case EPX_MOE_ERROR_DUPLICATE_EXPERT:
    return fmt::format("topk_idx[{}, {}] is {}, as is an entry of the row before it; experts differ", i, j, value);
  case EPX_MOE_ERROR_ROW:
    return fmt::format("row_map[{}, {}] is {}; there are {} rows (-1 means none)", i, j, value, record.limit);
  case EPX_MOE_ERROR_DUPLICATE_ROW:
    return fmt::format("row_map[{}, {}] is {}, as is an entry before it; each row belongs to one route", i, j, value);
  case EPX_MOE_ERROR_COUNT:
    return fmt::format("global_counts[{}, {}] is {}; counts are not negative", i, j, value);
  case EPX_MOE_ERROR_ROWS_NEEDED:
    return fmt::format("{} rows are needed, more than an int32 can count", value);
  case EPX_MOE_ERROR_OFFSET:
    return fmt::format("offsets[{}] is {}; it must be no less than the one before it, and there are {} rows", i, value,
                       record.limit);
  case EPX_MOE_ERROR_ZONE_COUNT:
    return fmt::format("counts[{}] is {}; its zone has {} rows", i, value, record.limit);
  case EPX_MOE_ERROR_ZONE_ALIGNMENT:
    return fmt::format("offsets[{}] is {}; products in FP8 take zones that begin at multiples of {}", i, value,
                       record.limit);
  }
  return "an error of no known kind";
}

} // namespace

void epx::moe::read_errors(ErrorRecord& record, epx_moe_errors_report* report) {
  require_struct(report, "report");
  epx_moe_errors_report values{};
  values.struct_size = sizeof(values);
  // Until the first error is there, which its kernel may just be writing, there is none.
  if (std::atomic_ref(record.is_written).load(std::memory_order_acquire) != 0) {
    values.num_errors = static_cast<int64_t>(std::atomic_ref(record.num_errors).load(std::memory_order_relaxed));
    values.op = record.op;
    values.kind = record.kind;
    values.i = record.i;
    values.j = record.j;
    values.value = record.value;
    values.limit = record.limit;
    const std::string sentence = fmt::format("{}: {}", ::name_of(record.op), ::describe(record));
    sentence.copy(values.message, sizeof(values.message) - 1); // the rest is zero
  }
  *report = values;
}

epx_status epx_moe_errors_create(epx_moe_errors* errors) {
  return at_c_boundary(__func__, [&] {
    if (errors == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "errors is NULL");
    if constexpr (kWithCuda) {
      auto owner = std::make_unique<epx_moe_errors_s>();
      owner->record = make_error_record();
      *errors = owner.release();
    } else {
      refuse_cuda();
    }
  });
}

void epx_moe_errors_destroy(epx_moe_errors errors) {
  const std::unique_ptr<epx_moe_errors_s> owner(errors);
  if constexpr (kWithCuda)
    if (owner != nullptr) free_error_record(owner->record);
}

epx_status epx_moe_errors_read(epx_moe_errors errors, epx_moe_errors_report* report) {
  return at_c_boundary(__func__, [&] {
    if (errors == nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "errors is NULL");
    read_errors(*errors->record, report);
  });
}
