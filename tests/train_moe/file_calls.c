/* SPDX-License-Identifier: Apache-2.0 */
/* This is preloaded into train_moe, and writes its fsync and renameat calls, in order, to the file that EPX_TEST_CALLS names. It
 * fails the fsync of a regular file with ENOSPC when EPX_TEST_FSYNC_FAILS is set, as a disk does that finds out late that it is
 * full. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

static void note(const char* call, const char* on) {
  const char* const file = getenv("EPX_TEST_CALLS");
  if (file == NULL) return;
  char line[64];
  const int size = snprintf(line, sizeof(line), "%s %s\n", call, on);
  const int calls = open(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (calls < 0) return;
  if (write(calls, line, (size_t)size) != size) perror("file_calls");
  close(calls);
}

int fsync(int fd) {
  int (*const next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
  struct stat state;
  if (fstat(fd, &state) != 0) return -1;
  note("fsync", S_ISDIR(state.st_mode) ? "folder" : "file");
  if (S_ISREG(state.st_mode) && getenv("EPX_TEST_FSYNC_FAILS") != NULL) {
    errno = ENOSPC;
    return -1;
  }
  return next(fd);
}

int renameat(int from_folder, const char* from, int to_folder, const char* to) {
  int (*const next)(int, const char*, int, const char*) =
      (int (*)(int, const char*, int, const char*))dlsym(RTLD_NEXT, "renameat");
  note("rename", to);
  return next(from_folder, from, to_folder, to);
}
