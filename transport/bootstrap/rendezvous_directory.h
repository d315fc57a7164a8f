// The directory in which the ranks of one job meet: whole files appear there, and disappear.
#pragma once

#include <chrono>
#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace epx {

// `<parent>/epx-<job_id>`, mode 0700; files in it have mode 0600. Several ranks create, use and remove it at the same time,
// on one machine or through a shared file system. What the file system refuses is thrown as EPX_ERROR_SYSTEM with the path.
class RendezvousDirectory {
public:
  using Names = std::set<std::string, std::less<>>;

  // Creates the directory unless it is there. `writer` (a nonce) keeps the temporary names of different writers apart.
  RendezvousDirectory(const std::string& parent, const std::string& job_id, std::string writer);

  // The file appears as a whole, or replaces the one of this name as a whole.
  void write(std::string_view name, std::string_view content);

  // Nothing when there is no such file, or none that a rank could have written: larger than max_bytes, or not a plain file.
  std::optional<std::string> read(std::string_view name, size_t max_bytes) const;

  // True when this call removed it. Of several that try, exactly one does: that is how ranks agree on who came first.
  bool remove(std::string_view name) const noexcept;

  Names list() const;

  // Makes files that other machines have just written visible here: a network file system caches that a name did not exist,
  // and opening the directory is what makes it ask again.
  void refresh() const noexcept;

  // Removes plain files that were last written `age` or longer before `reference` was, by the file system's own clock.
  void remove_older_than(std::string_view reference, std::chrono::seconds age) const noexcept;

  // Removes the directory if it is empty.
  void leave() const noexcept;

private:
  void create() const;
  std::string file(std::string_view name) const;

  std::string parent_;
  std::string path_;
  std::string writer_;
  unsigned num_written_ = 0;
};

} // namespace epx
