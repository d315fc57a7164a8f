// SPDX-License-Identifier: Apache-2.0
// epx_moe.hpp compiles as the first header of a file, and in two files of one program: epx_moe_hpp_test.cc is the other.
#include "epx/epx_moe.hpp"

const char* failing_function_of_another_file() {
  try {
    epx::moe::row_map({.alignment = -1});
  } catch (const epx::Error& error) {
    return error.function();
  }
  return "";
}
