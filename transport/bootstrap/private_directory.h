// SPDX-License-Identifier: Apache-2.0
// Makes directories that only this user can use, whatever the umask of the process is.
#pragma once

#include <string>

namespace epx {

// Makes the directory `name` in the directory of the descriptor `parent`. It has mode 0700 from the moment at which it appears,
// so that no other process sees another mode. Returns 0 or an errno, EEXIST when the name is taken.
int make_private_directory(int parent, const std::string& name);

} // namespace epx
