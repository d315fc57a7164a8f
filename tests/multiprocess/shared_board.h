// SPDX-License-Identifier: Apache-2.0
// A SharedBoard is memory that the processes of a test share; it is mapped before they are forked.
#pragma once

#include <new>

#include <sys/mman.h>

#include "tests/support/check.h"

namespace epx::test {

// `Board` consists of lock-free atomics.
template <typename Board>
class SharedBoard {
public:
  SharedBoard() {
    void* memory = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "no memory for {} bytes", sizeof(Board));
    board_ = new (memory) Board{};
  }
  ~SharedBoard() { ::munmap(board_, sizeof(Board)); }
  SharedBoard(const SharedBoard&) = delete;
  SharedBoard& operator=(const SharedBoard&) = delete;

  Board* operator->() const { return board_; }
  Board& operator*() const { return *board_; }

private:
  Board* board_;
};

} // namespace epx::test
