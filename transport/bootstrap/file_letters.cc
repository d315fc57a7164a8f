#include "transport/bootstrap/file_letters.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include <fmt/format.h>

#include "runtime/base/random.h"

namespace epx {
namespace {

constexpr std::string_view kHelloPrefix = "hello.";
constexpr size_t kNonceDigits = 32;
constexpr char kMagic[8] = {'e', 'p', 'x', 'm', 'e', 'e', 't', '1'};

struct Header {
  char magic[8];
  uint32_t kind;
  int32_t rank;
  int32_t num_ranks;
  int32_t status;
  uint64_t body_bytes;
  char nonce[kNonceDigits];
};
static_assert(sizeof(Header) == 64);

// Nonces become parts of file names.
bool is_nonce(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

} // namespace

std::string draw_nonce() {
  return fmt::format("{:016x}{:016x}", random_u64(), random_u64());
}

std::string encode(const Letter& letter) {
  Header header{};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.kind = static_cast<uint32_t>(letter.kind);
  header.rank = letter.rank;
  header.num_ranks = letter.num_ranks;
  header.status = letter.status;
  header.body_bytes = letter.body.size();
  letter.nonce.copy(header.nonce, kNonceDigits);
  std::string bytes(sizeof(Header), '\0');
  std::memcpy(bytes.data(), &header, sizeof(Header));
  return bytes += letter.body;
}

std::optional<Letter> decode(std::string_view bytes, LetterKind kind) {
  Header header{};
  if (bytes.size() < sizeof(Header)) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof(Header));
  const std::string_view nonce(header.nonce, kNonceDigits);
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0 || header.kind != static_cast<uint32_t>(kind) ||
      header.body_bytes != bytes.size() - sizeof(Header) || !is_nonce(nonce) || header.status < EPX_SUCCESS ||
      header.status > EPX_ERROR_INTERNAL)
    return std::nullopt;
  return Letter{kind,
                header.rank,
                header.num_ranks,
                static_cast<epx_status>(header.status),
                std::string(nonce),
                std::string(bytes.substr(sizeof(Header)))};
}

std::string hello_name(int rank) {
  return fmt::format("{}{}", kHelloPrefix, rank);
}

std::string welcome_name(int rank, std::string_view nonce) {
  return fmt::format("welcome.{}.{}", rank, nonce);
}

std::string reject_name(int rank, std::string_view nonce) {
  return fmt::format("reject.{}.{}", rank, nonce);
}

std::string in_name(uint64_t round, int rank, std::string_view session) {
  return fmt::format("in.{}.{}.{}", round, rank, session);
}

std::string quit_name(uint64_t round, int rank, std::string_view session) {
  return fmt::format("quit.{}.{}.{}", round, rank, session);
}

std::string out_name(uint64_t round, int rank, std::string_view session) {
  return fmt::format("out.{}.{}.{}", round, rank, session);
}

std::optional<int> rank_of_hello(std::string_view name) {
  if (!name.starts_with(kHelloPrefix)) return std::nullopt;
  int rank = 0;
  const std::string_view digits = name.substr(kHelloPrefix.size());
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc() || end != digits.data() + digits.size() || rank < 0) return std::nullopt;
  return rank;
}

} // namespace epx
