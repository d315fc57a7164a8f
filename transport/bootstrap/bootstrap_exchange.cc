// SPDX-License-Identifier: Apache-2.0
#include "transport/bootstrap/bootstrap_exchange.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string_view>

#include <fmt/ranges.h>

#include "base/log.h"
#include "base/names.h"
#include "transport/control/keyed_hash.h"

namespace epx {
namespace {

constexpr uint32_t kSealMagic = 0x65707873; // "epxs"
constexpr int64_t kTimeToTellMs = 10'000;   // for peers to come to the all-gather that tells them
constexpr const char* kWhere = "creating the group: epx_bootstrap.all_gather";

uint32_t checksum_of(ExchangeRecord record) {
  record.seal.checksum = 0;
  return static_cast<uint32_t>(keyed_hash({}, std::as_bytes(std::span(&record, 1))));
}

// Returns the version of the libepx that sealed the record; 0 where it is not known. Records of 0.1 have no seal, and in the
// first all-gather their version at the beginning of the payload.
int32_t version_of(const ExchangeRecord& record, int rank, uint32_t round) {
  if (record.seal.magic == kSealMagic) return record.seal.checksum == checksum_of(record) ? record.seal.version : 0;
  int32_t version = 0;
  std::memcpy(&version, record.payload, sizeof(version));
  const bool may_be_older = round == 0 && version > 0 && version < kLibraryVersion;
  return may_be_older && record.status == EPX_SUCCESS && record.rank == rank ? version : 0;
}

// Returns what is wrong with the bytes that came in the place of `rank`; "" when they are its record.
std::string why_wrong(const ExchangeRecord& record, int rank, const RecordSeal& own, int own_rank) {
  const auto bytes = std::as_bytes(std::span(&record, 1));
  const auto end = std::find_if(bytes.rbegin(), bytes.rend(), [](std::byte byte) { return byte != std::byte{0}; }).base();
  if (end == bytes.begin()) return fmt::format("wrote no record of rank {}: all its bytes are 0", rank);
  if (record.seal.magic != kSealMagic) {
    std::string start;
    for (const std::byte byte : bytes.first<8>())
      start += fmt::format(" {:02x}", static_cast<unsigned>(byte));
    return fmt::format("wrote something else than the record of rank {} in its place: it begins with the bytes{}", rank,
                       start);
  }
  if (record.seal.checksum != checksum_of(record))
    return fmt::format("wrote a damaged record of rank {}: its checksum is wrong, and all after byte {} of {} is 0", rank,
                       end - bytes.begin(), bytes.size());
  if (record.rank != rank)
    return fmt::format("wrote the record of rank {}{} in the place of rank {}: records must be in rank order", record.rank,
                       record.rank == own_rank ? ", this rank's own," : "", rank);
  if (record.seal.round != own.round)
    return fmt::format("wrote the record of rank {} from all-gather {} of this creation, and this one is number {}", rank,
                       record.seal.round, own.round);
  return "";
}

} // namespace

std::vector<ExchangeRecord> BootstrapExchange::gather(ExchangeRecord mine) {
  const std::vector<ExchangeRecord> world = gather_sound_world(mine);
  std::vector<ExchangeRecord> group;
  for (const int member : members_)
    group.push_back(world[static_cast<size_t>(member)]);
  for (const ExchangeRecord& record : world)
    group.front().flags |= record.flags;
  return group;
}

void BootstrapExchange::stand_by() {
  ExchangeRecord mine{};
  mine.flags = ExchangeRecord::kStandsBy;
  const auto stands_by = [](const ExchangeRecord& record) { return record.flags == ExchangeRecord::kStandsBy; };
  while (!std::ranges::all_of(gather_sound_world(mine), stands_by)) {
  }
}

void BootstrapExchange::log_step(const char* name, uint32_t first_round) const {
  log::transport().info("creating the group: {} took {} all-gathers of the bootstrap", name, round_ - first_round);
}

std::vector<ExchangeRecord> BootstrapExchange::gather_sound_world(ExchangeRecord mine) {
  mine.rank = bootstrap_.rank;
  const uint32_t round = round_;
  std::vector<ExchangeRecord> world = gather_world(mine, timeout_ms_);
  try {
    require_sound(world, round);
  } catch (const StatusError& error) {
    if (error.status() == EPX_ERROR_INVALID_ARGUMENT) tell_peers(error);
    if (mine.status != EPX_SUCCESS) throw StatusError(mine.status, mine.message);
    throw;
  }
  throw_peer_failure(mine, world);
  return world;
}

std::vector<ExchangeRecord> BootstrapExchange::gather_world(ExchangeRecord mine, int64_t timeout_ms) {
  mine.seal = {kSealMagic, kLibraryVersion, bootstrap_.num_ranks, round_, 0};
  mine.seal.checksum = checksum_of(mine);
  std::vector<ExchangeRecord> world(static_cast<size_t>(bootstrap_.num_ranks));
  char message[EPX_MAX_MESSAGE_BYTES] = "";
  const epx_status status = bootstrap_.all_gather(bootstrap_.context, &mine, world.data(), sizeof(ExchangeRecord),
                                                  timeout_ms, message, sizeof(message));
  ++round_;
  message[sizeof(message) - 1] = '\0';
  if (status != EPX_SUCCESS && mine.status != EPX_SUCCESS) throw StatusError(mine.status, mine.message);
  if (status < EPX_SUCCESS || status > EPX_ERROR_INTERNAL)
    fail(EPX_ERROR_INVALID_ARGUMENT, "{} returned {}, which is no epx_status", kWhere, static_cast<int>(status));
  if (status != EPX_SUCCESS)
    fail(status, "creating the group: {}", message[0] != '\0' ? message : "the bootstrap's all_gather failed");
  return world;
}

// Versions come first, since records of other versions may differ in everything else.
void BootstrapExchange::require_sound(const std::vector<ExchangeRecord>& world, uint32_t round) const {
  for (int rank = 0; rank < bootstrap_.num_ranks; ++rank) {
    const int32_t version = version_of(world[static_cast<size_t>(rank)], rank, round);
    if (version != 0 && version != kLibraryVersion)
      fail(EPX_ERROR_MISMATCH, "the version of libepx differs between ranks: rank {} has {}, rank {} has {}",
           bootstrap_.rank, kLibraryVersion, rank, version);
  }
  const RecordSeal own{kSealMagic, kLibraryVersion, bootstrap_.num_ranks, round, 0};
  for (int rank = 0; rank < bootstrap_.num_ranks; ++rank) {
    const ExchangeRecord& record = world[static_cast<size_t>(rank)];
    if (const std::string why = why_wrong(record, rank, own, bootstrap_.rank); !why.empty())
      fail(EPX_ERROR_INVALID_ARGUMENT, "{} {}", kWhere, why);
    if (record.seal.num_ranks != bootstrap_.num_ranks)
      fail(EPX_ERROR_MISMATCH, "epx_bootstrap.num_ranks differs between ranks: rank {} has {}, rank {} has {}",
           bootstrap_.rank, bootstrap_.num_ranks, rank, record.seal.num_ranks);
  }
}

// They are in the next all-gather, where a record with a failure fails them too.
void BootstrapExchange::tell_peers(const StatusError& failure) noexcept {
  try {
    ExchangeRecord mine{};
    mine.rank = bootstrap_.rank;
    mine.status = failure.status();
    failure.message().copy(mine.message, ExchangeRecord::kMaxMessage - 1);
    gather_world(mine, std::min(timeout_ms_, kTimeToTellMs));
  } catch (...) { // they find out by their own timeout
  }
}

} // namespace epx
