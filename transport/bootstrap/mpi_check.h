// SPDX-License-Identifier: Apache-2.0
// check_mpi turns MPI's error codes into exceptions.
#pragma once

#include <string>

#include <mpi.h>

#include "base/error.h"

namespace epx {

// The error's message names `call`. The communicator must have MPI_ERRORS_RETURN.
inline void check_mpi(int code, const char* call) {
  if (code == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  if (MPI_Error_string(code, words, &length) != MPI_SUCCESS) length = 0;
  fail(EPX_ERROR_SYSTEM, "{}: {} (code {})", call, std::string(words, static_cast<size_t>(length)), code);
}

} // namespace epx
