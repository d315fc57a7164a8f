/* epx: expert-parallel exchange. The public C API (C11).
 *
 * epx moves the tokens of a Mixture-of-Experts layer to the ranks that own their experts (dispatch) and brings the experts'
 * outputs back (combine), forward and backward. A set of ranks creates a *group*; every later call is made by all ranks of
 * the group in the same order.
 *
 * Symbols used in the shapes below
 *   P    ranks in the group              E    experts, laid out over the ranks in contiguous blocks; when P does not
 *   T    tokens of this rank in a call,       divide E, the first E mod P ranks own one more
 *        0 <= T <= max_tokens_per_rank;  E_l  experts that this rank owns (epx_group_info.num_local_experts)
 *        may differ from rank to rank    K    top_k of the layer, 1..64
 *   H    hidden size of a call,          N    rows of the receive tensors of a call; any N, may differ from call to call
 *        1 <= H <= hidden_dim            R    receive capacity in rows (epx_group_info.max_recv_tokens_per_rank)
 *   a    alignment of the layer, in rows (0 means 1)
 * A *route* is one (token, k) pair. A *slot* is a row of the receive tensors. The *zone* of a local expert is its run of
 * slots, padded to a multiple of a.
 *
 * Conventions
 * - Every function that can fail returns an epx_status. When it is not EPX_SUCCESS, epx_last_error() holds one sentence with
 *   the names and the values. A call that is refused (EPX_ERROR_INVALID_ARGUMENT, EPX_ERROR_UNSUPPORTED) has touched nothing,
 *   written nothing, and has not taken part in the group's sequence of calls: correct it and call again.
 * - Errors that can be lived with (a bad index, overflow, too few receive rows, the handle memory of another layer) do not
 *   fail the call. The call takes part in the exchange, so that no peer waits, and epx_group_status() reports them.
 * - Errors that cannot (a timeout, an abort, ranks out of sequence) poison the group: this call and each later one return
 *   them at once, and epx_group_status() names the culprit. Destroy the group and create another.
 * - Tensors are contiguous, row-major, aligned to their element size. Output tensors overlap no other tensor of the call.
 *   The library reads descriptors only during the call and owns none of the memory they name.
 * - On the host transport tensors and handle memory are host memory, `stream` is NULL, and a call has finished when it
 *   returns. With EPX_TRANSPORT_NCCL they are memory of the rank's GPU, `stream` is a cudaStream_t, and the five operations are
 *   asynchronous on it: what goes wrong there is returned by a later call and told by epx_group_status.
 * - One group is used by one thread at a time, except epx_group_abort and epx_group_status, which any thread may call.
 *   Groups are independent of each other.
 * - The C API only grows: no field moves, no value is used again, and struct_size tells old callers from new ones.
 */
#ifndef EPX_EPX_H_
#define EPX_EPX_H_

#include <stddef.h>
#include <stdint.h>

#define EPX_VERSION_MAJOR 0
#define EPX_VERSION_MINOR 1
#define EPX_VERSION_PATCH 0

#if defined(__GNUC__)
#define EPX_API __attribute__((visibility("default")))
#else
#define EPX_API
#endif

/* Enumerations have the size of an int32_t. C++ is told so, since a C caller may pass any value in one. */
#ifdef __cplusplus
#define EPX_ENUM_INT32 : int32_t
extern "C" {
#else
#define EPX_ENUM_INT32
#endif

/* ---- Version, status ------------------------------------------------------------------------------------------------ */

typedef enum epx_status EPX_ENUM_INT32 {
  EPX_SUCCESS = 0,
  EPX_ERROR_INVALID_ARGUMENT = 1, /* refused on the host; nothing happened */
  EPX_ERROR_UNSUPPORTED = 2,      /* this build, transport or machine cannot do it; nothing happened */
  EPX_ERROR_MISMATCH = 3,         /* ranks disagree on something that must be equal; in a call: sticky */
  EPX_ERROR_OUT_OF_MEMORY = 4,    /* memory or /dev/shm is exhausted */
  EPX_ERROR_SYSTEM = 5,           /* the operating system, the file system or MPI refused something */
  EPX_ERROR_TIMEOUT = 6,          /* a rank did not come within timeout_ms; in a call: sticky */
  EPX_ERROR_ABORTED = 7,          /* epx_group_abort was called, here or on a peer; sticky */
  EPX_ERROR_OUT_OF_SEQUENCE = 8,  /* ranks made different calls; sticky */
  EPX_ERROR_INTERNAL = 9          /* a defect of epx */
} epx_status;

/* Major * 10000 + minor * 100 + patch of the library that is loaded (compare with the EPX_VERSION_* of the header). */
EPX_API int32_t epx_version(void);

/* The name of a status, "EPX_SUCCESS" for instance; never NULL. The string is static. */
EPX_API const char* epx_status_string(epx_status status);

/* The sentence that explains the last failure of a call on this thread; "" before the first. Valid until this thread's next
 * failing call. Never NULL. */
EPX_API const char* epx_last_error(void);

/* Sets this thread's sentence. For libraries and language bindings that stand on epx and share its error reporting, as
 * libepx_mpi does. The string is copied; NULL means "". */
EPX_API void epx_set_last_error(const char* message);

/* ---- Tensors -------------------------------------------------------------------------------------------------------- */

typedef enum epx_dtype EPX_ENUM_INT32 {
  EPX_DTYPE_UNSET = 0,
  EPX_FLOAT32 = 1,
  EPX_FLOAT16 = 2,
  EPX_BFLOAT16 = 3,
  EPX_INT32 = 4,
  EPX_INT64 = 5,
  EPX_FLOAT64 = 6, /* epx_moe.h only */
  EPX_UINT8 = 7    /* epx_moe.h only */
} epx_dtype;

typedef void* epx_stream; /* a cudaStream_t on GPUs, NULL on the host transport */

/* A view of memory that the caller owns. Zero the whole struct first, or use epx_tensor_1d/2d/3d. */
typedef struct epx_tensor {
  void* data; /* may be NULL where the tensor has no elements */
  epx_dtype dtype;
  int32_t ndim;              /* 1..4 */
  int64_t sizes[4];          /* elements, outermost first; entries beyond ndim are ignored */
  void* sidecar;             /* opaque bytes that travel with each row: [sizes[0], sidecar_row_bytes]; NULL for none */
  int64_t sidecar_row_bytes; /* 0 for none */
  int64_t reserved[2];       /* 0 */
} epx_tensor;

static inline epx_tensor epx_tensor_1d(void* data, epx_dtype dtype, int64_t size0) {
  epx_tensor tensor = {data, dtype, 1, {size0, 0, 0, 0}, NULL, 0, {0, 0}};
  return tensor;
}

static inline epx_tensor epx_tensor_2d(void* data, epx_dtype dtype, int64_t size0, int64_t size1) {
  epx_tensor tensor = {data, dtype, 2, {size0, size1, 0, 0}, NULL, 0, {0, 0}};
  return tensor;
}

static inline epx_tensor epx_tensor_3d(void* data, epx_dtype dtype, int64_t size0, int64_t size1, int64_t size2) {
  epx_tensor tensor = {data, dtype, 3, {size0, size1, size2, 0}, NULL, 0, {0, 0}};
  return tensor;
}

/* ---- Bootstrap ------------------------------------------------------------------------------------------------------ */

/* How ranks find each other while a group is created; not used afterwards. Two are ready-made: epx_bootstrap_file below and
 * epx_bootstrap_mpi in epx_mpi.h. A framework may fill one in itself: zero the whole struct first. */
typedef struct epx_bootstrap {
  size_t struct_size; /* sizeof(epx_bootstrap) */
  int32_t rank;       /* of this process (or thread), 0 <= rank < num_ranks */
  int32_t num_ranks;
  /* Every rank passes bytes_per_rank bytes at `send`; recv gets num_ranks * bytes_per_rank bytes in rank order. Blocks, but
   * for no longer than timeout_ms milliseconds. On failure returns another status than EPX_SUCCESS and may write one
   * zero-terminated sentence of at most message_bytes bytes to `message` (name the ranks that are missing). */
  epx_status (*all_gather)(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                           char* message, size_t message_bytes);
  void (*release)(void* context); /* frees the context; called by epx_bootstrap_free; may be NULL */
  void* context;
  void* reserved[3]; /* NULL */
} epx_bootstrap;

/* Ranks meet through files below `directory` (local or shared between the machines; it must exist and be writable).
 *   job_id      1 to 64 characters of [A-Za-z0-9._-]: ranks with the same one meet; jobs with different ones may share the
 *               directory at the same time. What a dead job of the same name left behind is never taken for a live rank.
 *   timeout_ms  > 0: the longest that any one step waits for the other ranks.
 * Returns once all ranks have come. Files have mode 0600 in a subdirectory of mode 0700; all of them are gone when the last
 * rank has freed its bootstrap. Release with epx_bootstrap_free.
 * Errors: INVALID_ARGUMENT; SYSTEM (directory missing or not writable); TIMEOUT (the message lists the ranks that never
 * came); MISMATCH (two processes claim one rank, or ranks disagree on num_ranks). */
EPX_API epx_status epx_bootstrap_file(const char* directory, const char* job_id, int32_t rank, int32_t num_ranks,
                                      int64_t timeout_ms, epx_bootstrap* bootstrap);

/* Releases what a ready-made bootstrap holds and clears the struct. Accepts NULL and a zeroed struct. Groups that were
 * created with it live on. */
EPX_API void epx_bootstrap_free(epx_bootstrap* bootstrap);

/* ---- Group ---------------------------------------------------------------------------------------------------------- */

typedef struct epx_group_s* epx_group;

typedef enum epx_combine_precision EPX_ENUM_INT32 {
  /* Each expert rank sums its routes of a token in k order in float32 and rounds once to the token dtype; the home rank sums
   * these partials in rank order in float32 and rounds once. One row per (token, expert rank) travels. */
  EPX_COMBINE_WIRE = 0,
  /* The row of every route travels home and is summed there in k order in float32 with one rounding: the same bits for every
   * number of ranks when nothing is dropped. */
  EPX_COMBINE_EXACT = 1
} epx_combine_precision;

/* What happens to routes that exceed the receive capacity. They are dropped and counted either way. */
typedef enum epx_overflow EPX_ENUM_INT32 {
  EPX_OVERFLOW_ERROR = 0, /* the receiver also reports EPX_EVENT_OVERFLOW in its status */
  EPX_OVERFLOW_DROP = 1
} epx_overflow;

typedef enum epx_transport EPX_ENUM_INT32 {
  EPX_TRANSPORT_AUTO = 0, /* the fastest that all ranks can use */
  EPX_TRANSPORT_HOST = 1, /* POSIX shared memory, for ranks on one machine; processes or threads */
  EPX_TRANSPORT_NCCL = 2  /* NVLink through NCCL symmetric windows; each rank has a GPU of its own, the calling thread's
                             current device at creation. UNSUPPORTED in builds without CUDA */
} epx_transport;

/* Ranks of a group must agree on every field except color, key, num_comm_sms and timeout_ms. */
typedef struct epx_group_config {
  size_t struct_size;                      /* set by epx_group_config_init */
  int32_t num_experts;                     /* E >= 1; required */
  int32_t max_tokens_per_rank;             /* >= 1; required */
  int32_t hidden_dim;                      /* largest H of a call, elements; required */
  int32_t max_top_k;                       /* largest K of a layer, 1..64; required */
  int32_t max_alignment;                   /* largest alignment of a layer, rows; default 128 */
  epx_dtype max_token_dtype;               /* widest token dtype of a call; required: FLOAT32, FLOAT16 or BFLOAT16 */
  int64_t max_recv_tokens_per_rank;        /* R in rows; 0 (default): the worst case, P * max_tokens_per_rank * max_top_k +
                                       ceil(E / P) * (max_alignment - 1), rounded up to max_alignment */
  int32_t max_sidecar_bytes;               /* largest sidecar of a row, bytes; default 0 */
  epx_combine_precision combine_precision; /* default EPX_COMBINE_WIRE */
  epx_overflow overflow;                   /* default EPX_OVERFLOW_ERROR */
  epx_transport transport;                 /* default EPX_TRANSPORT_AUTO */
  int32_t num_comm_sms; /* streaming multiprocessors for communication on GPUs, 0 (default): as many as there are; the host
                           transport has none and ignores it. A call's kernel runs once it has all of them, and then waits for
                           its peers: calls of several groups that may run at the same time, on several streams, need numbers
                           that fit on the GPU together, or each may wait until timeout_ms for what the other holds */
  int32_t color;        /* ranks of one bootstrap with different colors form different groups; default 0 */
  int32_t key;          /* ranks of a group are ordered by (key, rank in the bootstrap); default 0 */
  int64_t timeout_ms;   /* > 0: the longest that one wait for a peer lasts; default: the environment variable
                           EPX_TIMEOUT_MS if set, else 300000 */
  int64_t reserved[6];  /* 0 */
} epx_group_config;

/* Fills in defaults. The required fields are left 0 and must be set. Errors: INVALID_ARGUMENT (NULL, or EPX_TIMEOUT_MS is
 * not a positive number). */
EPX_API epx_status epx_group_config_init(epx_group_config* config);

/* Creates the group of this rank. Collective over the bootstrap: all its ranks call, and either all succeed or all fail.
 * All memory that calls need is allocated here. The bootstrap and the config stay the caller's.
 * Errors: INVALID_ARGUMENT (this rank's config); MISMATCH (the message names the field, two ranks and their values);
 * UNSUPPORTED (transport); OUT_OF_MEMORY (the message tells how much was wanted); TIMEOUT (who is missing); SYSTEM. */
EPX_API epx_status epx_group_create(const epx_bootstrap* bootstrap, const epx_group_config* config, epx_group* group);

/* Frees the group. Local: no peer is waited for, also after a failure. Accepts NULL. Every call on the group must have
 * returned. Memory from epx_mem_alloc is freed with it. */
EPX_API void epx_group_destroy(epx_group group);

/* Ends the group from any thread, at any time before epx_group_destroy: this rank's calls, the one in progress too, return
 * EPX_ERROR_ABORTED, and peers that wait for this rank learn that it aborted. Local; does not wait. */
EPX_API epx_status epx_group_abort(epx_group group);

typedef struct epx_group_info {
  size_t struct_size;               /* set by the caller: sizeof(epx_group_info) */
  uint64_t group_id;                /* random; the same on all ranks; carried by handle memory */
  int32_t rank;                     /* in the group */
  int32_t num_ranks;                /* P */
  int32_t num_experts;              /* E */
  int32_t num_local_experts;        /* E_l */
  int32_t first_local_expert;       /* global index of the first */
  epx_transport transport;          /* the one in use, never AUTO */
  int64_t max_recv_tokens_per_rank; /* R, resolved */
  int64_t window_bytes;             /* shared memory that the group holds for its own use on this rank */
  int64_t timeout_ms;
  int32_t max_tokens_per_rank; /* these as in the group's config */
  int32_t hidden_dim;
  int32_t max_top_k;
  int32_t max_alignment;
  epx_dtype max_token_dtype;
  epx_combine_precision combine_precision;
} epx_group_info;

/* Describes the group. Errors: INVALID_ARGUMENT. */
EPX_API epx_status epx_group_query(epx_group group, epx_group_info* info);

/* What a rank of such a group takes, in bytes; on GPUs it has some records of its own besides. The parts of the window that
 * this version lists add up to window_bytes; a later one may list more. */
typedef struct epx_memory_plan {
  size_t struct_size;               /* set by the caller: sizeof(epx_memory_plan) */
  int64_t max_recv_tokens_per_rank; /* R, resolved, in rows */
  int64_t window_bytes;             /* memory that every peer can store into, one per rank */
  int64_t control_bytes;            /* of which: call records, flags, poison record, exchange board */
  int64_t count_bytes;              /* of which: route counts, [2, P, E]; experts of few routes */
  int64_t slot_record_bytes;        /* of which: origins of slots, [R]; first slots of tokens, [P, max_tokens] */
  int64_t scatter_row_bytes;        /* of which: staged rows of dispatch and combine_bwd; dispatch has
                                       places of their own for up to 128 tokens */
  int64_t scatter_sidecar_bytes;    /* of which: their sidecars */
  int64_t scatter_weight_bytes;     /* of which: their weights, and which tokens have come */
  int64_t gather_row_bytes;         /* of which: staged rows of combine and dispatch_bwd; the same */
  int64_t gather_weight_bytes;      /* of which: their weights, and which tokens have come */
  int64_t scratch_bytes;            /* host transport: private memory of the group for use within a call */
  int64_t handle_mem_bytes;         /* epx_handle_mem_size for (max_top_k, max_alignment); allocated by the caller, one per
                                       layer in flight */
} epx_memory_plan;

/* Tells what epx_group_create would allocate on each rank of a group of num_ranks ranks, without allocating or
 * communicating. color, key, num_comm_sms and timeout_ms do not matter. Errors: INVALID_ARGUMENT, UNSUPPORTED. */
EPX_API epx_status epx_group_memory_plan(const epx_group_config* config, int32_t num_ranks, epx_memory_plan* plan);

/* ---- Status --------------------------------------------------------------------------------------------------------- */

typedef enum epx_operation EPX_ENUM_INT32 {
  EPX_OP_NONE = 0,
  EPX_OP_PREPARE = 1,
  EPX_OP_DISPATCH = 2,
  EPX_OP_COMBINE = 3,
  EPX_OP_COMBINE_BWD = 4,
  EPX_OP_DISPATCH_BWD = 5,
  EPX_OP_MEM_ALLOC = 6,
  EPX_OP_MEM_FREE = 7
} epx_operation;

typedef enum epx_phase EPX_ENUM_INT32 {
  EPX_PHASE_NONE = 0,
  EPX_PHASE_ARRIVE = 1,  /* waiting for peers to enter the call */
  EPX_PHASE_COMPLETE = 2 /* waiting for peers' data */
} epx_phase;

/* Kinds of errors that a group lives on with. */
typedef enum epx_event_kind EPX_ENUM_INT32 {
  EPX_EVENT_BAD_INDEX = 0,      /* a topk_idx entry < -1 or >= E; the route was treated as masked */
  EPX_EVENT_OVERFLOW = 1,       /* routes to this rank exceeded R (overflow policy ERROR); they were dropped */
  EPX_EVENT_TOO_FEW_ROWS = 2,   /* N was smaller than offsets[E_l] of the handle; routes beyond N were dropped */
  EPX_EVENT_HANDLE_MISMATCH = 3 /* handle memory of another layer, group, T or prepare, or damaged; this rank, or the two
                                    ranks that disagree, took part without routes */
} epx_event_kind;

enum { EPX_MAX_EVENT_KINDS = 16, EPX_MAX_REPORTED_RANKS = 64, EPX_MAX_MESSAGE_BYTES = 1024 };

typedef struct epx_group_report {
  size_t struct_size; /* set by the caller: sizeof(epx_group_report) */

  /* Sticky failure. */
  epx_status status;                       /* EPX_SUCCESS, or what every later call returns */
  epx_operation operation;                 /* the call that failed */
  epx_phase phase;                         /* where it waited; NONE when a peer reported the failure */
  int32_t culprit;                         /* rank that caused it; -1 when there is none */
  uint64_t sequence;                       /* number of the failed call, from 1 */
  uint64_t expected;                       /* TIMEOUT: sequence number that was waited for */
  uint64_t seen;                           /* TIMEOUT: the last one the culprit had reached */
  int32_t num_missing;                     /* TIMEOUT: peers that this rank waited for in vain */
  int32_t missing[EPX_MAX_REPORTED_RANKS]; /* the first of them, ascending */

  /* What the group lived on with since the last epx_group_status. */
  uint64_t event_counts[EPX_MAX_EVENT_KINDS]; /* BAD_INDEX, OVERFLOW, TOO_FEW_ROWS: routes; HANDLE_MISMATCH: calls; those
                                                 of kinds that this version does not have are 0 */
  epx_event_kind first_event;                 /* kind of the first; meaningful when any count is > 0 */
  epx_operation first_event_operation;
  uint64_t first_event_sequence;

  char message[EPX_MAX_MESSAGE_BYTES]; /* the sticky failure, else the first event, in one sentence; "" when all is well */
} epx_group_report;

/* Reads the group's status without synchronising, and clears the events (not the sticky failure). Returns EPX_SUCCESS when
 * the report was written, whatever it says. Errors: INVALID_ARGUMENT. */
EPX_API epx_status epx_group_status(epx_group group, epx_group_report* report);

/* ---- Memory --------------------------------------------------------------------------------------------------------- */

/* Allocates `bytes` (> 0, the same on all ranks) of memory that peers can reach. Receive tensors that lie in it are written
 * in place by dispatch and combine_bwd, and may be read in place by combine and dispatch_bwd (on the host transport: when
 * those of all ranks, weights included, do); others are staged, with the same result. Collective; counts as two calls in
 * sequence numbers. *ptr is aligned to 256 bytes and its contents are zero. On GPUs it and epx_mem_free synchronise the device.
 * Errors: INVALID_ARGUMENT; OUT_OF_MEMORY (on all ranks, if any lacks it; the group lives on); MISMATCH (bytes differ; the
 * group lives on); sticky ones. */
EPX_API epx_status epx_mem_alloc(epx_group group, size_t bytes, void** ptr);

/* Makes `bytes` (> 0, the same on all ranks) at ptr, which the caller owns, memory that peers can reach, as if it came from
 * epx_mem_alloc; its contents stay. It must live until epx_mem_free(group, ptr), which then only ends the registration, or
 * epx_group_destroy. Collective; counts as two calls; synchronises the device. NCCL can register what ncclMemAlloc made, or
 * a framework's pool of such memory, at an address that is a multiple of 4096. Errors: INVALID_ARGUMENT (also: memory that
 * the group knows already); MISMATCH (bytes differ; the group lives on); UNSUPPORTED (the host transport, which cannot map a
 * process's own memory into another; memory that NCCL cannot register: then on all ranks, and the group lives on); sticky
 * ones. */
EPX_API epx_status epx_mem_register(epx_group group, void* ptr, size_t bytes);

/* Frees memory from epx_mem_alloc, or ends the registration of memory from epx_mem_register. Collective, in the same order
 * on all ranks; local on a poisoned group. NULL is refused. Errors: INVALID_ARGUMENT (not such memory); OUT_OF_SEQUENCE
 * (ranks free different allocations; sticky); sticky ones. */
EPX_API epx_status epx_mem_free(epx_group group, void* ptr);

/* ---- Layer and handle memory ---------------------------------------------------------------------------------------- */

typedef struct epx_layer {
  int32_t top_k;     /* K, 1..max_top_k */
  int32_t alignment; /* a, zones are padded to a multiple of it, 0..max_alignment; 0 means 1 */
} epx_layer;

/* Bytes of handle memory, the routing state of one layer in flight; at most 16 * (max_tokens_per_rank * K + R) + 8 * P * E +
 * 64 KiB, and where R is below its default up to 4 * P * (max_tokens_per_rank + 128 * K) more. Local. The caller allocates it
 * where the tokens live, aligned to 16 bytes. epx_prepare fills it in; then it is read-only for any number of later calls in
 * any order, also from a copy of its bytes, as long as the group lives. It needs no freeing beyond the caller's own. Errors:
 * INVALID_ARGUMENT. */
EPX_API epx_status epx_handle_mem_size(epx_group group, const epx_layer* layer, size_t* bytes);

/* ---- The five operations -------------------------------------------------------------------------------------------- */
/* All are collective: every rank of the group makes the same calls in the same order, with the same layer, H, dtype,
 * sidecar bytes and choice of weights; each passes the handle memory that the same epx_prepare filled in. A pointer to a
 * tensor that is NULL means "not wanted" where the comment says optional. Each args struct starts with struct_size =
 * sizeof(the struct); zero the rest first.
 * Errors of all: INVALID_ARGUMENT (refused, nothing happened); MISMATCH, OUT_OF_SEQUENCE, TIMEOUT, ABORTED (sticky). */

typedef struct epx_prepare_args {
  size_t struct_size;
  epx_layer layer;
  void* handle_mem; /* [out] */
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* topk_idx; /* [in]  [T, K] INT32 or INT64: global expert of each route; -1 masks it. Duplicates in a row
                                 are separate routes. A bad index is reported and treated as masked. */
  const epx_tensor* counts;   /* [out] [E_l] INT32 or INT64: rows of each local expert, after drops, without padding */
  const epx_tensor* offsets;  /* [out] [E_l + 1], dtype of counts: first slot of each zone; the last entry is the number of
                                 rows in use */
  const epx_tensor* global_counts; /* [out, optional] [P, E], dtype of counts: routes from each rank to each expert, before
                                      drops, without masked and bad ones */
  const epx_tensor* info; /* [out, optional] [5] INT64: demand, kept, dropped (routes to this rank), dropped (routes of this
                             rank), rows_needed (what offsets[E_l] would be with unlimited R) */
  const epx_tensor*
      slot; /* [out, optional] [T, K] INT32: slot of each route on its expert's rank; -1 where masked or dropped */
  const epx_tensor* slot_origin; /* [out, optional] [R, 3] INT32: (source rank, token, k) of each slot; -1 for pads and
                                    unused slots */
} epx_prepare_args;

/* Turns top-k indices into a plan. Inside a zone, slots are ordered by (source rank, token, k), on every transport; the
 * first floor(R / a) * a slots exist, routes beyond them are dropped. */
EPX_API epx_status epx_prepare(epx_group group, const epx_prepare_args* args);

typedef struct epx_dispatch_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* tokens;       /* [in]  [T, H] FLOAT32, FLOAT16 or BFLOAT16; may have a sidecar */
  const epx_tensor* topk_weights; /* [in, optional] [T, K] FLOAT32 */
  const epx_tensor* recv_tokens;  /* [out] [N, H], dtype of tokens; a sidecar of the same row bytes iff tokens has one */
  const epx_tensor* recv_weights; /* [out] [N] FLOAT32, iff topk_weights is given */
} epx_dispatch_args;

/* recv_tokens[slot(r, t, k)] = tokens_r[t], bit for bit; weights and sidecars likewise. Pad rows inside zones become zero,
 * and so do the rows of a rank that took part without routes. Rows at or above offsets[E_l] are not touched. */
EPX_API epx_status epx_dispatch(epx_group group, const epx_dispatch_args* args);

typedef struct epx_combine_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* expert_out;   /* [in]  [N, H] FLOAT32, FLOAT16 or BFLOAT16 */
  const epx_tensor* recv_weights; /* [in, optional] [N] FLOAT32; absent: all 1 */
  const epx_tensor* out;          /* [out] [T, H], dtype of expert_out */
} epx_combine_args;

/* out[t] = sum over k of recv_weights[slot(t, k)] * expert_out[slot(t, k)], in float32 by the group's combine_precision, each
 * step acc = fma(w, x, acc) from +0. A token without a route gets zero. Pad rows are never read. */
EPX_API epx_status epx_combine(epx_group group, const epx_combine_args* args);

typedef struct epx_combine_bwd_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* grad_out;          /* [in]  [T, H] FLOAT32, FLOAT16 or BFLOAT16 */
  const epx_tensor* expert_out;        /* [in]  [N, H], dtype of grad_out, iff grad_recv_weights is wanted */
  const epx_tensor* recv_weights;      /* [in, optional] [N] FLOAT32, as in combine */
  const epx_tensor* grad_expert_out;   /* [out] [N, H], dtype of grad_out */
  const epx_tensor* grad_recv_weights; /* [out, optional] [N] FLOAT32 */
} epx_combine_bwd_args;

/* For slot s of (r, t, k): grad_expert_out[s] = recv_weights[s] * grad_out_r[t], rounded to float32 and then to the dtype
 * (without weights: a copy); grad_recv_weights[s] = <grad_out_r[t], expert_out[s]>, summed as acc[h mod 256] =
 * fma(g[h], x[h], acc[h mod 256]) with h ascending, then by adding adjacent pairs until one is left. Pad rows become zero.
 * Rows at or above offsets[E_l] are not touched. */
EPX_API epx_status epx_combine_bwd(epx_group group, const epx_combine_bwd_args* args);

typedef struct epx_dispatch_bwd_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* grad_recv;         /* [in]  [N, H] FLOAT32, FLOAT16 or BFLOAT16 */
  const epx_tensor* grad_recv_weights; /* [in, optional] [N] FLOAT32 */
  const epx_tensor* grad_tokens;       /* [out] [T, H], dtype of grad_recv */
  const epx_tensor* grad_topk_weights; /* [out] [T, K] FLOAT32, iff grad_recv_weights is given */
} epx_dispatch_bwd_args;

/* grad_tokens[t] = sum over k of grad_recv[slot(t, k)], as in combine without weights. grad_topk_weights[t, k] =
 * grad_recv_weights[slot(t, k)]; 0 where the route was masked or dropped. */
EPX_API epx_status epx_dispatch_bwd(epx_group group, const epx_dispatch_bwd_args* args);

#ifdef __cplusplus
}
#endif

#endif /* EPX_EPX_H_ */
