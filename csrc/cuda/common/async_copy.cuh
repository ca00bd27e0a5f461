// Copies from device to shared memory that run in the background (cp.async), for any GPU since Ampere.  A lane waits for
// its own copies only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// 16 bytes from device to shared memory, or 16 zero bytes without touching `from`.
__device__ inline void copy_async_16(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}

// Ends a group of copies, perhaps an empty one.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the kPending youngest of this lane's groups are unfinished.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One number of 4 bytes from device to shared memory.
__device__ inline void copy_number_async(uint32_t to, const int* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

}  // namespace quire::cuda
