// SPDX-License-Identifier: Apache-2.0
// epx.hpp compiles as the first header of a file, and in two files of one program: epx_hpp_test.cc is the other.
#include "epx/epx.hpp"

const char* failing_function_of_another_file() {
  try {
    static_cast<void>(epx::GroupView().handle_mem_size({.top_k = 1}));
  } catch (const epx::Error& error) {
    return error.function();
  }
  return "";
}
