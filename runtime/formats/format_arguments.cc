// SPDX-License-Identifier: Apache-2.0
#include "runtime/formats/format_arguments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/names.h"
#include "runtime/struct_size.h"

namespace epx {
namespace {

// The dtypes that a scaling may have. The first ones are the defaults.
struct Scaling {
  epx_scaling scaling;
  std::array<epx_dtype, 2> elements; // UNSET: there is no second one
  std::array<epx_dtype, 2> scales;
  bool has_floor;
};
constexpr std::array<Scaling, 4> kScalings = {{
    {EPX_SCALING_BLOCK128, {EPX_FLOAT8_E4M3}, {EPX_FLOAT32}, true},
    {EPX_SCALING_BLOCK128_POW2, {EPX_FLOAT8_E4M3}, {EPX_FLOAT32, EPX_FLOAT8_E8M0}, true},
    {EPX_SCALING_MX, {EPX_FLOAT8_E4M3, EPX_FLOAT8_E5M2}, {EPX_FLOAT8_E8M0}, false},
    {EPX_SCALING_NV, {EPX_FLOAT4_E2M1}, {EPX_FLOAT8_E4M3}, false},
}};
constexpr float kDefaultFloor = 1e-4f;

const Scaling& require_scaling(epx_scaling scaling, const char* function) {
  const auto* const found =
      std::ranges::find_if(kScalings, [scaling](const Scaling& entry) { return entry.scaling == scaling; });
  if (found == kScalings.end())
    fail(
        EPX_ERROR_INVALID_ARGUMENT,
        "{}: scaling is {} ({}); it must be EPX_SCALING_BLOCK128 (1), EPX_SCALING_BLOCK128_POW2 (2), EPX_SCALING_MX (3) or "
        "EPX_SCALING_NV (4)",
        function, static_cast<int>(scaling), name_of(scaling));
  return *found;
}

void require_one_of(const std::array<epx_dtype, 2>& allowed, epx_dtype dtype, const char* what, epx_scaling scaling,
                    const char* function) {
  if (dtype != EPX_DTYPE_UNSET && std::ranges::count(allowed, dtype) != 0) return;
  const std::string wanted = allowed[1] == EPX_DTYPE_UNSET
                                 ? name_of(allowed[0])
                                 : fmt::format("{} or {}", name_of(allowed[0]), name_of(allowed[1]));
  fail(EPX_ERROR_INVALID_ARGUMENT, "{}: {} has dtype {} ({}); with scaling {} it must be {}", function, what,
       static_cast<int>(dtype), name_of(dtype), name_of(scaling), wanted);
}

} // namespace

epx_row_format default_format(epx_scaling scaling, const char* function) {
  const Scaling& entry = require_scaling(scaling, function);
  epx_row_format format{};
  format.struct_size = sizeof(format);
  format.scaling = scaling;
  format.dtype = entry.elements[0];
  format.amax_floor = entry.has_floor ? kDefaultFloor : 0.0f;
  return format;
}

WireFormat check_format(const epx_row_format& format, const char* function) {
  require_fixed_size("epx_row_format", format.struct_size, sizeof(format));
  const Scaling& entry = require_scaling(format.scaling, function);
  require_one_of(entry.elements, format.dtype, "format", format.scaling, function);
  if (entry.has_floor ? !std::isfinite(format.amax_floor) || format.amax_floor < 0.0f : format.amax_floor != 0.0f)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}: format.amax_floor is {}; with scaling {} it must be {}", function,
         format.amax_floor, name_of(format.scaling), entry.has_floor ? "finite and not negative" : "0");
  if (std::ranges::any_of(format.reserved, [](int64_t field) { return field != 0; }))
    fail(EPX_ERROR_INVALID_ARGUMENT,
         "{}: format has a reserved field that is not 0: call epx_row_format_init before setting fields", function);
  // On a wire that nobody sees, a scale has its shortest form.
  epx_dtype scales = entry.scales[1] == EPX_DTYPE_UNSET ? entry.scales[0] : entry.scales[1];
  if (format.recv_scales != nullptr && format.scale_layout != EPX_SCALES_PACKED) {
    require_one_of(entry.scales, format.recv_scales->dtype, "format.recv_scales", format.scaling, function);
    scales = format.recv_scales->dtype;
  }
  return {format.scaling, format.dtype, scales, format.amax_floor + 0.0f}; // ranks compare bits, and -0 is 0
}

void require_no_tensors(const epx_row_format& format, const char* name, const char* why) {
  const std::pair<const char*, const epx_tensor*> tensors[] = {{"scales", format.scales},
                                                               {"row_scales", format.row_scales},
                                                               {"encode_scale", format.encode_scale},
                                                               {"recv_scales", format.recv_scales},
                                                               {"recv_row_scales", format.recv_row_scales}};
  for (const auto& [member, tensor] : tensors)
    if (tensor != nullptr) fail(EPX_ERROR_INVALID_ARGUMENT, "{}.{} is given; {}, so it must be NULL", name, member, why);
}

void require_scale_layout(const WireFormat& format, epx_scale_layout layout, const std::string& name) {
  switch (layout) {
  case EPX_SCALES_ROWS:
  case EPX_SCALES_COLUMNS:
    return;
  case EPX_SCALES_PACKED:
    if (format.scales != EPX_FLOAT8_E8M0)
      fail(EPX_ERROR_INVALID_ARGUMENT,
           "{} is packed; the scales of scaling {} are {}, and those of an entry are float8_e8m0", name,
           name_of(format.scaling), name_of(format.scales));
    return;
  case EPX_SCALES_TILES:
    if (single_element_bytes(format.scales) != 1)
      fail(EPX_ERROR_INVALID_ARGUMENT, "{} is tiles; the scales are {}, and those of a tile have one byte", name,
           name_of(format.scales));
    return;
  }
  fail(EPX_ERROR_INVALID_ARGUMENT,
       "{} is {}; it must be EPX_SCALES_ROWS (0), EPX_SCALES_COLUMNS (1), EPX_SCALES_PACKED (2) or EPX_SCALES_TILES (3)",
       name, static_cast<int>(layout));
}

void require_whole_bytes(const WireFormat& format, int64_t hidden, const char* function) {
  if (hidden % elements_per_byte(format.elements) != 0)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{}: H is {}; with scaling {} it must be even, since a byte has two elements",
         function, hidden, name_of(format.scaling));
}

} // namespace epx
