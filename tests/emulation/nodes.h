// SPDX-License-Identifier: Apache-2.0
// Tells the emulation which ranks are on one node. Programs that also run on GPUs find there that the function is NULL.
#pragma once

// In groups that the calling thread creates from now on, nodes are the ranks of the bootstrap from n * ranks to
// (n + 1) * ranks - 1, provided that each uses the device that has its number. 0: as on GPUs, by NCCL_HOSTID or the machine.
extern "C" __attribute__((weak)) void epx_emulation_set_ranks_per_node(int ranks);
