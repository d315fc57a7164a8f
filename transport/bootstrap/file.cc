// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/file.h"

#include <memory>
#include <string_view>

#include "base/error.h"
#include "transport/bootstrap/bootstrap_callback.h"
#include "transport/bootstrap/file_session.h"
#include "transport/interrupt.h"

namespace epx {
namespace {

using std::chrono::milliseconds;

epx_status all_gather_callback(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                               char* message, size_t message_bytes) {
  return run_callback(message, message_bytes, [&] {
    static_cast<FileSession*>(context)->all_gather(send, recv, bytes_per_rank, milliseconds(timeout_ms));
  });
}

// In a child of fork() the files belong to the parent, which may be in the middle of a session.
void release_callback(void* context) {
  auto* const session = static_cast<FileSession*>(context);
  if (session->is_own_process()) delete session;
}

void check_arguments(const std::string& directory, const std::string& job_id, int rank, int num_ranks,
                     milliseconds timeout) {
  constexpr size_t kMaxJobIdBytes = 64;
  constexpr std::string_view kJobIdCharacters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
  if (directory.empty()) fail(EPX_ERROR_INVALID_ARGUMENT, "directory is empty");
  if (job_id.empty() || job_id.size() > kMaxJobIdBytes)
    fail(EPX_ERROR_INVALID_ARGUMENT, "job_id has {} characters; it must have 1 to {}", job_id.size(), kMaxJobIdBytes);
  if (job_id.find_first_not_of(kJobIdCharacters) != std::string::npos)
    fail(EPX_ERROR_INVALID_ARGUMENT, "job_id is '{}'; only characters of [A-Za-z0-9._-] are allowed", job_id);
  if (num_ranks < 1) fail(EPX_ERROR_INVALID_ARGUMENT, "num_ranks is {}; it must be >= 1", num_ranks);
  if (rank < 0 || rank >= num_ranks)
    fail(EPX_ERROR_INVALID_ARGUMENT, "rank is {}; it must be 0..{} when num_ranks is {}", rank, num_ranks - 1, num_ranks);
  if (timeout.count() <= 0) fail(EPX_ERROR_INVALID_ARGUMENT, "timeout_ms is {}; it must be > 0", timeout.count());
}

} // namespace

epx_bootstrap make_file_bootstrap(const std::string& directory, const std::string& job_id, int rank, int num_ranks,
                                  std::chrono::milliseconds timeout) {
  check_arguments(directory, job_id, rank, num_ranks, timeout);
  auto session = std::make_unique<FileSession>(directory, Participant{job_id, rank, num_ranks, draw_nonce()});
  require_not_interrupted(fmt::format("job '{}'", job_id));
  session->rendezvous(timeout);
  epx_bootstrap bootstrap{};
  bootstrap.struct_size = sizeof(bootstrap);
  bootstrap.rank = rank;
  bootstrap.num_ranks = num_ranks;
  bootstrap.all_gather = all_gather_callback;
  bootstrap.release = release_callback;
  bootstrap.context = session.release();
  return bootstrap;
}

} // namespace epx
