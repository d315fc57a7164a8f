// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_library.h"

#include <dlfcn.h>

#include "base/error.h"
#include "transport/nccl/nccl_versions.h"

namespace epx {
namespace {

constexpr const char* kFileName = "libnccl.so.2";

NcclLibrary load() {
  // dlopen() returns the library that the process has already loaded under this soname, wherever its file lies. It is never
  // closed: threads of NCCL may outlive the last group.
  void* const handle = dlopen(kFileName, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const error = dlerror();
    fail(EPX_ERROR_UNSUPPORTED, "transport nccl needs {}, which cannot be loaded: {}", kFileName,
         error != nullptr ? error : "no reason given");
  }
  const auto find = [handle]<typename Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(handle, name));
    return function != nullptr;
  };
  const auto require = [&]<typename Function>(Function& function, const char* name) {
    if (!find(function, name))
      fail(EPX_ERROR_UNSUPPORTED, "transport nccl: the {} that is loaded has no {}", kFileName, name);
  };
  NcclLibrary library{};
  require(library.GetErrorString, "ncclGetErrorString");
  require(library.GetLastError, "ncclGetLastError");
  require(library.GetVersion, "ncclGetVersion");
  // An old release lacks functions: its version says more than their names.
  int version = 0;
  if (library.GetVersion(&version) == ncclSuccess) require_supported_nccl(version);
  require(library.AllGather, "ncclAllGather");
  require(library.CommAbort, "ncclCommAbort");
  require(library.CommDestroy, "ncclCommDestroy");
  require(library.CommFinalize, "ncclCommFinalize");
  require(library.CommGetAsyncError, "ncclCommGetAsyncError");
  require(library.CommInitRankConfig, "ncclCommInitRankConfig");
  require(library.CommWindowDeregister, "ncclCommWindowDeregister");
  require(library.CommWindowRegister, "ncclCommWindowRegister");
  require(library.GetUniqueId, "ncclGetUniqueId");
  require(library.GroupEnd, "ncclGroupEnd");
  require(library.GroupStart, "ncclGroupStart");
  require(library.MemAlloc, "ncclMemAlloc");
  require(library.MemFree, "ncclMemFree");
  require(library.Recv, "ncclRecv");
  require(library.Send, "ncclSend");
  require(library.TeamLsa, "ncclTeamLsa");
  find(library.GetLsaDevicePointer, "ncclGetLsaDevicePointer");
  return library;
}

} // namespace

const NcclLibrary& nccl() {
  // A failure is not remembered, since a framework may load its NCCL later on.
  static const NcclLibrary library = load();
  return library;
}

} // namespace epx
