// SPDX-License-Identifier: Apache-2.0
// Calls of a group by epx.h. A call that fails goes on as a StatusError with its status and its sentence.
#pragma once

#include "base/error.h"
#include "epx/epx.h"

namespace epx::moe {

inline void throw_if_failed(epx_status status) {
  if (status != EPX_SUCCESS) throw StatusError(status, epx_last_error());
}

inline epx_group_info query(epx_group group) {
  epx_group_info info{};
  info.struct_size = sizeof(info);
  throw_if_failed(epx_group_query(group, &info));
  return info;
}

} // namespace epx::moe
