// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/file_messages.h"

#include <algorithm>
#include <cstring>

#include "transport/bootstrap/rendezvous_names.h"

namespace epx {
namespace {

constexpr char kMessageMagic[kMagicBytes] = {'e', 'p', 'x', 'm', 'e', 'e', 't', '2'};

struct Header {
  char magic[kMagicBytes];
  uint32_t kind;
  int32_t rank;
  int32_t num_ranks;
  int32_t status;
  uint64_t body_bytes;
  char nonce[kNonceDigits];
  ProcessOrigin origin;
};
static_assert(sizeof(Header) == kHeaderBytes);

// A nonce becomes part of a file name, so its characters are checked.
bool is_nonce(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

std::optional<Header> header_of(std::string_view bytes) {
  Header header{};
  if (bytes.size() < sizeof(Header)) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof(Header));
  if (std::memcmp(header.magic, kMessageMagic, kMagicBytes) != 0 || !is_nonce({header.nonce, kNonceDigits}) ||
      header.status < EPX_SUCCESS || header.status > EPX_ERROR_INTERNAL)
    return std::nullopt;
  return header;
}

} // namespace

std::string encode(const Message& message, const ProcessOrigin& writer) {
  Header header{};
  std::memcpy(header.magic, kMessageMagic, kMagicBytes);
  header.kind = static_cast<uint32_t>(message.kind);
  header.rank = message.rank;
  header.num_ranks = message.num_ranks;
  header.status = message.status;
  header.body_bytes = message.body.size();
  message.nonce.copy(header.nonce, kNonceDigits);
  header.origin = writer;
  std::string bytes(sizeof(Header), '\0');
  std::memcpy(bytes.data(), &header, sizeof(Header));
  return bytes += message.body;
}

std::optional<Message> decode(std::string_view bytes, MessageKind kind) {
  const std::optional<Header> header = header_of(bytes);
  if (!header || header->kind != static_cast<uint32_t>(kind) || header->body_bytes != bytes.size() - sizeof(Header))
    return std::nullopt;
  return Message{kind,
                 header->rank,
                 header->num_ranks,
                 static_cast<epx_status>(header->status),
                 std::string(header->nonce, kNonceDigits),
                 std::string(bytes.substr(sizeof(Header))),
                 header->origin};
}

std::optional<ProcessOrigin> origin_of(std::string_view bytes) {
  const std::optional<Header> header = header_of(bytes);
  return header ? std::optional(header->origin) : std::nullopt;
}

bool begins_like_older_message(std::string_view bytes) {
  return bytes.substr(0, kMagicBytes) == "epxmeet1";
}

bool begins_like_message(std::string_view bytes) {
  const size_t length = std::min(bytes.size(), kMagicBytes);
  return std::memcmp(bytes.data(), kMessageMagic, length) == 0;
}

} // namespace epx
