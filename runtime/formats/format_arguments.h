// SPDX-License-Identifier: Apache-2.0
// What a caller passes as an epx_row_format. Messages begin with `function`, or with the name of what has the format.
#pragma once

#include <string>

#include "epx/epx.h"
#include "runtime/formats/row_format.h"

namespace epx {

// Returns the format of a scaling with its defaults. Throws when there is no such scaling.
epx_row_format default_format(epx_scaling scaling, const char* function);

// Returns the format that a caller passed, without its tensors: elements, floor and scaling fit each other, and so does the
// dtype of the scales where a tensor of them is given. Throws INVALID_ARGUMENT.
WireFormat check_format(const epx_row_format& format, const char* function);

// Throws INVALID_ARGUMENT when the format has a tensor, which the sentence calls a member of `name`; `why` says why it has none.
void require_no_tensors(const epx_row_format& format, const char* name, const char* why);

// Throws INVALID_ARGUMENT unless scales of the format can lie in the layout, which the sentence calls `name`.
void require_scale_layout(const WireFormat& format, epx_scale_layout layout, const std::string& name);

// Throws INVALID_ARGUMENT unless a quantised row of `hidden` elements has whole bytes.
void require_whole_bytes(const WireFormat& format, int64_t hidden, const char* function);

} // namespace epx
