// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/rendezvous_names.h"

#include <algorithm>
#include <array>
#include <charconv>

#include <fmt/format.h>

#include "base/random.h"

namespace epx {
namespace {

constexpr size_t kOriginDigits = 16;

bool is_decimal(std::string_view text) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && (text == "0" || text.front() != '0');
}

bool is_hexadecimal(std::string_view text, size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

// A name consists of a prefix and fields, with points between them.
struct Grammar {
  std::string_view prefix;
  std::string_view fields; // one character each: number, nonce ('x') or origin
};

constexpr std::array<Grammar, 8> kGrammars = {{
    {"alive", "nx"},
    {"hello", "n"},
    {"welcome", "nx"},
    {"reject", "nx"},
    {"in", "nnx"},
    {"quit", "nnx"},
    {"out", "nnx"},
    {"tmp", "oxn"},
}};

bool is_field(std::string_view text, char kind) {
  if (kind == 'n') return is_decimal(text);
  return is_hexadecimal(text, kind == 'x' ? kNonceDigits : kOriginDigits);
}

bool matches(std::string_view name, const Grammar& grammar) {
  if (!name.starts_with(grammar.prefix)) return false;
  name.remove_prefix(grammar.prefix.size());
  for (const char kind : grammar.fields) {
    if (!name.starts_with('.')) return false;
    name.remove_prefix(1);
    const size_t length = std::min(name.find('.'), name.size());
    if (!is_field(name.substr(0, length), kind)) return false;
    name.remove_prefix(length);
  }
  return name.empty();
}

// Returns the number that follows `prefix` in a name whose grammar has been checked.
std::optional<int> rank_behind(std::string_view prefix, std::string_view name) {
  int rank = 0;
  const std::string_view digits = name.substr(prefix.size());
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), rank);
  if (error != std::errc()) return std::nullopt;
  return rank;
}

} // namespace

std::string draw_nonce() {
  return fmt::format("{:016x}{:016x}", random_u64(), random_u64());
}

std::string alive_name(int rank, std::string_view nonce) {
  return fmt::format("alive.{}.{}", rank, nonce);
}

std::string hello_name(int rank) {
  return fmt::format("hello.{}", rank);
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

std::string temporary_name(uint64_t origin_hash, std::string_view nonce, unsigned number) {
  return fmt::format("tmp.{:016x}.{}.{}", origin_hash, nonce, number);
}

std::optional<int> rank_of_hello(std::string_view name) {
  return matches(name, {"hello", "n"}) ? rank_behind("hello.", name) : std::nullopt;
}

std::optional<int> rank_of_alive(std::string_view name) {
  return matches(name, {"alive", "nx"}) ? rank_behind("alive.", name) : std::nullopt;
}

bool is_temporary(std::string_view name) {
  return matches(name, {"tmp", "oxn"});
}

bool is_temporary_of(std::string_view name, uint64_t origin_hash) {
  return is_temporary(name) && name.starts_with(fmt::format("tmp.{:016x}.", origin_hash));
}

bool is_rendezvous_name(std::string_view name) {
  return std::any_of(kGrammars.begin(), kGrammars.end(), [&](const Grammar& grammar) { return matches(name, grammar); });
}

} // namespace epx
