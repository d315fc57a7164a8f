// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/file_liveness.h"

#include <algorithm>
#include <optional>

#include "transport/bootstrap/file_messages.h"
#include "transport/bootstrap/rendezvous_names.h"

namespace epx {
namespace {

bool is_alive_file(const std::string& name) {
  return rank_of_alive(name).has_value();
}

// Returns whether name and contents say that a process of this one's origin wrote the file. The directory has checked the user.
bool is_of_this_origin(const RendezvousDirectory& directory, const std::string& name) {
  const ProcessOrigin& here = directory.origin();
  const std::optional<std::string> start = directory.read_start(name, kHeaderBytes);
  if (!here.known() || !start || !is_rendezvous_name(name)) return false;
  if (is_temporary_of(name, here.hash()))
    return begins_like_message(*start); // its writer may have died before it wrote more
  return origin_of(*start) == here;
}

bool is_certainly_dead(const RendezvousDirectory& directory, const std::string& alive_file) {
  return directory.has_reliable_locks() && is_of_this_origin(directory, alive_file) && !directory.may_be_locked(alive_file);
}

} // namespace

AliveFile::AliveFile(RendezvousDirectory& directory, int rank, int num_ranks, const std::string& nonce)
    : directory_(directory), name_(alive_name(rank, nonce)),
      content_(encode({MessageKind::kAlive, rank, num_ranks, EPX_SUCCESS, nonce, "", {}}, directory.origin())),
      lock_(directory.write_locked(name_, content_)) {}

void AliveFile::keep() {
  if (!directory_.contains(name_)) lock_ = directory_.write_locked(name_, content_);
}

void Attendance::note(const RendezvousDirectory::Names& names) {
  for (const std::string& name : names) {
    const std::optional<int> rank = rank_of_alive(name);
    if (rank && known_.insert(name).second && !is_certainly_dead(directory_, name)) ranks_.insert(*rank);
  }
}

bool Attendance::lives(int rank) const {
  return directory_.has_reliable_locks() && std::any_of(known_.begin(), known_.end(), [&](const std::string& name) {
           return rank_of_alive(name) == rank && is_of_this_origin(directory_, name) && directory_.may_be_locked(name);
         });
}

void remove_files_of_dead_jobs(RendezvousDirectory& directory) noexcept {
  try {
    if (!directory.has_reliable_locks()) return;
    const RendezvousDirectory::Names files = directory.list();
    // The alive files are listed afterwards, because a process makes its own before any other file: every live writer of one of
    // `files` has an alive file now.
    const RendezvousDirectory::Names now = directory.list();
    const bool all_dead = std::all_of(now.begin(), now.end(), [&](const std::string& name) {
      return !is_alive_file(name) || is_certainly_dead(directory, name) || !directory.contains(name);
    });
    if (!all_dead) return;
    for (const std::string& name : files)
      if (is_of_this_origin(directory, name)) directory.remove(name);
  } catch (...) { // leftovers do no harm
  }
}

void remove_old_files(RendezvousDirectory& directory, const std::string& reference, std::chrono::seconds age) noexcept {
  try {
    const std::optional<int64_t> now = directory.last_written(reference);
    if (!now) return;
    for (const std::string& name : directory.list()) {
      const std::optional<int64_t> then = directory.last_written(name);
      if (!then || *now - *then < age.count() || !is_of_this_origin(directory, name)) continue;
      if (!is_alive_file(name) || !directory.may_be_locked(name)) directory.remove(name);
    }
  } catch (...) { // leftovers do no harm
  }
}

} // namespace epx
