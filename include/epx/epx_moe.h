/* SPDX-License-Identifier: Apache-2.0 */
/** @file
 * Expert compute around epx: router, local permutation, grouped FFN, and the MoE block made of them. The public C API (C11)
 * of libepx_moe, which uses nothing of epx but epx.h. Every piece can be used alone.
 *
 * Symbols: T tokens, E experts, K = top_k, H hidden size, F size of the FFN's inner layer. E_l are the experts of this
 * rank, N the rows of the expert side (slots), P the ranks.
 *
 * ## Conventions, beyond those of epx.h
 * - Functions other than epx_moe_block_* and epx_moe_arena_* are local: no rank communicates. They keep no state and may be
 *   called from any thread.
 * - With `cuda` NULL, tensors are host memory, and the call computes on the calling thread and has finished when it
 *   returns.
 * - Else tensors are memory of the calling thread's current CUDA device (managed memory is fine, pinned host memory is
 *   refused). The call is enqueued on cuda->stream. It allocates nothing, does not wait for the device, and can be
 *   captured in a CUDA graph. The first call of a kind may have to wait while CUDA loads its kernels; those of a block
 *   are loaded when it is created. Where the build has no CUDA, the machine no GPU, or the GPU a compute capability below
 *   9.0, the call is refused (UNSUPPORTED). Where a block computes is not the call's choice: see epx_moe_block_create().
 * - "real" below means FLOAT32 or FLOAT64, the same one for all tensors of a call that are called real. Computation is in
 *   that type. FLOAT64 is there to check gradients. On CUDA real is FLOAT32, and a comment says what else a tensor may be
 *   there; computation is in FLOAT32.
 * - Determinism: a call's result depends on its arguments alone, on one kind of processor or GPU, however many SMs it
 *   has. What the FFN makes of a row does not depend on which other rows are there, so it has the same bits for every
 *   number of ranks. The local permutation has the same bits on the host and on CUDA.
 * - Output tensors overlap no other tensor of the call, which is not checked here. Where a comment says optional, NULL
 *   means "not wanted".
 * - struct_size and the _destroy functions follow epx.h. Unlike epx.h, this header may still change; CHANGELOG.md says
 *   how. Until 1.0 the library takes exactly the struct_size that it was built with, and refuses another. Build against
 *   the header of the library that is loaded. The _init functions are told the size.
 * - Errors: INVALID_ARGUMENT (refused; nothing was written) unless said otherwise, and OUT_OF_MEMORY (of this process;
 *   outputs may be partly written); epx_last_error() has the sentence. The host looks at all data before it writes. On
 *   CUDA bad data is no error of the call: see epx_moe_errors. What CUDA itself refuses is SYSTEM.
 */
#ifndef EPX_EPX_MOE_H_
#define EPX_EPX_MOE_H_

#include "epx/epx.h"

#ifdef __cplusplus
extern "C" {
#endif

/** @defgroup moe_cuda CUDA
 * @{ */

/** What calls on a GPU saw in their data, where the host cannot look without waiting for the device: a record in host
 * memory that kernels write. Whatever the data is, a kernel writes nothing beyond the tensors of its call, and ends. */
typedef struct epx_moe_errors_s* epx_moe_errors;

/** Where a call runs on a GPU: the calling thread's current device. Every args struct has a pointer to it. */
typedef struct epx_moe_cuda {
  size_t struct_size; /**< sizeof(epx_moe_cuda) */
  epx_stream stream;  /**< a cudaStream_t of the device; NULL: the default stream */
  /** [scratch] Memory of the device, aligned to 256 bytes; may be NULL where a call needs none. Calls that may run at the
   * same time need one each. Its content does not matter, before and after. */
  void* workspace;
  size_t workspace_bytes; /**< at least what the epx_moe_..._workspace of the call says */
  epx_moe_errors errors;  /**< [optional] where the call reports bad data; NULL: nowhere */
  /** The most SMs that the call's kernels are made for, to leave the others to kernels beside them; 0: all. Results do not
   * depend on it. The FFN takes two at least where it uses tensor cores. */
  int32_t num_sms;
  int32_t reserved0; /**< 0 */
} epx_moe_cuda;

/** The calls that report errors. */
typedef enum epx_moe_op EPX_ENUM_INT32 {
  EPX_MOE_OP_NONE = 0,
  EPX_MOE_OP_ROUTER_BWD = 1,
  EPX_MOE_OP_AUX_LOSS = 2,
  EPX_MOE_OP_BIAS_UPDATE = 3,
  EPX_MOE_OP_ROW_MAP = 4,
  EPX_MOE_OP_PERMUTE = 5,
  EPX_MOE_OP_PERMUTE_BWD = 6,
  EPX_MOE_OP_UNPERMUTE = 7,
  EPX_MOE_OP_UNPERMUTE_BWD = 8,
  EPX_MOE_OP_FFN = 9,
  EPX_MOE_OP_FFN_BWD = 10,
  EPX_MOE_OP_QUANTISE_ROWS = 11,
  EPX_MOE_OP_QUANTISE_SWIGLU = 12,
  EPX_MOE_OP_QUANTISE_SWIGLU_BWD = 13,
  EPX_MOE_OP_FFN_FP8 = 14,
  EPX_MOE_OP_FFN_FP8_BWD = 15
} epx_moe_op;

/** What an error is, with the values that the report has, and what the call does about it.
 * - EXPERT: topk_idx[i, j] = value is no expert, or is -1 beside experts. epx_moe_row_map takes it for -1; the router's
 *   calls take the token for a masked one.
 * - DUPLICATE_EXPERT: topk_idx[i, j] = value, as an entry of the token before it; the router's calls take the token for a
 *   masked one.
 * - ROW: row_map[i, j] = value is no row, and is taken for -1.
 * - DUPLICATE_ROW: row_map[i, j] = value, as a route before it, and is taken for -1. Only epx_moe_permute and
 *   epx_moe_unpermute_bwd see it; in the other two calls both routes read the row.
 * - COUNT: global_counts[i, j] = value is negative, and is taken for 0.
 * - ROWS_NEEDED: value rows are needed, more than an INT32 can count; row_map is all -1, and offsets end at INT32_MAX.
 * - OFFSET: offsets[i] = value is less than the one before it, or beyond the rows. ZONE_COUNT: counts[i] = value does not
 *   fit its zone, which has `limit` rows. The FFN takes what of such zones lies within the rows; where zones overlap, the
 *   rows that they share hold the output of any of them. epx_moe_quantise_... may leave out any part of such zones.
 * - ZONE_ALIGNMENT: offsets[i] = value is no multiple of `limit`, and its zone has rows. Tensor cores take such a
 *   zone for empty in the gradients of weights. */
typedef enum epx_moe_error_kind EPX_ENUM_INT32 {
  EPX_MOE_ERROR_NONE = 0,
  EPX_MOE_ERROR_EXPERT = 1,
  EPX_MOE_ERROR_DUPLICATE_EXPERT = 2,
  EPX_MOE_ERROR_ROW = 3,
  EPX_MOE_ERROR_DUPLICATE_ROW = 4,
  EPX_MOE_ERROR_COUNT = 5,
  EPX_MOE_ERROR_ROWS_NEEDED = 6,
  EPX_MOE_ERROR_OFFSET = 7,
  EPX_MOE_ERROR_ZONE_COUNT = 8,
  EPX_MOE_ERROR_ZONE_ALIGNMENT = 9
} epx_moe_error_kind;

/** What a record has. */
typedef struct epx_moe_errors_report {
  size_t struct_size;      /**< set by the caller */
  int64_t num_errors;      /**< since epx_moe_errors_create; 0: all that follows is 0 */
  epx_moe_op op;           /**< of the first error, as all below; of several in one call, any may be the first */
  epx_moe_error_kind kind; /**< what the error is */
  int64_t i;               /**< where in the tensor that the kind names; 0 with ROWS_NEEDED */
  int64_t j;               /**< the second index; 0 where the tensor has one dimension */
  int64_t value;           /**< what is there */
  int64_t limit;           /**< EXPERT: num_experts; ROW, OFFSET: the rows; ZONE_COUNT: rows of the zone; ZONE_ALIGNMENT: of
                            * what offsets are multiples; else 0 */
  char message[256];       /**< the error in one sentence */
} epx_moe_errors_report;

/** Creates a record, for calls on any device, of which one at a time uses it. Allocates and may synchronise.
 * Errors: UNSUPPORTED (no CUDA in this build, or no GPU); OUT_OF_MEMORY; SYSTEM. */
EPX_API epx_status epx_moe_errors_create(epx_moe_errors* errors);

/** Frees the record; no call that was given it may still be running. Local. Accepts NULL. */
EPX_API void epx_moe_errors_destroy(epx_moe_errors errors);

/** Reads the record, without synchronising: after the stream has been synchronised it has what the calls saw. Any thread
 * may call it at any time. */
EPX_API epx_status epx_moe_errors_read(epx_moe_errors errors, epx_moe_errors_report* report);

/** @} */

/** @defgroup router Router
 * @{ */

/** How a logit becomes a score. Selection looks at score + selection_bias, weights come from the score alone. */
typedef enum epx_moe_score EPX_ENUM_INT32 {
  EPX_MOE_TOPK_THEN_SOFTMAX = 0, /**< select by logit; weights are the softmax over the selected logits (Mixtral) */
  EPX_MOE_SOFTMAX_THEN_TOPK = 1, /**< softmax over all experts, then select (Switch, DeepSeek-V2) */
  /** Sigmoid of each logit (DeepSeek-V3). It is 0 below -88.7 (FLOAT64: -709.8), so that selection takes such experts as
   * equal; shares of them are right all the same. */
  EPX_MOE_SIGMOID = 2
} epx_moe_score;

/** How a router selects experts, and weighs them. */
typedef struct epx_moe_router_config {
  size_t struct_size;  /**< set by epx_moe_router_config_init */
  int32_t num_experts; /**< E >= 1; required */
  int32_t top_k;       /**< K, 1..E; required */
  epx_moe_score score; /**< default TOPK_THEN_SOFTMAX */
  /** > 1: experts are split into this many contiguous groups of equal size. A token selects only from the topk_groups
   * groups of the highest scores (see group_score_top_k), ties by the lower group. Must divide E. Default 1. */
  int32_t num_groups;
  /** 1..num_groups, and they must have K experts: K <= topk_groups * E / num_groups. Default 1. */
  int32_t topk_groups;
  /** 1: the K weights of a token are divided by their sum. They add up to 1 also where the scores underflow: the shares
   * then come from the logits. Of logits far below 0 the shares of sigmoids are those of a softmax. Weights are 0 where
   * all K logits are -infinity. No effect on TOPK_THEN_SOFTMAX, whose weights add up to 1. Default 0. */
  int32_t renormalize;
  double scaling_factor; /**< multiplies the weights, after renormalisation; finite. Default 1 */
  double aux_loss_coeff; /**< c of the load-balance loss; finite; 0 (default): no such loss */
  /** A group's score is the sum of this many of its best (score + bias), added best first: 1..E / num_groups. DeepSeek-V2
   * takes 1, DeepSeek-V3 takes 2, and Hugging Face's code does as they do. 0 (default): K / topk_groups, as Megatron
   * takes; topk_groups must then divide K. No effect with one group. */
  int32_t group_score_top_k;
  int32_t reserved0;   /**< 0 */
  int64_t reserved[3]; /**< 0 */
} epx_moe_router_config;

/** Fills in defaults; num_experts and top_k are left 0 and must be set. `struct_size` is sizeof(epx_moe_router_config) of
 * the caller; the other _init functions are told it too. */
EPX_API epx_status epx_moe_router_config_init(epx_moe_router_config* config, size_t struct_size);

/** Arguments of epx_moe_router(). */
typedef struct epx_moe_router_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  /** [in] [T, E] real (CUDA: or BFLOAT16); -infinity excludes an expert from weight, but not from selection. */
  const epx_tensor* logits;
  const epx_tensor* selection_bias; /**< [in, optional] [E] real: added to the scores for selection only */
  const epx_tensor* token_mask;     /**< [in, optional] [T] UINT8: 0 masks the token, whatever its logits are */
  /** [out] [T, K] INT32 or INT64: selected experts, best first, ties by the lower index; all -1 for a token that is
   * masked or bad. */
  const epx_tensor* topk_idx;
  const epx_tensor* topk_weights; /**< [out] [T, K] real; 0 where topk_idx is -1 */
  /** [out, optional] [3] INT64: masked tokens, bad tokens, index of the first bad token or -1. A token is bad when its
   * scores, its group scores or its weights are not numbers, as they are when a logit or the bias is NaN. */
  const epx_tensor* info;
} epx_moe_router_args;

/** Selects top_k experts for each token and weighs them. On CUDA num_groups is at most 1024, and no workspace is needed. */
EPX_API epx_status epx_moe_router(const epx_moe_router_config* config, const epx_moe_router_args* args);

/** Arguments of epx_moe_router_bwd(). */
typedef struct epx_moe_router_bwd_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* logits;            /**< [in]  [T, E] real (CUDA: or BFLOAT16), as given to epx_moe_router */
  const epx_tensor* topk_idx;          /**< [in]  [T, K] as it returned them */
  const epx_tensor* grad_topk_weights; /**< [in, optional] [T, K] real; absent: all 0 */
  /** [in] [P, E] INT32 or INT64: routes from each rank to each expert, as epx_prepare returns them; required when
   * aux_loss_coeff is not 0, else NULL. */
  const epx_tensor* global_counts;
  double aux_loss_grad; /**< gradient of the caller's loss with respect to the load-balance loss; often 1 */
  /** [out] [T, E] dtype of logits; 0 for masked and bad tokens. Selection has no gradient. */
  const epx_tensor* grad_logits;
} epx_moe_router_bwd_args;

/** Gradient of the logits, through the weights and through the load-balance loss. */
EPX_API epx_status epx_moe_router_bwd(const epx_moe_router_config* config, const epx_moe_router_bwd_args* args);

/** The bytes of workspace that the call needs on CUDA. The _workspace functions look at shapes only, never at `cuda` or at
 * data, and need no GPU: allocate once for the largest shape. */
EPX_API epx_status epx_moe_router_bwd_workspace(const epx_moe_router_config* config, const epx_moe_router_bwd_args* args,
                                                size_t* bytes);

/** Arguments of epx_moe_aux_loss(). */
typedef struct epx_moe_aux_loss_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* logits;        /**< [in]  [T, E] real (CUDA: or BFLOAT16) */
  const epx_tensor* topk_idx;      /**< [in]  [T, K] INT32 or INT64: rows of -1 are masked tokens */
  const epx_tensor* global_counts; /**< [in]  [P, E] INT32 or INT64 */
  const epx_tensor* loss;          /**< [out] [1] FLOAT64: this rank's share; the loss is the sum over the ranks */
} epx_moe_aux_loss_args;

/** The load-balance loss of Switch Transformer (arXiv:2101.03961, eq. 4) over the T_g tokens of all ranks that are not
 * masked:
 *
 *   aux = E * c / (K * T_g^2) * sum_e (sum_t p[t, e]) * n_e
 *
 * Here n_e is the sum of global_counts over the ranks, and T_g = sum_e n_e / K. n_e counts as a constant in the gradient.
 * p is the softmax over all experts. With EPX_MOE_SIGMOID it is the sigmoids divided by their sum, as renormalised
 * weights are: equal logits of any value have p = 1 / E. Without routes (T_g = 0) the loss is 0, and so is its gradient.
 * A rank without tokens, or whose tokens are all masked, has a share of 0. */
EPX_API epx_status epx_moe_aux_loss(const epx_moe_router_config* config, const epx_moe_aux_loss_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_aux_loss_workspace(const epx_moe_router_config* config, const epx_moe_aux_loss_args* args,
                                              size_t* bytes);

/** Arguments of epx_moe_bias_update(). */
typedef struct epx_moe_bias_update_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* global_counts;  /**< [in] [P, E] INT32 or INT64 */
  double rate;                      /**< finite */
  const epx_tensor* selection_bias; /**< [in, out] [E] real */
} epx_moe_bias_update_args;

/** Balances without a loss (arXiv:2408.15664): selection_bias[e] += rate * sign(mean of n - n_e). Sums and mean are
 * FLOAT64. The sign is exact while all counts together are below 2^53 (9e15); beyond that, an n_e that FLOAT64 does not
 * tell from the mean counts as equal to it, and its bias stays. No workspace is needed. */
EPX_API epx_status epx_moe_bias_update(const epx_moe_bias_update_args* args);

/** @} */

/** @defgroup permutation Local permutation
 *
 * For those who route without epx: rows sorted by expert on one rank. The order is that of epx_prepare: zones by expert,
 * each padded to a multiple of the alignment, and inside a zone by (token, k).
 * @{ */

/** Arguments of epx_moe_row_map(). */
typedef struct epx_moe_row_map_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* topk_idx; /**< [in]  [T, K] INT32 or INT64: 0..E-1, or -1 for none */
  int32_t alignment;          /**< rows, >= 0; 0 means 1 */
  const epx_tensor* counts;   /**< [out] [E] INT32 or INT64: routes to each expert */
  const epx_tensor* offsets;  /**< [out] [E + 1], dtype of counts: first row of each zone; at last the rows needed */
  const epx_tensor* row_map;  /**< [out] [T, K] INT32: row of each route, -1 for none */
} epx_moe_row_map_args;

/** Sorts routes by expert (stable). E is the size of counts. Errors: INVALID_ARGUMENT, also for an index >= E or < -1, and
 * for more rows than an INT32 can count. */
EPX_API epx_status epx_moe_row_map(const epx_moe_row_map_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_row_map_workspace(const epx_moe_row_map_args* args, size_t* bytes);

/** Arguments of epx_moe_permute(). */
typedef struct epx_moe_permute_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* row_map;      /**< [in]  [T, K] INT32: rows 0..N-1, each at most once, or -1; in each of these calls */
  const epx_tensor* tokens;       /**< [in]  [T, H] any dtype */
  const epx_tensor* topk_weights; /**< [in, optional] [T, K] any dtype */
  const epx_tensor* rows;         /**< [out] [N, H] dtype of tokens */
  const epx_tensor* row_weights;  /**< [out] [N] dtype of topk_weights, iff those are given */
  epx_pads pads;                  /**< what becomes of rows that no route maps to */
} epx_moe_permute_args;

/** rows[row_map[t, k]] = tokens[t], bit for bit, and row_weights[row_map[t, k]] = topk_weights[t, k]. Rows that no route
 * maps to become zero, unless pads is EPX_PADS_UNTOUCHED. */
EPX_API epx_status epx_moe_permute(const epx_moe_permute_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_permute_workspace(const epx_moe_permute_args* args, size_t* bytes);

/** Arguments of epx_moe_permute_bwd(). */
typedef struct epx_moe_permute_bwd_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* row_map;           /**< [in]  [T, K] INT32 */
  const epx_tensor* grad_rows;         /**< [in]  [N, H] real (CUDA: or FLOAT16 or BFLOAT16) */
  const epx_tensor* grad_row_weights;  /**< [in, optional] [N] real */
  const epx_tensor* grad_tokens;       /**< [out] [T, H] dtype of grad_rows */
  const epx_tensor* grad_topk_weights; /**< [out] [T, K] real, iff grad_row_weights is given; 0 where row_map is -1 */
} epx_moe_permute_bwd_args;

/** grad_tokens[t] = sum over k of grad_rows[row_map[t, k]], as epx_moe_unpermute sums. No workspace is needed. */
EPX_API epx_status epx_moe_permute_bwd(const epx_moe_permute_bwd_args* args);

/** Arguments of epx_moe_unpermute(). */
typedef struct epx_moe_unpermute_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* row_map; /**< [in]  [T, K] INT32 */
  const epx_tensor* rows; /**< [in]  [N, H] real (CUDA: or FLOAT16 or BFLOAT16); rows that no route maps to are not read */
  const epx_tensor* topk_weights; /**< [in, optional] [T, K] real; absent: all 1 */
  const epx_tensor* tokens;       /**< [out] [T, H] dtype of rows */
} epx_moe_unpermute_args;

/** tokens[t] = sum over k of topk_weights[t, k] * rows[row_map[t, k]]. Each step is acc = fma(w, x, acc) from +0 in k
 * order. One rounding to the dtype of tokens follows: the bits of epx_combine with EPX_COMBINE_EXACT. No workspace is
 * needed. */
EPX_API epx_status epx_moe_unpermute(const epx_moe_unpermute_args* args);

/** Arguments of epx_moe_unpermute_bwd(). */
typedef struct epx_moe_unpermute_bwd_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_tensor* row_map;           /**< [in]  [T, K] INT32 */
  const epx_tensor* grad_tokens;       /**< [in]  [T, H] real (CUDA: or FLOAT16 or BFLOAT16) */
  const epx_tensor* rows;              /**< [in]  [N, H] dtype of grad_tokens, iff grad_topk_weights is wanted */
  const epx_tensor* topk_weights;      /**< [in, optional] [T, K] real, as in epx_moe_unpermute */
  const epx_tensor* grad_rows;         /**< [out] [N, H] dtype of grad_tokens; rows that no route maps to become zero */
  const epx_tensor* grad_topk_weights; /**< [out, optional] [T, K] real; 0 where row_map is -1 */
} epx_moe_unpermute_bwd_args;

/** grad_rows[row_map[t, k]] = topk_weights[t, k] * grad_tokens[t]; grad_topk_weights[t, k] = <grad_tokens[t],
 * rows[row_map[t, k]]>, summed as epx_combine_bwd sums. */
EPX_API epx_status epx_moe_unpermute_bwd(const epx_moe_unpermute_bwd_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_unpermute_bwd_workspace(const epx_moe_unpermute_bwd_args* args, size_t* bytes);

/** @} */

/** @defgroup ffn Grouped FFN
 * @{ */

/** The activation between the two projections of an expert. */
typedef enum epx_moe_activation EPX_ENUM_INT32 {
  EPX_MOE_SWIGLU = 0, /**< h = silu(gate) * up */
  EPX_MOE_GELU = 1,   /**< h = up * Phi(up), exact (erf); no gate */
  EPX_MOE_RELU2 = 2   /**< h = max(up, 0)^2; no gate */
} epx_moe_activation;

/** The shape of the experts of one rank. */
typedef struct epx_moe_ffn_config {
  size_t struct_size;            /**< set by epx_moe_ffn_config_init */
  int32_t num_local_experts;     /**< E_l >= 0 */
  int32_t hidden_dim;            /**< H >= 1; required */
  int32_t ffn_dim;               /**< F >= 1; required */
  epx_moe_activation activation; /**< default SWIGLU */
  int64_t reserved[4];           /**< 0 */
} epx_moe_ffn_config;

/** Fills in defaults; hidden_dim and ffn_dim are left 0 and must be set. */
EPX_API epx_status epx_moe_ffn_config_init(epx_moe_ffn_config* config, size_t struct_size);

/** Parameters of this rank's experts, or their gradients; real (CUDA: weights have the dtype of recv_tokens, biases that or
 * FLOAT32, and so have all gradients). Weights are laid out [out, in] as in torch.nn.Linear. With SWIGLU, gate and up are
 * given either stacked (gate first) or separately, weights and biases each as they like. Without a gate only the members
 * named up and down are given. Every bias is optional by itself. */
typedef struct epx_moe_ffn_params {
  size_t struct_size;
  const epx_tensor* gate_up_weight; /**< [E_l, 2F, H] */
  const epx_tensor* gate_weight;    /**< [E_l, F, H] */
  const epx_tensor* up_weight;      /**< [E_l, F, H] */
  const epx_tensor* down_weight;    /**< [E_l, H, F] */
  const epx_tensor* gate_up_bias;   /**< [E_l, 2F] */
  const epx_tensor* gate_bias;      /**< [E_l, F] */
  const epx_tensor* up_bias;        /**< [E_l, F] */
  const epx_tensor* down_bias;      /**< [E_l, H] */
} epx_moe_ffn_params;

/** Arguments of epx_moe_ffn(). */
typedef struct epx_moe_ffn_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_moe_ffn_params* params; /**< [in] */
  const epx_tensor* recv_tokens;    /**< [in]  [N, H] real (CUDA: or FLOAT16 or BFLOAT16) */
  const epx_tensor* counts;         /**< [in]  [E_l] INT32 or INT64, as epx_prepare returns them */
  const epx_tensor* offsets;        /**< [in]  [E_l + 1], dtype of counts; offsets[E_l] <= N */
  /** [in, optional] [N] real: *early* weighting. Row s of the output, its down_bias included, is multiplied by
   * recv_weights[s]; combine is then called without weights. */
  const epx_tensor* recv_weights;
  const epx_tensor* expert_out; /**< [out] [N, H] dtype of recv_tokens; only the counts[e] rows of each zone are written */
  /** [out, optional] [N, 2F] (gate, then up) with SWIGLU, else [N, F], dtype of recv_tokens: what epx_moe_ffn_bwd needs;
   * rows as in expert_out. */
  const epx_tensor* pre_act;
} epx_moe_ffn_args;

/** expert_out[s] = w_s * (down_e h(gate_e x_s, up_e x_s) + down_bias_e) for the rows s of each expert e. Pad rows and
 * rows that are not in use are neither read nor written. On CUDA products are summed in FLOAT32. What lies between the
 * kernels, pre_act and w_s * h for instance, is rounded to the dtype of recv_tokens.
 *
 * On CUDA with BFLOAT16, and H and F multiples of 8, the rows and weights of both calls must be aligned to 16 bytes.
 * These are all tensors but counts, offsets, recv_weights, biases and the gradients of these. A GPU of compute capability
 * 9.0 then multiplies on tensor cores, if the library was built with CUTLASS. Which kernels run depends on the dtype, H
 * and F alone (and on N, from 2^31 rows on). */
EPX_API epx_status epx_moe_ffn(const epx_moe_ffn_config* config, const epx_moe_ffn_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_ffn_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_args* args, size_t* bytes);

/** Arguments of epx_moe_ffn_bwd(). */
typedef struct epx_moe_ffn_bwd_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_moe_ffn_params* params;    /**< [in] */
  const epx_tensor* recv_tokens;       /**< [in]  [N, H], as given to epx_moe_ffn; so are the next three */
  const epx_tensor* counts;            /**< [in]  [E_l] */
  const epx_tensor* offsets;           /**< [in]  [E_l + 1] */
  const epx_tensor* recv_weights;      /**< [in, optional] [N] real */
  const epx_tensor* pre_act;           /**< [in]  as epx_moe_ffn wrote it */
  const epx_tensor* grad_expert_out;   /**< [in]  [N, H] dtype of recv_tokens */
  const epx_tensor* grad_recv;         /**< [out] [N, H] dtype of recv_tokens; rows as in expert_out */
  const epx_tensor* grad_recv_weights; /**< [out, optional] [N] real; only with recv_weights; rows as in expert_out */
  /** [out] of any of params' tensors, stacked or separate whatever params are. Those that are NULL are not wanted; NULL:
   * none is.
   */
  const epx_moe_ffn_params* grads;
  /** 1: adds to grads (CUDA: all FLOAT32); 0: overwrites them, with zero for an expert without rows. */
  int32_t accumulate;
} epx_moe_ffn_bwd_args;

/** Gradients of parameters are summed in an order that depends only on a row's place in its zone: in row order, except on
 * tensor cores. So they have the same bits for every number of ranks. On CUDA grad_recv is rounded twice where gate and
 * up are separate tensors, since their two products are added in its dtype. */
EPX_API epx_status epx_moe_ffn_bwd(const epx_moe_ffn_config* config, const epx_moe_ffn_bwd_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_ffn_bwd_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_bwd_args* args,
                                             size_t* bytes);

/** @} */

/** @defgroup quantise Quantisers
 *
 * Rows and weights to FLOAT8_E4M3, for products whose inner index has a scale for each 128 elements: the group "Row formats"
 * of epx.h defines scales, codes, and what becomes of elements that are not finite, with "column" or "block" in the place of
 * "row". The scaling is BLOCK128 or BLOCK128_POW2; weights may be in MX and NV, too. A `format` says scaling, dtype and
 * amax_floor; its tensors are NULL.
 *
 * The same numbers have the same codes and scales on the host and on CUDA. On CUDA rows, weights, pre_act, grad_h and codes are
 * aligned to 16 bytes. Only epx_moe_quantise_swiglu_bwd needs a workspace. H, F, R and C are multiples of 128 and not 0:
 * products in FP8 take no other.
 * @{ */

/** Arguments of epx_moe_quantise_rows(). */
typedef struct epx_moe_quantise_rows_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_row_format* format; /**< [in] scaling and amax_floor, and in scale_layout the layout of row_scales */
  const epx_tensor* rows;       /**< [in] [N, H] FLOAT32, FLOAT16, BFLOAT16, or FLOAT8_E4M3 with `scales` */
  const epx_tensor* scales; /**< [in] FLOAT32 in scale_layout: a scale for each 128 elements of a row, iff rows are E4M3 */
  epx_scale_layout scale_layout; /**< of scales: EPX_SCALES_ROWS (0) or EPX_SCALES_COLUMNS; 0 without scales */
  int32_t reserved0;             /**< 0 */
  /** [in, optional] [E_l] INT32 or INT64, as epx_prepare returns them. Given with offsets or not at all; without them all
   * rows are one zone, and E_l below is 1. */
  const epx_tensor* counts;
  const epx_tensor* offsets;   /**< [in, optional] [E_l + 1], dtype of counts; offsets[E_l] <= N */
  const epx_tensor* row_codes; /**< [out, optional] [N, H] FLOAT8_E4M3 */
  /** [out] Iff row_codes is given, in format->scale_layout, S = H / 128. FLOAT32; with BLOCK128_POW2 FLOAT32 or
   * FLOAT8_E8M0, or INT32 for PACKED. For TILES zones begin at multiples of 128, which is not checked. */
  const epx_tensor* row_scales;
  const epx_tensor* column_codes;  /**< [out, optional] [H, N] FLOAT8_E4M3: the codes of row n are column n */
  const epx_tensor* column_scales; /**< [out] Iff column_codes is given: [N / 128 + E_l, H] FLOAT32, N / 128 rounded down */
} epx_moe_quantise_rows_args;

/** Quantises the rows of each zone, along rows (1 x 128, as forward and dgrad multiply them) or along columns (128 x 1,
 * transposed, as wgrad multiplies them), or both from one read of `rows`.
 *
 * The blocks of a column begin at the first row of a zone; the last one of a zone may be short. Block b of zone e has the
 * scales column_scales[offsets[e] / 128 + e + b, :], with the quotient rounded down. So they are found without the counts
 * of other zones, and those of a zone are one contiguous matrix [blocks, H]. CUTLASS's blockwise grouped products read such
 * a matrix of an operand whose outer index is H ("MN-major", scale granularity 1 x 128). The codes of a zone are
 * the matrix [H, counts[e]] at column_codes[:, offsets[e]], K-major with a leading dimension of N. TMA reads it where N and
 * the offsets are multiples of 16. The call itself takes any N and any alignment of zones; it is faster where both are
 * multiples of 8.
 *
 * E4M3 rows are dequantised as q * s in float32, and that number is quantised again, with no other rounding between. So
 * columns that are made of rows in FP8 are a second rounding.
 *
 * The pad rows of a zone that complete its last block of 128 rows become zero bytes, in codes and in row_scales, as far as
 * the zone has them. So where zones begin at multiples of 128, a product may read whole blocks; elsewhere it takes counts[e]
 * for the end. What else is no row of a zone is neither read nor written: further pads, rows from offsets[E_l] on, and rows
 * of column_scales that are no block's. Where row_scales has places beyond S (PACKED, TILES), those of rows that are written become zero. */
EPX_API epx_status epx_moe_quantise_rows(const epx_moe_quantise_rows_args* args);

/** Arguments of epx_moe_quantise_weights(). */
typedef struct epx_moe_quantise_weights_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  /** [in] scaling, dtype and amax_floor. scale_layout is EPX_SCALES_ROWS (0); with MX and NV it may be EPX_SCALES_TILES. */
  const epx_row_format* format;
  const epx_tensor* weights; /**< [in] [E_l, R, C] FLOAT32, FLOAT16 or BFLOAT16 */
  const epx_tensor* codes;   /**< [out, optional] [E_l, R, C] dtype of the format */
  /** [out] Iff codes is given. BLOCK128 and BLOCK128_POW2: [E_l, R / 128, C / 128] FLOAT32. MX: [E_l, R, C / 32]
   * FLOAT8_E8M0, in tiles [E_l, R / 128, C / 128, 512]. NV: [E_l, R, C / 16] FLOAT8_E4M3, in tiles
   * [E_l, R / 128, C / 64, 512]. */
  const epx_tensor* scales;
  const epx_tensor* transposed_codes;      /**< [out, optional] [E_l, C, R] dtype of the format */
  const epx_tensor* transposed_scales;     /**< [out] Iff transposed_codes is given: as scales, with R and C exchanged */
  const epx_tensor* row_scales;            /**< [out] With NV iff codes is given: [E_l, R] FLOAT32 */
  const epx_tensor* transposed_row_scales; /**< [out] With NV iff transposed_codes is given: [E_l, C] FLOAT32 */
} epx_moe_quantise_weights_args;

/** Quantises weights. BLOCK128 and BLOCK128_POW2 have one scale for each block of 128 x 128, of which amax is taken. The
 * transposed codes and scales are the others transposed, bit for bit, from one read of the weights. Products in FP8 on GPUs
 * of compute capability 9.0 take both operands K-major: forward multiplies by `codes`, dgrad by `transposed_codes`. The
 * caller holds both, E_l * R * C bytes each, and their scales, 4 bytes for 16384 elements. Together they take what the
 * weights take in BFLOAT16.
 *
 * MX and NV are for weights that go elsewhere, to servers whose GPUs multiply them. Each row of C elements has the codes
 * and scales of a row that epx_dispatch quantises. So has each row of the transposed weights, made of the weights
 * themselves: its blocks hold other elements, and its codes are not the others transposed. */
EPX_API epx_status epx_moe_quantise_weights(const epx_moe_quantise_weights_args* args);

/** Arguments of epx_moe_quantise_swiglu(). */
typedef struct epx_moe_quantise_swiglu_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_row_format* format;    /**< [in] as of epx_moe_quantise_rows */
  const epx_tensor* pre_act;       /**< [in] [N, 2F] (gate, then up) FLOAT32 or BFLOAT16 */
  const epx_tensor* recv_weights;  /**< [in, optional] [N] FLOAT32: early weighting; absent: all 1 */
  const epx_tensor* counts;        /**< [in, optional] as of epx_moe_quantise_rows, and so are the others below */
  const epx_tensor* offsets;       /**< [in, optional] [E_l + 1] */
  const epx_tensor* row_codes;     /**< [out, optional] [N, F] */
  const epx_tensor* row_scales;    /**< [out] iff row_codes is given */
  const epx_tensor* column_codes;  /**< [out, optional] [F, N] */
  const epx_tensor* column_scales; /**< [out] iff column_codes is given: [N / 128 + E_l, F] */
} epx_moe_quantise_swiglu_args;

/** Quantises w_s * h, where h = silu(gate) * up, as epx_moe_quantise_rows quantises rows: what `down` multiplies. It is
 * computed in float32, and not rounded to the dtype of pre_act. Its exponential, and so a code, may differ between processors. */
EPX_API epx_status epx_moe_quantise_swiglu(const epx_moe_quantise_swiglu_args* args);

/** Arguments of epx_moe_quantise_swiglu_bwd(). */
typedef struct epx_moe_quantise_swiglu_bwd_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_row_format* format;      /**< [in] as of epx_moe_quantise_rows; gradients want an amax_floor of 0 */
  const epx_tensor* pre_act;         /**< [in] [N, 2F] FLOAT32 or BFLOAT16, as given to epx_moe_quantise_swiglu */
  const epx_tensor* grad_h;          /**< [in] [N, F] dtype of pre_act: the gradient of w_s * h */
  const epx_tensor* recv_weights;    /**< [in, optional] [N] FLOAT32, as given to epx_moe_quantise_swiglu */
  const epx_tensor* counts;          /**< [in, optional] as of epx_moe_quantise_rows, and so are codes and scales below */
  const epx_tensor* offsets;         /**< [in, optional] [E_l + 1] */
  const epx_tensor* row_codes;       /**< [out, optional] [N, 2F]: of the gradient of pre_act, for dgrad */
  const epx_tensor* row_scales;      /**< [out] iff row_codes is given */
  const epx_tensor* column_codes;    /**< [out, optional] [2F, N]: of the same gradient, for wgrad of gate and up */
  const epx_tensor* column_scales;   /**< [out] iff column_codes is given: [N / 128 + E_l, 2F] */
  const epx_tensor* h_column_codes;  /**< [out, optional] [F, N]: of w_s * h, for wgrad of down */
  const epx_tensor* h_column_scales; /**< [out] iff h_column_codes is given: [N / 128 + E_l, F] */
  /** [out, optional] [N] FLOAT32, only with recv_weights: the sum of grad_h * h over F, in a fixed order. Only rows of zones
   * are written. */
  const epx_tensor* grad_recv_weights;
} epx_moe_quantise_swiglu_bwd_args;

/** Gradients through w_s * silu(gate) * up, computed in float32 and quantised without another rounding. One read of pre_act
 * and grad_h gives all outputs, of which one at least is wanted. w_s * h is computed again: its columns have the codes that
 * epx_moe_quantise_swiglu gives for the same format, so those of a forward with the same amax_floor. As there, the exponential
 * may differ between processors. */
EPX_API epx_status epx_moe_quantise_swiglu_bwd(const epx_moe_quantise_swiglu_bwd_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_quantise_swiglu_bwd_workspace(const epx_moe_quantise_swiglu_bwd_args* args, size_t* bytes);

/** @} */

/** @defgroup ffn_fp8 Grouped FFN in FP8
 *
 * The grouped FFN with SWIGLU whose products multiply FLOAT8_E4M3, as groups "Row formats" of epx.h and "Quantisers" define
 * it: a scale for each 128 elements of a row, one for each 128 x 128 of a weight. H and F are multiples of 128, and N of
 * 16. There are no biases. What is not quantised is *wide*: FLOAT32 on the host, BFLOAT16 on CUDA.
 *
 * The codes of each block of 128 elements are multiplied and summed by themselves; the sum times both scales is added to
 * that of the blocks before it, in FLOAT32. On the host the dequantised elements are multiplied, in FLOAT32. The rows
 * between the products, and the gradients of pre_act, are quantised with BLOCK128 and an amax_floor of 0. They are computed
 * and quantised in FLOAT32 (epx_moe_quantise_swiglu); with EPX_MOE_RECIPE_FP8_ACTIVATIONS the gradients are rounded to wide
 * before.
 *
 * On CUDA all tensors but counts, offsets, recv_weights and grad_recv_weights are aligned to 16 bytes. A GPU of compute
 * capability 9.0 multiplies on tensor cores, if the library was built with CUTLASS.
 * @{ */

/** Which of the experts' products multiply FLOAT8_E4M3. */
typedef enum epx_moe_recipe EPX_ENUM_INT32 {
  EPX_MOE_RECIPE_WIDE = 0, /**< none */
  /** Those of the forward, and the gradients of rows. The gradients of weights are products of wide rows: of those received
   * and of the gradients of expert_out, both dequantised, and of the inner ones, which are not quantised for it. */
  EPX_MOE_RECIPE_FP8_ACTIVATIONS = 1,
  /** All. The gradients of weights multiply columns of the zones. Those of rows that were received in FP8 are quantised a
   * second time (epx_moe_quantise_rows). Zones begin at multiples of 16, as with an alignment of 16: see
   * EPX_MOE_ERROR_ZONE_ALIGNMENT. */
  EPX_MOE_RECIPE_FP8 = 2
} epx_moe_recipe;

/** Weights of this rank's experts, gate and up stacked, as epx_moe_quantise_params() makes them of gate_up_weight and
 * down_weight. They are made once for each step of the optimizer, from masters in FLOAT32, FLOAT16 or
 * BFLOAT16. A forward looks at the first four, a backward at the others. That of a block with `recompute` looks at the
 * first two, too. */
typedef struct epx_moe_fp8_params {
  size_t struct_size;
  const epx_tensor* gate_up_codes;             /**< [E_l, 2F, H] FLOAT8_E4M3, as all codes */
  const epx_tensor* gate_up_scales;            /**< [E_l, 2F / 128, H / 128] FLOAT32, as all scales */
  const epx_tensor* down_codes;                /**< [E_l, H, F] */
  const epx_tensor* down_scales;               /**< [E_l, H / 128, F / 128] */
  const epx_tensor* gate_up_transposed_codes;  /**< [E_l, H, 2F] */
  const epx_tensor* gate_up_transposed_scales; /**< [E_l, H / 128, 2F / 128] */
  const epx_tensor* down_transposed_codes;     /**< [E_l, F, H] */
  const epx_tensor* down_transposed_scales;    /**< [E_l, F / 128, H / 128] */
} epx_moe_fp8_params;

/** Arguments of epx_moe_quantise_params(). */
typedef struct epx_moe_quantise_params_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_row_format* format;     /**< [in] as of epx_moe_quantise_weights */
  const epx_tensor* gate_up_weight; /**< [in] [E_l, 2F, H] (gate, then up) FLOAT32, FLOAT16 or BFLOAT16 */
  const epx_tensor* down_weight;    /**< [in] [E_l, H, F] likewise; the two dtypes may differ */
  /** [out] Tensors that are NULL are not wanted: codes and their scales are given both or neither, and of each weight one
   * orientation at least is. */
  const epx_moe_fp8_params* fp8_params;
} epx_moe_quantise_params_args;

/** What two calls of epx_moe_quantise_weights() write, in one. On CUDA weights and codes are aligned to 16 bytes.
 * epx_moe_ffn_fp8() wants that of the scales, too. */
EPX_API epx_status epx_moe_quantise_params(const epx_moe_quantise_params_args* args);

/** Arguments of epx_moe_transpose_params(). */
typedef struct epx_moe_transpose_params_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  /** [out] Transposed codes and scales: of each weight both or neither, of one weight at least. [in] The codes and scales
   * of the weights whose transposes are given. The other tensors are not looked at. */
  const epx_moe_fp8_params* fp8_params;
} epx_moe_transpose_params_args;

/** Writes the transposed codes and scales of weights from their codes and scales, with the bits that
 * epx_moe_quantise_params() gives them: a block of 128 x 128 has the same codes and one scale either way. So ranks that have
 * shards of weights can quantise them, gather codes and scales, and transpose these without the wide weights. On CUDA codes
 * are aligned to 16 bytes. */
EPX_API epx_status epx_moe_transpose_params(const epx_moe_transpose_params_args* args);

/** Arguments of epx_moe_ffn_fp8(). */
typedef struct epx_moe_ffn_fp8_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_moe_fp8_params* params; /**< [in] */
  const epx_tensor* recv_tokens;    /**< [in]  [N, H] FLOAT8_E4M3, as epx_dispatch writes them with BLOCK128 */
  const epx_tensor* recv_scales;    /**< [in]  [N, H / 128] FLOAT32: EPX_SCALES_ROWS */
  const epx_tensor* counts;         /**< [in]  [E_l] INT32 or INT64, as epx_prepare returns them */
  const epx_tensor* offsets;        /**< [in]  [E_l + 1], dtype of counts; offsets[E_l] <= N */
  const epx_tensor* recv_weights;   /**< [in, optional] [N] FLOAT32: early weighting, as in epx_moe_ffn */
  const epx_tensor* expert_out;     /**< [out] [N, H] wide; only the counts[e] rows of each zone are written */
  const epx_tensor* pre_act;        /**< [out, optional] [N, 2F] (gate, then up) wide: what epx_moe_ffn_fp8_bwd needs */
} epx_moe_ffn_fp8_args;

/** expert_out[s] = down_e (w_s * silu(gate_e x_s) * (up_e x_s)), as epx_moe_ffn computes it. */
EPX_API epx_status epx_moe_ffn_fp8(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_ffn_fp8_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_args* args,
                                             size_t* bytes);

/** Arguments of epx_moe_ffn_fp8_bwd(). */
typedef struct epx_moe_ffn_fp8_bwd_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;
  const epx_moe_fp8_params* params;    /**< [in] */
  const epx_tensor* recv_tokens;       /**< [in]  [N, H], as given to epx_moe_ffn_fp8; so are the next four */
  const epx_tensor* recv_scales;       /**< [in]  [N, H / 128] */
  const epx_tensor* counts;            /**< [in]  [E_l] */
  const epx_tensor* offsets;           /**< [in]  [E_l + 1] */
  const epx_tensor* recv_weights;      /**< [in, optional] [N] FLOAT32 */
  const epx_tensor* pre_act;           /**< [in]  [N, 2F] as epx_moe_ffn_fp8 wrote it */
  const epx_tensor* grad_expert_out;   /**< [in]  [N, H] FLOAT8_E4M3, as epx_combine_bwd writes them with BLOCK128 */
  const epx_tensor* grad_scales;       /**< [in]  [N, H / 128] FLOAT32: EPX_SCALES_ROWS */
  const epx_tensor* grad_recv;         /**< [out] [N, H] wide; rows as in expert_out */
  const epx_tensor* grad_recv_weights; /**< [out, optional] [N] FLOAT32; only with recv_weights; rows as in expert_out */
  const epx_moe_ffn_params* grads;     /**< [out] gate_up_weight and down_weight: FLOAT32 or wide; NULL: not wanted */
  int32_t accumulate;                  /**< as in epx_moe_ffn_bwd */
  epx_moe_recipe recipe;               /**< how grads are computed; not EPX_MOE_RECIPE_WIDE */
} epx_moe_ffn_fp8_bwd_args;

/** The gradients of epx_moe_ffn_fp8. They pass straight through its quantisers. */
EPX_API epx_status epx_moe_ffn_fp8_bwd(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_bwd_args* args);
/** The bytes of workspace that the call needs on CUDA; see epx_moe_router_bwd_workspace(). */
EPX_API epx_status epx_moe_ffn_fp8_bwd_workspace(const epx_moe_ffn_config* config, const epx_moe_ffn_fp8_bwd_args* args,
                                                 size_t* bytes);

/** @} */

/** @defgroup block Block
 *
 * router -> prepare -> dispatch -> FFN -> combine, forward and backward: one object per layer. Parameters are the
 * caller's. What has to be kept between a forward and its backward is a *flight*, in an arena that the blocks of a group
 * may share. An arena and its blocks are used by one thread at a time, as the group is.
 *
 * On a GPU calls of the blocks of an arena on different streams run in the order in which they were made. A call that a
 * capture keeps from being ordered is refused, as with the calls of a group (docs/api.md, "Streams and captures"). Calls
 * that are captured in a graph are left out of that order too. A captured forward counts as its flight's forward from the
 * capture on, but fills the flight when the graph is replayed. The caller orders the replays and the other calls of the
 * flight.
 * @{ */

/** An MoE layer. */
typedef struct epx_moe_block_s* epx_moe_block;

/** The memory of blocks: their flights, and what a call needs while it runs. */
typedef struct epx_moe_arena_s* epx_moe_arena;

/** Where a route's weight is applied. The results differ only by rounding. */
typedef enum epx_moe_weighting EPX_ENUM_INT32 {
  EPX_MOE_WEIGHT_LATE = 0, /**< in combine */
  EPX_MOE_WEIGHT_EARLY = 1 /**< in the FFN, before the down projection */
} epx_moe_weighting;

/** How rows come to their experts and back (docs/moe-layer.md, "Paths"). */
typedef enum epx_moe_path EPX_ENUM_INT32 {
  EPX_MOE_PATH_DISPATCH = 0, /**< epx_prepare, epx_dispatch, epx_combine: a row travels once to each rank of its experts */
  /** All ranks' tokens and routes come to every rank, which takes its experts' rows; partial sums of all tokens go home and
   * are added in rank order. The bits are DISPATCH's in a group of precision WIRE. For a top_k that reaches most ranks. */
  EPX_MOE_PATH_RING = 1,
  /** Each rank sorts its rows by expert, and epx_ragged_all_to_all carries them: a row travels once to each expert. The bits
   * are DISPATCH's in a group of precision EXACT. */
  EPX_MOE_PATH_RAGGED = 2
} epx_moe_path;

/** The parts of an MoE layer, and what it is created for. What it points to, the arena excepted, is copied and need not
 * outlive the call that it is passed to. Ranks of a group agree on every field, those of `router`, `ffn` and
 * `dispatch_format` too, except ffn->num_local_experts, max_tokens_per_rank and recompute. */
typedef struct epx_moe_block_config {
  size_t struct_size;                  /**< set by epx_moe_block_config_init */
  const epx_moe_router_config* router; /**< required; num_experts must be the group's */
  const epx_moe_ffn_config* ffn;       /**< required; num_local_experts is not used: the group has it */
  /** Shared memory, of the same group, into which the block fits (epx_moe_arena_config); must outlive the block. NULL:
   * the block has its own. */
  epx_moe_arena arena;
  /** Of the tokens, the parameters and the experts' products. FLOAT32 (default); with a group on GPUs also BFLOAT16 or
   * FLOAT16, without a group also FLOAT64. */
  epx_dtype dtype;
  epx_moe_weighting weighting; /**< default LATE */
  int32_t alignment;           /**< of the layer, rows; default 1 */
  int32_t max_in_flight;       /**< the flights of the block's own arena, >= 1; with a shared one: ignored. Default 1 */
  int32_t max_tokens_per_rank; /**< without a group: the largest T, required; with one: ignored, the group has it */
  /** 1: a flight does not keep pre_act; the backward computes it again from the rows received. The results have the same
   * bits, and ranks may differ in it. Default 0. */
  int32_t recompute;
  /** [optional] The format in which the forward's rows travel to their experts (epx.h, "Row formats", way c): they arrive
   * in `dtype`, dequantised, and a rank's rows for itself are quantised too. NULL: they travel as they are. Its tensors
   * are NULL, its scale_layout ROWS. dtype is not FLOAT64; H is even with NV. All other rows stay wide: those of combine
   * and of the backward, whose gradients pass straight through the quantiser. */
  const epx_row_format* dispatch_format;
  /** Which products of the experts are in FP8 (group "Grouped FFN in FP8"). Default WIDE. In the others rows travel to
   * their experts in FP8 and arrive so: tokens with BLOCK128 and its default floor, the gradients of combine with a floor
   * of 0. What travels home is in `dtype`. The activation is SWIGLU, the weighting EARLY, H and F are multiples of 128,
   * dtype is FLOAT32 on the host and BFLOAT16 on GPUs, and dispatch_format is NULL. With FP8 `alignment` is a multiple of
   * 16. */
  epx_moe_recipe recipe;
  /** How rows come to their experts and back. Default DISPATCH. The others take weighting EARLY, recipe WIDE, no
   * dispatch_format, a group of one node, and a receive capacity that drops no route. Without
   * a group all are the same. */
  epx_moe_path path;
  int64_t reserved[4]; /**< 0 */
} epx_moe_block_config;

/** Fills in defaults. */
EPX_API epx_status epx_moe_block_config_init(epx_moe_block_config* config, size_t struct_size);

/** What an arena is created for. Ranks agree on every field, and on those of `block` as for a block.
 *
 * Another block of the group fits into the arena where it needs no more than `block` of each of four kinds of memory, in
 * bytes. The arena's max_rows takes the place of R there. The four kinds:
 * - Rows that peers reach for a flight: recv_tokens, recv_weights and, with EPX_MOE_WEIGHT_LATE, expert_out. With a recipe
 * in
 *   FP8 recv_tokens take a byte for an element, and 4 bytes for 128 elements.
 * - Rows that peers reach for all flights: the gradients of these three, whatever the weighting. That of expert_out takes
 * what
 *   recv_tokens take.
 * - Memory for a flight: handle memory, the router's results and logits, and the FFN's inner rows unless `recompute` is 1.
 * - Workspace: the gradient of the weights, the FFN's inner rows if `recompute` is 1, and on a GPU the workspace of the
 *   calls.
 *
 * The FFN's inner rows have 2F elements with SWIGLU, else F. So dtype, H, F, K, activation, weighting, recompute and recipe
 * decide. Score, alignment and the like do not matter, except that a load-balance loss needs a little workspace on a GPU.
 * Kinds do not stand in for each other: an arena for a block that recomputes takes none that does not, nor the other way
 * round. */
typedef struct epx_moe_arena_config {
  size_t struct_size;                /**< set by epx_moe_arena_config_init */
  const epx_moe_block_config* block; /**< required: a block that fits; its arena and max_in_flight are ignored */
  /** Forwards, of all blocks together, whose backward is still to come; >= 1; default 1. */
  int32_t num_flights;
  int32_t reserved0; /**< 0 */
  /** The most rows that a rank receives in a call, at most the group's R; 0 (default): R. A route whose slot lies beyond is
   * dropped. With a recipe in FP8 it is rounded up to a multiple of 16. The group's status reports it in each operation
   * that moves rows (EPX_EVENT_TOO_FEW_ROWS). Without a group: 0. */
  int64_t max_rows;
  int64_t reserved[4]; /**< 0 */
} epx_moe_arena_config;

/** Fills in defaults. */
EPX_API epx_status epx_moe_arena_config_init(epx_moe_arena_config* config, size_t struct_size);

/** Creates an arena. Collective over the group, which must outlive it; with group = NULL for local blocks. The rows that
 * peers reach lie in memory from epx_mem_alloc, the rest in memory of this process or of the group's GPU. Errors: as
 * epx_moe_block_create without an arena. */
EPX_API epx_status epx_moe_arena_create(epx_group group, const epx_moe_arena_config* config, epx_moe_arena* arena);

/** Frees the arena, also where it returns an error. The blocks that use it are destroyed before. Collective over the
 * arena's group, if it has one that has not failed. Accepts NULL. Errors: those of epx_mem_free. */
EPX_API epx_status epx_moe_arena_destroy(epx_moe_arena arena);

/** As epx_moe_arena_destroy, but local: the memory that peers reach stays the group's, which frees it when it is
 * destroyed. One rank may call it alone, also after epx_group_destroy, when no call of the arena is under way on the
 * host. It is for destructors, for finalizers of languages that collect garbage, and for programs that end by a failure.
 * On a GPU it waits for all work on the device. Accepts NULL. */
EPX_API void epx_moe_arena_destroy_local(epx_moe_arena arena);

/** The bytes that an arena has. */
typedef struct epx_moe_arena_info {
  size_t struct_size;      /**< set by the caller */
  int32_t num_flights;     /**< as created */
  int32_t reserved0;       /**< 0 */
  int64_t max_rows;        /**< as created, or R */
  int64_t window_bytes;    /**< the part of total_bytes that is memory from epx_mem_alloc */
  int64_t flight_bytes;    /**< of one flight, in both kinds of memory */
  int64_t workspace_bytes; /**< needed while a call runs, and shared by all flights */
  int64_t total_bytes;     /**< num_flights * flight_bytes + workspace_bytes */
} epx_moe_arena_info;

/** Tells the bytes of an arena. Local. */
EPX_API epx_status epx_moe_arena_query(epx_moe_arena arena, epx_moe_arena_info* info);

/** Creates the layer. With group = NULL it is local: all experts are on this rank, nothing is exchanged, it computes on
 * the host, and the results have the bits of a group with EPX_COMBINE_EXACT. Otherwise the group must offer the dtype and
 * outlive the block. With the host transport the block computes on the host. Else it computes on the group's GPU, which
 * must be the calling thread's current device in each call. Without an arena the block gets one of its own. Collective
 * over the group, with an arena too, since the ranks compare their options (by epx_group_all_gather).
 *
 * Errors on this rank alone, before the group makes a call: INVALID_ARGUMENT (a config is NULL or has another struct_size).
 *
 * Errors on all ranks alike, and the group lives on; what one rank alone finds fails on the others with its number:
 * - MISMATCH: an option differs between ranks. The message names it, two ranks and their values.
 * - INVALID_ARGUMENT: the config; it does not fit the group or the arena.
 * - UNSUPPORTED: a group on GPUs in a build without CUDA.
 * - SYSTEM.
 * - OUT_OF_MEMORY of memory that peers reach.
 *
 * OUT_OF_MEMORY of this process or GPU: the group is aborted, since its other ranks may have the block already. Sticky
 * errors: those of epx_mem_alloc. */
EPX_API epx_status epx_moe_block_create(epx_group group, const epx_moe_block_config* config, epx_moe_block* block);

/** Frees the block, also where it returns an error; before its arena and its group, and on a GPU after its calls have
 * ended there. Collective over the group if it has an arena of its own, unless the group has failed. Accepts NULL.
 * Errors: those of epx_mem_free. */
EPX_API epx_status epx_moe_block_destroy(epx_moe_block block);

/** As epx_moe_block_destroy, but local, as epx_moe_arena_destroy_local is. A block whose arena is shared goes before the
 * arena. Accepts NULL. */
EPX_API void epx_moe_block_destroy_local(epx_moe_block block);

/** Arguments of epx_moe_block_fwd(). Tensors are memory of the host, or of the group's GPU where it has one. */
typedef struct epx_moe_block_fwd_args {
  size_t struct_size;
  /** Required iff the block computes on a GPU. Its workspace is not used: the arena has one. Where cuda->errors is NULL,
   * bad data that the device finds is recorded in the block's own record: epx_moe_block_errors(). */
  const epx_moe_cuda* cuda;
  int32_t flight; /**< 0..num_flights of the arena - 1: where to keep what backward needs; overwrites what was there */
  const epx_tensor* tokens; /**< [in]  [T, H] dtype of the block */
  const epx_tensor* logits; /**< [in]  [T, E] real (CUDA: or BFLOAT16): the gate's, router_weight * token for instance */
  const epx_tensor* selection_bias; /**< [in, optional] [E] real */
  const epx_tensor* token_mask;     /**< [in, optional] [T] UINT8: 0 masks the token; its output is 0 */
  /** [in] as of epx_moe_ffn, with the block's dtype for recv_tokens; NULL with a recipe in FP8 */
  const epx_moe_ffn_params* params;
  const epx_moe_fp8_params* fp8_params; /**< [in] iff the block's recipe is in FP8 */
  const epx_tensor* out;                /**< [out] [T, H] dtype of the block */
  const epx_tensor* topk_idx;           /**< [out, optional] [T, K] INT32 or INT64 */
  const epx_tensor* topk_weights;       /**< [out, optional] [T, K] real */
  const epx_tensor* global_counts;      /**< [out, optional] [P, E] INT32 or INT64 */
  const epx_tensor* info; /**< [out, optional] [3] INT64, as of epx_moe_router: bad tokens are treated as masked ones */
} epx_moe_block_fwd_args;

/** Collective. Enqueued on cuda->stream, where the block computes on a GPU: it allocates no memory there, does not wait
 * for the device, and can be captured in a CUDA graph. Errors: INVALID_ARGUMENT and UNSUPPORTED: the call can be made
 * again, and the flight is as before; but when the group refuses its part of the call, the flight has no forward any
 * more. Those of the five operations of epx.h. SYSTEM and OUT_OF_MEMORY: the group is aborted, since its other ranks
 * would wait for this one, unless the call was being captured. epx_group_status reports routes that the group drops. */
EPX_API epx_status epx_moe_block_fwd(epx_moe_block block, const epx_moe_block_fwd_args* args);

/** Arguments of epx_moe_block_bwd(). */
typedef struct epx_moe_block_bwd_args {
  size_t struct_size;
  const epx_moe_cuda* cuda;             /**< as in the forward */
  int32_t flight;                       /**< of a forward of this block */
  const epx_moe_ffn_params* params;     /**< [in] as in the forward */
  const epx_moe_fp8_params* fp8_params; /**< [in] likewise */
  const epx_tensor* grad_out;           /**< [in]  [T, H] dtype of the block */
  double aux_loss_grad;                 /**< as in epx_moe_router_bwd */
  /** [out] [T, H] dtype of the block: the gradient through the experts only; the caller adds the gradient through the
   * logits. */
  const epx_tensor* grad_tokens;
  const epx_tensor* grad_logits;   /**< [out] [T, E] dtype of the forward's logits */
  const epx_moe_ffn_params* grads; /**< [out] as in epx_moe_ffn_bwd, or epx_moe_ffn_fp8_bwd */
  int32_t accumulate;              /**< as in epx_moe_ffn_bwd */
} epx_moe_block_bwd_args;

/** Collective. Needs a forward of this block in the same flight; may be repeated. Errors: as epx_moe_block_fwd. */
EPX_API epx_status epx_moe_block_bwd(epx_moe_block block, const epx_moe_block_bwd_args* args);

/** Reads the block's own record of the bad data that its calls have found on the GPU, as epx_moe_errors_read does. Errors:
 * INVALID_ARGUMENT, also for a block that computes on the host. */
EPX_API epx_status epx_moe_block_errors(epx_moe_block block, epx_moe_errors_report* report);

/** @} */

#ifdef __cplusplus
}
#endif

#endif /* EPX_EPX_MOE_H_ */
