// A step that all ranks take together on the host: each brings a small record or says why it cannot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "epx/epx.h"
#include "runtime/base/error.h"

namespace epx {

// What travels. Fixed size, so that the ranks agree on it whatever they bring.
struct ExchangeRecord {
  static constexpr size_t kMaxMessage = 224;
  static constexpr size_t kMaxPayload = 256;
  epx_status status; // of the sender; EPX_SUCCESS: the payload counts
  int32_t rank;      // of the sender, as messages name it
  char message[kMaxMessage];
  std::byte payload[kMaxPayload];
};

class Exchange {
public:
  virtual ~Exchange() = default;

  // Runs `bring` and gathers what it returns from every rank of the group, in rank order. When it throws an Error, or a
  // peer's did, all ranks throw: the failing rank its own error, the others the same status with the failing rank's number.
  template <typename Bring>
  auto all_gather(Bring&& bring) -> std::vector<std::invoke_result_t<Bring>> {
    using Payload = std::invoke_result_t<Bring>;
    static_assert(std::is_trivially_copyable_v<Payload> && sizeof(Payload) <= ExchangeRecord::kMaxPayload);
    ExchangeRecord mine{};
    std::string own_failure;
    try {
      const Payload payload = bring();
      std::memcpy(mine.payload, &payload, sizeof(Payload));
    } catch (const Error& error) {
      mine.status = error.status();
      own_failure = error.message();
      own_failure.copy(mine.message, ExchangeRecord::kMaxMessage - 1);
    }
    const std::vector<ExchangeRecord> records = gather(mine);
    if (mine.status != EPX_SUCCESS) throw Error(mine.status, own_failure);
    std::vector<Payload> payloads(records.size());
    for (size_t i = 0; i < records.size(); ++i)
      std::memcpy(&payloads[i], records[i].payload, sizeof(Payload));
    return payloads;
  }

protected:
  // Gathers the records of this rank's group. When a peer's record carries a failure that this rank's does not, throws it
  // with throw_peer_failure.
  virtual std::vector<ExchangeRecord> gather(ExchangeRecord mine) = 0;

  [[noreturn]] static void throw_peer_failure(const ExchangeRecord& record) {
    fail(record.status, "rank {}: {}", record.rank, record.message);
  }
};

} // namespace epx
