// SPDX-License-Identifier: Apache-2.0
// Any code in a rank's process may overwrite its window. Here rank 1 of two consists of words that the test stores in rank 0's
// window beforehand, sound ones and damaged ones, so that rank 0 waits for no other process.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "base/error.h"
#include "runtime/stages/call_descriptor.h"
#include "runtime/stages/host/host_stages.h"
#include "runtime/stages/host/protocol/call_protocol.h"
#include "runtime/status_board.h"

namespace {

using namespace epx;

constexpr int kRanks = 2;
constexpr int kTokens = 4;
constexpr int kTopK = 2;
constexpr int kExperts = 4; // two of each rank
constexpr int kHidden = 4;
constexpr int kPeerRoutes = 3; // all go to the first expert of rank 0, after the routes of rank 0

GroupContext make_context(int rank, int64_t timeout_ms) {
  epx_group_config config{};
  config.struct_size = sizeof(config);
  config.num_experts = kExperts;
  config.max_tokens_per_rank = kTokens;
  config.hidden_dim = kHidden;
  config.max_top_k = kTopK;
  config.max_alignment = 1;
  config.max_token_dtype = EPX_FLOAT32;
  GroupContext context{};
  context.window_access = WindowAccess::by_host;
  context.shape = resolve(config, kRanks);
  context.layout = make_window_layout(context.shape, WindowAccess::by_host);
  context.group_id = 7;
  context.rank = rank;
  context.timeout_ms = timeout_ms;
  return context;
}

class OneOfTwo {
public:
  explicit OneOfTwo(int rank = 0, int64_t timeout_ms = 60'000)
      : context_(make_context(rank, timeout_ms)), windows_{Memory(blocks()), Memory(blocks())},
        bases_{windows_[0].data()->bytes, windows_[1].data()->bytes}, window_{bases_, rank, kRanks},
        protocol_(context_, window_, status_), stages_(context_, window_, allocations_, protocol_, status_),
        handle_(make_handle_layout(context_.shape, kTopK).total_bytes / sizeof(Block) + 1) {}

  const WindowLayout& layout() const { return context_.layout; }
  host::CallProtocol& protocol() { return protocol_; }

  template <typename T>
  T& word(int owner, const Region& region, int64_t index = 0) {
    return window_.at<T>(owner, region.offset)[index];
  }
  CallDescriptor& post() { return word<CallDescriptor>(0, layout().call_descriptors, 1); }

  // Stores what rank 1 stores in call `sequence`, with all its data.
  void come(epx_operation operation, uint64_t sequence) {
    post() = CallDescriptor{};
    post().operation = operation;
    post().top_k = kTopK;
    post().alignment = 1;
    if (operation == EPX_OP_DISPATCH) {
      post().hidden = kHidden;
      post().dtype = EPX_FLOAT32;
      post().plan_id = 1;
      post().recv_rows = kTokens;
      post().rows_allocation = post().weights_allocation = -1;
    }
    post().sequence = sequence;
    word<Flag>(0, layout().complete, 1).value = sequence;
    std::byte* board = &word<std::byte>(0, layout().board, kExchangeRecordBytes);
    reinterpret_cast<ExchangeRecord*>(board)->rank = 1;
  }
  int32_t& count(int expert) {
    return word<int32_t>(0, layout().counts, (1 * kRanks + 1) * kExperts + expert); // the counts of call 1
  }
  SlotRecord& record(int64_t slot) { return word<LlSlotRecord>(0, layout().ll_slot_records, slot).record; }

  // Stores what rank 1 stores in prepare as call 1: its routes come after the four of rank 0 to the same expert.
  void come_to_prepare() {
    come(EPX_OP_PREPARE, 1);
    count(0) = kPeerRoutes;
    for (int i = 0; i < kPeerRoutes; ++i)
      record(kTokens + i) = {i, -1, 1, 0, 1, 0};
  }

  void prepare() {
    int32_t topk_idx[kTokens * kTopK];
    for (int route = 0; route < kTokens * kTopK; ++route)
      topk_idx[route] = route % kTopK == 0 ? 0 : 2;
    int32_t counts[kExperts];
    int32_t offsets[kExperts + 1];
    PrepareCall call{};
    call.top_k = kTopK;
    call.alignment = 1;
    call.handle_mem = handle_.data()->bytes;
    call.num_tokens = kTokens;
    call.topk_idx = topk_idx;
    call.counts = counts;
    call.offsets = offsets;
    stages_.prepare(call);
  }

  void dispatch() {
    float tokens[kTokens * kHidden] = {};
    float recv_tokens[2 * kTokens * kTopK * kHidden] = {};
    DispatchCall call{};
    call.operation = EPX_OP_DISPATCH;
    call.top_k = kTopK;
    call.alignment = 1;
    call.handle_mem = handle_.data()->bytes;
    call.num_tokens = kTokens;
    call.recv_rows = 2 * kTokens * kTopK;
    call.hidden = kHidden;
    call.dtype = EPX_FLOAT32;
    call.tokens = reinterpret_cast<const std::byte*>(tokens);
    call.recv_tokens = reinterpret_cast<std::byte*>(recv_tokens);
    stages_.dispatch(call);
  }

  std::vector<int32_t> exchange() {
    host::CallExchange exchange(protocol_, context_, window_, describe(EPX_OP_MEM_ALLOC));
    post().top_k = post().alignment = 0;
    return exchange.all_gather([] { return int32_t{5}; });
  }

  epx_group_report report() { return status_.report(); }

  AbortRecord abort_record_at(int owner) { return unpack_abort_record(word<Flag>(owner, layout().abort_record).value); }

private:
  struct alignas(kRegionAlignment) Block {
    std::byte bytes[kRegionAlignment];
  };
  using Memory = std::vector<Block>;
  size_t blocks() const { return static_cast<size_t>(context_.layout.total_bytes) / sizeof(Block); }

  GroupContext context_;
  Memory windows_[kRanks];
  std::byte* bases_[kRanks];
  PeerWindow window_;
  StatusBoard status_;
  Allocations allocations_;
  host::CallProtocol protocol_;
  host::HostStages stages_;
  Memory handle_;
};

// Checks that rank 0's call fails since its window is damaged, that the sentence contains `words`, and that rank 1 gets an
// abort record.
void check_damage(OneOfTwo& rank, const std::function<void()>& call, const std::vector<std::string>& words) {
  std::string message;
  try {
    call();
  } catch (const StatusError& error) {
    CHECK(error.status() == EPX_ERROR_INTERNAL);
    message = error.message();
  }
  CAPTURE(message);
  CHECK(message.find("control words of the window of rank 0 are damaged") != std::string::npos);
  for (const std::string& word : words) {
    CAPTURE(word);
    CHECK(message.find(word) != std::string::npos);
  }
  const epx_group_report report = rank.report();
  CHECK(report.status == EPX_ERROR_INTERNAL);
  CHECK(report.culprit == 0);
  CHECK(rank.abort_record_at(1).status == EPX_ERROR_INTERNAL);
  CHECK(rank.abort_record_at(1).culprit == 0);
}

} // namespace

TEST_CASE("words of a peer that are sound are taken") {
  OneOfTwo rank;
  rank.come_to_prepare();
  rank.prepare();
  rank.come(EPX_OP_DISPATCH, 2);
  rank.dispatch();
  rank.come(EPX_OP_MEM_ALLOC, 3);
  CHECK(rank.exchange() == std::vector<int32_t>{5, 0});
  CHECK(rank.report().status == EPX_SUCCESS);
}

TEST_CASE("an abort record that no rank can have stored is reported as damage") {
  const uint64_t sound = pack(AbortRecord{EPX_ERROR_TIMEOUT, EPX_OP_COMBINE, 1, 3});
  const uint64_t damaged[] = {
      1,                                                                 // no status
      ~uint64_t{0},                                                      // nothing is right
      sound | uint64_t{0xf} << 60,                                       // no such status
      sound | uint64_t{0xf} << 56,                                       // no such operation
      pack(AbortRecord{EPX_ERROR_TIMEOUT, EPX_OP_COMBINE, 35032, 3}),    // no such rank
      pack(AbortRecord{EPX_ERROR_TIMEOUT, EPX_OP_COMBINE, kRanks, 3}),   // one too many
      pack(AbortRecord{EPX_ERROR_ABORTED, EPX_OP_NONE, 0xffff, 0}),      // the last
      pack(AbortRecord{EPX_SUCCESS, EPX_OP_DISPATCH, 1, 3}),             // success
      pack(AbortRecord{static_cast<epx_status>(10), EPX_OP_NONE, 0, 0}), // one too many
  };
  for (const uint64_t word : damaged) {
    CAPTURE(word);
    OneOfTwo rank;
    rank.word<Flag>(0, rank.layout().abort_record).value = word;
    check_damage(rank, [&] { rank.protocol().begin(EPX_OP_DISPATCH); }, {"abort record", "dispatch (call 1)"});
  }
  OneOfTwo rank;
  rank.word<Flag>(0, rank.layout().abort_record).value = sound;
  CHECK_THROWS_AS(rank.protocol().begin(EPX_OP_DISPATCH), StatusError);
  CHECK(rank.report().status == EPX_ERROR_TIMEOUT);
}

TEST_CASE("a peer is told whose window is damaged") {
  OneOfTwo rank(1);
  rank.word<Flag>(1, rank.layout().abort_record).value = pack(AbortRecord{EPX_ERROR_INTERNAL, EPX_OP_COMBINE, 0, 9});
  CHECK_THROWS_AS(rank.protocol().begin(EPX_OP_DISPATCH), StatusError);
  const epx_group_report report = rank.report();
  CHECK(report.status == EPX_ERROR_INTERNAL);
  CHECK(report.culprit == 0);
  CHECK(std::string(report.message).find("rank 0 found in combine (call 9)") != std::string::npos);
}

TEST_CASE("a rank that gives up names a rank that exists, whatever the others left in their windows") {
  constexpr int64_t kShortMs = 20;
  const uint64_t damaged[] = {pack(Waiting{1, EPX_PHASE_ARRIVE, 35032}), pack(Waiting{1, static_cast<epx_phase>(9), 0}),
                              pack(Waiting{1, EPX_PHASE_NONE, 0}), ~uint64_t{0}};
  for (const uint64_t word : damaged) {
    CAPTURE(word);
    OneOfTwo rank(0, kShortMs);
    rank.word<Flag>(1, rank.layout().waiting).value = word;
    rank.protocol().begin(EPX_OP_DISPATCH);
    CHECK_THROWS_AS(rank.protocol().arrive({}), StatusError);
    CHECK(rank.report().culprit == 1);
  }
  for (const uint64_t word : {~uint64_t{0}, pack(AbortRecord{EPX_ERROR_TIMEOUT, EPX_OP_COMBINE, 35032, 3})}) {
    CAPTURE(word);
    OneOfTwo rank(1, kShortMs);
    rank.word<Flag>(0, rank.layout().abort_record).value = word; // this window decides which rank is the culprit
    rank.protocol().begin(EPX_OP_DISPATCH);
    CHECK_THROWS_AS(rank.protocol().arrive({}), StatusError);
    const epx_group_report report = rank.report();
    CHECK(report.status == EPX_ERROR_TIMEOUT);
    CHECK(report.culprit == 0);
  }
}

TEST_CASE("a sequence number ahead of this rank's is reported as damage") {
  {
    OneOfTwo rank;
    rank.come_to_prepare();
    rank.post().sequence = 0x123456789;
    check_damage(rank, [&] { rank.prepare(); }, {"rank 1", "arrive", std::to_string(0x123456789)});
  }
  OneOfTwo rank;
  rank.come_to_prepare();
  rank.word<Flag>(0, rank.layout().complete, 1).value = ~uint64_t{0};
  check_damage(rank, [&] { rank.prepare(); }, {"rank 1", "complete", std::to_string(~uint64_t{0})});
}

TEST_CASE("a peer's call descriptor is checked before it is used") {
  struct Damage {
    const char* name;
    void (*spoil)(CallDescriptor& post);
    std::string value;
  };
  const Damage damages[] = {
      {"operation", [](CallDescriptor& post) { post.operation = 77; }, "77"},
      {"no operation", [](CallDescriptor& post) { post.operation = 0; }, "0"},
      {"rows below zero", [](CallDescriptor& post) { post.recv_rows = -5; }, "-5"},
      {"allocation", [](CallDescriptor& post) { post.rows_allocation = 123; }, "123"},
      {"allocation below none", [](CallDescriptor& post) { post.rows_allocation = -2; }, "-2"},
      {"allocation of weights", [](CallDescriptor& post) { post.weights_allocation = 124; }, "124"},
      {"rows without number",
       [](CallDescriptor& post) {
         post.rows_allocation = 0;
         post.recv_rows = int64_t{1} << 61;
       },
       std::to_string(int64_t{1} << 61)},
  };
  for (const Damage& damage : damages) {
    CAPTURE(damage.name);
    OneOfTwo rank;
    rank.come_to_prepare();
    rank.prepare();
    rank.come(EPX_OP_DISPATCH, 2);
    damage.spoil(rank.post());
    check_damage(rank, [&] { rank.dispatch(); }, {"rank 1", damage.value});
  }
}

TEST_CASE("route counts that a peer cannot have are reported as damage") {
  for (const int32_t routes : {-1, std::numeric_limits<int32_t>::min(), kTokens * kTopK + 1}) {
    for (int expert = 0; expert < kExperts; ++expert) {
      CAPTURE(routes);
      CAPTURE(expert);
      OneOfTwo rank;
      rank.come_to_prepare();
      rank.count(expert) = routes;
      check_damage(rank, [&] { rank.prepare(); }, {"rank 1", std::to_string(routes)});
    }
  }
  OneOfTwo rank;
  rank.come_to_prepare();
  for (int expert = 0; expert < kExperts; ++expert)
    rank.count(expert) = kTokens; // each is possible by itself
  check_damage(rank, [&] { rank.prepare(); }, {"rank 1", std::to_string(kTokens * kTopK)});
}

TEST_CASE("slot records that lead out of the tables are reported as damage") {
  const std::pair<SlotRecord, std::string> damages[] = {
      {{0, -1, kRanks, 0, 1, 0}, "rank 2"},  {{0, -1, SlotRecord::kNoSource, 0, 1, 0}, "rank 65535"},
      {{-1, -1, 1, 0, 1, 0}, "token -1"},    {{kTokens, -1, 1, 0, 1, 0}, "token 4"},
      {{0, -2, 1, 0, 1, 0}, "next slot -2"}, {{0, kTokens + kPeerRoutes, 1, 0, 1, 0}, "next slot 7"},
      {{0, -1, 1, kTopK, 1, 0}, "k 2"},      {{0, -1, 1, 0, 1, kRanks}, "order 2"},
  };
  for (const auto& [record, words] : damages) {
    OneOfTwo rank;
    rank.come_to_prepare();
    rank.record(kTokens + 1) = record;
    check_damage(rank, [&] { rank.prepare(); }, {"slot 5", words});
  }
}

TEST_CASE("records on the exchange board are checked before they are used") {
  const auto record_of = [](OneOfTwo& rank) {
    return reinterpret_cast<ExchangeRecord*>(&rank.word<std::byte>(0, rank.layout().board, kExchangeRecordBytes));
  };
  {
    OneOfTwo rank;
    rank.come(EPX_OP_MEM_ALLOC, 1);
    record_of(rank)->status = static_cast<epx_status>(77);
    check_damage(rank, [&] { rank.exchange(); }, {"rank 1", "77"});
  }
  {
    OneOfTwo rank;
    rank.come(EPX_OP_MEM_ALLOC, 1);
    record_of(rank)->rank = 5;
    check_damage(rank, [&] { rank.exchange(); }, {"rank 1", "rank 5"});
  }
  OneOfTwo rank;
  rank.come(EPX_OP_MEM_ALLOC, 1);
  record_of(rank)->status = EPX_ERROR_OUT_OF_MEMORY;
  std::memset(record_of(rank)->message, 'x', sizeof(ExchangeRecord::message)); // without an end
  std::memset(record_of(rank)->payload, 'y', sizeof(ExchangeRecord::payload));
  try {
    rank.exchange();
    FAIL("succeeded");
  } catch (const StatusError& error) {
    CHECK(error.message() == "rank 1: " + std::string(ExchangeRecord::kMaxMessage, 'x'));
  }
}

// Whatever the words are, prepare ends, and touches nothing else, as AddressSanitizer checks.
TEST_CASE("a call ends whatever the damage to the control words") {
  std::mt19937_64 random(20261122);
  int failed = 0;
  constexpr int kTrials = 3'000;
  for (int trial = 0; trial < kTrials; ++trial) {
    OneOfTwo rank(0, 2);
    rank.come_to_prepare();
    const WindowLayout& layout = rank.layout();
    const Region read[] = {
        {layout.abort_record.offset, 8},
        {layout.call_descriptors.offset + static_cast<int64_t>(sizeof(CallDescriptor)), sizeof(CallDescriptor)},
        {layout.complete.offset + static_cast<int64_t>(sizeof(Flag)), 8},
        {layout.counts.offset, 2 * kRanks * kExperts * static_cast<int64_t>(sizeof(int32_t))},
        {layout.ll_slot_records.offset, (kTokens + kPeerRoutes) * kLlSlotRecordBytes}};
    for (uint64_t damages = random() % 4 + 1; damages > 0; --damages) {
      const Region& region = read[random() % std::size(read)];
      rank.word<std::byte>(0, region, static_cast<int64_t>(random() % static_cast<uint64_t>(region.bytes))) =
          static_cast<std::byte>(random());
    }
    try {
      rank.prepare();
    } catch (const StatusError& error) {
      ++failed;
      CHECK(!error.message().empty());
      const epx_group_report report = rank.report();
      CHECK(report.culprit >= -1);
      CHECK(report.culprit < kRanks);
      CHECK(report.status == error.status());
    }
  }
  CHECK(failed > kTrials / 10);
  CHECK(failed < kTrials);
}
