// SPDX-License-Identifier: Apache-2.0
// Marks functions that host and device code share and that cannot be constexpr.
#pragma once

#if defined(__CUDACC__)
#define EPX_HOST_DEVICE __host__ __device__
#else
#define EPX_HOST_DEVICE
#endif
