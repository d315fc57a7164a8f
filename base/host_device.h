// Marks what host and device code share and constexpr alone does not reach.
#pragma once

#if defined(__CUDACC__)
#define EPX_HOST_DEVICE __host__ __device__
#else
#define EPX_HOST_DEVICE
#endif
