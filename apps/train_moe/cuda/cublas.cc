// SPDX-License-Identifier: Apache-2.0
#include "apps/train_moe/cuda/cublas.h"

#include <string>

#include <dlfcn.h>

#include "apps/train_moe/errors.h"

namespace train::cuda {
namespace {

std::string file_name() {
  return fmt::format("libcublas.so.{}", CUBLAS_VER_MAJOR);
}

// Sets a pointer to the function of that name.
template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) fail(kExitFailure, "--device cuda: {} has no {}", file_name(), name);
}

} // namespace

Cublas load_cublas() {
  void* const library = dlopen(file_name().c_str(), RTLD_NOW | RTLD_LOCAL); // stays until the process ends
  if (library == nullptr) fail(kExitFailure, "--device cuda needs {}: {}", file_name(), dlerror());
  Cublas cublas{};
  find(library, "cublasCreate_v2", cublas.create);
  find(library, "cublasDestroy_v2", cublas.destroy);
  find(library, "cublasSetStream_v2", cublas.set_stream);
  find(library, "cublasSetMathMode", cublas.set_math_mode);
  find(library, "cublasSgemm_v2", cublas.sgemm);
  find(library, "cublasGetStatusString", cublas.status_string);
  return cublas;
}

} // namespace train::cuda
