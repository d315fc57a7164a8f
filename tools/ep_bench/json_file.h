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

  // Replaces the contents. A file is replaced as a whole: who stops the program meanwhile leaves the contents of before. To a
  // pipe the text is appended. Throws RuntimeError.
  void write(const nlohmann::json& json);

  bool is_pipe() const { return !is_regular_; } // or a terminal or device

private:
  bool replace(const std::string& text) const; // returns false where the directory takes no other file

  std::string file_;
  int fd_ = -1;
  bool is_regular_ = false;
  bool is_new_ = false;     // created by this object
  bool is_written_ = false; // or partly
};

} // namespace epx::bench
