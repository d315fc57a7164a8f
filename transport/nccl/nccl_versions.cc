// SPDX-License-Identifier: Apache-2.0
#include "transport/nccl/nccl_versions.h"

#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace epx {
namespace {

// nccl_device/impl/core__types.h of these releases has void* winHost; char* lsaFlatBase; int lsaRank, worldRank; uint32_t
// stride4G.
constexpr NcclWindowLayout kWindowOf228{8, 24, 28};

// A release is listed here when the suites `gpu` have run with it. From 2.29.2 on NCCL has ncclGetLsaDevicePointer.
constexpr NcclVersion kSupported[] = {
    {22803, "2.28.3", &kWindowOf228},
    {22809, "2.28.9", &kWindowOf228},
    {22907, "2.29.7", nullptr},
    {23007, "2.30.7", nullptr},
};

template <typename T>
T read(std::span<const std::byte> bytes, size_t offset) {
  T value;
  std::memcpy(&value, bytes.subspan(offset, sizeof(T)).data(), sizeof(T));
  return value;
}

} // namespace

std::span<const NcclVersion> supported_nccl_versions() {
  return kSupported;
}

const NcclVersion& require_supported_nccl(int code) {
  std::string names;
  for (const NcclVersion& version : kSupported) {
    if (version.code == code) return version;
    names += (names.empty() ? "" : ", ") + std::string(version.name);
  }
  fail(EPX_ERROR_UNSUPPORTED,
       "the NCCL library that is loaded is {} ({}); epx works with {}: structures on the device differ between releases; "
       "load one "
       "of these (LD_LIBRARY_PATH)",
       nccl_version_name(code), code, names);
}

std::string nccl_version_name(int code) {
  return fmt::format("{}.{}.{}", code / 10'000, code / 100 % 100, code % 100); // NCCL_VERSION() of nccl.h, since 2.9
}

std::string why_not_one_nccl(std::span<const int> codes) {
  for (size_t rank = 1; rank < codes.size(); ++rank)
    if (codes[rank] != codes[0])
      return fmt::format("rank 0 has loaded NCCL {}, rank {} NCCL {}", nccl_version_name(codes[0]), rank,
                         nccl_version_name(codes[rank]));
  return "";
}

std::byte* lsa_base(const NcclWindowLayout& layout, std::span<const std::byte> window, int lsa_rank) {
  const auto stride = static_cast<ptrdiff_t>(read<uint32_t>(window, layout.stride_4g)) << 32;
  return read<std::byte*>(window, layout.lsa_flat_base) + lsa_rank * stride;
}

} // namespace epx
