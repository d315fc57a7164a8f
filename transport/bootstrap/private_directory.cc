// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/private_directory.h"

#include <cerrno>
#include <csignal>
#include <fstream>
#include <string>

#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace epx {
namespace {

// Returns whether the umask may take permissions from the owner. umask() itself cannot be asked without changing it for all
// threads.
bool may_limit_owner() {
  std::ifstream status("/proc/thread-self/status");
  for (std::string key; status >> key;)
    if (unsigned mask = 0; key == "Umask:" && status >> std::oct >> mask) return (mask & S_IRWXU) != 0;
  return true; // without /proc
}

// A child has a umask of its own. Nothing else is safe in it, since the other threads do not exist there. It is made by
// clone() because a child of fork() sends SIGCHLD, for which the program may have a handler.
int make_in_child(int parent, const char* name) {
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before); // a handler of the program's must not run in the child
  const long child = ::syscall(SYS_clone, 0, nullptr, nullptr, nullptr, nullptr);
  if (child == 0) {
    ::umask(0);
    ::_exit(::mkdirat(parent, name, S_IRWXU) == 0 ? 0 : errno);
  }
  const int clone_error = child < 0 ? errno : 0;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) return clone_error;
  int status = 0;
  while (::waitpid(static_cast<pid_t>(child), &status, __WCLONE) < 0)
    if (errno != EINTR) return errno;
  return WIFEXITED(status) ? WEXITSTATUS(status) : EINTR;
}

} // namespace

int make_private_directory(int parent, const std::string& name) {
  if (may_limit_owner()) return make_in_child(parent, name.c_str());
  return ::mkdirat(parent, name.c_str(), S_IRWXU) == 0 ? 0 : errno;
}

} // namespace epx
