// SPDX-License-Identifier: Apache-2.0
// Sizes, offsets and slot arithmetic have closed-form answers.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "base/dtypes.h"
#include "base/error.h"
#include "runtime/config.h"
#include "runtime/layout/handle_limits.h"
#include "runtime/layout/handle_memory.h"
#include "runtime/layout/load.h"
#include "runtime/layout/multi_node_handle.h"
#include "runtime/layout/planner.h"
#include "runtime/layout/rank_major.h"
#include "runtime/layout/slices.h"
#include "runtime/layout/slots.h"
#include "runtime/layout/window_layout.h"
#include "runtime/stages/stages.h"
#include "runtime/tuning/tuning.h"

namespace {

epx_group_config small_config() {
  epx_group_config config{};
  config.struct_size = sizeof(config);
  config.num_experts = 10;
  config.max_tokens_per_rank = 6;
  config.hidden_dim = 33;
  config.max_top_k = 3;
  config.max_alignment = 4;
  config.max_token_dtype = EPX_BFLOAT16;
  config.timeout_ms = 1000;
  return config;
}

} // namespace

TEST_CASE("experts lie in contiguous blocks, the first ranks own one more") {
  const epx::ExpertBlocks uneven{10, 4}; // 3 3 2 2
  const int first_experts[] = {0, 3, 6, 8, 10};
  for (int rank = 0; rank <= 4; ++rank)
    CHECK(uneven.first_expert(rank) == first_experts[rank]);
  const epx::ExpertBlocks fewer{2, 5}; // 1 1 0 0 0
  CHECK(fewer.num_local_experts(1) == 1);
  CHECK(fewer.num_local_experts(2) == 0);
  for (const epx::ExpertBlocks& blocks : {uneven, fewer, epx::ExpertBlocks{7, 7}, epx::ExpertBlocks{1, 3}})
    for (int rank = 0; rank < blocks.num_ranks; ++rank)
      for (int expert = blocks.first_expert(rank); expert < blocks.first_expert(rank + 1); ++expert)
        CHECK(blocks.rank_of(expert) == rank);
}

TEST_CASE("zones and usable slots") {
  CHECK(epx::effective_alignment(0) == 1);
  CHECK(epx::zone_rows(0, 16) == 0);
  CHECK(epx::zone_rows(1, 16) == 16);
  CHECK(epx::zone_rows(16, 16) == 16);
  CHECK(epx::usable_slots(50, 16) == 48);
  CHECK(epx::usable_slots(15, 16) == 0);
}

TEST_CASE("the receive capacity defaults to the worst case") {
  // 3 ranks * 6 tokens * 3 routes + ceil(10 / 3) experts * 3 pads = 66, rounded up to 4
  CHECK(epx::resolve(small_config(), 3).max_recv_tokens == 68);
  epx_group_config config = small_config();
  config.max_recv_tokens_per_rank = 17;
  CHECK(epx::resolve(config, 3).max_recv_tokens == 17);
}

TEST_CASE("slots that do not fit int32 are refused with the numbers") {
  epx_group_config config = small_config();
  config.max_tokens_per_rank = 1 << 24;
  config.max_top_k = 64;
  try {
    epx::resolve(config, 3);
    FAIL("accepted");
  } catch (const epx::StatusError& error) {
    CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
    CHECK(error.message().find("3221225484") != std::string::npos); // 3 * 2^24 * 64 + 4 * 3
  }
}

TEST_CASE("tokens of all ranks that do not fit int32 are refused, however few rows a rank receives") {
  epx_group_config config = small_config();
  config.max_top_k = 1;
  config.max_tokens_per_rank = (1 << 30) - 1;
  config.max_recv_tokens_per_rank = 17;
  CHECK(epx::resolve(config, 2).max_tokens_per_rank == (1 << 30) - 1);
  try {
    epx::resolve(config, 3);
    FAIL("accepted");
  } catch (const epx::StatusError& error) {
    CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
    CHECK(error.message().find("max_tokens_per_rank 1073741823 times 3 ranks") != std::string::npos);
  }
}

TEST_CASE("regions of the window are aligned, apart, and add up") {
  const auto check = [](epx_combine_precision precision, epx::WindowAccess access) {
    epx_group_config config = small_config();
    config.combine_precision = precision;
    config.max_sidecar_bytes = 5;
    const epx::GroupShape shape = epx::resolve(config, 5);
    const epx::WindowLayout layout = epx::make_window_layout(shape, access);
    int64_t end = 0;
    for (const epx::Region& region : {layout.abort_record,
                                      layout.waiting,
                                      layout.call_descriptors,
                                      layout.complete,
                                      layout.slice_flags,
                                      layout.board,
                                      layout.counts,
                                      layout.gathered_routes,
                                      layout.slice_records,
                                      layout.ll_slot_records,
                                      layout.first_slots,
                                      layout.scatter_rows,
                                      layout.scatter_sidecars,
                                      layout.scatter_weights,
                                      layout.scatter_token_weights,
                                      layout.scatter_ready_flags,
                                      layout.gather_rows,
                                      layout.gather_weights,
                                      layout.gather_ready_flags,
                                      layout.ll_scatter_rows,
                                      layout.ll_scatter_weights,
                                      layout.ll_rank_major_routes,
                                      layout.ll_gather_rows,
                                      layout.ll_gather_weights}) {
      CHECK(region.offset == end);
      CHECK(region.offset % epx::kRegionAlignment == 0);
      end = region.offset + region.bytes;
    }
    CHECK(end == layout.total_bytes);
    CHECK(layout.row_stride == 128); // 33 bf16 = 66 bytes, padded to lines
    CHECK(layout.sidecar_stride == 16);
    CHECK(layout.gather_staging_rows == 6 * 3); // min(5 ranks, top-3) and 3 routes are the same here
    CHECK(layout.counts.bytes >= 2 * 5 * 10 * 4);
  };
  for (const epx_combine_precision precision : {EPX_COMBINE_WIRE, EPX_COMBINE_EXACT})
    for (const epx::WindowAccess access : {epx::WindowAccess::by_host, epx::WindowAccess::by_kernels})
      check(precision, access);
}

TEST_CASE("what kernels alone use takes no bytes where the host accesses windows") {
  const epx::GroupShape shape = epx::resolve(small_config(), 5);
  const epx::WindowLayout host = epx::make_window_layout(shape, epx::WindowAccess::by_host);
  for (const epx::Region& region :
       {host.gathered_routes, host.first_slots, host.scatter_token_weights, host.scatter_ready_flags,
        host.gather_ready_flags, host.ll_scatter_rows, host.ll_scatter_weights, host.ll_rank_major_routes,
        host.ll_gather_rows, host.ll_gather_weights})
    CHECK(region.bytes == 0);
  CHECK(host.call_descriptors.bytes == 5 * int64_t{sizeof(epx::CallDescriptor)} + 128); // rounded up to 256
  CHECK(host.counts.bytes == 512);                                                      // 2 * 5 * 10 * 4, rounded up
  CHECK(host.slice_flags.bytes == 768);
  CHECK(host.total_bytes < epx::make_window_layout(shape, epx::WindowAccess::by_kernels).total_bytes);
}

TEST_CASE("records of slices: a place for each, apart by half, peer and field, within their region") {
  for (const int num_ranks : {1, 3, 4, 64}) {
    const epx::GroupShape shape = epx::resolve(small_config(), num_ranks);
    for (const epx::WindowAccess access : {epx::WindowAccess::by_host, epx::WindowAccess::by_kernels}) {
      const epx::WindowLayout layout = epx::make_window_layout(shape, access);
      const bool is_host = access == epx::WindowAccess::by_host;
      const int64_t bytes = is_host ? sizeof(int32_t) : sizeof(epx::LlPacket8), of_pair = EPX_MAX_SLICES / num_ranks;
      int64_t end = layout.slice_records.offset;
      for (int half = 0; half < (is_host ? 1 : 2); ++half) {
        for (int peer = 0; peer < num_ranks; ++peer) {
          for (const auto field : {epx::SliceField::size, epx::SliceField::input_offset, epx::SliceField::output_offset,
                                   epx::SliceField::recv_size}) {
            const int64_t first = epx::slice_record_offset(layout, num_ranks, peer, field, 0, bytes, half);
            CHECK(first >= end);
            end = epx::slice_record_offset(layout, num_ranks, peer, field, of_pair - 1, bytes, half) + bytes;
            CHECK(end - first == of_pair * bytes);
          }
        }
      }
      CHECK(end <= layout.slice_records.offset + layout.slice_records.bytes);
    }
  }
}

TEST_CASE("the bytes of rows, as far as an int64 counts them") {
  CHECK(epx::row_bytes(EPX_BFLOAT16, 33) == 66);
  CHECK(epx::row_pitch(66, "a row") == 80);
  CHECK(epx::row_pitch(80, "a row") == 80);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  CHECK(epx::checked_bytes_of_rows(EPX_FLOAT32, 3, 5) == 60);
  CHECK(epx::checked_bytes_of_rows(EPX_UINT8, 1, kMax) == kMax);
  CHECK(epx::checked_bytes_of_rows(EPX_FLOAT32, 0, kMax) == 0);
  CHECK_FALSE(epx::checked_bytes_of_rows(EPX_FLOAT32, 1, kMax / 2).has_value());
  CHECK_FALSE(epx::checked_bytes_of_rows(EPX_FLOAT32, kMax / 2, 1).has_value());
}

TEST_CASE("a token is staged by (source, token) or by slot, whichever needs fewer rows") {
  epx_group_config config = small_config();
  const epx::GroupShape large = epx::resolve(config, 4); // R = 84 >= 24
  const epx::WindowLayout by_token = epx::make_window_layout(large, epx::WindowAccess::by_host);
  CHECK(by_token.scatter_by_token);
  CHECK(by_token.scatter_staging_rows == 24);
  CHECK(epx::scatter_staging_row(by_token, large, 3, 5, 77) == 3 * 6 + 5);
  config.max_recv_tokens_per_rank = 20;
  const epx::GroupShape small = epx::resolve(config, 4);
  const epx::WindowLayout by_slot = epx::make_window_layout(small, epx::WindowAccess::by_host);
  CHECK_FALSE(by_slot.scatter_by_token);
  CHECK(by_slot.scatter_staging_rows == 20);
  CHECK(epx::scatter_staging_row(by_slot, small, 3, 5, 17) == 17);
}

TEST_CASE("gather staging: one row per token and rank, or per route") {
  const epx::GroupShape shape = epx::resolve(small_config(), 2);
  CHECK(epx::partial_staging_row(shape, 4, 3, 1) == 4 * 2 + 1); // 2 ranks < top-3
  CHECK(epx::partial_staging_row(shape, 4, 1, 0) == 4);
  CHECK(epx::route_index(4, 3, 2) == 14);
}

TEST_CASE("LL staging: a place for each chunk, apart by parity, within its region") {
  epx_group_config config = small_config();
  config.hidden_dim = 1000; // 2000 bytes: two LL chunks
  config.max_sidecar_bytes = 5;
  const epx::GroupShape shape = epx::resolve(config, 4);
  const epx::WindowLayout layout = epx::make_window_layout(shape, epx::WindowAccess::by_kernels);
  CHECK(layout.ll_tokens == 6);
  CHECK(layout.gathered_routes_per_rank == epx::kMaxGatheredRoutes / 4);
  CHECK(layout.ll_row_chunks == 2);
  CHECK(layout.ll_chunks == 3);
  CHECK(epx::ll_scatter_packet(layout, shape, 0, 0, 0, 2) == 2 * epx::kLlChunkPackets);
  CHECK(epx::ll_scatter_packet(layout, shape, 0, 0, 1, 0) == 3 * epx::kLlChunkPackets);
  CHECK(epx::ll_scatter_packet(layout, shape, 1, 0, 0, 0) == int64_t{4} * 6 * 3 * epx::kLlChunkPackets);
  CHECK((epx::ll_scatter_packet(layout, shape, 1, 3, 5, 2) + epx::kLlChunkPackets) * int64_t{sizeof(epx::LlPacket16)} ==
        layout.ll_scatter_rows.bytes);
  CHECK((epx::ll_gather_packet(layout, shape, 1, 5, 2, 1) + epx::kLlChunkPackets) * int64_t{sizeof(epx::LlPacket16)} ==
        layout.ll_gather_rows.bytes);
  CHECK(epx::ll_scatter_weight(layout, shape, 1, 3, 5, 2) * int64_t{sizeof(epx::LlPacket8)} <
        layout.ll_scatter_weights.bytes);
  CHECK((epx::ll_scatter_weight(layout, shape, 1, 3, 5, 2) + 1) * int64_t{sizeof(epx::RankMajorRoute)} <=
        layout.ll_rank_major_routes.bytes);
  CHECK(epx::ll_gather_weight(layout, shape, 1, 5, 2) * int64_t{sizeof(epx::LlPacket8)} < layout.ll_gather_weights.bytes);
  config.max_tokens_per_rank = 4096;
  const auto ll_tokens = [&](int num_ranks) {
    return epx::make_window_layout(epx::resolve(config, num_ranks), epx::WindowAccess::by_kernels).ll_tokens;
  };
  CHECK(ll_tokens(4) == epx::kMaxLlTokens);
  CHECK(ll_tokens(64) == epx::kMaxLlTokensOfAllRanks / 64);
  config.hidden_dim = 28672;
  config.max_token_dtype = EPX_BFLOAT16;
  CHECK(ll_tokens(1) == epx::kMaxLlTokens);
  CHECK(ll_tokens(2) == epx::kMaxLlTokens);
  CHECK(ll_tokens(4) == epx::kMaxLlBytes / (int64_t{3} * 2 * 28672));
  config.hidden_dim = 57344;
  CHECK(ll_tokens(4) == epx::kMinLlTokens);
  config.hidden_dim = 14336;
  config.max_top_k = 2; // a row goes to two ranks at most
  CHECK(ll_tokens(4) == epx::kMaxLlTokens);
  config.max_top_k = 64;
  CHECK(ll_tokens(2) == epx::kMinLlTokens); // the routing all-gather carries 64 tokens of 64 routes
}

TEST_CASE("LL chunks of quantised rows: parts of whole blocks, which the staging of their group has room for") {
  const epx::WireFormat block128{EPX_SCALING_BLOCK128, EPX_FLOAT8_E4M3, EPX_FLOAT32, 0.0F};
  const epx::WireFormat pow2{EPX_SCALING_BLOCK128_POW2, EPX_FLOAT8_E4M3, EPX_FLOAT8_E8M0, 0.0F};
  const epx::WireFormat mx{EPX_SCALING_MX, EPX_FLOAT8_E5M2, EPX_FLOAT8_E8M0, 0.0F};
  const epx::WireFormat nv{EPX_SCALING_NV, EPX_FLOAT4_E2M1, EPX_FLOAT8_E4M3, 0.0F};
  CHECK(epx::ll_chunks_of(block128, 7168) == 6); // of 1408 elements and 11 scales
  CHECK(epx::ll_chunks_of(pow2, 7168) == 7);     // of 1024 elements and 8 scales
  CHECK(epx::ll_chunks_of(mx, 7168) == 6);
  CHECK(epx::ll_chunks_of(nv, 7168) == 3);
  CHECK(epx::ll_chunks_of(nv, 2) == 1);
  const auto row_chunks = [](epx_dtype max_token_dtype, int hidden) {
    epx_group_config config = small_config();
    config.max_token_dtype = max_token_dtype;
    config.hidden_dim = hidden;
    return epx::make_window_layout(epx::resolve(config, 4), epx::WindowAccess::by_kernels).ll_row_chunks;
  };
  for (const int hidden : {1, 100, 1024, 1026, 2880, 7168, 14336}) {
    CAPTURE(hidden);
    CHECK(row_chunks(EPX_FLOAT8_E4M3, hidden) >= epx::ll_chunks_of(pow2, hidden));
    CHECK(row_chunks(EPX_FLOAT8_E5M2, hidden) >= epx::ll_chunks_of(mx, hidden));
    CHECK(row_chunks(EPX_BFLOAT16, hidden) >= epx::ll_chunks_of(pow2, hidden));
    if (hidden % 2 == 0) CHECK(row_chunks(EPX_FLOAT4_E2M1, hidden) >= epx::ll_chunks_of(nv, hidden));
  }
  CHECK(row_chunks(EPX_BFLOAT16, 7168) == 10); // as of plain rows
}

TEST_CASE("on few SMs fewer tokens take the low-latency path, and fewer routes are gathered") {
  epx_group_config config = small_config();
  config.max_tokens_per_rank = 4096;
  config.hidden_dim = 7168;
  config.max_token_dtype = EPX_BFLOAT16;
  config.max_top_k = 8;
  const epx::WindowLayout full = epx::make_window_layout(epx::resolve(config, 4), epx::WindowAccess::by_kernels);
  const auto on_sms = [&](int num_sms) {
    epx::WindowLayout layout = full;
    epx::limit_ll_path(layout, 4, epx::ll_limits(epx::measured_tuning({9, 0}, 4), num_sms));
    return layout;
  };
  CHECK(full.ll_row_chunks == 10);
  CHECK(on_sms(84).ll_tokens == 512);
  CHECK(on_sms(84).gathered_routes_per_rank == 4096);
  CHECK(on_sms(16).ll_tokens == 48);
  CHECK(on_sms(16).gathered_routes_per_rank == 2048);
  CHECK(on_sms(0).ll_tokens == 0);
  config.max_tokens_per_rank = 9;
  epx::WindowLayout small = epx::make_window_layout(epx::resolve(config, 4), epx::WindowAccess::by_kernels);
  epx::limit_ll_path(small, 4, epx::ll_limits(epx::measured_tuning({9, 0}, 4), 16));
  CHECK(small.ll_tokens == 9);
}

TEST_CASE("the memory plan lists the regions of the window, for the transport that the config names") {
  const epx::GroupShape shape = epx::resolve(small_config(), 4);
  const std::pair<epx_transport, epx::WindowAccess> transports[] = {{EPX_TRANSPORT_HOST, epx::WindowAccess::by_host},
                                                                    {EPX_TRANSPORT_NCCL, epx::WindowAccess::by_kernels}};
  for (const auto& [transport, access] : transports) {
    const epx_memory_plan plan = epx::plan_memory(shape, transport);
    CHECK(plan.window_bytes == epx::make_window_layout(shape, access).total_bytes);
    CHECK(plan.control_bytes + plan.count_bytes + plan.slot_record_bytes + plan.scatter_row_bytes +
              plan.scatter_sidecar_bytes + plan.scatter_weight_bytes + plan.gather_row_bytes + plan.gather_weight_bytes ==
          plan.window_bytes);
    CHECK(plan.handle_mem_bytes == epx::make_handle_layout(shape, 3).total_bytes);
    CHECK((plan.scratch_bytes > 0) == (transport == EPX_TRANSPORT_HOST));
  }
  CHECK(epx::plan_memory(shape, EPX_TRANSPORT_AUTO).window_bytes ==
        epx::plan_memory(shape, EPX_TRANSPORT_NCCL).window_bytes);
}

TEST_CASE("handle memory over nodes keeps to the formula of epx.h, and legs have places of their own in it") {
  for (const int nodes : {2, 64}) {
    for (const int tokens : {1, 1030, 4096}) {
      for (const int top_k : {1, 8, 64}) {
        epx_group_config config = small_config();
        config.num_experts = 256;
        config.max_tokens_per_rank = tokens;
        config.max_top_k = top_k;
        config.ranks_per_node = 8;
        config.max_recv_tokens_per_rank = 100'000;
        const int64_t ranks = int64_t{8} * nodes, padded = tokens == 1030 ? 2048 : tokens;
        const epx::GroupShape group = epx::resolve(config, static_cast<int>(ranks));
        const int64_t bytes = epx::handle_mem_bytes(group, epx::WindowAccess::by_kernels, top_k);
        CHECK(bytes <= int64_t{12} * (nodes + 1) * padded * top_k + (4 * ranks + int64_t{16} * nodes) * padded +
                           12 * group.max_recv_tokens + 8 * ranks * 256 + 65536);
        const epx::MultiNodeShape shape = epx::make_multi_node_shape(group, 9); // the second rank of the second node
        CHECK(shape.padded_tokens() == padded);
        const epx::MultiNodeHandleLayout layout = epx::make_multi_node_handle_layout(shape, top_k);
        const int last = shape.num_legs() - 1, first = shape.leg(1, 0);
        const epx::HandleLayout plan = epx::leg_layout(layout, shape, top_k, last);
        const int64_t chunk = shape.chunk_tokens();
        CHECK(plan.routes + chunk * top_k * static_cast<int64_t>(sizeof(epx::Route)) <= layout.leg_first_slots);
        CHECK(plan.first_slots + 8 * chunk * static_cast<int64_t>(sizeof(int32_t)) <= layout.total_bytes);
        CHECK(epx::leg_layout(layout, shape, top_k, first).zone_begin == layout.zone_begin);
        CHECK(epx::leg_layout(layout, shape, top_k, shape.leg(0, 0)).zone_begin == layout.no_zones);
      }
    }
  }
}

TEST_CASE("handle memory keeps to the formula of the contract") {
  for (const int ranks : {1, 2, 4, 8, 64}) {
    for (const int tokens : {1, 128, 256, 512, 8192}) {
      for (const int top_k : {1, 8, 32, 64}) {
        epx_group_config config = small_config();
        config.num_experts = 256;
        config.max_tokens_per_rank = tokens;
        config.max_top_k = top_k;
        const epx::GroupShape shape = epx::resolve(config, ranks);
        const int64_t allowed = 16 * (int64_t{tokens} * top_k + shape.max_recv_tokens) + 8 * int64_t{ranks} * 256 + 65536;
        CHECK(epx::make_handle_layout(shape, top_k).total_bytes <= allowed);

        epx::GroupShape tight = shape;
        tight.max_recv_tokens = tokens;
        const int64_t more = 4 * int64_t{ranks} * (tokens + 128 * top_k);
        CHECK(epx::make_handle_layout(tight, top_k).total_bytes <= allowed - 16 * (shape.max_recv_tokens - tokens) + more);
      }
    }
  }
}

TEST_CASE("rank-major plans number the rows that sources can have, and tell a row's first route from the others") {
  const epx::GroupShape shape = epx::resolve(small_config(), 5); // 6 tokens for each rank
  CHECK(epx::slots_per_source(shape, 4) == 4);
  CHECK(epx::slots_per_source(shape, 9) == 6);
  for (const int32_t slot : {0, 1, 29}) {
    CHECK(epx::encode_slot(slot, false) < -1);
    CHECK(epx::decode_slot(epx::encode_slot(slot, false)) == slot);
    CHECK(epx::encode_slot(slot, true) == slot);
    CHECK(epx::decode_slot(slot) == slot);
  }
  CHECK(epx::decode_slot(-1) == -1);

  for (const epx::WindowAccess access : {epx::WindowAccess::by_host, epx::WindowAccess::by_kernels}) {
    const epx::WindowLayout layout = epx::make_window_layout(shape, access);
    CHECK(layout.rank_major_routes().offset == layout.ll_slot_records.offset);
    const int64_t most = epx::rank_major_route(shape.num_ranks * epx::slots_per_source(shape, 9), shape.max_top_k);
    CHECK(most * static_cast<int64_t>(sizeof(epx::RankMajorRoute)) <= layout.rank_major_routes().bytes);
  }

  epx::MovementCall call{};
  CHECK(!call.is_rank_major());
  CHECK(call.row_of_slot(17) == 17);
  CHECK(call.num_slots(shape) == shape.max_recv_tokens);
  call.rows_per_source = 9;
  call.slots_per_source = 6;
  CHECK(call.num_slots(shape) == 30);
  CHECK(call.row_of_slot(5) == 5);
  CHECK(call.row_of_slot(6) == 9); // the first row of source 1
  CHECK(call.row_of_slot(29) == 41);
  call.rows_per_source = call.slots_per_source = 0; // no rows, and no slots
  CHECK(call.num_slots(shape) == 0);
  CHECK(call.row_of_slot(0) == 0);

  for (const int32_t token : {0, 5})
    for (const int32_t rank_ordinal : {0, 1, 2}) {
      const auto row = static_cast<int32_t>(epx::partial_staging_row(shape, token, 3, rank_ordinal));
      const epx::PartialRow partial = epx::partial_row_at(shape, row, 3);
      CHECK((partial.token == token && partial.rank_ordinal == rank_ordinal));
    }
}

TEST_CASE("wherever damaged handle memory has a source begin, its compact rows are rows of the receive tensors") {
  const epx::GroupShape shape = epx::resolve(small_config(), 5);
  constexpr int64_t kSlots = 6; // of each source; M is no less
  const epx::HandleLimits limits(shape, 2, shape.num_ranks * kSlots);
  CHECK(limits.compact_row({6, 13}, 2, kSlots) == 15);
  for (const int32_t begin : {-1, INT32_MIN, 24, 25, 30, INT32_MAX})
    for (const int64_t row : {int64_t{0}, kSlots - 1}) {
      const int64_t found = limits.compact_row({6, begin}, row, kSlots);
      CHECK((found >= 0 && found < shape.num_ranks * kSlots));
    }

  epx_group_config config = small_config();
  config.max_tokens_per_rank = 1; // as many first slots as ranks, but twice as many words of SourceRows
  const epx::GroupShape least = epx::resolve(config, 64);
  const epx::HandleLayout layout = epx::make_handle_layout(least, 1);
  CHECK(layout.ll_slots - layout.first_slots >= 64 * static_cast<int64_t>(sizeof(epx::SourceRows)));
}

TEST_CASE("a damaged handle header is detected") {
  epx::HandleHeader header{};
  header.magic = epx::kHandleMagic;
  header.group_id = 0x1234;
  header.plan_id = 7;
  header.num_tokens = 5;
  header.top_k = 2;
  header.is_compact = 1;
  header.alignment = 16;
  header.rows_per_source = epx::kExpertMajor;
  header.checksum = epx::header_checksum(header);
  auto* bytes = reinterpret_cast<unsigned char*>(&header);
  for (size_t i = 0; i < offsetof(epx::HandleHeader, body_checksum); ++i) {
    bytes[i] ^= 0x10;
    CHECK(header.checksum != epx::header_checksum(header));
    bytes[i] ^= 0x10;
  }
  CHECK(header.checksum == epx::header_checksum(header));
}

TEST_CASE("an abort record survives its packing") {
  const epx::AbortRecord abort_record = epx::unpack_abort_record(
      epx::pack(epx::AbortRecord{EPX_ERROR_TIMEOUT, EPX_OP_DISPATCH_BWD, 65534, 123456789012, EPX_PHASE_COMPLETE}));
  CHECK(abort_record.status == EPX_ERROR_TIMEOUT);
  CHECK(abort_record.operation == EPX_OP_DISPATCH_BWD);
  CHECK(abort_record.culprit == 65534);
  CHECK(abort_record.sequence == 123456789012);
  CHECK(abort_record.phase == EPX_PHASE_COMPLETE);
}

TEST_CASE("the record of what a rank waits for survives its packing") {
  const epx::Waiting waiting = epx::unpack_waiting(epx::pack(epx::Waiting{123456789012, EPX_PHASE_COMPLETE, 65534}));
  CHECK(waiting.sequence == 123456789012);
  CHECK(waiting.phase == EPX_PHASE_COMPLETE);
  CHECK(waiting.peer == 65534);
}

TEST_CASE("agreement names the field, two ranks and their values") {
  std::vector<epx_group_config> configs(3, small_config());
  const std::vector<int> world_ranks = {4, 6, 8};
  CHECK_NOTHROW(epx::require_agreement(configs, world_ranks));
  configs[2].hidden_dim = 34;
  try {
    epx::require_agreement(configs, world_ranks);
    FAIL("accepted");
  } catch (const epx::StatusError& error) {
    CHECK(error.status() == EPX_ERROR_MISMATCH);
    CHECK(error.message() == "epx_group_config.hidden_dim differs between ranks: rank 4 has 33, rank 8 has 34");
  }
  configs[2] = small_config();
  configs[2].color = 5;
  configs[2].key = 5;
  configs[2].num_comm_sms = 5;
  configs[2].timeout_ms = 5;
  CHECK_NOTHROW(epx::require_agreement(configs, world_ranks)); // these may differ
}

TEST_CASE("the load of counts") {
  // Two ranks own experts 0 to 2, and 3 and 4.
  const std::vector<int64_t> counts = {3, 0, 5, 1, 2, //
                                       4, 1, 0, 6, 0};
  const epx::ExpertBlocks experts{5, 2};
  const auto load = [&](int64_t max_recv_tokens, int alignment, int64_t stride) {
    return epx::load_of(counts, experts, {epx::usable_slots(max_recv_tokens, alignment), alignment, stride});
  };
  const epx_load_report roomy = load(100, 1, 0);
  CHECK(roomy.routes == 22);
  CHECK(roomy.dropped == 0);
  CHECK(roomy.rows_needed == 13);
  CHECK(roomy.most_routes_of_rank == 13);
  CHECK(roomy.most_routes_of_expert == 7);
  CHECK(load(13, 1, 0).dropped == 0);
  CHECK(load(8, 1, 0).dropped == 5 + 1);          // rank 0 has 13 routes, rank 1 has 9
  const epx_load_report aligned = load(16, 4, 0); // zones of 8, 4, 8 and of 8, 4 rows
  CHECK(aligned.rows_needed == 20);
  CHECK(aligned.dropped == 1); // the last zone of rank 0 has room for 4 of 5
  const epx_load_report strided = load(18, 1, 6);
  CHECK(strided.dropped == 1 + 1); // experts 0 and 3 have 7 routes
  CHECK(strided.rows_needed == 13);
  CHECK(epx::load_of(std::vector<int64_t>(10), experts, {8, 1, 0}).routes == 0);
}
