// SPDX-License-Identifier: Apache-2.0
// The files of a rendezvous have these names:
//
//   alive.<rank>.<nonce>              locked by the process that has this nonce, for as long as it has its bootstrap
//   hello.<rank>                      rank: "I am here, and this is my nonce"; replaced by whoever claims the rank next
//   welcome.<rank>.<nonce>            rank 0: "you are in session S"; removed by the rank that has this nonce
//   reject.<rank>.<nonce>             rank 0, or who else claims the rank: "you cannot come in, because ..."
//   in.<round>.<rank>.<session>       rank: its contribution to an all-gather; removed by rank 0, or by the rank if it gives up
//   quit.<round>.<rank>.<session>     rank: "my deadline has passed"; rank 0 decides now, if it lives; removed by the rank, or
//                                     by rank 0 if the rank has left
//   out.<round>.<rank>.<session>      rank 0: all contributions, or why there are none; removed by the rank
//   tmp.<origin>.<nonce>.<number>     a file before it is renamed, written by the process that has this nonce; the origin is
//                                     the hash of its ProcessOrigin
// Ranks, rounds and numbers are decimal; nonces and sessions are 32 hexadecimal digits, an origin is 16.
//
// Live processes draw nonces and sessions at random, so that of a dead job's files only a `hello` can be taken for a live
// one's, and a rank is in a session only when it has taken the welcome that carries its own nonce.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace epx {

inline constexpr size_t kNonceDigits = 32;

std::string draw_nonce();

std::string alive_name(int rank, std::string_view nonce);
std::string hello_name(int rank);
std::string welcome_name(int rank, std::string_view nonce);
std::string reject_name(int rank, std::string_view nonce);
std::string in_name(uint64_t round, int rank, std::string_view session);
std::string quit_name(uint64_t round, int rank, std::string_view session);
std::string out_name(uint64_t round, int rank, std::string_view session);
std::string temporary_name(uint64_t origin_hash, std::string_view nonce, unsigned number);

// Return the rank in a name that hello_name made, or that alive_name made; nothing for any other name.
std::optional<int> rank_of_hello(std::string_view name);
std::optional<int> rank_of_alive(std::string_view name);

// Return whether temporary_name made this name, and for a process of this origin.
bool is_temporary(std::string_view name);
bool is_temporary_of(std::string_view name, uint64_t origin_hash);

// Returns whether one of the functions above can have made this name.
bool is_rendezvous_name(std::string_view name);

} // namespace epx
