// Asynchronous copies from device to shared memory (cp.async), for any GPU since Ampere.  A lane waits only for the
// copies that it issued.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Copies 16 bytes from device to shared memory, or writes 16 zero bytes without reading `from`.
__device__ inline void copy_async_16(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}

// Commits a group of copies, possibly an empty one.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this lane's last committed groups are in flight.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Copies 4 bytes from device to shared memory.
__device__ inline void copy_async_4(uint32_t to, const int* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

}  // namespace quire::cuda
