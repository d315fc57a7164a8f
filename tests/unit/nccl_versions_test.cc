// SPDX-License-Identifier: Apache-2.0
// These tests check which NCCL libraries epx works with, and how it reads what differs between them.
#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "transport/nccl/nccl_versions.h"

namespace epx {
namespace {

TEST_CASE("an NCCL library is chosen by its code") {
  CHECK(std::string(require_supported_nccl(22803).name) == "2.28.3");
  CHECK(std::string(require_supported_nccl(22809).name) == "2.28.9");
  for (const NcclVersion& version : supported_nccl_versions()) {
    CHECK(&require_supported_nccl(version.code) == &version);
    CHECK(nccl_version_name(version.code) == version.name);
    CHECK((version.window == nullptr) == (version.code >= 22902)); // when ncclGetLsaDevicePointer came
  }
}

TEST_CASE("an NCCL library that epx has not run with is refused with the ones that it has") {
  for (const int code : {0, 22703, 22802, 22804, 22808, 22810, 22900, 23100}) {
    try {
      require_supported_nccl(code);
      FAIL("NCCL ", code, " is taken");
    } catch (const StatusError& error) {
      CHECK(error.status() == EPX_ERROR_UNSUPPORTED);
      CHECK(error.message().find(nccl_version_name(code)) != std::string::npos);
      for (const NcclVersion& version : supported_nccl_versions())
        CHECK(error.message().find(version.name) != std::string::npos);
    }
  }
}

TEST_CASE("ranks that have loaded different NCCL libraries learn which") {
  CHECK(why_not_one_nccl(std::vector<int>{22809}) == "");
  CHECK(why_not_one_nccl(std::vector<int>{22803, 22803, 22803}) == "");
  CHECK(why_not_one_nccl(std::vector<int>{22809, 22809, 22803}) == "rank 0 has loaded NCCL 2.28.9, rank 2 NCCL 2.28.3");
}

// ncclWindow_vidmem as the headers of 2.28.3 declare it; those of 2.28.9 append to it.
struct WindowOf2283 {
  void* winHost;
  char* lsaFlatBase;
  int lsaRank;
  int worldRank;
  uint32_t stride4G;
  uint32_t mcOffset4K;
};

TEST_CASE("the base addresses of a window are found in its struct on the device") {
  WindowOf2283 window{};
  std::memset(&window, 0x5a, sizeof(window)); // what is not read
  window.lsaFlatBase = reinterpret_cast<char*>(0x7f0012345000);
  window.stride4G = 32; // 128 GiB
  for (const int code : {22803, 22809}) {
    const NcclWindowLayout* const layout = require_supported_nccl(code).window;
    REQUIRE(layout != nullptr);
    REQUIRE(layout->bytes <= sizeof(window));
    const std::span<const std::byte> bytes = std::as_bytes(std::span(&window, 1)).first(layout->bytes);
    for (const int rank : {0, 1, 7, 71})
      CHECK(reinterpret_cast<uint64_t>(lsa_base(*layout, bytes, rank)) ==
            0x7f0012345000 + static_cast<uint64_t>(rank) * 32 * (uint64_t{1} << 32));
  }
}

} // namespace
} // namespace epx
