// SPDX-License-Identifier: Apache-2.0
// Each file of a rendezvous contains one message: a header and a body.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "epx/epx.h"
#include "transport/bootstrap/rendezvous_directory.h"
#include "transport/process_origin.h"

namespace epx {

enum class MessageKind : uint32_t { kHello = 1, kWelcome, kReject, kIn, kQuit, kOut, kAlive };

struct Message {
  MessageKind kind = MessageKind::kHello;
  int rank = 0; // hello, in, quit, alive: the sender; the others: the receiver
  int num_ranks = 0;
  epx_status status = EPX_SUCCESS;
  std::string nonce;    // alive, hello, reject: the rank's; the others: the session's
  std::string body;     // in, out: the data; with a status other than EPX_SUCCESS: a sentence
  ProcessOrigin origin; // the writer's; decode fills it in
};

inline constexpr size_t kMaxNoteBytes = size_t{64} * 1024; // all kinds but in and out
inline constexpr size_t kHeaderBytes = 176;

std::string encode(const Message& message, const ProcessOrigin& writer);
// Returns nothing when `bytes` are not a complete message of this kind.
std::optional<Message> decode(std::string_view bytes, MessageKind kind);

// Returns the writer of a message of any kind, of which `bytes` are the first kHeaderBytes or more; nothing when they are no
// header.
std::optional<ProcessOrigin> origin_of(std::string_view bytes);

// Returns whether a file that begins with `bytes` can be a message, or one that is being written: false is certain.
bool begins_like_message(std::string_view bytes);
inline constexpr size_t kMagicBytes = 8;
// Returns whether epx 0.1 before the change of its format wrote it: such a message has no origin, so that nobody can know
// whether its writer lives.
bool begins_like_older_message(std::string_view bytes);

inline void write_message(RendezvousDirectory& directory, std::string_view name, const Message& message) {
  directory.write(name, encode(message, directory.origin()));
}
inline std::optional<Message> read_message(const RendezvousDirectory& directory, std::string_view name, MessageKind kind,
                                           size_t max_bytes = kMaxNoteBytes) {
  const std::optional<std::string> bytes = directory.read(name, max_bytes);
  return bytes ? decode(*bytes, kind) : std::nullopt;
}

} // namespace epx
