// SPDX-License-Identifier: Apache-2.0
// These tests check the growth of structs with example structs, whose second version this library knows.
#include "runtime/struct_size.h"

#include <cstring>
#include <new>
#include <string>

#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"

namespace {

struct MadeUpArgs {
  size_t struct_size;
  int64_t first; // the first version ends behind it
  int32_t second;
  int32_t third;
  int64_t fourth;
};

struct MadeUpOutput {
  size_t struct_size;
  int64_t first; // the first version ends behind it
  int64_t second;
  int64_t third;
};

} // namespace

namespace epx {

template <>
inline constexpr GrowingStruct kGrowingStruct<MadeUpArgs> = {"made_up_args", 16};
template <>
inline constexpr GrowingStruct kGrowingStruct<MadeUpOutput> = {"made_up_output", 16};

} // namespace epx

namespace {

// Holds `bytes` bytes in front of a page that no access may touch.
class BytesAtTheEdge {
public:
  explicit BytesAtTheEdge(size_t bytes) : page_(static_cast<size_t>(::sysconf(_SC_PAGESIZE))) {
    pages_ = ::mmap(nullptr, 3 * page_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(pages_ != MAP_FAILED);
    REQUIRE(::mprotect(static_cast<std::byte*>(pages_) + 2 * page_, page_, PROT_NONE) == 0);
    data_ = static_cast<std::byte*>(pages_) + 2 * page_ - bytes;
  }
  ~BytesAtTheEdge() { ::munmap(pages_, 3 * page_); }
  BytesAtTheEdge(const BytesAtTheEdge&) = delete;
  BytesAtTheEdge& operator=(const BytesAtTheEdge&) = delete;

  std::byte* data() { return data_; }
  // Returns the pointer as a caller of some version would pass it.
  template <typename Struct>
  Struct* as() {
    return reinterpret_cast<Struct*>(data_);
  }

private:
  size_t page_;
  void* pages_ = nullptr;
  std::byte* data_ = nullptr;
};

// Writes args of `bytes` bytes in which all fields that this library knows are set.
void set_args(BytesAtTheEdge& memory, size_t bytes) {
  const MadeUpArgs args = {bytes, 11, 22, 33, 44};
  std::memcpy(memory.data(), &args, std::min(bytes, sizeof(args)));
}

template <typename Body>
std::string refusal(const Body& body) {
  try {
    body();
  } catch (const epx::StatusError& error) {
    CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
    return error.message();
  }
  return "not refused";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

} // namespace

TEST_CASE("args of an older caller: what its struct does not have is 0, and is not read") {
  for (const size_t bytes : {16, 24, 32}) {
    CAPTURE(bytes);
    BytesAtTheEdge memory(bytes);
    set_args(memory, bytes);
    const MadeUpArgs args = epx::read_args(memory.as<const MadeUpArgs>());
    CHECK(args.first == 11);
    CHECK(args.second == (bytes > 16 ? 22 : 0));
    CHECK(args.third == (bytes > 16 ? 33 : 0));
    CHECK(args.fourth == (bytes > 24 ? 44 : 0));
  }
}

TEST_CASE("args of a newer caller: what this library does not know must be 0") {
  for (const size_t bytes : {40, 48, 4096}) {
    CAPTURE(bytes);
    BytesAtTheEdge memory(bytes);
    set_args(memory, bytes);
    const MadeUpArgs args = epx::read_args(memory.as<const MadeUpArgs>());
    CHECK(args.fourth == 44);
    for (const size_t offset : {size_t{32}, bytes - 3, bytes - 1}) {
      memory.data()[offset] = std::byte{1};
      const std::string sentence = refusal([&] { epx::read_args(memory.as<const MadeUpArgs>()); });
      CAPTURE(sentence);
      CHECK(contains(sentence, "made_up_args.struct_size is " + std::to_string(bytes)));
      CHECK(contains(sentence, "32 bytes"));
      CHECK(contains(sentence, "byte " + std::to_string(offset) + " is not 0"));
      memory.data()[offset] = std::byte{0};
    }
  }
}

TEST_CASE("a struct_size that no version has is refused, and nothing behind it is read or written") {
  for (const size_t bytes :
       {size_t{0}, size_t{8}, size_t{15}, size_t{20}, size_t{33}, size_t{4097}, size_t{4104}, SIZE_MAX}) {
    CAPTURE(bytes);
    BytesAtTheEdge memory(sizeof(size_t));
    std::memcpy(memory.data(), &bytes, sizeof(bytes));
    const std::string of_args = refusal([&] { epx::read_args(memory.as<const MadeUpArgs>()); });
    CHECK(contains(of_args, "made_up_args.struct_size is " + std::to_string(bytes)));
    CHECK(contains(of_args, "16..4096"));
    bool asked = false;
    const std::string of_output = refusal([&] {
      epx::write_output(memory.as<MadeUpOutput>(), [&] {
        asked = true;
        return MadeUpOutput{};
      });
    });
    CHECK(contains(of_output, "made_up_output.struct_size is " + std::to_string(bytes)));
    CHECK_FALSE(asked);
  }
}

TEST_CASE("an output has what both know, zeros beyond, and the caller's struct_size") {
  for (const size_t bytes : {16, 24, 32, 40, 4096}) {
    CAPTURE(bytes);
    BytesAtTheEdge memory(bytes);
    std::memset(memory.data(), 0xa5, bytes);
    std::memcpy(memory.data(), &bytes, sizeof(bytes));
    epx::write_output(memory.as<MadeUpOutput>(), [] { return MadeUpOutput{7, 11, 22, 33}; });
    const MadeUpOutput expected = {bytes, 11, 22, 33};
    CHECK(std::memcmp(memory.data(), &expected, std::min(bytes, sizeof(expected))) == 0);
    for (size_t i = sizeof(expected); i < bytes; ++i)
      CHECK(memory.data()[i] == std::byte{0});
  }
}
