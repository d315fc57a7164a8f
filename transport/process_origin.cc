// SPDX-License-Identifier: Apache-2.0
#include "transport/process_origin.h"

#include <cstring>
#include <string_view>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "transport/file_descriptor.h"

namespace epx {

bool ProcessOrigin::operator==(const ProcessOrigin& other) const {
  return known() && std::memcmp(this, &other, sizeof(*this)) == 0;
}

// The hash is FNV-1a.
uint64_t ProcessOrigin::hash() const {
  uint64_t hash = 0xcbf29ce484222325U;
  for (const char c : std::string_view(reinterpret_cast<const char*>(this), sizeof(*this)))
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3U;
  return hash;
}

ProcessOrigin this_process_origin() {
  ProcessOrigin origin;
  utsname names{};
  if (::uname(&names) == 0) std::string_view(names.nodename).copy(origin.host, sizeof(origin.host));
  const FileDescriptor file(::open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  constexpr size_t kUuidCharacters = 36;
  if (!file || ::read(file.get(), origin.boot_id, kUuidCharacters) != kUuidCharacters) origin.boot_id[0] = '\0';
  struct stat info {};
  if (::stat("/proc/self/ns/pid", &info) == 0) origin.pid_namespace = info.st_ino;
  return origin;
}

} // namespace epx
