// SPDX-License-Identifier: Apache-2.0
#include "tests/emulation/exported_memory.h"

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

namespace epx::emulation {
namespace {

struct Mapping {
  int file;
  size_t bytes;
};

struct Handle {
  int64_t process;
  int64_t file;
  uint64_t bytes;
};

std::mutex mutex;
std::map<const void*, Mapping> mappings;

void* map(int file, size_t bytes) {
  void* const memory = file < 0 ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    if (file >= 0) close(file);
    return nullptr;
  }
  const std::scoped_lock lock(mutex);
  mappings[memory] = {file, bytes};
  return memory;
}

} // namespace

void* allocate_exportable(size_t bytes) {
  const int file = memfd_create("epx_emulated_memory", MFD_CLOEXEC);
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes)) != 0) {
    close(file);
    return nullptr;
  }
  return map(file, bytes);
}

bool export_memory(const void* memory, char (&handle)[64]) {
  const std::scoped_lock lock(mutex);
  const auto found = mappings.find(memory);
  if (found == mappings.end()) return false;
  const Handle exported{getpid(), found->second.file, found->second.bytes};
  static_assert(sizeof(exported) <= sizeof(handle));
  std::memcpy(handle, &exported, sizeof(exported));
  return true;
}

void* open_exported(const char (&handle)[64]) {
  Handle exported;
  std::memcpy(&exported, handle, sizeof(exported));
  const std::string path = fmt::format("/proc/{}/fd/{}", exported.process, exported.file);
  return map(open(path.c_str(), O_RDWR | O_CLOEXEC), exported.bytes);
}

bool free_exportable(void* memory) {
  Mapping mapping{};
  {
    const std::scoped_lock lock(mutex);
    const auto found = mappings.find(memory);
    if (found == mappings.end()) return false;
    mapping = found->second;
    mappings.erase(found);
  }
  munmap(memory, mapping.bytes);
  close(mapping.file);
  return true;
}

} // namespace epx::emulation
