// SPDX-License-Identifier: Apache-2.0
// The text that ep_bench --help prints below its options.
#pragma once

namespace epx::bench {

inline constexpr const char* kFooter = R"(Figures
  A time is that of one call, in microseconds, on the slowest rank of an iteration; all ranks start together. 'slowest' is
  the rank that was that most often. Timed are prepare (counts and offsets only), dispatch with weights, combine with
  weights, combine_bwd with weights and their gradients, and dispatch_bwd with weights; on nccl also combine_bwd-nograd
  (with weights, without their gradients), prepare, dispatch and combine in a row as one, prepare_dispatch, and
  prepare_dispatch and combine in a row as one. With --layout rank-major there is no prepare, combine and combine_bwd have
  no weights, a row is one of a (token, rank) instead of one of a route, and on nccl dispatch and combine in a row are timed
  as one.
  On nccl a time is that between two CUDA events around the call on its stream, or with --graph around its replay: from
  before its first kernel to the last byte in place. Before it comes a barrier of all ranks' streams; the whole iteration
  is enqueued before any of it runs, so that the host's speed is in no time.
  A row is --hidden elements of --dtype; 1 GB is 1e9 bytes; rows are means over the ranks, and times are medians. With
  --row-format or --wire-format, rows of dispatch have other bytes where they are read, on the wire and where they land,
  and with --sum-format partial sums have other bytes on the wire, scales included (a line above the table says how many).
  logical GB/s and the memcpy count those that land, wire GB/s and the wire bound those on the wire, the HBM bound all
  three. Scales of fp8-block128-pow2 are fp32, but E8M0 in packed ones, in tiles and with --wire-format.
  logical GB/s   rows that a rank receives in dispatch (combine, dispatch_bwd: sends back) x row bytes / time
  wire GB/s      rows that must reach another rank x row bytes / time: one per (token, remote rank), and for the combine
                 and dispatch_bwd of --combine-precision exact one per remote route
  memcpy ratio   host transport: (rows that the operation must write x row bytes / time) / (bytes/s of a plain memcpy of as
                 many rows of the operation's input, by all ranks at once, timed beside the operation in the same
                 iteration, from the first rank's start to the last rank's end). dispatch and combine_bwd write one row per
                 route, their memcpy goes to scattered places; combine and dispatch_bwd write one row per (token, expert
                 rank), with exact one per route, and one per token, and their memcpy comes from scattered places
  floor us       --floor: the speed-of-light bound, the larger of two times, measured after the iterations by all ranks
                 at once, with the same input sets, barrier and events; each is the median of 24 runs on the slowest
                 rank, and the best of several kernels. Wire bound: each row is read once and stored once to each
                 distinct rank that it must reach, the own one too (dispatch and combine_bwd: one per (token, expert
                 rank); combine and dispatch_bwd: the same back, with exact one per route), by 16, 32, 64, 96, 128 and
                 as many blocks as the GPU has SMs, with plain and with bulk stores. HBM bound: as many rows read and
                 written locally as the operation must, each once, by all SMs, with plain and with bulk stores, reads
                 among the writes and after them:
                 dispatch reads the tokens and what arrived for several slots, and writes the rows in use (with --pads
                 untouched without their pads); combine_bwd reads the tokens, what arrived and (with gradients)
                 expert_out, and writes what arrives and the rows in use; combine and dispatch_bwd read their slots and
                 what came back, and write what comes back and the tokens. Rank-major: dispatch and combine_bwd read the
                 tokens and write their rows, own ones too. With --wire-format dispatch also writes and reads what arrived.
                 With --num-comm-sms the bound on no more SMs than that is printed beside it, and the ratio to it
                 Several nodes: the time that NCCL alone needs, for one group of ncclSend and ncclRecv between all rail peers,
                 for the distinct rows that must cross between nodes, also where a call sends more ('rails' above the table
                 has the bytes of both): dispatch and combine_bwd one row for each (token, other node), combine and
                 dispatch_bwd the same with node, with wire one for each (token, rank of another node), with exact one for
                 each route there. Calls made one by one are then enqueued while the stream runs, since they may wait on the
                 host, which is in their times
  ratio          --floor: median time / speed-of-light bound
  native/epx     --native, a table of its own: median time of the native call / median time of the line that it is compared
                 with, in the same run, with the same input sets, iterations, barrier and events. The native dispatch sorts
                 its routes by expert, gathers all ranks' counts by ncclAllGather, copies them to the host, which waits for
                 them once, packs one row per route, sends the rows in one group of ncclSend and ncclRecv between all ranks,
                 the own one too, and permutes what arrives into expert-major order. It is compared with dispatch, and with
                 prepare_dispatch, which begins with the counts too. dispatch-nocounts has the rows alone, and exchange
                 their ncclSend and ncclRecv alone, beside epx_ragged_all_to_all of the same rows. The native combine
                 goes the way back, and sums each token's rows in fp32 with their weights. Sorts and permutations are those
                 of libepx_moe, and the communicator has NCCL's defaults. In favour of the native way, weights do not travel,
                 and calls that do not wait on the host are enqueued while the stream is blocked. It is never replayed from a
                 graph. --verify compares it with the serial reference. --block has the same rows in a whole layer
  wrong          elements that differ from the serial reference, all ranks together (--verify)
  With --block the router selects the routing, the same for the exchange, its floor and the block, and a second table has
  the whole block of libepx_moe, the pieces of it that are no exchange, and beside it on nccl the same layer on collectives
  only (native: counts to the host, ncclSend and ncclRecv of permuted rows, the same grouped FFN), and the dense bound: one
  cuBLAS product for each grouped one, of T * K rows. fwd+bwd writes the experts' gradients too, in --dtype. Times are those
  between events after a barrier of the streams, as above; whole layers (block, native) are enqueued while the stream runs,
  so that the host's work is in them where the GPU waits for it. --recipe adds a block whose experts are in FP8 (block-fp8),
  and the time of quantising its weights, which is in no other line. --path adds one whose rows take another path (block-ring).
  --gather adds what FSDP over all ranks costs before a layer: 'gather' brings the expert weights of another layer of this
  size, of which each rank keeps an equal part, to all ranks: by NCCL's copy engines, or with --gather-sms on so many SMs by
  epx_ragged_all_to_all. 'gather-fp8' brings codes and scales. They are timed alone, and on a stream of their own beside
  forward and backward of each block: 'block fwd+bwd + gather' ends when both have. Below the table stand the bytes that a
  rank receives, and by how much the gather makes the step longer. On the host nothing runs beside a call: the gather comes
  first. --verify compares what was gathered beside a block, bit for bit.
  --verify compares their outputs with the block's.
  TFLOP/s        of a rank: (forward 6, forward and backward 18) x T x K x H x F / time
  paused us      --pause-ms: the median of a quarter of the iterations, 5 at least, each after a pause of all ranks
  iqr us         the distance between the quartiles of the times that 'median us' is of
  dense us       the dense bound of the same products, in the same run
  wire us        --floor: the sum of the wire bounds of the operations that the line contains
  ratio          median / (dense us + wire us); max ratio: median / the larger of the two
How often
  With --iters the iterations are so many. Without it a point stops by noise: it warms up until the medians of two batches of
  iterations agree, and measures until the 95 % interval of each line's median lies within --noise of it, or until the
  iterations have taken --budget for each line. All lines of a point have as many iterations. --native and --block have no
  such rule: they take 20 iterations, or --iters.
Sweeps
  Lists of --tokens, --layout, --routing and --num-comm-sms are measured in one run: every combination is a point with a group of
  its own. The table then has a row for each point and line, 'noise' is half of the interval in percent of the median, and
  'state' says what to look at: noisy (the interval is wider than --noise), throttled (samples during which a GPU's clocks were
  held down, as NVML tells), outliers (samples more than 3 interquartile ranges beyond the quartiles). None is left out of the
  median. A point that fails is marked, and the next one is measured. The file of --json is written after each point: what ends
  a run early, a signal or a rank that dies, leaves the finished points in it, with status 'partial'.
Of an option that is repeated, the last counts.
Exit status: 0; 1 when a call failed or a result is wrong; 2 when the command line is; 128 + the signal's number after SIGINT or
SIGTERM.)";

} // namespace epx::bench
