// The NCCL releases that epx has run with on GPUs, and what differs between them. libepx is compiled against one release and
// may load another: what it calls has the same signature in all of these (nccl.h and nccl_device/core.h), and of the
// structs that NCCL keeps on the device it reads those fields alone that a layout below names.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace epx {

// Where ncclWindow_vidmem, the device's struct behind an ncclWindow_t, has what says where the ranks' shares lie: in bytes
// from its begin.
struct NcclWindowLayout {
  size_t lsa_flat_base; // char*: the share of rank 0 of the LSA domain
  size_t stride_4g;     // uint32_t: from one rank's share to the next one's, in units of 4 GiB
  size_t bytes;         // up to the end of the last of both
};

struct NcclVersion {
  int code; // as ncclGetVersion says it
  const char* name;
  const NcclWindowLayout* window; // NULL: the library has ncclGetLsaDevicePointer, and no struct is read
};

std::span<const NcclVersion> supported_nccl_versions();

// The release with this code. Throws UNSUPPORTED, with the releases that are supported.
const NcclVersion& require_supported_nccl(int code);

// 22809: "2.28.9".
std::string nccl_version_name(int code);

// Why ranks that have loaded these releases cannot make a group: two differ. "" when all are the same.
std::string why_not_one_nccl(std::span<const int> codes);

// The address of a rank's share, from the first `layout.bytes` bytes of the device's struct.
std::byte* lsa_share(const NcclWindowLayout& layout, std::span<const std::byte> window, int lsa_rank);

} // namespace epx
