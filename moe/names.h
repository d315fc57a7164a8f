// SPDX-License-Identifier: Apache-2.0
// Names of the enumerators of epx_moe.h, for messages.
#pragma once

#include "epx/epx_moe.h"

namespace epx {

constexpr const char* name_of(epx_moe_score score) {
  switch (score) {
  case EPX_MOE_TOPK_THEN_SOFTMAX:
    return "topk_then_softmax";
  case EPX_MOE_SOFTMAX_THEN_TOPK:
    return "softmax_then_topk";
  case EPX_MOE_SIGMOID:
    return "sigmoid";
  }
  return "unknown score";
}

constexpr const char* name_of(epx_moe_activation activation) {
  switch (activation) {
  case EPX_MOE_SWIGLU:
    return "swiglu";
  case EPX_MOE_GELU:
    return "gelu";
  case EPX_MOE_RELU2:
    return "relu2";
  }
  return "unknown activation";
}

constexpr const char* name_of(epx_moe_weighting weighting) {
  switch (weighting) {
  case EPX_MOE_WEIGHT_LATE:
    return "late";
  case EPX_MOE_WEIGHT_EARLY:
    return "early";
  }
  return "unknown weighting";
}

constexpr const char* name_of(epx_moe_path path) {
  switch (path) {
  case EPX_MOE_PATH_DISPATCH:
    return "dispatch";
  case EPX_MOE_PATH_RING:
    return "ring";
  case EPX_MOE_PATH_RAGGED:
    return "ragged";
  }
  return "unknown path";
}

constexpr const char* name_of(epx_moe_recipe recipe) {
  switch (recipe) {
  case EPX_MOE_RECIPE_WIDE:
    return "wide";
  case EPX_MOE_RECIPE_FP8_ACTIVATIONS:
    return "fp8_activations";
  case EPX_MOE_RECIPE_FP8:
    return "fp8";
  }
  return "unknown recipe";
}

} // namespace epx
