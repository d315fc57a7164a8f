// SPDX-License-Identifier: Apache-2.0
// This is the list of NCCL releases that epx has run with on GPUs, and of what differs between them. libepx is compiled against
// one release and may load another: the functions that it calls have the same signature in all of these (nccl.h and
// nccl_device/core.h), and of the structs that NCCL keeps on the device it reads only the fields that a layout below names.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace epx {

// ncclWindow_vidmem, the device's struct behind an ncclWindow_t, has the fields from which the ranks' base addresses follow at
// these offsets, in bytes.
struct NcclWindowLayout {
  size_t lsa_flat_base; // char*: base of rank 0 of the LSA domain
  size_t stride_4g;     // uint32_t: from one rank's base to the next one's, in units of 4 GiB
  size_t bytes;         // up to the end of the later of both
};

struct NcclVersion {
  int code; // as ncclGetVersion returns it
  const char* name;
  const NcclWindowLayout* window; // NULL: the library has ncclGetLsaDevicePointer, and no struct is read
};

std::span<const NcclVersion> supported_nccl_versions();

// Returns the release with this code. Throws UNSUPPORTED, with the releases that are supported.
const NcclVersion& require_supported_nccl(int code);

// Returns "2.28.9" for 22809.
std::string nccl_version_name(int code);

// Returns why ranks that have loaded these releases cannot make a group (two differ); "" when all are the same.
std::string why_not_one_nccl(std::span<const int> codes);

// Returns a rank's base address in the window, from the first `layout.bytes` bytes of the device's struct.
std::byte* lsa_base(const NcclWindowLayout& layout, std::span<const std::byte> window, int lsa_rank);

} // namespace epx
