// SPDX-License-Identifier: Apache-2.0
// A Replacement replaces a file by a new one as a whole, or leaves the old one as it is.
#pragma once

#include <span>
#include <string>

#include "apps/train_moe/files.h"

namespace train {

// What is written goes to a temporary file of a new name, ".train_moe-*.tmp", in the folder of `file`; no file that was there
// before is opened for writing or deleted. `option` names the file in sentences. All throw Error. A process that is killed
// in between leaves its temporary file behind.
class Replacement {
public:
  // Refuses a `file` that is there and not a regular one: renaming over a symbolic link or a device would destroy that.
  Replacement(const char* option, const std::string& file);
  ~Replacement(); // deletes the temporary file unless it has taken the file's place
  Replacement(const Replacement&) = delete;
  Replacement& operator=(const Replacement&) = delete;

  void write(std::span<const char> bytes);

  // The new file takes the place of the old one; it is on the disk when this returns. A full disk is found out before.
  void commit();

private:
  void require_regular() const;
  [[noreturn]] void fail_with_errno() const;

  std::string shown_; // "--checkpoint FILE"
  std::string name_;  // of the file, in its folder
  Descriptor folder_;
  std::string temporary_name_;
  Descriptor temporary_;
  bool is_temporary_there_ = false;
};

} // namespace train
