// SPDX-License-Identifier: Apache-2.0
// These tests use epx.hpp and the public library alone, and compile with the warnings of a strict user.
#include "epx/epx.hpp"

#include <array>
#include <barrier>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

struct Bf16 { // a user's own element type
  uint16_t bits;
};
template <>
inline constexpr epx_dtype epx::kDtypeOf<Bf16> = EPX_BFLOAT16;

const char* failing_function_of_another_file(); // epx_hpp_alone.cc

namespace {

using namespace std::chrono_literals;

// ---- What must compile, and what must not ----

template <typename Owner>
constexpr bool kIsOwner = std::is_nothrow_move_constructible_v<Owner>&& std::is_nothrow_move_assignable_v<Owner>&&
                              std::is_nothrow_default_constructible_v<Owner>&& std::is_nothrow_destructible_v<Owner> &&
                          !std::is_copy_constructible_v<Owner> && !std::is_copy_assignable_v<Owner>;
static_assert(kIsOwner<epx::Group>);
static_assert(kIsOwner<epx::Memory>);
static_assert(kIsOwner<epx::Bootstrap>);
static_assert(std::is_trivially_copyable_v<epx::GroupView> && sizeof(epx::GroupView) == sizeof(epx_group));
static_assert(std::is_trivially_copyable_v<epx::Tensor> && sizeof(epx::Tensor) == sizeof(epx_tensor));
static_assert(std::is_base_of_v<std::runtime_error, epx::Error>);
static_assert(std::is_nothrow_copy_constructible_v<epx::Error>);

// Outputs are not const, ranges outlive the expression, and elements have a dtype.
static_assert(std::is_constructible_v<epx::Tensor, std::vector<float>&, epx::Shape>);
static_assert(std::is_constructible_v<epx::Tensor, std::span<Bf16>, epx::Shape>);
static_assert(!std::is_constructible_v<epx::Tensor, const std::vector<float>&, epx::Shape>);
static_assert(!std::is_constructible_v<epx::Tensor, std::span<const float>, epx::Shape>);
static_assert(!std::is_constructible_v<epx::Tensor, epx::ConstTensor>);
static_assert(!std::is_constructible_v<epx::Tensor, const void*, epx_dtype, epx::Shape>);
static_assert(std::is_constructible_v<epx::ConstTensor, const std::vector<float>&, epx::Shape>);
static_assert(std::is_constructible_v<epx::ConstTensor, const std::array<int64_t, 3>&>);
static_assert(!std::is_constructible_v<epx::ConstTensor, std::vector<float>, epx::Shape>);
static_assert(!std::is_constructible_v<epx::ConstTensor, std::vector<char>&, epx::Shape>);
static_assert(std::is_convertible_v<epx::Tensor, epx::ConstTensor>);

// ---- Support ----

constexpr int kExperts = 4;
constexpr int kTopK = 2;
constexpr int kHidden = 3;
constexpr int kMaxTokens = 4;
constexpr epx::Layer kLayer = {.top_k = kTopK, .alignment = 2};

epx::GroupConfig small_config() {
  epx::GroupConfig config;
  config.num_experts = kExperts;
  config.max_tokens_per_rank = kMaxTokens;
  config.hidden_dim = kHidden;
  config.max_top_k = kTopK;
  config.max_token_dtype = EPX_FLOAT32;
  config.max_sidecar_bytes = 2;
  config.transport = EPX_TRANSPORT_HOST;
  config.timeout_ms = 20'000;
  return config;
}

// Returns what `action` throws, which must be an Error.
template <typename Action>
epx::Error error_of(Action&& action) {
  try {
    action();
  } catch (const epx::Error& error) {
    return error;
  }
  return {EPX_SUCCESS, "nothing was thrown"};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// A Board is an all-gather among ranks that are threads.
class Board {
public:
  explicit Board(int num_ranks) : parts_(static_cast<size_t>(num_ranks)), barrier_(num_ranks) {}

  epx::Bootstrap bootstrap(int rank) {
    const auto gather = [this, rank](std::span<const std::byte> send, std::span<std::byte> recv,
                                     std::chrono::milliseconds) {
      parts_[static_cast<size_t>(rank)] = send;
      barrier_.arrive_and_wait();
      auto end = recv.begin();
      for (const std::span<const std::byte> part : parts_)
        end = std::ranges::copy(part, end).out;
      barrier_.arrive_and_wait();
    };
    return epx::bootstrap_from(rank, static_cast<int32_t>(parts_.size()), gather);
  }

private:
  std::vector<std::span<const std::byte>> parts_;
  std::barrier<> barrier_;
};

// Runs `body` as each rank of a group, and reports what it throws.
void with_group(int num_ranks, const std::function<void(epx::Group&, int rank)>& body,
                const epx::GroupConfig& config = small_config()) {
  Board board(num_ranks);
  std::vector<std::string> failures(static_cast<size_t>(num_ranks));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) {
      threads.emplace_back([&, rank] {
        epx::Group group;
        try {
          group = epx::Group(board.bootstrap(rank), config);
          body(group, rank);
        } catch (const std::exception& error) {
          failures[static_cast<size_t>(rank)] = error.what();
          group.abort();
        }
      });
    }
  }
  for (int rank = 0; rank < num_ranks; ++rank)
    CHECK_MESSAGE(failures[static_cast<size_t>(rank)] == "", "rank " << rank);
}

void require(bool ok, const std::string& what) { // doctest's macros are for the main thread
  if (!ok) throw std::runtime_error(what);
}

// This layer is prepared: token t of this rank goes to experts t and t + 1.
struct Prepared {
  explicit Prepared(epx::GroupView group, int64_t num_tokens = kMaxTokens)
      : handle(group.handle_mem_size(kLayer)), topk_idx(static_cast<size_t>(num_tokens) * kTopK) {
    const epx_group_info info = group.query();
    rows = info.max_recv_tokens_per_rank;
    counts.resize(static_cast<size_t>(info.num_local_experts));
    offsets.resize(counts.size() + 1);
    for (size_t route = 0; route < topk_idx.size(); ++route)
      topk_idx[route] = static_cast<int32_t>((route / kTopK + route % kTopK) % kExperts);
    group.prepare({.layer = kLayer,
                   .handle_mem = handle,
                   .topk_idx = {topk_idx, {num_tokens, kTopK}},
                   .counts = counts,
                   .offsets = offsets});
  }

  int64_t rows = 0;
  std::vector<std::byte> handle;
  std::vector<int32_t> topk_idx;
  std::vector<int64_t> counts, offsets;
};

} // namespace

TEST_CASE("a failed call throws its status, its function and its sentence") {
  epx::GroupConfig config = small_config();
  config.max_top_k = 65;
  Board board(1);
  const epx::Error error = error_of([&] { epx::Group(board.bootstrap(0), config); });
  CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(error.function()) == "epx_group_create");
  CHECK(std::string(error.what()) == epx_last_error());
  CHECK(contains(error.what(), "max_top_k"));
  CHECK(contains(error.what(), "65"));

  CHECK(error_of([] { epx::require_success(EPX_ERROR_TIMEOUT, "f"); }).status() == EPX_ERROR_TIMEOUT);
  CHECK_NOTHROW(epx::require_success(EPX_SUCCESS, "f"));
  CHECK(std::string(failing_function_of_another_file()) == "epx_handle_mem_size");
}

TEST_CASE("a failure is described by its function, status and sentence") {
  CHECK(epx::describe(epx::Error(EPX_ERROR_TIMEOUT, "rank 1 never came", "epx_group_create")) ==
        "epx_group_create: EPX_ERROR_TIMEOUT: rank 1 never came");
  CHECK(epx::describe(std::runtime_error("no disk")) == "no disk");
}

TEST_CASE("calls on an empty view or owner are refused with their names") {
  epx::Group group;
  CHECK(!group);
  CHECK(group.get() == nullptr);
  group.abort();
  for (const auto& [name, call] : std::vector<std::pair<std::string, std::function<void()>>>{
           {"epx_group_query", [&] { group.query(); }},
           {"epx_group_status", [&] { group.status(); }},
           {"epx_mem_alloc", [&] { static_cast<void>(group.mem_alloc(1)); }},
           {"epx_mem_register", [&] { static_cast<void>(group.mem_register({})); }},
           {"epx_group_query", [&] { static_cast<void>(group.all_gather(1)); }}, // which counts the ranks
           {"epx_prepare", [&] { group.prepare({}); }},
           {"epx_dispatch", [&] { group.dispatch({}); }},
           {"epx_combine", [&] { group.combine({}); }},
           {"epx_combine_bwd", [&] { group.combine_bwd({}); }},
           {"epx_dispatch_bwd", [&] { group.dispatch_bwd({}); }},
           {"epx_ragged_all_to_all", [&] { group.ragged_all_to_all({}); }}}) {
    const epx::Error error = error_of(call);
    CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
    CHECK(name == error.function());
    CHECK_MESSAGE(contains(error.what(), "group is NULL"), std::string(error.what()));
  }
  epx::Memory memory;
  CHECK(!memory);
  memory.free(); // nothing
  const epx::Bootstrap bootstrap;
  CHECK(!bootstrap);
  CHECK(bootstrap.get() == nullptr);
  CHECK(error_of([&] { epx::Group(bootstrap, small_config()); }).status() == EPX_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("tensors carry data, dtype and shape of typed memory") {
  std::vector<float> rows(6);
  const epx::Tensor tensor(rows, {2, size_t{3}});
  CHECK(tensor.get()->data == rows.data());
  CHECK(tensor.data() == rows.data());
  CHECK(tensor.get()->dtype == EPX_FLOAT32);
  CHECK(tensor.get()->ndim == 2);
  CHECK(tensor.get()->sizes[0] == 2);
  CHECK(tensor.get()->sizes[1] == 3);
  CHECK(tensor.get()->sidecar == nullptr);
  CHECK(tensor.get()->reserved[0] == 0);

  const std::array<int64_t, 2> counts = {1, 2};
  const epx::ConstTensor vector = counts;
  CHECK(vector.get()->data == counts.data());
  CHECK(vector.dtype() == EPX_INT64);
  CHECK(vector.ndim() == 1);
  CHECK(vector.size(0) == 2);

  std::vector<Bf16> halves(24);
  CHECK(epx::Tensor(std::span(halves).first(12), {1, 2, 2, 3}).get()->dtype == EPX_BFLOAT16);
  CHECK(epx::Tensor(halves.data(), EPX_FLOAT16, {24}).get()->dtype == EPX_FLOAT16);

  std::array<std::byte, 8> bytes{};
  const epx::Tensor with_sidecar = tensor.with_sidecar(bytes.data(), 4);
  CHECK(with_sidecar.get()->sidecar == bytes.data());
  CHECK(with_sidecar.get()->sidecar_row_bytes == 4);
  CHECK(tensor.get()->sidecar == nullptr);
  CHECK(epx::ConstTensor(tensor).with_sidecar(bytes.data(), 4).get()->sidecar == bytes.data());
  CHECK(epx::Tensor(*with_sidecar.get()).get()->sidecar == bytes.data());

  CHECK(!epx::Tensor());
  CHECK(epx::Tensor().get() == nullptr);
  CHECK(!epx::ConstTensor(epx_tensor{}));
  CHECK(epx::Tensor(nullptr, EPX_FLOAT32, {0, 3}).get() != nullptr); // a tensor without elements is not an absent one
}

TEST_CASE("a shape that does not fit the memory is refused with both numbers") {
  std::vector<float> rows(6);
  const epx::Error error = error_of([&] { epx::Tensor(rows, {2, 4}); });
  CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(error.what()) == "a tensor of shape [2, 4] has 8 elements; the memory given has 6");
  CHECK(contains(error_of([&] { epx::ConstTensor(rows, {5}); }).what(), "[5] has 5 elements; the memory given has 6"));
  CHECK(contains(error_of([&] { epx::Tensor(rows, {-2, -3}); }).what(), "[-2, -3] has a negative size"));
  CHECK(contains(error_of([&] { epx::Tensor(rows, {int64_t{1} << 62, 2}); }).what(), "more elements than an int64"));
  CHECK_NOTHROW(epx::Tensor(rows, {1, 2, 3, 1}));
  CHECK(epx::Shape(0, std::numeric_limits<int64_t>::max(), 2).num_elements() == 0);
}

TEST_CASE("defaults and plans are those of the C API") {
  epx_group_config c_config;
  REQUIRE(epx_group_config_init(&c_config) == EPX_SUCCESS);
  const epx::GroupConfig config;
  CHECK(config.struct_size == c_config.struct_size);
  CHECK(config.max_alignment == c_config.max_alignment);
  CHECK(config.timeout_ms == c_config.timeout_ms);

  const epx_memory_plan plan = epx::memory_plan(small_config(), 3);
  CHECK(plan.window_bytes > 0);
  CHECK(error_of([] { static_cast<void>(epx::memory_plan(small_config(), 0)); }).status() == EPX_ERROR_INVALID_ARGUMENT);
}

TEST_CASE("a row format: defaults, sizes, and the C struct") {
  epx_row_format c_format;
  for (const epx_scaling scaling : {EPX_SCALING_BLOCK128, EPX_SCALING_BLOCK128_POW2, EPX_SCALING_MX, EPX_SCALING_NV}) {
    REQUIRE(epx_row_format_init(&c_format, scaling) == EPX_SUCCESS);
    const epx::RowFormat format(scaling);
    CHECK(format);
    CHECK(format.dtype == c_format.dtype);
    CHECK(format.amax_floor == c_format.amax_floor);
    CHECK(format.get().struct_size == sizeof(epx_row_format));
    CHECK(format.get().scaling == scaling);
    CHECK(format.get().recv_scales == nullptr);
  }
  CHECK(!epx::RowFormat());
  const epx::Error error = error_of([] { static_cast<void>(epx::RowFormat{EPX_SCALING_NONE}); });
  CHECK(error.status() == EPX_ERROR_INVALID_ARGUMENT);
  CHECK(std::string(error.function()) == "epx_row_format_init");

  epx::RowFormat format(EPX_SCALING_MX);
  CHECK(format.num_scales(7168) == 224);
  CHECK(format.num_scales(33) == 2);
  CHECK(epx::RowFormat(EPX_SCALING_BLOCK128_POW2).num_scales(129) == 2);
  CHECK(epx::RowFormat(EPX_SCALING_NV).num_scales(34) == 3);
  const auto shape_of = [&](epx_scale_layout layout) {
    format.scale_layout = layout;
    return format.recv_scales_shape(130, 200).to_string(); // 7 scales
  };
  CHECK(shape_of(EPX_SCALES_ROWS) == "[130, 7]");
  CHECK(shape_of(EPX_SCALES_COLUMNS) == "[7, 132]");
  CHECK(shape_of(EPX_SCALES_PACKED) == "[2, 132]");
  CHECK(shape_of(EPX_SCALES_TILES) == "[2, 2, 512]");

  std::vector<uint8_t> bytes(6);
  std::vector<float> floats(3);
  format.dtype = EPX_FLOAT8_E5M2;
  format.scales = {bytes.data(), EPX_FLOAT8_E8M0, {3, 2}};
  format.row_scales = floats;
  format.encode_scale = {floats.data(), EPX_FLOAT32, {1}};
  format.recv_scales = {bytes.data(), EPX_FLOAT8_E8M0, {6, 1}};
  format.recv_row_scales = floats;
  c_format = format.get();
  CHECK(c_format.dtype == EPX_FLOAT8_E5M2);
  CHECK(c_format.scale_layout == EPX_SCALES_TILES);
  CHECK(c_format.scales == format.scales.get());
  CHECK(c_format.row_scales == format.row_scales.get());
  CHECK(c_format.encode_scale == format.encode_scale.get());
  CHECK(c_format.recv_scales == format.recv_scales.get());
  CHECK(c_format.recv_row_scales == format.recv_row_scales.get());
  const epx::RowFormat same(c_format);
  CHECK(same.scaling == EPX_SCALING_MX);
  CHECK(same.dtype == EPX_FLOAT8_E5M2);
  CHECK(same.scale_layout == EPX_SCALES_TILES);
  CHECK(same.scales.data() == bytes.data());
  CHECK(same.recv_scales.size(0) == 6);
  CHECK(same.encode_scale.size(0) == 1);
  CHECK(same.row_scales.data() == floats.data());
  CHECK(same.recv_row_scales.data() == floats.data());
  CHECK(!epx::RowFormat(epx::RowFormat(EPX_SCALING_NV).get()).scales);
}

TEST_CASE("a bootstrap is released once, by its last owner") {
  int releases = 0;
  epx_bootstrap c_bootstrap = {};
  c_bootstrap.struct_size = sizeof(c_bootstrap);
  c_bootstrap.num_ranks = 5;
  c_bootstrap.all_gather = [](void*, const void*, void*, size_t, int64_t, char*, size_t) { return EPX_SUCCESS; };
  c_bootstrap.release = [](void* context) { ++*static_cast<int*>(context); };
  c_bootstrap.context = &releases;
  {
    epx::Bootstrap first(c_bootstrap);
    epx::Bootstrap second(std::move(first));
    CHECK(!first);
    CHECK(second.num_ranks() == 5);
    first = std::move(second);
    CHECK(first.get()->context == &releases);
    CHECK(releases == 0);
    first = epx::Bootstrap();
    CHECK(releases == 1);
    const epx::Bootstrap third(c_bootstrap);
  }
  CHECK(releases == 2);
  epx::Bootstrap last(c_bootstrap);
  epx_bootstrap released = last.release();
  CHECK(!last);
  CHECK(releases == 2);
  epx_bootstrap_free(&released);
  CHECK(releases == 3);
}

TEST_CASE("group creation rethrows what an all-gather throws") {
  const auto creation = [](auto all_gather) {
    return error_of([&] { epx::Group(epx::bootstrap_from(0, 2, all_gather), small_config()); });
  };
  const epx::Error timed_out = creation([](auto, auto, auto) { throw epx::Error(EPX_ERROR_TIMEOUT, "rank 1 is late"); });
  CHECK(timed_out.status() == EPX_ERROR_TIMEOUT);
  CHECK_MESSAGE(contains(timed_out.what(), "rank 1 is late"), std::string(timed_out.what()));
  const epx::Error refused = creation([](auto, auto, auto) { throw std::runtime_error("the store is closed"); });
  CHECK(refused.status() == EPX_ERROR_SYSTEM);
  CHECK_MESSAGE(contains(refused.what(), "the store is closed"), std::string(refused.what()));
  CHECK(creation([](auto, auto, auto) { throw 5; }).status() == EPX_ERROR_SYSTEM);
  const epx::Error endless = creation([](auto, auto, auto) { throw std::runtime_error(std::string(10'000, 'x')); });
  CHECK(contains(endless.what(), "xxx"));
}

TEST_CASE("the file bootstrap reports a missing directory") {
  const epx::Error error =
      error_of([] { static_cast<void>(epx::bootstrap_file("/nonexistent/folder", "job", 0, 1, 100ms)); });
  CHECK(error.status() == EPX_ERROR_SYSTEM);
  CHECK(std::string(error.function()) == "epx_bootstrap_file");
  CHECK(contains(error.what(), "/nonexistent/folder"));
}

TEST_CASE("a group moves, is released and adopted, and works as a view") {
  with_group(2, [](epx::Group& group, int rank) {
    const epx_group handle = group.get();
    epx::Group other(std::move(group));
    require(!group && other.get() == handle, "move construction");
    group = std::move(other);
    require(!other && group.get() == handle, "move assignment");
    epx::Group& itself = group;
    group = std::move(itself);
    require(group.get() == handle, "assignment to itself");

    const epx::Group adopted(group.release());
    const epx::GroupView view = adopted;
    require(!group && view.get() == handle && view.query().rank == rank, "release and adoption");
    const Prepared prepared(view);
    require(epx::GroupView(handle).status().message[0] == '\0', "status");
  });
}

TEST_CASE("the five operations with designated initialisers") {
  with_group(2, [](epx::Group& group, int rank) {
    constexpr int64_t kTokens = 3;
    const Prepared layer(group, kTokens);
    const auto rows = static_cast<size_t>(layer.rows);
    const std::vector<float> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    const std::vector<float> topk_weights(kTokens * kTopK, 0.5F);
    const std::array<std::byte, kTokens* 2> sidecar = {std::byte{1}, std::byte{2}, std::byte{3},
                                                       std::byte{4}, std::byte{5}, std::byte{6}};
    epx::Memory window = group.mem_alloc(rows * kHidden * sizeof(float));
    std::vector<float> recv_weights(rows), grad_rows(rows * kHidden), grad_row_weights(rows);
    std::vector<std::byte> recv_sidecar(rows * 2);
    std::vector<float> out(tokens.size()), grad_tokens(tokens.size()), grad_topk_weights(topk_weights.size());
    const epx::Tensor recv_tokens(window.as<float>(), {rows, kHidden});
    const epx::Shape row_shape(rows, kHidden);

    group.dispatch({.layer = kLayer,
                    .handle_mem = layer.handle,
                    .tokens = epx::ConstTensor(tokens, {kTokens, kHidden}).with_sidecar(sidecar.data(), 2),
                    .topk_weights = {topk_weights, {kTokens, kTopK}},
                    .recv_tokens = recv_tokens.with_sidecar(recv_sidecar.data(), 2),
                    .recv_weights = recv_weights});
    // The first row of the first expert of rank 1, expert 2, is rank 0's token 1 with k = 1; that of rank 0 its token 0.
    const std::span<const float> first = window.as<float>().first(kHidden);
    require(first[0] == (rank == 0 ? 1.0F : 4.0F), "the first row received");
    require(recv_sidecar[0] == (rank == 0 ? std::byte{1} : std::byte{3}), "its sidecar");
    require(recv_weights[0] == 0.5F, "its weight");

    group.combine({.layer = kLayer,
                   .handle_mem = layer.handle,
                   .expert_out = recv_tokens,
                   .recv_weights = recv_weights,
                   .out = {out, {kTokens, kHidden}}});
    require(out == tokens, "two routes of weight 1/2 give the token back");

    group.combine_bwd({.layer = kLayer,
                       .handle_mem = layer.handle,
                       .grad_out = {tokens, {kTokens, kHidden}},
                       .expert_out = recv_tokens,
                       .recv_weights = recv_weights,
                       .grad_expert_out = {grad_rows, row_shape},
                       .grad_recv_weights = grad_row_weights});
    require(grad_rows[0] == 0.5F * first[0], "combine_bwd");
    require(grad_row_weights[0] == (rank == 0 ? 14.0F : 77.0F), "the gradient of a weight is <token, token>");

    group.dispatch_bwd({.layer = kLayer,
                        .handle_mem = layer.handle,
                        .grad_recv = {grad_rows, row_shape},
                        .grad_recv_weights = grad_row_weights,
                        .grad_tokens = {grad_tokens, {kTokens, kHidden}},
                        .grad_topk_weights = {grad_topk_weights, {kTokens, kTopK}}});
    require(grad_tokens == tokens, "dispatch_bwd");
    require(grad_topk_weights == std::vector<float>({14, 14, 77, 77, 194, 194}), "gradients of the weights");
    window.free();
    require(!window, "free");
  });
}

TEST_CASE("the load of counts, and bad counts") {
  epx::GroupConfig config = small_config();
  config.max_recv_tokens_per_rank = 2;
  with_group(
      2,
      [](epx::Group& group, int) {
        std::vector<int32_t> counts(2 * kExperts);
        counts[0] = kMaxTokens; // from rank 0 to the first expert, which is rank 0's
        counts[kExperts + kExperts - 1] = 2;
        const epx_load_report load = group.load_of_counts(kLayer, {counts, {2, kExperts}});
        require(load.routes == kMaxTokens + 2 && load.most_routes_of_rank == kMaxTokens, "the routes");
        require(load.dropped == kMaxTokens - 2, "what is dropped");
        require(load.rows_needed == kMaxTokens && load.most_routes_of_expert == kMaxTokens, "what is needed");

        const auto refused = [&](const epx::Layer& layer, const epx::ConstTensor& tensor, int64_t zone_stride,
                                 const std::vector<std::string>& words) {
          const epx::Error error = error_of([&] { static_cast<void>(group.load_of_counts(layer, tensor, zone_stride)); });
          require(error.status() == EPX_ERROR_INVALID_ARGUMENT, "the status");
          for (const std::string& word : words)
            require(contains(error.what(), word), std::string(error.what()) + " lacks " + word);
        };
        const epx::ConstTensor good(counts, {2, kExperts});
        refused({.top_k = 0}, good, 0, {"layer.top_k is 0"});
        refused(kLayer, good, -1, {"zone_stride is -1"});
        refused(kLayer, {}, 0, {"global_counts"});
        refused(kLayer, {counts, {kExperts, 2}}, 0, {"global_counts", "[P, E]"});
        refused(kLayer, {static_cast<const void*>(counts.data()), EPX_FLOAT32, {2, kExperts}}, 0,
                {"global_counts", "float32"});
        refused(kLayer, {static_cast<const void*>(nullptr), EPX_INT32, {2, kExperts}}, 0, {"global_counts", "NULL"});
        counts[1] = -3;
        refused(kLayer, good, 0, {"-3 routes from rank 0 to expert 1"});
        counts[1] = kMaxTokens * kTopK + 1;
        refused(kLayer, good, 0, {"max_tokens_per_rank * top_k"});
      },
      config);
}

TEST_CASE("the rank-major calls") {
  with_group(2, [](epx::Group& group, int) {
    constexpr int64_t kTokens = 3;
    const std::vector<float> tokens = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    const std::vector<int32_t> topk_idx = {0, 3, 0, 3, 3, 0}; // each token goes to both ranks
    const std::vector<float> topk_weights = {1, 2, 3, 4, 5, 6};
    const epx::Layer rank_major_layer = {.top_k = kTopK};
    std::vector<std::byte> handle(group.handle_mem_size(rank_major_layer));
    std::vector<float> recv_tokens(2 * kTokens * kHidden), recv_weights(2 * kTokens * kTopK);
    std::vector<int64_t> recv_topk_idx(2 * kTokens * kTopK), counts(2);
    const epx::Shape rows(2, kTokens, kHidden), row_routes(2, kTokens, kTopK);
    group.dispatch_rank_major({.layer = rank_major_layer,
                               .handle_mem = handle,
                               .tokens = {tokens, {kTokens, kHidden}},
                               .topk_idx = {topk_idx, {kTokens, kTopK}},
                               .topk_weights = {topk_weights, {kTokens, kTopK}},
                               .recv_tokens = {recv_tokens, rows},
                               .recv_topk_idx = {recv_topk_idx, row_routes},
                               .recv_weights = {recv_weights, row_routes},
                               .counts = counts});
    require(counts == std::vector<int64_t>({kTokens, kTokens}), "the counts");
    require(std::equal(tokens.begin(), tokens.end(), recv_tokens.begin() + kTokens * kHidden), "the rows of rank 1");

    std::vector<float> out(tokens.size()), grad_rows(recv_tokens.size()), grad_tokens(tokens.size());
    std::vector<float> grad_topk_weights(topk_weights.size());
    group.combine_rank_major({.layer = rank_major_layer,
                              .handle_mem = handle,
                              .expert_out = {recv_tokens, rows},
                              .out = {out, {kTokens, kHidden}}});
    require(out == std::vector<float>({2, 4, 6, 8, 10, 12, 14, 16, 18}), "each token comes back from both ranks");
    group.combine_rank_major_bwd({.layer = rank_major_layer,
                                  .handle_mem = handle,
                                  .grad_out = {tokens, {kTokens, kHidden}},
                                  .grad_expert_out = {grad_rows, rows}});
    require(grad_rows == recv_tokens, "combine_rank_major_bwd");
    group.dispatch_rank_major_bwd({.layer = rank_major_layer,
                                   .handle_mem = handle,
                                   .grad_recv = {grad_rows, rows},
                                   .grad_recv_weights = {recv_weights, row_routes},
                                   .grad_tokens = {grad_tokens, {kTokens, kHidden}},
                                   .grad_topk_weights = {grad_topk_weights, {kTokens, kTopK}}});
    require(grad_tokens == out && grad_topk_weights == topk_weights, "dispatch_rank_major_bwd");
  });
}

TEST_CASE("rank-major rows without gaps") {
  with_group(2, [](epx::Group& group, int rank) {
    constexpr int64_t kTokens = 3, kRows = 4; // M leaves a gap
    const std::vector<float> tokens(kTokens * kHidden, 1.0F + static_cast<float>(rank));
    const std::vector<int32_t> topk_idx = {0, 3, 0, 3, 3, 0}; // each token goes to both ranks
    const epx::Layer rank_major_layer = {.top_k = kTopK};
    std::vector<std::byte> handle(group.handle_mem_size(rank_major_layer));
    std::vector<float> recv_tokens(2 * kRows * kHidden, 9), out(tokens.size());
    std::vector<int64_t> recv_topk_idx(2 * kRows * kTopK), counts(2);
    const epx::Shape rows(2, kRows, kHidden), row_routes(2, kRows, kTopK);
    group.dispatch_rank_major({.layer = rank_major_layer,
                               .handle_mem = handle,
                               .tokens = {tokens, {kTokens, kHidden}},
                               .topk_idx = {topk_idx, {kTokens, kTopK}},
                               .recv_tokens = {recv_tokens, rows},
                               .recv_topk_idx = {recv_topk_idx, row_routes},
                               .counts = counts,
                               .row_spacing = EPX_ROWS_COMPACT});
    std::vector<float> expected(kTokens * kHidden, 1.0F);
    expected.resize(2 * kTokens * kHidden, 2.0F); // rank 1's rows come behind the last of rank 0's
    expected.resize(recv_tokens.size(), 9.0F);
    require(recv_tokens == expected, "the rows");
    group.combine_rank_major({.layer = rank_major_layer,
                              .handle_mem = handle,
                              .expert_out = {recv_tokens, rows},
                              .out = {out, {kTokens, kHidden}}});
    require(out == std::vector<float>(out.size(), 2.0F + 2.0F * static_cast<float>(rank)), "the sums");
  });
}

TEST_CASE("slices of rows, there and back") {
  with_group(2, [](epx::Group& group, int rank) {
    // Rank r has r + 1 rows for each rank. They land behind the first row, those of rank 0 first.
    const int64_t mine = rank + 1;
    const std::vector<float> operand(static_cast<size_t>(2 * mine * kHidden), 1.0F + static_cast<float>(rank));
    const std::vector<int64_t> input_offsets = {0, mine}, send_sizes = {mine, mine}, recv_sizes = {1, 2};
    const std::vector<int64_t> output_offsets(2, rank == 0 ? 1 : 2);
    std::vector<float> output(5 * kHidden, 9.0F);
    group.ragged_all_to_all({.operand = {operand, {2 * mine, kHidden}},
                             .output = {output, {5, kHidden}},
                             .input_offsets = input_offsets,
                             .send_sizes = send_sizes,
                             .output_offsets = output_offsets,
                             .recv_sizes = recv_sizes});
    const std::vector<float> expected = {9, 9, 9, 1, 1, 1, 2, 2, 2, 2, 2, 2, 9, 9, 9};
    require(output == expected, "the rows of both ranks, between rows that stay");

    std::vector<float> returned(operand.size());
    group.ragged_all_to_all({.operand = {output, {5, kHidden}},
                             .output = {returned, {2 * mine, kHidden}},
                             .input_offsets = input_offsets,
                             .send_sizes = send_sizes,
                             .output_offsets = output_offsets,
                             .recv_sizes = recv_sizes,
                             .direction = EPX_SLICES_TRANSPOSED});
    require(returned == operand, "the rows that come back");

    const epx::Error error = error_of([&] { group.ragged_all_to_all({.operand = {operand, {2 * mine, kHidden}}}); });
    require(error.status() == EPX_ERROR_INVALID_ARGUMENT && std::string(error.function()) == "epx_ragged_all_to_all" &&
                contains(error.what(), "output is NULL"),
            error.what());
  });
}

TEST_CASE("dispatch with a row format, three ways") {
  constexpr int64_t kWide = 64, kTokens = 2, kScales = 2;
  epx::GroupConfig config = small_config();
  config.hidden_dim = kWide;
  const auto body = [](epx::Group& group, int) {
    const Prepared layer(group, kTokens); // experts 0 and 2 begin the zones, of token 0 and token 1
    const auto rows = static_cast<size_t>(layer.rows);
    const std::vector<float> tokens(kTokens * kWide, 1.0F); // the scale is 2^-8, the element is 2^8
    constexpr uint8_t kScale = 127 - 8, kElement = 0x78;
    std::vector<uint8_t> received(rows * kWide), scales(rows * kScales);
    epx::RowFormat format(EPX_SCALING_MX);
    format.recv_scales = {scales.data(), EPX_FLOAT8_E8M0, format.recv_scales_shape(layer.rows, kWide)};
    const epx::Tensor recv_tokens(received.data(), EPX_FLOAT8_E4M3, {rows, kWide});
    group.dispatch({.layer = kLayer,
                    .handle_mem = layer.handle,
                    .tokens = {tokens, {kTokens, kWide}},
                    .recv_tokens = recv_tokens,
                    .format = format});
    require(received[0] == kElement && received[kWide - 1] == kElement, "elements that the call quantised");
    require(scales[0] == kScale && scales[1] == kScale, "their scales");

    // The row comes as it has arrived, with other scales.
    const std::vector<uint8_t> quantised(kTokens * kWide, kElement), given(kTokens * kScales, 42);
    format.scales = {given.data(), EPX_FLOAT8_E8M0, {kTokens, kScales}};
    std::vector<std::byte> handle(layer.handle.size());
    std::vector<int64_t> counts(layer.counts.size()), offsets(layer.offsets.size());
    group.prepare_dispatch({.layer = kLayer,
                            .handle_mem = handle,
                            .topk_idx = {layer.topk_idx, {kTokens, kTopK}},
                            .counts = counts,
                            .offsets = offsets,
                            .tokens = {quantised.data(), EPX_FLOAT8_E4M3, {kTokens, kWide}},
                            .recv_tokens = recv_tokens,
                            .format = format});
    require(received[0] == kElement && scales[0] == 42 && scales[1] == 42, "rows that came quantised");

    std::vector<float> wide(2 * kTokens * kWide);
    std::vector<int32_t> recv_topk_idx(2 * kTokens * kTopK), source_counts(2);
    const epx::Layer rank_major_layer = {.top_k = kTopK};
    group.dispatch_rank_major({.layer = rank_major_layer,
                               .handle_mem = handle,
                               .tokens = {tokens, {kTokens, kWide}},
                               .topk_idx = {layer.topk_idx, {kTokens, kTopK}},
                               .recv_tokens = {wide, {2, kTokens, kWide}},
                               .recv_topk_idx = {recv_topk_idx, {2, kTokens, kTopK}},
                               .counts = source_counts,
                               .format = epx::RowFormat(EPX_SCALING_MX)});
    require(source_counts[0] > 0 && wide[0] == 1.0F && wide[kWide - 1] == 1.0F, "rows that the wire alone has quantised");
  };
  with_group(2, body, config);
}

TEST_CASE("dispatch with untouched pads") {
  with_group(2, [](epx::Group& group, int rank) {
    const int64_t num_tokens = rank == 0 ? 1 : 0; // it goes to experts 0 and 1, whose zones have a row and a pad each
    const Prepared layer(group, num_tokens);
    const std::vector<float> tokens = {1, 2, 3};
    for (const epx_pads pads : {EPX_PADS_ZERO, EPX_PADS_UNTOUCHED}) {
      std::vector<float> received(static_cast<size_t>(layer.rows) * kHidden, -1.0F);
      group.dispatch({.layer = kLayer,
                      .handle_mem = layer.handle,
                      .tokens = {tokens.data(), EPX_FLOAT32, {num_tokens, kHidden}},
                      .recv_tokens = {received, {layer.rows, kHidden}},
                      .pads = pads});
      const float pad = pads == EPX_PADS_ZERO ? 0.0F : -1.0F;
      require(received[0] == (rank == 0 ? 1.0F : -1.0F), "the first row");
      require(received[kHidden] == (rank == 0 ? pad : -1.0F), "the first pad");
    }
  });
}

TEST_CASE("a refused operation names its tensor, and the group goes on") {
  with_group(1, [](epx::Group& group, int) {
    const Prepared layer(group);
    std::vector<float> rows(static_cast<size_t>(layer.rows) * kHidden), out(kMaxTokens * kHidden);
    const epx::Error missing = error_of([&] {
      group.combine({.layer = kLayer, .handle_mem = layer.handle, .out = {out, {kMaxTokens, kHidden}}});
    });
    require(missing.status() == EPX_ERROR_INVALID_ARGUMENT && contains(missing.what(), "expert_out"), missing.what());
    const epx::Error wrong = error_of([&] {
      group.combine({.layer = kLayer,
                     .handle_mem = layer.handle,
                     .expert_out = {rows, {layer.rows, kHidden}},
                     .out = {out, {kHidden, kMaxTokens}}});
    });
    require(wrong.status() == EPX_ERROR_INVALID_ARGUMENT && std::string(wrong.function()) == "epx_combine", wrong.what());
    group.combine({.layer = kLayer,
                   .handle_mem = layer.handle,
                   .expert_out = {rows, {layer.rows, kHidden}},
                   .out = {out, {kMaxTokens, kHidden}}});
  });
}

TEST_CASE("status() reports events and clears them") {
  with_group(1, [](epx::Group& group, int) {
    Prepared layer(group);
    layer.topk_idx[0] = kExperts; // there is no such expert
    group.prepare({.layer = kLayer,
                   .handle_mem = layer.handle,
                   .topk_idx = {layer.topk_idx, {kMaxTokens, kTopK}},
                   .counts = layer.counts,
                   .offsets = layer.offsets});
    require(group.status().event_counts[EPX_EVENT_BAD_INDEX] == 1, "one bad index");
    require(group.status().event_counts[EPX_EVENT_BAD_INDEX] == 0, "cleared");
  });
}

TEST_CASE("memory of the group: a rank may drop it alone, and only free() is a call") {
  with_group(2, [](epx::Group& group, int rank) {
    epx::Memory memory = group.mem_alloc(4096);
    require(memory.size() == 4096 && reinterpret_cast<uintptr_t>(memory.data()) % 256 == 0, "size and alignment");
    require(memory.as<float>().size() == 1024 && memory.as<float>().back() == 0, "zeroed elements");
    epx::Memory moved(std::move(memory));
    require(!memory && memory.size() == 0 && moved, "move construction");
    memory = std::move(moved);
    require(memory && !moved, "move assignment");

    if (rank == 0) const epx::Memory dropped(std::move(memory)); // rank 1 keeps it
    const Prepared layer(group);
    epx::Memory both = group.mem_alloc(256);
    require(static_cast<bool>(both), "calls go on");
    std::byte* const data = both.data();
    both.free();
    both.free(); // it is empty: nothing
    epx::Memory stale(group.get(), data, 256);
    const epx::Error error = error_of([&] { stale.free(); });
    require(error.status() == EPX_ERROR_INVALID_ARGUMENT && contains(error.what(), "epx_mem_free"), error.what());
    require(static_cast<bool>(stale), "what cannot be freed stays");
  });
}

TEST_CASE("records of all ranks are gathered") {
  with_group(3, [](epx::Group& group, int rank) {
    struct Record {
      int32_t rank;
      double value;
    };
    const std::vector<Record> all = group.all_gather(Record{rank, rank * 0.5});
    require(all.size() == 3, "a record of each rank");
    for (int i = 0; i < 3; ++i)
      require(all[static_cast<size_t>(i)].rank == i && all[static_cast<size_t>(i)].value == i * 0.5, "in rank order");
  });
}

TEST_CASE("memory may be dropped after its group") {
  epx::Memory memory;
  Board board(1);
  {
    const epx::Group group(board.bootstrap(0), small_config());
    memory = group.mem_alloc(256);
  }
  CHECK(memory);
}

TEST_CASE("the host transport cannot register memory") {
  with_group(1, [](epx::Group& group, int) {
    std::vector<std::byte> own(4096);
    const epx::Error error = error_of([&] { static_cast<void>(group.mem_register(own)); });
    require(error.status() == EPX_ERROR_UNSUPPORTED && std::string(error.function()) == "epx_mem_register", error.what());
  });
}

TEST_CASE("a rank that aborts is named to its peer at once") {
  std::array<std::optional<epx::Error>, 2> errors;
  with_group(2, [&](epx::Group& group, int rank) {
    if (rank == 1) {
      group.abort();
      return;
    }
    errors[0] = error_of([&] { const Prepared layer(group); });
  });
  REQUIRE(errors[0]);
  CHECK(errors[0]->status() == EPX_ERROR_ABORTED);
  CHECK_MESSAGE(contains(errors[0]->what(), "rank 1"), std::string(errors[0]->what()));
}
