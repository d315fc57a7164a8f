// What the files of a rendezvous are called, and what they contain.
//
//   hello.<rank>                    rank: "I am here, and this is my nonce"; replaced by whoever claims the rank next
//   welcome.<rank>.<nonce>          rank 0: "you are in session S"; removed by the rank that has this nonce
//   reject.<rank>.<nonce>           rank 0, or who else claims the rank: "you cannot come in, because ..."
//   in.<round>.<rank>.<session>     rank: its part of an all-gather; removed by rank 0, or by the rank when it gives up
//   quit.<round>.<rank>.<session>   rank: "I give up this round, because ..."; removed by rank 0, or by the rank when it
//   leaves out.<round>.<rank>.<session>    rank 0: all parts, or why there are none; removed by the rank tmp.* on the way
//   to be one of these
// Nonces and sessions are drawn at random by processes that live, so that of what a dead job leaves only `hello` files can
// be mistaken, and a rank is in a session only when it has taken the welcome that carries its own nonce.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "epx/epx.h"
#include "transport/bootstrap/rendezvous_directory.h"

namespace epx {

enum class LetterKind : uint32_t { kHello = 1, kWelcome, kReject, kIn, kQuit, kOut };

struct Letter {
  LetterKind kind = LetterKind::kHello;
  int rank = 0; // whose hello or part it is; to whom the others go
  int num_ranks = 0;
  epx_status status = EPX_SUCCESS;
  std::string nonce; // hello, reject: of the rank; the others: of the session
  std::string body;  // in, out: the data; with a status other than EPX_SUCCESS: a sentence
};

inline constexpr size_t kMaxNoteBytes = size_t{64} * 1024; // of a hello, welcome or reject

std::string draw_nonce(); // 32 hexadecimal digits

std::string encode(const Letter& letter);
// Nothing when `bytes` are not a whole letter of this kind.
std::optional<Letter> decode(std::string_view bytes, LetterKind kind);

inline void write_letter(RendezvousDirectory& directory, std::string_view name, const Letter& letter) {
  directory.write(name, encode(letter));
}
inline std::optional<Letter> read_letter(const RendezvousDirectory& directory, std::string_view name, LetterKind kind,
                                         size_t max_bytes = kMaxNoteBytes) {
  const std::optional<std::string> bytes = directory.read(name, max_bytes);
  return bytes ? decode(*bytes, kind) : std::nullopt;
}

std::string hello_name(int rank);
std::string welcome_name(int rank, std::string_view nonce);
std::string reject_name(int rank, std::string_view nonce);
std::string in_name(uint64_t round, int rank, std::string_view session);
std::string quit_name(uint64_t round, int rank, std::string_view session);
std::string out_name(uint64_t round, int rank, std::string_view session);
// The rank of a name that hello_name gave.
std::optional<int> rank_of_hello(std::string_view name);

} // namespace epx
