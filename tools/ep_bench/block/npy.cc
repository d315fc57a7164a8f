// SPDX-License-Identifier: Apache-2.0
#include "tools/ep_bench/block/npy.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

#include <fmt/format.h>

#include "tools/ep_bench/errors.h"

namespace epx::bench {

void require_directory(const std::string& directory) {
  struct stat state {};
  const char* reason = nullptr;
  if (::stat(directory.c_str(), &state) != 0)
    reason = std::strerror(errno);
  else if (!S_ISDIR(state.st_mode))
    reason = "it is not a directory";
  else if (::access(directory.c_str(), W_OK | X_OK) != 0)
    reason = std::strerror(errno);
  if (reason != nullptr) throw UsageError(fmt::format("cannot write to '{}' of --dump: {}", directory, reason));
}

void write_npy(const std::string& file, std::span<const int64_t> shape, std::span<const float> values) {
  std::string sizes;
  for (const int64_t size : shape)
    sizes += fmt::format("{}, ", size);
  std::string header = fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}), }}", sizes);
  constexpr size_t kPrefix = 10, kUnit = 64; // the data begin at a multiple of 64 bytes
  header.append((kUnit - (kPrefix + header.size() + 1) % kUnit) % kUnit, ' ');
  header += '\n';
  const char prefix[kPrefix] = {'\x93',
                                'N',
                                'U',
                                'M',
                                'P',
                                'Y',
                                1,
                                0,
                                static_cast<char>(header.size() & 0xff),
                                static_cast<char>(header.size() >> 8)};
  std::ofstream out(file, std::ios::binary);
  out.write(prefix, kPrefix).write(header.data(), static_cast<std::streamsize>(header.size()));
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size_bytes()));
  if (!out.flush()) throw RuntimeError(fmt::format("cannot write '{}' of --dump: {}", file, std::strerror(errno)));
}

} // namespace epx::bench
