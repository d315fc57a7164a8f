#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the C snippets of docs/row-formats.md as they stand, on one rank: dispatch, whose codes and scales it compares, and
combine, whose sums it compares."""
import subprocess
import sys
import tempfile

import c_page

PROGRAM = """#include <epx/epx.h>
#include <stdio.h>
#include <stdlib.h>
static void check(epx_status status) {{
  if (status == EPX_SUCCESS) return;
  fprintf(stderr, "%s\\n", epx_last_error());
  exit(1);
}}
enum {{ N = 2, H = 128 }};
int main(void) {{
  epx_bootstrap bootstrap = {{0}};
  check(epx_bootstrap_file("{directory}", "row_formats", 0, 1, 10000, &bootstrap));
  epx_group_config config;
  check(epx_group_config_init(&config));
  config.num_experts = 1, config.max_tokens_per_rank = N, config.hidden_dim = H, config.max_top_k = 1;
  config.max_token_dtype = EPX_BFLOAT16, config.transport = EPX_TRANSPORT_HOST;
  epx_group group;
  check(epx_group_create(&bootstrap, &config, &group));
  const epx_layer layer = {{.top_k = 1}};
  size_t bytes;
  check(epx_handle_mem_size(group, &layer, &bytes));
  void* const handle = aligned_alloc(16, (bytes + 15) / 16 * 16);
  int32_t experts[N] = {{0, 0}}, counts[1], offsets[2];
  const epx_tensor topk_idx = epx_tensor_2d(experts, EPX_INT32, N, 1);
  const epx_tensor counts_out = epx_tensor_1d(counts, EPX_INT32, 1), offsets_out = epx_tensor_1d(offsets, EPX_INT32, 2);
  check(epx_prepare(group, &(epx_prepare_args){{.struct_size = sizeof(epx_prepare_args), .layer = layer, .handle_mem = handle,
                                               .handle_mem_bytes = bytes, .topk_idx = &topk_idx, .counts = &counts_out,
                                               .offsets = &offsets_out}}));
  static uint16_t tokens[N][H]; /* bfloat16: 448, then 1 */
  for (int h = 0; h < H; ++h) tokens[0][h] = 0x43e0, tokens[1][h] = 0x3f80;
  static uint8_t rows[N][H];
  static float scales[N];
  const epx_tensor tokens_in = epx_tensor_2d(tokens, EPX_BFLOAT16, N, H);
  epx_dispatch_args dispatch = {{.struct_size = sizeof(dispatch), .layer = layer, .handle_mem = handle,
                                .handle_mem_bytes = bytes, .tokens = &tokens_in}};
  {{
{dispatch}
  }}
  for (int h = 0; h < H; ++h)
    if (rows[0][h] != 0x7e || rows[1][h] != 0x7e) return 2;
  static uint16_t results[N][H], sums[N][H]; /* bfloat16: 448, then 1.03125, which E4M3 does not have at a scale of 1 */
  for (int h = 0; h < H; ++h) results[0][h] = results[1][h] = h == 0 ? 0x43e0 : 0x3f84;
  const epx_tensor expert_out = epx_tensor_2d(results, EPX_BFLOAT16, N, H), out = epx_tensor_2d(sums, EPX_BFLOAT16, N, H);
  epx_combine_args combine = {{.struct_size = sizeof(combine), .layer = layer, .handle_mem = handle,
                              .handle_mem_bytes = bytes, .expert_out = &expert_out, .out = &out}};
  {{
{combine}
  }}
  for (int h = 0; h < H; ++h)
    if (sums[0][h] != (h == 0 ? 0x43e0 : 0x3f80) || sums[1][h] != sums[0][h]) return 3;
  printf("%a %a\\n", scales[0], scales[1]);
  epx_group_destroy(group);
  epx_bootstrap_free(&bootstrap);
  free(handle);
  return 0;
}}
"""


def main():
    arguments = c_page.arguments_of(__doc__)
    with tempfile.TemporaryDirectory(prefix="epx_row_formats.") as directory:
        dispatch, combine = ("\n".join(lines) for lines in c_page.snippets_of(arguments.page))
        text = PROGRAM.format(directory=directory, dispatch=dispatch, combine=combine)
        program = c_page.compile_program(text, arguments, directory)
        output = subprocess.run([program], check=True, timeout=c_page.LIMIT_S, stdout=subprocess.PIPE, text=True).stdout
    if output != "0x1p+0 0x1.24924ap-9\n":  # 448 / 448, and 1 / 448
        sys.exit(f"the scales are {output}")


if __name__ == "__main__":
    main()
