// SPDX-License-Identifier: Apache-2.0
// Starts the threads that the library has of its own.
#pragma once

#include <csignal>
#include <future>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include <pthread.h>

#include "base/error.h"
#include "base/resource_limits.h"

namespace epx {

// The thread takes no signals, which are for the threads of the program. Throws SYSTEM; `what` says in its message whose thread
// it is.
template <typename Body>
std::thread start_background_thread(const char* what, Body&& body) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    std::thread thread(std::forward<Body>(body));
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    fail(EPX_ERROR_SYSTEM, "{} cannot be started: {}", what, describe_thread_errno(error.code().value()));
  }
}

// Calls `function` in such a thread, which nobody has to join. The future does not wait for it when it is destroyed.
template <typename Function>
auto run_in_background(const char* what, Function&& function) {
  std::packaged_task<std::invoke_result_t<Function>()> task(std::forward<Function>(function));
  auto result = task.get_future();
  start_background_thread(what, std::move(task)).detach();
  return result;
}

} // namespace epx
