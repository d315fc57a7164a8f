// SPDX-License-Identifier: Apache-2.0
// Loads libnccl.so.2 when the first group needs it. libepx does not link NCCL, so that a program or a Python package that has
// epx starts on machines without NCCL, and so that a framework that has loaded a libnccl.so.2 of its own shares it with epx.
#pragma once

#include <nccl.h>
#include <nccl_device.h>

namespace epx {

// The functions of NCCL that epx calls. All supported releases have them with these signatures.
struct NcclLibrary {
  decltype(&ncclAllGather) AllGather;
  decltype(&ncclCommAbort) CommAbort;
  decltype(&ncclCommDestroy) CommDestroy;
  decltype(&ncclCommFinalize) CommFinalize;
  decltype(&ncclCommGetAsyncError) CommGetAsyncError;
  decltype(&ncclCommInitRankConfig) CommInitRankConfig;
  decltype(&ncclCommWindowDeregister) CommWindowDeregister;
  decltype(&ncclCommWindowRegister) CommWindowRegister;
  decltype(&ncclGetErrorString) GetErrorString;
  decltype(&ncclGetLastError) GetLastError;
  decltype(&ncclGetUniqueId) GetUniqueId;
  decltype(&ncclGetVersion) GetVersion;
  decltype(&ncclGroupEnd) GroupEnd;
  decltype(&ncclGroupStart) GroupStart;
  decltype(&ncclMemAlloc) MemAlloc;
  decltype(&ncclMemFree) MemFree;
  decltype(&ncclRecv) Recv;
  decltype(&ncclSend) Send;
  ncclTeam_t (*TeamLsa)(ncclComm_t communicator);
  // Releases from 2.29.2 on have it; NULL in older ones.
  ncclResult_t (*GetLsaDevicePointer)(ncclWindow_t window, size_t offset, int lsa_rank, void** pointer);
};

// Returns the library, which is loaded on the first call and stays loaded. Throws UNSUPPORTED when it cannot be loaded, or is a
// release that epx does not support.
const NcclLibrary& nccl();

} // namespace epx
