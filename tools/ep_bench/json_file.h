// SPDX-License-Identifier: Apache-2.0
// The file of --json.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

namespace epx::bench {

// Opened before the run, so that a file that cannot be written is known before; what was in it stays until write(). A file
// that was not there and is not written to is removed again.
class JsonFile {
public:
  explicit JsonFile(const std::string& file); // throws UsageError
  ~JsonFile();
  JsonFile(const JsonFile&) = delete;
  JsonFile& operator=(const JsonFile&) = delete;

  void write(const nlohmann::json& json); // throws RuntimeError

private:
  std::string file_;
  int fd_ = -1;
  bool is_new_ = false;     // made here
  bool is_written_ = false; // or partly
};

} // namespace epx::bench
