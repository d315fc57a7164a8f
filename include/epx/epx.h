/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * epx: expert-parallel exchange. The public C API (C11).
 *
 * epx moves the tokens of a Mixture-of-Experts layer to the ranks that own their experts (dispatch), and brings the
 * experts' outputs back (combine). It does both forward and backward. A set of ranks creates a *group*. All ranks of the
 * group make every later call, in the same order.
 *
 * Symbols in the shapes below:
 *
 *      P    Ranks in the group.
 *      E    Experts, in contiguous blocks over the ranks. Where P does not divide E, the first E mod P ranks own one more.
 *      E_l  Experts that this rank owns (epx_group_info.num_local_experts).
 *      T    Tokens of this rank in a call, 0 <= T <= max_tokens_per_rank. Ranks may differ.
 *      H    Hidden size of a call, 1 <= H <= hidden_dim.
 *      K    Routes of a token: top_k of the layer, 1..64.
 *      a    Alignment of the layer, in rows. 0 means 1.
 *      R    Receive capacity in rows (epx_group_info.max_recv_tokens_per_rank).
 *      N    Rows of the receive tensors of a call. N is any number, and may differ from call to call.
 *      M    Rows of the receive tensors of a rank-major call for each source rank.
 *
 * A *route* is one (token, k) pair. A *slot* is a row of the receive tensors. The *zone* of a local expert is its run of
 * slots, padded to a multiple of a.
 *
 * ## Conventions, in short
 * docs/api.md has the rest: "Streams and captures", "Threads, signals and processes", "Beside other kernels" (how many
 * SMs to leave to NCCL) and "How this API grows". Groups of several nodes: docs/scaling.md, "What a caller sees".
 * - Every function that can fail returns an epx_status. When it is not EPX_SUCCESS, epx_last_error() holds one sentence
 *   with the names and the values. A call that is refused (EPX_ERROR_INVALID_ARGUMENT, EPX_ERROR_UNSUPPORTED) has touched
 *   nothing and written nothing. It has not taken part in the group's sequence of calls: correct it and call again.
 * - Recoverable errors (a bad index, overflow, too few receive rows, the handle memory of another layer) do not fail the
 *   call. The call takes part in the exchange, so that no peer waits, and epx_group_status() reports them.
 * - Sticky errors (a timeout, an abort, ranks out of sequence) end the group: this call and each later one return them at
 *   once, and epx_group_status() names the culprit. Destroy the group and create another.
 * - Tensors are contiguous, row-major, aligned to their element size. Output tensors overlap no other tensor of the call.
 *   The library reads descriptors only during the call, and owns none of the memory they name.
 * - On the host transport tensors and handle memory are host memory, `stream` is NULL, and a call has finished when it
 *   returns. With EPX_TRANSPORT_NCCL they are memory of the rank's GPU, `stream` is a cudaStream_t, and the operations are
 *   asynchronous on it. A later call returns what goes wrong there, and epx_group_status() reports it.
 * - One thread at a time uses a group. Any thread may call epx_group_abort, epx_group_status and epx_group_destroy.
 * - Structs begin with struct_size, but for epx_tensor and epx_layer. Zero the struct, set struct_size to its sizeof, then
 *   set the fields (or let the _init function of a config do so). A program that was built against 0.1 runs with every
 *   later libepx.so.0.
 * - A _destroy function accepts NULL, and frees also where it returns an error. One that returns nothing is local: it waits
 *   for no peer, and a rank may call it alone. One that returns a status is collective, as epx_mem_free is.
 *
 * ## Numbers, the same on every transport
 * - Copies keep every bit, NaN payloads too: dispatch, combine_bwd without weights, and their rank-major forms.
 * - Sums are in float32. The accumulator starts at +0, and each step is acc = fma(w, x, acc), or acc = acc + x without
 *   weights. A route or a partial sum that is absent takes no step; a lone partial sum is still added to +0, with one
 *   rank too.
 * - Every rounding is to nearest even; overflow gives infinity, and subnormal numbers are kept. Nothing else is contracted.
 * - In computed outputs a NaN is a NaN of any sign and payload.
 */
#ifndef EPX_EPX_H_
#define EPX_EPX_H_

#include <stddef.h>
#include <stdint.h>

#define EPX_VERSION_MAJOR 0 /**< of this header; epx_version() has the library's */
#define EPX_VERSION_MINOR 2 /**< of this header */
#define EPX_VERSION_PATCH 0 /**< of this header */

#if defined(__GNUC__)
#define EPX_API __attribute__((visibility("default")))
#else
#define EPX_API
#endif

/* Enumerations have the size of an int32_t. C++ declares it, since a C caller may pass any value in one. */
#ifdef __cplusplus
#define EPX_ENUM_INT32 : int32_t
extern "C" {
#else
#define EPX_ENUM_INT32
#endif

/** @defgroup errors Version, status
 * @{ */

/** What a call returns. Each that is called sticky ends the group. */
typedef enum epx_status EPX_ENUM_INT32 {
  EPX_SUCCESS = 0,
  EPX_ERROR_INVALID_ARGUMENT = 1, /**< refused on the host; nothing happened */
  EPX_ERROR_UNSUPPORTED = 2,      /**< this build, transport or machine cannot do it; nothing happened */
  EPX_ERROR_MISMATCH = 3,         /**< ranks disagree on something that must be equal; in a call: sticky */
  EPX_ERROR_OUT_OF_MEMORY = 4,    /**< memory is exhausted: the machine's, a cgroup's, a GPU's or that of /dev/shm */
  EPX_ERROR_SYSTEM = 5,           /**< the system, the file system, MPI or CUDA refused something; in a call: sticky */
  EPX_ERROR_TIMEOUT = 6,          /**< a rank did not come within timeout_ms; in a call: sticky */
  EPX_ERROR_ABORTED = 7,          /**< epx_group_abort was called, here or on a peer; sticky */
  EPX_ERROR_OUT_OF_SEQUENCE = 8,  /**< ranks made different calls, or one rank's overlapped; sticky */
  /** A defect of epx. In a call also: something else has written to memory that the ranks share (its control words cannot
   * be right). Sticky. */
  EPX_ERROR_INTERNAL = 9
} epx_status;

/** Major * 10000 + minor * 100 + patch of the library that is loaded (compare with the EPX_VERSION_* of the header). */
EPX_API int32_t epx_version(void);

/** The name of a status, "EPX_SUCCESS" for instance; never NULL. The string is static. */
EPX_API const char* epx_status_string(epx_status status);

/** The sentence that explains the last failure of a call on this thread; "" before the first. Valid until this thread's
 * next failing call. Never NULL. */
EPX_API const char* epx_last_error(void);

/** Sets this thread's sentence. For libraries and language bindings that stand on epx and share its error reporting, as
 * libepx_mpi does. The string is copied; NULL means "". */
EPX_API void epx_set_last_error(const char* message);

/** Ends waits for peers in this process: on each thread those of the call in progress, or else of its next call that
 * waits. That call returns EPX_ERROR_ABORTED, and its peers learn that this rank was interrupted. One epx_interrupt()
 * ends at most one call of each thread; a call that need not wait succeeds all the same. These wait on the host:
 * epx_bootstrap_file, epx_bootstrap_mpi, epx_group_create, epx_group_all_gather, epx_mem_*, and the operations of the
 * host transport and of several nodes. An interrupted call of a group ends the group. epx_group_destroy stops waiting for
 * the GPU, and aborts what runs there. A thread that has not used epx yet does not hear of earlier interrupts.
 * Async-signal-safe: a signal handler may call it. Waits for nothing. */
EPX_API void epx_interrupt(void);

/** Returns 1 when this thread has been interrupted, by epx_interrupt() or by its check function, else 0; and forgets the
 * interrupt. For an epx_bootstrap.all_gather of the caller's own: it asks while it waits, and then returns
 * EPX_ERROR_ABORTED. A program calls it where it has learned of the signal by itself and makes its next call on
 * purpose. */
EPX_API int32_t epx_interrupted(void);

/** Sets this thread's check function; NULL removes it. While a call of this thread waits, it calls the function now and
 * then, at most 50 times a second, and ends as by epx_interrupt() when that returns another value than 0. For language
 * bindings whose signal handlers run in the interpreter, as Python's do. The function may take its time. Calls of epx
 * that it makes do not call it again, and none may belong to the sequence of a group in whose call the thread is. */
EPX_API void epx_set_interrupt_check(int32_t (*check)(void));

/** @} */

/** @defgroup tensors Tensors
 * @{ */

/** Types of tensor elements. */
typedef enum epx_dtype EPX_ENUM_INT32 {
  EPX_DTYPE_UNSET = 0,
  EPX_FLOAT32 = 1,
  EPX_FLOAT16 = 2,
  EPX_BFLOAT16 = 3,
  EPX_INT32 = 4,
  EPX_INT64 = 5,
  EPX_FLOAT64 = 6, /**< epx_moe.h and ragged_all_to_all only */
  EPX_UINT8 = 7,   /**< epx_moe.h and ragged_all_to_all only */
  /* After 0.1, of quantised rows and their scales (see epx_row_format): */
  EPX_FLOAT8_E4M3 = 8,  /**< 4 exponent bits, 3 of mantissa, NaN but no infinity; at most 448 */
  EPX_FLOAT8_E5M2 = 9,  /**< 5 exponent bits, 2 of mantissa, as IEEE 754; at most 57344 */
  EPX_FLOAT4_E2M1 = 10, /**< two to a byte, the even index in the low nibble; sizes count elements; at most 6 */
  EPX_FLOAT8_E8M0 = 11  /**< scales only: 2^(byte - 127); 255 is NaN */
} epx_dtype;

typedef void* epx_stream; /**< a cudaStream_t on GPUs, NULL on the host transport */

/** A view of memory that the caller owns. Zero the whole struct first, or use epx_tensor_1d/2d/3d. */
typedef struct epx_tensor {
  void* data;                /**< may be NULL where the tensor has no elements */
  epx_dtype dtype;           /**< of the elements */
  int32_t ndim;              /**< 1..4 */
  int64_t sizes[4];          /**< elements, outermost first; entries beyond ndim are ignored */
  void* sidecar;             /**< opaque bytes that travel with each row: [sizes[0], sidecar_row_bytes]; NULL for none */
  int64_t sidecar_row_bytes; /**< 0 for none */
  int64_t reserved[2];       /**< 0 */
} epx_tensor;

/** A tensor of one dimension, without a sidecar. */
static inline epx_tensor epx_tensor_1d(void* data, epx_dtype dtype, int64_t size0) {
  epx_tensor tensor = {data, dtype, 1, {size0, 0, 0, 0}, NULL, 0, {0, 0}};
  return tensor;
}

/** A tensor of two dimensions, without a sidecar. */
static inline epx_tensor epx_tensor_2d(void* data, epx_dtype dtype, int64_t size0, int64_t size1) {
  epx_tensor tensor = {data, dtype, 2, {size0, size1, 0, 0}, NULL, 0, {0, 0}};
  return tensor;
}

/** A tensor of three dimensions, without a sidecar. */
static inline epx_tensor epx_tensor_3d(void* data, epx_dtype dtype, int64_t size0, int64_t size1, int64_t size2) {
  epx_tensor tensor = {data, dtype, 3, {size0, size1, size2, 0}, NULL, 0, {0, 0}};
  return tensor;
}

/** @} */

/** @defgroup bootstrap Bootstrap
 * @{ */

/** How ranks find each other while a group is created; not used afterwards. Two are ready-made: epx_bootstrap_file below
 * and epx_bootstrap_mpi in epx_mpi.h. A framework may fill one in itself: zero the whole struct first. */
typedef struct epx_bootstrap {
  size_t struct_size; /**< sizeof(epx_bootstrap), the same in every version */
  int32_t rank;       /**< of this process (or thread), 0 <= rank < num_ranks */
  int32_t num_ranks;  /**< ranks that create groups together, 1..65535 */
  /** Every rank passes bytes_per_rank bytes at `send`; recv gets num_ranks * bytes_per_rank bytes in rank order. Blocks,
   * but for no longer than timeout_ms milliseconds. On failure returns another status than EPX_SUCCESS and may write one
   * zero-terminated sentence of at most message_bytes bytes to `message` (name the ranks that are missing). While it
   * waits it asks epx_interrupted(). */
  epx_status (*all_gather)(void* context, const void* send, void* recv, size_t bytes_per_rank, int64_t timeout_ms,
                           char* message, size_t message_bytes);
  void (*release)(void* context); /**< frees the context; called by epx_bootstrap_free; may be NULL */
  void* context;                  /**< what both functions get; theirs alone */
  void* reserved[3];              /**< NULL */
} epx_bootstrap;

/** Ranks find each other through files below `directory` (local or shared between the machines; it must exist and be
 * writable).
 *
 *   num_ranks   1..65535.
 *   job_id      1 to 64 characters of [A-Za-z0-9._-]: ranks with the same one join; jobs with different ones may share the
 *               directory at the same time. What a dead job of the same name left behind is never taken for a live rank.
 *   timeout_ms  > 0: the longest that any one step waits for the other ranks. It fails on each rank within 100 ms + 10 % after
 *               its own timeout_ms, on a machine and a file system that do not stall for longer than 20 ms. A job that is
 *               suspended and resumed as a whole does not fail for that: each wait treats suspensions as described at
 *               timeout_ms of epx_group_config.
 *
 * Returns once all ranks have come. Files have mode 0600 in a subdirectory `epx-<job_id>` of mode 0700, whatever the
 * umask is; all of them are gone when the last rank has freed its bootstrap. Release with epx_bootstrap_free. A
 * subdirectory is refused as it is when another user owns it, when it has another mode, or when it holds anything beside
 * this user's files of a rendezvous (and `.nfs*`). It does not matter who put it there and when. Whoever puts another one
 * in its place gets no file of it.
 *
 * What a killed rank left is removed by the last of its job that outlives it, or by the next start with the same job_id.
 * That start must have the same host, boot, PID namespace and user. Besides, the file system must be local and no process
 * of the job live any more, or the files must be older than 10 minutes and 2 * timeout_ms. Leftovers of others stay where
 * they are.
 *
 * Errors:
 * - INVALID_ARGUMENT.
 * - SYSTEM: the directory is missing or not writable, or the subdirectory is refused. The message names it and the first
 *   entry that is not epx's.
 * - TIMEOUT: the message lists the ranks that never came, or rank 0, which collects what the others send, where it has
 *   died.
 * - MISMATCH: two processes claim one rank, or ranks disagree on num_ranks. */
EPX_API epx_status epx_bootstrap_file(const char* directory, const char* job_id, int32_t rank, int32_t num_ranks,
                                      int64_t timeout_ms, epx_bootstrap* bootstrap);

/** Releases what a ready-made bootstrap holds and clears the struct; in a child of fork(), it only clears it. Accepts NULL
 * and a zeroed struct. Groups that were created with it live on. */
EPX_API void epx_bootstrap_free(epx_bootstrap* bootstrap);

/** @} */

/** @defgroup group Group
 * @{ */

/** The ranks that share the experts, as one of them sees it. */
typedef struct epx_group_s* epx_group;

/** How combine and dispatch_bwd sum the rows of a token. */
typedef enum epx_combine_precision EPX_ENUM_INT32 {
  /** Each expert rank sums its routes of a token in k order in float32 and rounds once to the token dtype; the home rank
   * sums these partials in rank order in float32 and rounds once. One row per (token, expert rank) travels. */
  EPX_COMBINE_WIRE = 0,
  /** The row of every route travels home and is summed there in k order in float32 with one rounding: the same bits for
   * every number of ranks when nothing is dropped. */
  EPX_COMBINE_EXACT = 1,
  /* After 0.1: */
  /** For groups of several nodes. The ranks make partials as with EPX_COMBINE_WIRE. Those of a node's ranks, of the home
   * rank's node too, are summed in rank order in float32 and rounded once to the token dtype. The home rank sums the
   * nodes' sums in the order of the nodes in float32 and rounds once. A node without kept routes of the token takes no
   * step. At most one row per (token, node) needs to travel between nodes. In a group of one node it is
   * EPX_COMBINE_WIRE. */
  EPX_COMBINE_NODE = 2
} epx_combine_precision;

/** What happens to routes that exceed the receive capacity. They are dropped and counted either way. */
typedef enum epx_overflow EPX_ENUM_INT32 {
  EPX_OVERFLOW_ERROR = 0, /**< the receiver also reports EPX_EVENT_OVERFLOW in its status */
  EPX_OVERFLOW_DROP = 1   /**< the receiver reports no event */
} epx_overflow;

/** The transport of a group: how its ranks reach each other's memory. */
typedef enum epx_transport EPX_ENUM_INT32 {
  /** The fastest that all ranks can use. */
  EPX_TRANSPORT_AUTO = 0,
  /** Shared memory, for ranks on one machine, which are processes or threads. With more than one rank it is reserved at
   * once: what does not fit into the machine's available memory or a cgroup's limit is refused.
   *
   * The memory has no name, so that ranks that are killed, at any moment, leave nothing. A rank may be unable to open a
   * peer's /proc/PID/fd (other PID namespaces, processes that are not dumpable, security modules). The memory then has a
   * name epx-* in /dev/shm until all ranks have mapped it. When a rank is killed in that time, the others remove its
   * name. When the whole job is, the next one of the same user in the same PID namespace does. */
  EPX_TRANSPORT_HOST = 1,
  /** NVLink through NCCL symmetric windows, and NCCL's network between nodes. Each rank has a GPU of its own, the calling
   * thread's current device at creation. UNSUPPORTED in builds without CUDA. */
  EPX_TRANSPORT_NCCL = 2
} epx_transport;

/** What a group is created for. Its ranks must agree on every field except color, key, num_comm_sms and timeout_ms. */
typedef struct epx_group_config {
  size_t struct_size;          /**< set by epx_group_config_init; the same in every version */
  int32_t num_experts;         /**< E >= 1; required */
  int32_t max_tokens_per_rank; /**< >= 1; required */
  int32_t hidden_dim;          /**< largest H of a call, elements; required */
  int32_t max_top_k;           /**< largest K of a layer, 1..64; required */
  int32_t max_alignment;       /**< largest alignment of a layer, rows; default 128 */
  epx_dtype max_token_dtype;   /**< widest dtype that rows travel in; required: one of wide or quantised rows */
  /** R in rows. 0 (default): the worst case, P * max_tokens_per_rank * max_top_k + ceil(E / P) * (max_alignment - 1),
   * rounded up to max_alignment. */
  int64_t max_recv_tokens_per_rank;
  int32_t max_sidecar_bytes;               /**< largest sidecar of a row, bytes; default 0 */
  epx_combine_precision combine_precision; /**< default EPX_COMBINE_WIRE */
  epx_overflow overflow;                   /**< default EPX_OVERFLOW_ERROR */
  epx_transport transport;                 /**< default EPX_TRANSPORT_AUTO */
  /** The most SMs (streaming multiprocessors) that a call takes on GPUs. 0 (default): all but 48, or half of them where
   * that is more; docs/api.md, "Beside other kernels", has the reason. More than the GPU has means all. In a group of
   * several nodes it is 0 or at least 2. The host transport ignores it. */
  int32_t num_comm_sms;
  int32_t color; /**< ranks of one bootstrap with different colors form different groups; default 0 */
  int32_t key;   /**< ranks of a group are ordered by (key, rank in the bootstrap); default 0 */
  /** The longest that one wait for a peer lasts, > 0. Default: the environment variable EPX_TIMEOUT_MS if set (a process
   * reads it once), else 300000. A rank that alone is stopped for longer is named by the others.
   *
   * A job that is suspended and resumed as a whole (Ctrl-Z, a scheduler) lives on where the host waits. A wait that finds
   * that this process did not run for more than 1 s (or timeout_ms, if that is less) does not count that time, and gives
   * the peers timeout_ms anew. It never waits for more than 3 * timeout_ms without counting suspensions.
   *
   * Kernels on GPUs go on while their process is stopped, and count all time. There the job lives on when no kernel waits
   * for a peer, or when its processes are stopped for less than timeout_ms. */
  int64_t timeout_ms;
  int64_t reserved[5]; /**< 0 */
  /* After 0.1, out of the end of reserved: */
  /** 0 (default): as found at creation. Nodes have the same number of ranks, and rank r is on node r / ranks_per_node. With
   * EPX_TRANSPORT_NCCL another value than what is found is refused (docs/scaling.md, "Run it").
   *
   * On the host transport, whose ranks share one machine, 0 means one node. Any divisor of P splits the group there, for
   * tests, as far as EPX_COMBINE_NODE and the limits of groups of several nodes go.
   *
   * Ranks of a group of several nodes watch each other over TCP, each by a connection to rank 0 and a thread. A rank whose
   * process ends without epx_group_destroy ends the group after a second. Where children of fork() live on, which hold its
   * connection open, the group ends after timeout_ms. */
  int32_t ranks_per_node;
  /** For groups of several nodes on GPUs: this many tokens of each rank, 0..max_tokens_per_rank, travel to each other
   * node in every call, whatever the routing is. No call then waits on the host (docs/scaling.md, "What a caller sees").
   * Where more tokens go to a node, prepare drops the routes of the later ones to that node. info's number of dropped
   * routes of this rank's tokens has them, demand and events do not. 0 (default): max_tokens_per_rank in calls that a
   * graph captures, and what the routing needs in the others. The host transport has no rails and ignores it. */
  int32_t fixed_rail_tokens;
} epx_group_config;

/** Fills in defaults. The required fields are left 0 and must be set. Errors: INVALID_ARGUMENT (NULL, or EPX_TIMEOUT_MS is
 * not a positive number). */
EPX_API epx_status epx_group_config_init(epx_group_config* config);

/** Creates the group of this rank. Collective over the bootstrap: all its ranks call, and either all succeed or all fail.
 * All memory that calls need is allocated here. The bootstrap and the config stay the caller's.
 * Errors:
 * - INVALID_ARGUMENT: this rank's config, or EPX_CHECK_HANDLE_MEM, EPX_LOG or EPX_TUNING has no value that it may have.
 * - MISMATCH: the message names the field, two ranks and their values.
 * - UNSUPPORTED: the transport; ranks on several machines with transport host; more experts than the GPU's shared memory
 *   has room for; nodes that transport nccl cannot serve, with those that were found, or more than 64 ranks in one of
 *   them; several nodes where a GPU leaves the group fewer than 2 SMs.
 * - OUT_OF_MEMORY: the message says how much was wanted.
 * - TIMEOUT: the message says who is missing.
 * - SYSTEM. */
EPX_API epx_status epx_group_create(const epx_bootstrap* bootstrap, const epx_group_config* config, epx_group* group);

/** Frees the group, and the memory from epx_mem_alloc with it. Local: no peer is waited for. Accepts NULL, and a group
 * that has been destroyed; does nothing in a child of fork(). Any thread may call it at any time.
 *
 * A call that another thread is in is ended. The group is aborted, so that the call returns EPX_ERROR_ABORTED and peers
 * learn of it. This function waits for up to 10 s until the thread has left the call. Where it leaves later, the group is
 * freed then, and a warning says so. A call of the calling thread itself, in whose check function
 * (epx_set_interrupt_check) this function is called, is not waited for. A call that comes later is refused
 * (EPX_ERROR_ABORTED): less than 100 bytes of each group are kept for that until the process exits.
 *
 * Calls that are still under way on the GPU, and that no thread is in, are waited for, for up to timeout_ms, and with them
 * everything else on the device. Then they are aborted, as they are at once when the group has failed or was aborted.
 *
 * A device that other work keeps busy for 2 s more than timeout_ms (3 s with several nodes) is not waited for. The
 * group's memory, streams and events there are then not freed, and a warning says so. Freeing GPU memory itself waits for
 * work that other threads put on the device meanwhile. With several nodes a thread may still be freeing NCCL's
 * communicator then. Until the other work ends, calls of CUDA that free or destroy something wait for that thread, and a
 * process that exits waits for it up to 3 s. */
EPX_API void epx_group_destroy(epx_group group);

/** Ends the group from any thread, at any time before epx_group_destroy: this rank's calls, the one in progress too, return
 * EPX_ERROR_ABORTED, and peers that wait for this rank learn that it aborted. Local; does not wait. */
EPX_API epx_status epx_group_abort(epx_group group);

/** What epx_group_query() tells of a group. */
typedef struct epx_group_info {
  size_t struct_size;                      /**< set by the caller: sizeof(epx_group_info) */
  uint64_t group_id;                       /**< random; the same on all ranks; carried by handle memory */
  int32_t rank;                            /**< in the group */
  int32_t num_ranks;                       /**< P */
  int32_t num_experts;                     /**< E */
  int32_t num_local_experts;               /**< E_l */
  int32_t first_local_expert;              /**< global index of the first */
  epx_transport transport;                 /**< the one in use, never AUTO */
  int64_t max_recv_tokens_per_rank;        /**< R, resolved */
  int64_t window_bytes;                    /**< shared memory that the group holds for its own use on this rank */
  int64_t timeout_ms;                      /**< as in the group's config, or its default */
  int32_t max_tokens_per_rank;             /**< as in the group's config */
  int32_t hidden_dim;                      /**< as in the group's config */
  int32_t max_top_k;                       /**< as in the group's config */
  int32_t max_alignment;                   /**< as in the group's config */
  epx_dtype max_token_dtype;               /**< as in the group's config */
  epx_combine_precision combine_precision; /**< as in the group's config */
  /* After 0.1: */
  int32_t num_comm_sms;   /**< SMs that a call takes at most; 0 on the host transport */
  int32_t ranks_per_node; /**< of P / ranks_per_node nodes; rank r is on node r / ranks_per_node */
} epx_group_info;

/** Describes the group: fills in as much of *info as its struct_size has. Errors: INVALID_ARGUMENT. */
EPX_API epx_status epx_group_query(epx_group group, epx_group_info* info);

/** What a rank of a group takes, in bytes, exactly for the transport that the config names. For `auto` it is what
 * transport nccl takes, which is more than host does. On GPUs a rank has some records of its own besides. The parts of
 * the window that this version lists add up to window_bytes; a later version may list more. */
typedef struct epx_memory_plan {
  size_t struct_size;               /**< set by the caller: sizeof(epx_memory_plan) */
  int64_t max_recv_tokens_per_rank; /**< R, resolved, in rows */
  int64_t window_bytes;             /**< memory that every peer can store into, one per rank */
  int64_t control_bytes;            /**< of which: call descriptors, flags, abort record, exchange board */
  /** Of which: route counts, [2, P, E]; experts of the routing all-gather; the integers of ragged_all_to_all. */
  int64_t count_bytes;
  int64_t slot_record_bytes; /**< of which: origins of slots, [R]; first slots of tokens, [P, max_tokens] */
  /** Of which: staged rows of dispatch and combine_bwd. dispatch has places of their own for up to 512 tokens. */
  int64_t scatter_row_bytes;
  int64_t scatter_sidecar_bytes; /**< of which: sidecars of the rows in scatter_row_bytes */
  int64_t scatter_weight_bytes;  /**< of which: weights of these rows, and which tokens have come */
  /** Of which: staged rows of combine and dispatch_bwd, with places of their own for up to 512 tokens. */
  int64_t gather_row_bytes;
  int64_t gather_weight_bytes; /**< of which: weights of the rows in gather_row_bytes, and which tokens have come */
  /** Private memory of the group for use within a call: on the host transport, and on GPUs in groups of several nodes,
   * where it holds rows on their way to and from other nodes. */
  int64_t scratch_bytes;
  /** epx_handle_mem_size for (max_top_k, max_alignment); allocated by the caller, one per layer in flight. */
  int64_t handle_mem_bytes;
} epx_memory_plan;

/** Reports what epx_group_create would allocate on each rank of a group of num_ranks ranks, without allocating or
 * communicating, so that ranks_per_node = 0 means one node. color, key, num_comm_sms and timeout_ms do not matter. Errors:
 * INVALID_ARGUMENT; UNSUPPORTED. */
EPX_API epx_status epx_group_memory_plan(const epx_group_config* config, int32_t num_ranks, epx_memory_plan* plan);

/* After 0.1: */

/** The largest record of epx_group_all_gather(), in bytes. */
enum { EPX_MAX_RECORD_BYTES = 256 };

/** Gathers a small record of each rank, for what ranks have to agree on between calls: the options of a layer for instance.
 *
 *   send            [bytes_per_rank] this rank's record
 *   recv            [P, bytes_per_rank] the records of all ranks, in rank order; written only where the call succeeds
 *   bytes_per_rank  1..EPX_MAX_RECORD_BYTES, the same on all ranks
 *
 * Both are host memory, which may overlap, whatever the transport is. Collective; counts as epx_mem_alloc does in sequence
 * numbers; the call has finished when it returns. On GPUs it synchronises the device, and is no call for a training step.
 * Errors: INVALID_ARGUMENT; MISMATCH (bytes_per_rank differs; the group lives on); sticky ones. */
EPX_API epx_status epx_group_all_gather(epx_group group, const void* send, void* recv, size_t bytes_per_rank);

/** @} */

/** @defgroup status Status
 * @{ */

/** The calls that have a sequence number. */
typedef enum epx_operation EPX_ENUM_INT32 {
  EPX_OP_NONE = 0,
  EPX_OP_PREPARE = 1,
  EPX_OP_DISPATCH = 2,
  EPX_OP_COMBINE = 3,
  EPX_OP_COMBINE_BWD = 4,
  EPX_OP_DISPATCH_BWD = 5,
  EPX_OP_MEM_ALLOC = 6,
  EPX_OP_MEM_FREE = 7,
  /* After 0.1: */
  EPX_OP_DISPATCH_RANK_MAJOR = 8,
  EPX_OP_COMBINE_RANK_MAJOR = 9,
  EPX_OP_COMBINE_RANK_MAJOR_BWD = 10,
  EPX_OP_DISPATCH_RANK_MAJOR_BWD = 11,
  EPX_OP_PREPARE_DISPATCH = 12,
  EPX_OP_ALL_GATHER = 13,
  EPX_OP_RAGGED_ALL_TO_ALL = 14
} epx_operation;

/** Where in a call a rank waits. */
typedef enum epx_phase EPX_ENUM_INT32 {
  EPX_PHASE_NONE = 0,
  EPX_PHASE_ARRIVE = 1,  /**< waiting for peers to enter the call */
  EPX_PHASE_COMPLETE = 2 /**< waiting for peers' data */
} epx_phase;

/** Kinds of recoverable errors. */
typedef enum epx_event_kind EPX_ENUM_INT32 {
  EPX_EVENT_BAD_INDEX = 0, /**< a topk_idx entry < -1 or >= E; the route was treated as masked */
  /** Routes to this rank exceeded R, or those to an expert the zone_stride (overflow policy ERROR); they were dropped. */
  EPX_EVENT_OVERFLOW = 1,
  /** N was smaller than offsets[E_l] of the handle; routes beyond N were dropped. Each call reports it that passes such
   * an N. In dispatch_rank_major: a rank had more than M tokens for this one; the routes of the others were dropped. */
  EPX_EVENT_TOO_FEW_ROWS = 2,
  /** Handle memory of another layer, group, T or prepare, or damaged (epx_handle_mem_size says what is checked). This
   * rank took part without routes, or the routes between it and ranks with handle memory of another prepare were dropped;
   * see "operations". */
  EPX_EVENT_HANDLE_MISMATCH = 3,
  /* After 0.1: */
  /** ragged_all_to_all: the two ranks of a slice disagree on its size, or it leaves a tensor; it did not move. */
  EPX_EVENT_BAD_SLICE = 4
} epx_event_kind;

/** Sizes of the arrays of epx_group_report. */
enum { EPX_MAX_EVENT_KINDS = 16, EPX_MAX_REPORTED_RANKS = 64, EPX_MAX_MESSAGE_BYTES = 1024 };

/** What has gone wrong in a group, as epx_group_status() tells it. */
typedef struct epx_group_report {
  size_t struct_size; /**< set by the caller: sizeof(epx_group_report) */

  /* Sticky failure. */
  epx_status status;                       /**< EPX_SUCCESS, or what every later call returns */
  epx_operation operation;                 /**< the call that failed */
  epx_phase phase;                         /**< where it waited; NONE when a peer reported the failure */
  int32_t culprit;                         /**< rank that caused it; -1 when there is none */
  uint64_t sequence;                       /**< number of the failed call, from 1 */
  uint64_t expected;                       /**< TIMEOUT: sequence number that was waited for */
  uint64_t seen;                           /**< TIMEOUT: the last one the culprit had reached */
  int32_t num_missing;                     /**< TIMEOUT: peers that this rank waited for in vain */
  int32_t missing[EPX_MAX_REPORTED_RANKS]; /**< the first of them, ascending */

  /* Recoverable errors since the last epx_group_status. */
  /** BAD_INDEX, OVERFLOW, TOO_FEW_ROWS: routes. HANDLE_MISMATCH: calls. BAD_SLICE: slices from or to this rank. Kinds that
   * this version does not have: 0. */
  uint64_t event_counts[EPX_MAX_EVENT_KINDS];
  epx_event_kind first_event;          /**< kind of the first, the lowest of its call's; meaningful when any count is > 0 */
  epx_operation first_event_operation; /**< the call that it happened in */
  uint64_t first_event_sequence;       /**< the number of that call */

  /** The sticky failure, else the first event, in one sentence; "" when all is well. */
  char message[EPX_MAX_MESSAGE_BYTES];
} epx_group_report;

/** Reads the group's status without synchronising, and clears the events (not the sticky failure). Returns EPX_SUCCESS when
 * the report was written, whatever it says. Errors: INVALID_ARGUMENT; ABORTED (the group has been destroyed). */
EPX_API epx_status epx_group_status(epx_group group, epx_group_report* report);

/** @} */

/** @defgroup memory Memory
 * @{ */

/** Allocates `bytes` (> 0, the same on all ranks) of memory that peers can reach. *ptr is aligned to 256 bytes and its
 * contents are zero.
 *
 * dispatch and combine_bwd write receive tensors in place where they lie in it, but on GPUs not where staging is faster.
 * combine and dispatch_bwd may read them in place (on the host transport: when those of all ranks, weights included, lie
 * in it). Others are staged, with the same result. The same holds for rank-major calls.
 *
 * Collective; counts as two calls in sequence numbers, and as fewer where it fails, on all ranks alike. On GPUs it and
 * epx_mem_free synchronise the device.
 * Errors: INVALID_ARGUMENT; OUT_OF_MEMORY (on all ranks, if any lacks it; the group lives on); MISMATCH (bytes differ; the
 * group lives on); sticky ones. */
EPX_API epx_status epx_mem_alloc(epx_group group, size_t bytes, void** ptr);

/** Makes `bytes` (> 0, the same on all ranks) at ptr, which the caller owns, memory that peers can reach, as if it came
 * from epx_mem_alloc; its contents stay. It must live until epx_mem_free(group, ptr), which then only ends the
 * registration, or epx_group_destroy. Collective; counts as epx_mem_alloc does; synchronises the device. NCCL can
 * register what ncclMemAlloc made, or a framework's pool of such memory, at an address that is a multiple of 4096.
 * Errors:
 * - INVALID_ARGUMENT, also for memory that the group knows already.
 * - MISMATCH: bytes differ; the group lives on.
 * - UNSUPPORTED: the host transport, which cannot map a process's own memory into another. Memory that NCCL cannot
 *   register: then on all ranks, and the group lives on.
 * - Sticky ones. */
EPX_API epx_status epx_mem_register(epx_group group, void* ptr, size_t bytes);

/** Frees memory from epx_mem_alloc, or ends the registration of memory from epx_mem_register. Collective, in the same
 * order on all ranks, and counts as one call in sequence numbers; after a sticky error local, and no call. A call that
 * itself finds or makes a sticky error returns it, and has freed the memory. NULL is refused. Errors: INVALID_ARGUMENT
 * (not such memory); OUT_OF_SEQUENCE (ranks free different allocations; sticky); sticky ones. */
EPX_API epx_status epx_mem_free(epx_group group, void* ptr);

/** @} */

/** @defgroup layer Layer and handle memory
 * @{ */

/** What the calls of a layer have in common. */
typedef struct epx_layer {
  int32_t top_k;     /**< K, 1..max_top_k */
  int32_t alignment; /**< a, zones are padded to a multiple of it, 0..max_alignment; 0 means 1 */
} epx_layer;

/** Bytes of handle memory, the routing state of one layer in flight. Local. Errors: INVALID_ARGUMENT. At most:
 * - 16 * (max_tokens_per_rank * K + R) + 8 * P * E + 64 KiB, and where R is below its default up to
 *   4 * P * (max_tokens_per_rank + 128 * K) more.
 * - In a group of N > 1 nodes on GPUs 12 * (N + 1) * T' * K + (4 * P + 16 * N) * T' + 12 * R + 8 * P * E + 64 KiB. T' is
 *   max_tokens_per_rank, above 1024 rounded up to a multiple of that.
 *
 * The caller allocates it where the tokens live, aligned to 16 bytes. It needs no freeing beyond the caller's own.
 * epx_prepare, epx_prepare_dispatch or epx_dispatch_rank_major fills it in. Then it is read-only for any number of later
 * calls in any order, as long as the group lives. A copy of its bytes serves as well. Nobody writes to it while a call
 * runs.
 *
 * What a call checks of it. Its header carries a checksum: a call with the handle memory of another layer, group, T or
 * prepare, or with a damaged header, reports EPX_EVENT_HANDLE_MISMATCH. The routing state behind the header is not
 * compared with anything, so damage there is not reported. Whatever its bytes are, two things hold:
 * - No rank reads or writes beyond the tensors of the call and the group's own memory. What the call may write may get
 *   any contents: this rank's outputs, and those of peers that pass handle memory of the same prepare. With
 *   EPX_TRANSPORT_NCCL this may go on after the call has ended on its rank, in a receive tensor in memory from
 *   epx_mem_alloc or epx_mem_register, until all ranks have come to the group's next call.
 * - Each call ends. With EPX_TRANSPORT_NCCL ranks may wait for rows that nobody sends, until timeout_ms. That ends the
 *   group, and the report names the operation.
 *
 * The environment variable EPX_CHECK_HANDLE_MEM=1 finds damage of the routing state too. It is 0 by default and read
 * once; epx_group_create refuses other values. The call that fills the memory in then stores a checksum of the routing
 * state, and each call verifies it: damage is reported as EPX_EVENT_HANDLE_MISMATCH. One word that differs is always
 * found, more with probability 1 - 2^-64. It costs a pass over the handle memory in each call, on GPUs by one more
 * kernel: behind a call that fills it in, before the others. Calls can still be captured in a graph. */
EPX_API epx_status epx_handle_mem_size(epx_group group, const epx_layer* layer, size_t* bytes);

/** @} */

/** @defgroup formats Row formats
 *
 * Rows can travel in 8 or 4 bits with their scales. Without a format dispatch copies rows of any of these dtypes. With one,
 * dispatch and combine_bwd have three ways, which follow from the dtypes of a call. In combine_bwd grad_out is what tokens is
 * in dispatch, and grad_expert_out what recv_tokens is:
 *
 *      tokens          recv_tokens     recv_scales  what happens
 *   a  quantised       the same dtype  given        rows and scales arrive as they are
 *   b  wide            quantised       given        a row is quantised once, on its rank, and arrives quantised
 *   c  wide            as tokens       NULL         a row is quantised for the wire, and dequantised where it lands
 *
 * Wide is FLOAT32, FLOAT16 or BFLOAT16; quantised is FLOAT8_E4M3, FLOAT8_E5M2 or FLOAT4_E2M1. A quantised row follows from
 * the row, the format and encode_scale alone. It has the same bits on every transport and for every number of ranks, and a
 * rank's rows for itself are what it would have sent.
 *
 * ## The scalings
 * Blocks run along H from 0; the last may be short. amax is the largest magnitude of a block's finite elements. All
 * arithmetic is in float32, each operation rounded to nearest even, subnormals kept. E(v) rounds to nearest even, and what
 * is too large becomes the largest number. S, the scales of a row, is H over the block, rounded up.
 *
 *   BLOCK128       E4M3 by 128, scales FLOAT32. a = max(amax, amax_floor), s = a / 448, q = E(x * min(1 / s, FLT_MAX)).
 *   BLOCK128_POW2  E4M3 by 128, scales FLOAT32 or E8M0. s = 2^ceil(log2(a / 448)), within 2^-126 to 2^127; q = E(x / s).
 *   MX             E4M3 or E5M2 by 32, scales E8M0. b = the byte of the least power of two that is not below
 *                  amax * fl(1 / 448), or fl(1 / 57344) for E5M2; q = E(x * 2^(127 - b)).
 *   NV             E2M1 by 16 (H is even), scales E4M3, and row_scales FLOAT32. e = 2688 / the row's amax, at most FLT_MAX,
 *                  1 where that is 0; or encode_scale. s = E4M3(amax * (e * fl(1 / 6))); q = E(x * min(e / s, FLT_MAX)), 0
 *                  where s is 0. The row's scale is 1 / e.
 *
 * With BLOCK128 and BLOCK128_POW2, a = 0 gives s = 1. An element that is not finite becomes the NaN 0x7f, but E5M2 keeps
 * infinities. E2M1 has neither: the scale of such a block becomes 0x7f. Its codes are 0 without a sign, as where s is 0. An
 * element stands for q * s, with NV for q * (s * row_scale), in float32, rounded once to the receive dtype.
 *
 * The bits are those of DeepGEMM (BLOCK128), and of TransformerEngine (MX; NV with the row in the place of its tensor), on
 * finite input. Where MX's b is 0, some versions of TransformerEngine multiply by 1.
 *
 * combine_bwd multiplies by a weight w where rows land. In a and b, BLOCK128 alone takes weights: the elements stay, and each
 * scale becomes s * w, rounded. The other scalings refuse them (INVALID_ARGUMENT): weigh early, where the experts compute. In
 * c an element becomes (q * s) * w, each product rounded to float32, and then to the receive dtype. The weights' gradients
 * take the elements of grad_out as q * s in float32, without w. Ranks may differ in the dtype of expert_out.
 *
 * ## Sums
 * combine and dispatch_bwd, which add rows up, quantise for the wire alone: their tensors are wide, those of the format NULL.
 * A rank quantises the partial sum of a token's rows once, from float32, without a rounding to the dtype; in the rank-major
 * layout the row is the partial sum. The home rank adds the ranks' q * s in rank order in float32, from +0, and rounds once
 * to the dtype. Its own partial sum takes the same way, so results depend on the number of ranks, as those of WIRE do. The
 * scaling is BLOCK128 or MX, and the group's combine_precision is WIRE (else INVALID_ARGUMENT).
 *
 * A partial sum p in a block of scale s comes home with an error of at most max(2^-4 * |p|, 2^-10 * s) for E4M3, and
 * max(2^-3 * |p|, 2^-17 * s) for E5M2, times 1 + 2^-16, plus 2^-120, where q * s is finite. The errors of a token's partial
 * sums add up. To that come the roundings of the sum at home.
 *
 * With a format max_token_dtype bounds what travels, a row with its scales, and tensors may be wider than it. On GPUs
 * combine_bwd and sums with one take the high-throughput path, and so does epx_prepare_dispatch in a group of more than 1024
 * experts.
 * @{ */

/** How the elements of a quantised row are scaled. */
typedef enum epx_scaling EPX_ENUM_INT32 {
  EPX_SCALING_NONE = 0,
  EPX_SCALING_BLOCK128 = 1,
  EPX_SCALING_BLOCK128_POW2 = 2,
  EPX_SCALING_MX = 3,
  EPX_SCALING_NV = 4
} epx_scaling;

/** Where the scales of received rows lie. N is the rows of recv_tokens, P * M of them in the rank-major layout. */
typedef enum epx_scale_layout EPX_ENUM_INT32 {
  EPX_SCALES_ROWS = 0, /**< [N, S] */
  /** [S, ld] with ld = N rounded up to 4: scale i of row n at [i, n]. Entries N..ld - 1 are not touched. */
  EPX_SCALES_COLUMNS = 1,
  /** E8M0 alone: [ceil(S / 4), ld] INT32 with ld as before. An entry has four scales of a row, the lowest block in the
   * lowest byte, and 0 beyond S. */
  EPX_SCALES_PACKED = 2,
  /** Scales of one byte alone: tiles of 128 rows by 4 scales, [ceil(N / 128), ceil(S / 4), 512]. Scale i of row n is byte
   * (n % 32) * 16 + (n % 128 / 32) * 4 + i % 4 of tile [n / 128, i / 4], and bytes beyond S are 0. The layer's alignment is a
   * multiple of 128. Not in the rank-major layout. */
  EPX_SCALES_TILES = 3
} epx_scale_layout;

/** The format in which the rows of a call travel. Ranks agree on scaling, dtype, amax_floor and the dtype of scales, and so
 * on the way, since they agree on the dtypes of tokens and recv_tokens. */
typedef struct epx_row_format {
  size_t struct_size;                /**< set by epx_row_format_init; the same in every version */
  epx_scaling scaling;               /**< of rows on the wire; not NONE */
  epx_dtype dtype;                   /**< of the elements that travel: see the scalings */
  float amax_floor;                  /**< of BLOCK128 and BLOCK128_POW2, >= 0 and finite; 0 in the others */
  epx_scale_layout scale_layout;     /**< of recv_scales; ranks may differ; ROWS in c and in sums */
  const epx_tensor* scales;          /**< [in]  a: [T, S], dtype of the scaling's scales; NULL in the others */
  const epx_tensor* row_scales;      /**< [in]  a, NV: [T] FLOAT32; NULL in the others */
  const epx_tensor* encode_scale;    /**< [in, optional] b and c, NV: [1] FLOAT32 > 0, finite: e of this rank's rows */
  const epx_tensor* recv_scales;     /**< [out] a and b: in scale_layout; NULL in c and in sums */
  const epx_tensor* recv_row_scales; /**< [out] a and b, NV: [N] FLOAT32; NULL in the others */
  int64_t reserved[4];               /**< 0 */
} epx_row_format;

/** Fills in a scaling's defaults: dtype FLOAT4_E2M1 for NV and else FLOAT8_E4M3; amax_floor 1e-4 where there is one, which
 * is DeepSeek's. Gradients need 0: with the default, values of 1e-9 keep two steps of E4M3. Errors: INVALID_ARGUMENT. */
EPX_API epx_status epx_row_format_init(epx_row_format* format, epx_scaling scaling);

/** @} */

/** @defgroup operations The five operations
 *
 * All are collective: every rank of the group makes the same calls in the same order. Layer, H, dtype, sidecar bytes and
 * choice of weights are the same. Each rank passes the handle memory that the same epx_prepare (or epx_prepare_dispatch)
 * filled in. Everything else may differ between ranks: T, N, the dtypes of prepare's topk_idx and counts, its optional
 * outputs, and where tensors lie. Only epx_dispatch, epx_prepare_dispatch and epx_dispatch_rank_major take sidecars; in
 * another operation a tensor with one is refused.
 *
 * A rank may pass handle memory that is not that of the call (EPX_EVENT_HANDLE_MISMATCH).
 * - The call cannot use it: it is of another layer, group or T, nobody has filled it in, or it is damaged. This rank then
 *   takes part without routes. None of its tensors is touched, in memory that peers reach neither. It alone reports the
 *   event.
 * - It is valid, but of another prepare than that of some ranks. The call then drops the routes between ranks whose
 *   prepares differ, and keeps those between ranks of the same prepare. A rank's routes to itself stay, by the plan that
 *   it passed. All its tensors are written as that plan says. Each rank that has met another prepare reports the event,
 *   once for the call.
 * To a rank whose routes with another are dropped, that one's tokens have no routes, and its experts have no rows. What
 * would have come from it is zero. What would have gone to it takes no step in sums.
 *
 * A pointer to a tensor that is NULL means "not wanted" where the comment says optional. Each args struct starts with
 * struct_size = sizeof(the struct). Zero the rest first, since later versions may have more fields (docs/api.md, "How
 * this API grows").
 *
 * Errors of all: INVALID_ARGUMENT (refused, nothing happened). MISMATCH, OUT_OF_SEQUENCE, TIMEOUT, ABORTED and INTERNAL,
 * which are sticky. On GPUs SYSTEM: CUDA refused the kernel of a rank, which is the culprit. Its peers learn that while
 * they wait, and do not time out. SYSTEM is sticky, but not while the stream is being captured.
 * @{ */

/** Arguments of epx_prepare(). */
typedef struct epx_prepare_args {
  size_t struct_size;
  epx_layer layer;
  void* handle_mem; /**< [out] */
  size_t handle_mem_bytes;
  epx_stream stream;
  /** [in] [T, K] INT32 or INT64: global expert of each route; -1 masks it. Duplicates in a row are separate routes. A bad
   * index is reported and treated as masked. */
  const epx_tensor* topk_idx;
  const epx_tensor* counts; /**< [out] [E_l] INT32 or INT64: rows of each local expert, after drops, without padding */
  /** [out] [E_l + 1], dtype of counts: first slot of each zone; the last entry is where the last zone ends: the number of
   * rows in use, or E_l * Z with a zone_stride Z. */
  const epx_tensor* offsets;
  /** [out, optional] [P, E], dtype of counts: routes from each rank to each expert, before drops, without masked and bad
   * ones. */
  const epx_tensor* global_counts;
  /** [out, optional] [5] INT64: demand, kept, dropped (routes to this rank), dropped (routes of this rank), rows_needed
   * (what offsets[E_l] would be with unlimited R). */
  const epx_tensor* info;
  const epx_tensor* slot; /**< [out, optional] [T, K] INT32: slot on its expert's rank; -1 where masked or dropped */
  /** [out, optional] [R, 3] INT32: (source rank, token, k) of each slot; -1 for pads and unused slots. */
  const epx_tensor* slot_origin;
  /* After 0.1: */
  /** [optional] Z, rows from one zone to the next: a multiple of the alignment, the same on all ranks, E_l * Z <= R for the
   * largest E_l; 0: a zone begins where the one before it ends. */
  int64_t zone_stride;
} epx_prepare_args;

/** Turns top-k indices into a plan. Inside a zone, slots are ordered by (source rank, token, k), on every transport; the
 * first floor(R / a) * a slots exist, routes beyond them are dropped.
 *
 * With a zone_stride Z the zone of local expert e begins at slot e * Z. Receive tensors are [E_l, Z, H] with counts, as
 * masked grouped products take them; N = E_l * Z. An expert's routes beyond Z are dropped: info and EPX_EVENT_OVERFLOW tell.
 * Pads are the rows from counts[e] to the next multiple of the alignment a; the zone's rows behind them are not touched. */
EPX_API epx_status epx_prepare(epx_group group, const epx_prepare_args* args);

/** How the routing of one prepare loads the ranks, as epx_load_of_counts() finds it: the same on all ranks. */
typedef struct epx_load_report {
  size_t struct_size; /**< set by the caller: sizeof(epx_load_report) */
  int64_t routes;     /**< of all ranks, before drops, without masked ones */
  int64_t dropped;    /**< those that exceed the receive capacity of their ranks, or the zone_stride */
  /** By the rank that needs most, pads included. Without a zone_stride an R of as many drops nothing; a zone_stride needs
   * most_routes_of_expert, too. */
  int64_t rows_needed;
  int64_t most_routes_of_rank;   /**< the routes to the rank with most of them; balanced: routes / P */
  int64_t most_routes_of_expert; /**< the routes to the expert with most of them; balanced: routes / E */
} epx_load_report;

/** Tells from the counts that a prepare has exchanged what was dropped, on all ranks together, and what would have been
 * needed. All ranks have the same counts, so they find the same without another exchange. Where `dropped` is not 0, all may
 * run the step again on a group with a larger max_recv_tokens_per_rank. The least capacity factor that drops nothing is
 * rows_needed / (routes / P).
 *
 * global_counts is [P, E] INT32 or INT64, as epx_prepare and epx_prepare_dispatch write it, in memory of the host: on GPUs
 * copy it once the stream has come past the prepare. layer and zone_stride are those of the prepare. What a rank drops
 * where N is too small, and what a group of several nodes drops beyond fixed_rail_tokens, is not in the counts. Local.
 * Errors: INVALID_ARGUMENT, also for counts below 0. */
EPX_API epx_status epx_load_of_counts(epx_group group, const epx_layer* layer, int64_t zone_stride,
                                      const epx_tensor* global_counts, epx_load_report* report);

/** What dispatch does to the pad rows of its zones. */
typedef enum epx_pads EPX_ENUM_INT32 {
  EPX_PADS_ZERO = 0,     /**< they become zero, with their weights, sidecars and scales */
  EPX_PADS_UNTOUCHED = 1 /**< nothing is written to them */
} epx_pads;

/** Arguments of epx_dispatch(). */
typedef struct epx_dispatch_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* tokens;       /**< [in]  [T, H] of wide or quantised rows; may have a sidecar */
  const epx_tensor* topk_weights; /**< [in, optional] [T, K] FLOAT32 */
  const epx_tensor*
      recv_tokens; /**< [out] [N, H], dtype of tokens or of format; a sidecar of the same row bytes iff tokens has one */
  const epx_tensor* recv_weights; /**< [out] [N] FLOAT32, iff topk_weights is given */
  /* After 0.1: */
  epx_pads pads;                /**< of this rank's zones; ranks may differ */
  int32_t reserved0;            /**< 0 */
  const epx_row_format* format; /**< [optional] in which the rows travel; NULL: as they are */
} epx_dispatch_args;

/** recv_tokens[slot(r, t, k)] = tokens_r[t], bit for bit or as the format says, with its weight and sidecar. Pad rows
 * inside zones become zero, unless pads is EPX_PADS_UNTOUCHED; a matrix product that needs none of their rows saves the
 * time of writing them. The rows of a rank that took part without routes become zero in either case. Rows at or above
 * offsets[E_l] are not touched. */
EPX_API epx_status epx_dispatch(epx_group group, const epx_dispatch_args* args);

/** Arguments of epx_prepare_dispatch(): those of epx_prepare() and of epx_dispatch(), each once. The smallest struct_size
 * is 136. */
typedef struct epx_prepare_dispatch_args {
  size_t struct_size;
  epx_layer layer;
  void* handle_mem; /**< [out] */
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* topk_idx;      /**< [in]  [T, K] INT32 or INT64, as in epx_prepare_args */
  const epx_tensor* counts;        /**< [out] [E_l] INT32 or INT64, as in epx_prepare_args */
  const epx_tensor* offsets;       /**< [out] [E_l + 1], dtype of counts, as in epx_prepare_args */
  const epx_tensor* global_counts; /**< [out, optional] [P, E], dtype of counts, as in epx_prepare_args */
  const epx_tensor* info;          /**< [out, optional] [5] INT64, as in epx_prepare_args */
  const epx_tensor* slot;          /**< [out, optional] [T, K] INT32, as in epx_prepare_args */
  const epx_tensor* slot_origin;   /**< [out, optional] [R, 3] INT32, as in epx_prepare_args */
  const epx_tensor* tokens;        /**< [in]  [T, H] of wide or quantised rows; may have a sidecar */
  const epx_tensor* topk_weights;  /**< [in, optional] [T, K] FLOAT32 */
  const epx_tensor*
      recv_tokens; /**< [out] [N, H], dtype of tokens or of format; a sidecar of the same row bytes iff tokens has one */
  const epx_tensor* recv_weights; /**< [out] [N] FLOAT32, iff topk_weights is given */
  epx_pads pads;                  /**< of this rank's zones; ranks may differ */
  int32_t reserved0;              /**< 0 */
  const epx_row_format* format;   /**< [optional] in which the rows travel; NULL: as they are */
  int64_t zone_stride;            /**< [optional] as in epx_prepare_args */
} epx_prepare_dispatch_args;

/** What epx_prepare() and then epx_dispatch() with its handle memory do, as one call with one sequence number. The handle
 * memory is the same except for that number. The outputs are the same, and so are the reports, of operation
 * EPX_OP_PREPARE_DISPATCH. N is chosen before offsets[E_l] can be read. All ranks of the group make this call, or all
 * make the two others.
 *
 * On the GPUs of one node it is the faster form for few tokens. For many tokens it is so where the group has several
 * ranks and takes 48 SMs or more, and max_recv_tokens_per_rank is 0 or at least P * max_tokens_per_rank; with two ranks
 * up to 250 MB of T * K rows. The rows then leave before their slots are known. */
EPX_API epx_status epx_prepare_dispatch(epx_group group, const epx_prepare_dispatch_args* args);

/** Arguments of epx_combine(). */
typedef struct epx_combine_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* expert_out;   /**< [in]  [N, H] FLOAT32, FLOAT16 or BFLOAT16 */
  const epx_tensor* recv_weights; /**< [in, optional] [N] FLOAT32; absent: all 1 */
  const epx_tensor* out;          /**< [out] [T, H], dtype of expert_out */
  /* After 0.1: */
  const epx_row_format* format; /**< [optional] in which partial sums travel; NULL: in the dtype */
} epx_combine_args;

/** out[t] = sum over k of recv_weights[slot(t, k)] * expert_out[slot(t, k)], by the group's combine_precision and the rules
 * above. A token without a route gets zero. Pad rows are never read. */
EPX_API epx_status epx_combine(epx_group group, const epx_combine_args* args);

/** Arguments of epx_combine_bwd(). */
typedef struct epx_combine_bwd_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* grad_out;          /**< [in]  [T, H] FLOAT32, FLOAT16 or BFLOAT16; with a format also quantised */
  const epx_tensor* expert_out;        /**< [in]  [N, H], dtype of grad_out, or with a format any of the three that are
                                        * wide; iff grad_recv_weights is wanted */
  const epx_tensor* recv_weights;      /**< [in, optional] [N] FLOAT32, as in combine */
  const epx_tensor* grad_expert_out;   /**< [out] [N, H], dtype of grad_out or of format */
  const epx_tensor* grad_recv_weights; /**< [out, optional] [N] FLOAT32 */
  /* After 0.1: */
  const epx_row_format* format; /**< [optional] in which the rows travel; NULL: as they are */
} epx_combine_bwd_args;

/** For slot s of (r, t, k): grad_expert_out[s] = recv_weights[s] * grad_out_r[t], rounded to float32 and then to the
 * dtype (without weights: a copy). Besides, grad_recv_weights[s] = <grad_out_r[t], expert_out[s]>. It is summed as acc[h
 * mod 256] = fma(g[h], x[h], acc[h mod 256]) with h ascending, then by adding adjacent pairs until one is left. Pad rows
 * become zero, with their scales. Rows at or above offsets[E_l] are not touched. What a format changes is said there. */
EPX_API epx_status epx_combine_bwd(epx_group group, const epx_combine_bwd_args* args);

/** Arguments of epx_dispatch_bwd(). */
typedef struct epx_dispatch_bwd_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* grad_recv;         /**< [in]  [N, H] FLOAT32, FLOAT16 or BFLOAT16 */
  const epx_tensor* grad_recv_weights; /**< [in, optional] [N] FLOAT32 */
  const epx_tensor* grad_tokens;       /**< [out] [T, H], dtype of grad_recv */
  const epx_tensor* grad_topk_weights; /**< [out] [T, K] FLOAT32, iff grad_recv_weights is given */
  /* After 0.1: */
  const epx_row_format* format; /**< [optional] in which partial sums travel, as in combine */
} epx_dispatch_bwd_args;

/** grad_tokens[t] = sum over k of grad_recv[slot(t, k)], as in combine without weights. grad_topk_weights[t, k] =
 * grad_recv_weights[slot(t, k)]; 0 where the route was masked or dropped. */
EPX_API epx_status epx_dispatch_bwd(epx_group group, const epx_dispatch_bwd_args* args);

/** @} */

/** @defgroup rank_major The rank-major layout
 *
 * A rank receives each token once, however many of its experts the token goes to, in an array [P, M, H] by source rank.
 * There is no prepare and no exchange before the rows: epx_dispatch_rank_major makes the plan, and writes it into handle
 * memory for the three other calls. The caller sorts the rows by expert and sums the experts' rows of a token himself,
 * for instance by epx_moe.h's local permutation.
 *
 * *Row* i of source rank r is r's i-th token, in ascending order, that has a route to this rank. A row is *kept* when it is
 * below M. The routes of the others are dropped, whatever the group's overflow policy is, and this rank reports them
 * (EPX_EVENT_TOO_FEW_ROWS). epx_dispatch_rank_major alone reports them: the later calls with its handle memory do not.
 *
 * *Places.* The receive tensors have P * M rows, [P, M, ...]. By default kept row i of source r is row r * M + i of
 * them. With EPX_ROWS_COMPACT it is row counts[0] + ... + counts[r - 1] + i: the rows of all sources follow each other
 * without gaps, as in DeepEP's normal form. M, and which rows are kept, do not depend on that. epx_dispatch_rank_major
 * chooses it, and the three other calls find it in the handle memory. Below, [r, i] is row i of source r, wherever it
 * lies. Compact rows pass through staging also where recv_tokens lies in memory from epx_mem_alloc: a sender does not
 * know how many rows the ranks below it have.
 *
 * M >= 0 is any number and the same on all ranks (else MISMATCH, sticky); M = max_tokens_per_rank is never too few. The
 * receive capacity R drops nothing here, but rows pass through staging of its size: P * min(M, max_tokens_per_rank) * K
 * must not exceed R, which it never does where R is the default (INVALID_ARGUMENT).
 *
 * On GPUs the dispatch takes the low-latency path where NVLink connects all ranks and min(M, max_tokens_per_rank) is at
 * most a limit of the group. It takes the high-throughput path otherwise, however few the tokens are: for few tokens,
 * choose a small M. The limit is min(512, 2048 / P), and less for long rows, a large max_top_k, or where a rank has fewer
 * than 80 SMs for the call.
 *
 * The calls are collective, with the conventions and errors of the other operations (see there). The dtypes of topk_idx,
 * recv_topk_idx and counts may differ between ranks, and from each other. A group of several nodes refuses them
 * (UNSUPPORTED; the message has the bytes of staging that they would take). layer.alignment is 0 or 1, as there are no
 * zones. Handle memory has epx_handle_mem_size() bytes. What a call checks of it, and what damage can do, is said there;
 * that of epx_prepare, or that of an epx_dispatch_rank_major with another M, is reported as EPX_EVENT_HANDLE_MISMATCH.
 * @{ */

/** Where the kept rows of a source rank begin in the receive tensors of a rank-major plan. */
typedef enum epx_row_spacing EPX_ENUM_INT32 {
  EPX_ROWS_STRIDED = 0, /**< M rows apart: those of source r at row r * M */
  EPX_ROWS_COMPACT = 1  /**< behind those of the source before: at row counts[0] + ... + counts[r - 1] */
} epx_row_spacing;

/** Arguments of epx_dispatch_rank_major(). The smallest struct_size is 96. */
typedef struct epx_dispatch_rank_major_args {
  size_t struct_size;
  epx_layer layer;
  void* handle_mem; /**< [out] */
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* tokens;       /**< [in]  [T, H] of wide or quantised rows; may have a sidecar */
  const epx_tensor* topk_idx;     /**< [in]  [T, K] INT32 or INT64, as in epx_prepare_args */
  const epx_tensor* topk_weights; /**< [in, optional] [T, K] FLOAT32 */
  /** [out] [P, M, H], dtype of tokens or of format; a sidecar [P, M, sidecar_row_bytes] of the same row bytes iff tokens has
   * one. */
  const epx_tensor* recv_tokens;
  /** [out] [P, M, K] INT32 or INT64: the local expert, 0..E_l - 1, of each route to this rank; -1 for each k whose route is
   * masked or goes to another rank. */
  const epx_tensor* recv_topk_idx;
  const epx_tensor* recv_weights; /**< [out] [P, M, K] FLOAT32, iff topk_weights is given: 0 where recv_topk_idx is -1 */
  const epx_tensor* counts;       /**< [out] [P] INT32 or INT64: kept rows of each source rank */
  const epx_row_format* format;   /**< [optional] in which the rows travel; NULL: as they are */
  epx_row_spacing row_spacing;    /**< the same on all ranks, else MISMATCH */
  int32_t reserved0;              /**< 0 */
} epx_dispatch_rank_major_args;

/** recv_tokens[r, i] = tokens_r[t] for kept row i of r, which is token t, bit for bit or as the format says, with its
 * sidecar. recv_topk_idx and recv_weights at [r, i, k] say which of this rank's experts its routes go to, and with which
 * weights. Duplicate experts of a token stay two k. No other row is touched, in any tensor: of source r those at or beyond
 * counts[r], and with EPX_ROWS_COMPACT those behind the last source's. */
EPX_API epx_status epx_dispatch_rank_major(epx_group group, const epx_dispatch_rank_major_args* args);

/** Arguments of epx_combine_rank_major(). The smallest struct_size is 56. */
typedef struct epx_combine_rank_major_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* expert_out; /**< [in]  [P, M, H] FLOAT32, FLOAT16 or BFLOAT16: the sum of each row's experts' rows */
  const epx_tensor* out;        /**< [out] [T, H], dtype of expert_out */
  const epx_row_format* format; /**< [optional] in which rows travel home (Sums); NULL: as they are */
} epx_combine_rank_major_args;

/** out[t] = the sum of token t's kept rows over the ranks in ascending order, in float32 by the rules above, rounded
 * once. Without a format that is what epx_combine yields in precision `wire` if the caller has summed a row's experts by fma
 * in k order from +0 in float32, and rounded once. A token without a kept row gets zero. Rows at or beyond counts are never read.
 * Errors: besides, INVALID_ARGUMENT in a group of precision `exact`, whose results do not depend on the number of
 * ranks. */
EPX_API epx_status epx_combine_rank_major(epx_group group, const epx_combine_rank_major_args* args);

/** Arguments of epx_combine_rank_major_bwd(). The smallest struct_size is 56. */
typedef struct epx_combine_rank_major_bwd_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* grad_out;        /**< [in]  [T, H] FLOAT32, FLOAT16 or BFLOAT16; with a format also quantised */
  const epx_tensor* grad_expert_out; /**< [out] [P, M, H], dtype of grad_out or of format */
  const epx_row_format* format;      /**< [optional] in which the rows travel; NULL: as they are */
} epx_combine_rank_major_bwd_args;

/** grad_expert_out[r, i] = grad_out_r[t] for kept row i of r, which is token t, bit for bit or as the format says. The rows
 * of a rank that took part without routes become zero, with their scales. Rows at or beyond counts are not touched. */
EPX_API epx_status epx_combine_rank_major_bwd(epx_group group, const epx_combine_rank_major_bwd_args* args);

/** Arguments of epx_dispatch_rank_major_bwd(). The smallest struct_size is 72. */
typedef struct epx_dispatch_rank_major_bwd_args {
  size_t struct_size;
  epx_layer layer;
  const void* handle_mem;
  size_t handle_mem_bytes;
  epx_stream stream;
  const epx_tensor* grad_recv;         /**< [in]  [P, M, H] FLOAT32, FLOAT16 or BFLOAT16: the sum over the row's routes */
  const epx_tensor* grad_recv_weights; /**< [in, optional] [P, M, K] FLOAT32; read where recv_topk_idx was not -1 */
  const epx_tensor* grad_tokens;       /**< [out] [T, H], dtype of grad_recv */
  const epx_tensor* grad_topk_weights; /**< [out] [T, K] FLOAT32, iff grad_recv_weights is given */
  const epx_row_format* format;        /**< [optional] in which rows travel home (Sums); NULL: as they are */
} epx_dispatch_rank_major_bwd_args;

/** grad_tokens[t] = the sum of grad_recv over token t's kept rows, as in epx_combine_rank_major. grad_topk_weights[t, k] =
 * grad_recv_weights[r, i, k] of the rank and row that the route went to; 0 where it was masked or dropped. Errors: as
 * epx_combine_rank_major. */
EPX_API epx_status epx_dispatch_rank_major_bwd(epx_group group, const epx_dispatch_rank_major_bwd_args* args);

/** @} */

/** @defgroup ragged Ragged all-to-all
 *
 * Slices of rows between the ranks, as jax.lax.ragged_all_to_all defines them, for callers who sort their rows themselves.
 * It needs no layer, no handle memory and no routing.
 * @{ */

/** The most slices of a call. */
enum { EPX_MAX_SLICES = 2048 };

/** In which direction the slices of a call move. */
typedef enum epx_slice_direction EPX_ENUM_INT32 {
  EPX_SLICES_FORWARD = 0, /**< from input_offsets of operand to output_offsets of output */
  /** Back: of the forward's four integer tensors, operand is the gradient of its output, and output that of its operand. */
  EPX_SLICES_TRANSPOSED = 1
} epx_slice_direction;

/** Arguments of epx_ragged_all_to_all(). The smallest struct_size is 72. K is here the number of slices, a multiple of P up
 * to EPX_MAX_SLICES, the same on all ranks: slice i goes to rank i / (K / P). A row is what lies below the first dimension
 * of operand. */
typedef struct epx_ragged_all_to_all_args {
  size_t struct_size;
  epx_stream stream;
  const epx_tensor* operand;       /**< [in]  [N, ...], up to 4 dimensions of any dtype; rows have whole bytes */
  const epx_tensor* output;        /**< [in, out] [M, ...], of operand's dtype and other dimensions */
  const epx_tensor* input_offsets; /**< [in]  [K] INT32 or INT64: the first row of slice i in this rank's operand */
  const epx_tensor* send_sizes;    /**< [in]  [K], dtype of input_offsets: its rows */
  const epx_tensor*
      output_offsets; /**< [in]  [K], dtype of input_offsets: its first row in the output of the rank it goes to */
  /** [in] [K], dtype of input_offsets: what the other ranks have in send_sizes. Entry r * (K / P) + j has the rows of the
   * j-th slice from rank r to this one. */
  const epx_tensor* recv_sizes;
  epx_slice_direction direction; /**< the same on all ranks, else MISMATCH */
  int32_t reserved0;             /**< 0 */
} epx_ragged_all_to_all_args;

/** Moves slices. With EPX_SLICES_FORWARD, for slice i from rank r to rank d, row output_offsets_r[i] + n of d's output
 * becomes row input_offsets_r[i] + n of r's operand, for n < send_sizes_r[i], bit for bit. With EPX_SLICES_TRANSPOSED the
 * rows go the other way: row input_offsets_r[i] + n of r's output becomes row output_offsets_r[i] + n of d's operand. Rows
 * of output that nothing lands on keep what they have.
 *
 * Slices may overlap where they are read: all ranks may send every peer the same rows, which is an all-gather. Where they
 * overlap in an output, either may be what is left. So a transposed call does not add up what comes back of rows that several
 * slices have read. An all-to-all of equal parts has K = P.
 *
 * N and M are any numbers below 2^31, which may differ between ranks. A row has 1 to 2^31 - 1 bytes; rows may be longer than
 * the group's. K is at least P. Where output lies
 * in memory from epx_mem_alloc or epx_mem_register, rows land in it. Otherwise they pass through the group's staging, in as
 * many rounds as that takes.
 *
 * A slice moves whole, or not at all. It does not move where its size is negative, where send_sizes and recv_sizes disagree
 * on it, or where it leaves operand or output. Both its ranks then report EPX_EVENT_BAD_SLICE; of a slice to itself a rank
 * counts one. Offsets of a slice of no rows may be anything. The integers are read on the device: no call waits on the host, and a graph replays with what they are then.
 *
 * Collective, with the conventions and errors of the other operations. Ranks disagree on K, the bytes of a row or the
 * direction: MISMATCH, sticky. UNSUPPORTED: a group of several nodes; on GPUs an output outside memory of the group that
 * would take more than 512 rounds. */
EPX_API epx_status epx_ragged_all_to_all(epx_group group, const epx_ragged_all_to_all_args* args);

/** @} */

#ifdef __cplusplus
}
#endif

#endif /* EPX_EPX_H_ */
