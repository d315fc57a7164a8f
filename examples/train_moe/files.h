// Files, whole.
#pragma once

#include <cerrno>
#include <fstream>
#include <ios>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "examples/train_moe/errors.h"

namespace train {

// The bytes of a file that `option` names. Throws Error when it cannot be read.
template <typename Byte>
std::vector<Byte> read_file(const char* option, const std::string& file) {
  std::ifstream stream;
  stream.exceptions(std::ios::failbit | std::ios::badbit);
  errno = 0;
  try {
    stream.open(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  } catch (const std::ios::failure&) {
    fail(kExitUsage, "{} {}: {}", option, file, errno != 0 ? std::generic_category().message(errno) : "it cannot be read");
  }
}

} // namespace train
