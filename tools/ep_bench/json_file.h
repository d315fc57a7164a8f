// SPDX-License-Identifier: Apache-2.0
// JsonFile is the file of --json.
#pragma once

#include <string>

#include <nlohmann/json_fwd.hpp>

namespace epx::bench {

// It is opened before the run, so that a file that cannot be written fails early; its contents stay until write(). A file that
// is new and not written to is removed again.
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
  bool is_new_ = false;     // created by this object
  bool is_written_ = false; // or partly
};

} // namespace epx::bench
