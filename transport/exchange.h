// SPDX-License-Identifier: Apache-2.0
// An Exchange is a collective step on the host: each rank contributes a small record, or the error that kept it from one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "base/printable.h"
#include "epx/epx.h"

namespace epx {

// A BootstrapExchange seals its records, since the all-gather that carries them may be anybody's; other exchanges leave it 0.
struct RecordSeal {
  uint32_t magic;
  int32_t version;   // the sender's, of libepx
  int32_t num_ranks; // of the sender's bootstrap
  uint32_t round;    // of this creation: all-gathers before this one
  uint32_t checksum; // of the record whose checksum is 0
};

// The record has a fixed size, so that the ranks agree on it whatever their payloads are. Size and offsets are those of 0.1,
// which had no seal and a longer message: so ranks of both versions can tell each other that their versions differ.
struct ExchangeRecord {
  static constexpr size_t kMaxMessage = 204;
  static constexpr size_t kMaxPayload = 256;
  static constexpr int32_t kRefuses = 1;
  static constexpr int32_t kStandsBy = 2;
  epx_status status; // the sender's; EPX_SUCCESS: the payload is valid
  int32_t rank;      // the sender's, as messages name it
  int32_t flags;     // kRefuses: the sender contributes false to all_of; kStandsBy: see BootstrapExchange
  char message[kMaxMessage];
  RecordSeal seal;
  std::byte payload[kMaxPayload];
};
static_assert(sizeof(ExchangeRecord) == 492 && offsetof(ExchangeRecord, payload) == 236);

class Exchange {
public:
  virtual ~Exchange() = default;

  // Runs `bring` and gathers what it returns from every rank of the group, in rank order. When it throws a StatusError, or a
  // peer's did, all ranks throw: the failing rank its own error, the others the same status with the failing rank's number.
  template <typename Bring>
  auto all_gather(Bring&& bring) -> std::vector<std::invoke_result_t<Bring>> {
    using Payload = std::invoke_result_t<Bring>;
    const std::vector<ExchangeRecord> records =
        gather_after([&](ExchangeRecord& mine) { mine = record_with<Payload>(bring()); });
    return payloads_of<Payload>(records);
  }

  // Gathers `mine` of every rank of the group, in rank order. In a NodeExchange these are more than the ranks whose records
  // all_gather returns: those of the other nodes count as well.
  template <typename Payload>
  std::vector<Payload> all_gather_of_group(const Payload& mine) {
    return payloads_of<Payload>(gather_all(record_with(mine)));
  }

  // Returns whether `bring` returned true on every rank; throws as all_gather does. While groups are created, the ranks of all
  // groups of the bootstrap count: a further exchange may depend on the answer, and all ranks have to make the same ones.
  template <typename Bring>
  bool all_of(Bring&& bring) {
    const std::vector<ExchangeRecord> records =
        gather_after([&](ExchangeRecord& mine) { mine.flags = bring() ? 0 : ExchangeRecord::kRefuses; });
    return std::none_of(records.begin(), records.end(),
                        [](const ExchangeRecord& record) { return (record.flags & ExchangeRecord::kRefuses) != 0; });
  }

  // Two ranks have brought other values.
  struct Difference {
    int rank; // the first one, as messages name it
    int64_t value;
    int other_rank; // the first one whose value is another
    int64_t other_value;
  };

  // Compares the values `mine` of all ranks of the group, those of other nodes too. All ranks get the same answer.
  std::optional<Difference> find_difference(int64_t mine) {
    const std::vector<ExchangeRecord> records = gather_all(record_with(mine));
    const std::vector<int64_t> values = payloads_of<int64_t>(records);
    for (size_t i = 1; i < values.size(); ++i)
      if (values[i] != values[0]) return Difference{records[0].rank, values[0], records[i].rank, values[i]};
    return {};
  }

protected:
  // Gathers the records of this rank's group. When a peer's record has a failure and this rank's has none, it throws that
  // (throw_peer_failure). kRefuses is also set in a returned record when a rank refuses whose record is not returned.
  virtual std::vector<ExchangeRecord> gather(ExchangeRecord mine) = 0;

  // Gathers the records of all ranks of the group; NodeExchange overrides it, since its gather() returns those of one node.
  virtual std::vector<ExchangeRecord> gather_all(ExchangeRecord mine) { return gather(mine); }

  // For exchanges that are made of others.
  static std::vector<ExchangeRecord> gather_by(Exchange& other, const ExchangeRecord& mine) { return other.gather(mine); }

  // Throws the first failure among the gathered records, unless `mine`, this rank's, has one.
  static void throw_peer_failure(const ExchangeRecord& mine, const std::vector<ExchangeRecord>& all) {
    if (mine.status != EPX_SUCCESS) return;
    for (const ExchangeRecord& record : all) {
      if (record.status == EPX_SUCCESS) continue;
      fail(record.status, "rank {}: {}", record.rank, printable({record.message, ExchangeRecord::kMaxMessage}));
    }
  }

private:
  template <typename Payload>
  static ExchangeRecord record_with(const Payload& payload) {
    static_assert(std::is_trivially_copyable_v<Payload> && sizeof(Payload) <= ExchangeRecord::kMaxPayload);
    ExchangeRecord record{};
    std::memcpy(record.payload, &payload, sizeof(Payload));
    return record;
  }
  template <typename Payload>
  static std::vector<Payload> payloads_of(const std::vector<ExchangeRecord>& records) {
    std::vector<Payload> payloads(records.size());
    for (size_t i = 0; i < records.size(); ++i)
      std::memcpy(&payloads[i], records[i].payload, sizeof(Payload));
    return payloads;
  }

  // Gathers the record that `fill` fills in, or its error.
  template <typename Fill>
  std::vector<ExchangeRecord> gather_after(Fill&& fill) {
    ExchangeRecord mine{};
    std::string own_failure;
    try {
      as_status_error([&] { fill(mine); });
    } catch (const StatusError& error) {
      mine.status = error.status();
      own_failure = error.message();
      own_failure.copy(mine.message, ExchangeRecord::kMaxMessage - 1);
    }
    std::vector<ExchangeRecord> records = gather(mine);
    if (mine.status != EPX_SUCCESS) throw StatusError(mine.status, own_failure);
    return records;
  }
};

} // namespace epx
