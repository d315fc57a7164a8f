# SPDX-License-Identifier: Apache-2.0
# The members that args structs begin with mean the same in each, so that the headers do not explain them again; the API
# reference does.
s|^(  size_t struct_size;)$|\1 /**< set by the caller: sizeof(the struct) */|
s|^(  epx_stream stream;)$|\1 /**< where the call runs: a cudaStream_t on GPUs, NULL on the host transport */|
s|^(  const epx_moe_cuda\* cuda;)$|\1 /**< where the call runs on a GPU; NULL: on the host */|
s|^(  epx_layer layer;)$|\1 /**< the same on all ranks */|
s|^(  const void\* handle_mem;)$|\1 /**< [in] as epx_prepare() filled it in */|
s|^(  size_t handle_mem_bytes;)$|\1 /**< epx_handle_mem_size(), or more */|
