// Kernel launches, with errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace quire::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

inline int current_device() {
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

inline int device_attribute(cudaDeviceAttr attribute) {
  int value;
  check(cudaDeviceGetAttribute(&value, attribute, current_device()), "cudaDeviceGetAttribute");
  return value;
}

// A decode step is a chain of small kernels.  If each started after its predecessor's end, every launch would leave a
// gap of microseconds.  With launch() a kernel starts while its predecessor in the stream still runs (programmatic
// dependent launch, since Hopper).  On older GPUs both functions below are empty.
//
// The kernel must call wait_for_previous_kernels() before it touches memory that an earlier kernel may still write or
// read; in practice, before its first access to device memory other than weights.  After the call, the work of all
// earlier kernels is done and visible.
__device__ inline void wait_for_previous_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the stream's next kernel start once all CTAs have called this; that kernel then runs up to its own wait.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches kernel(args...), which must call the two functions above, because it may start while its predecessor runs.
// `second` is another launch attribute; before Hopper neither attribute is set.
template <class... Params, class... Args>
void launch_with(cudaLaunchAttribute second, void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes,
                 cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1] = second;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 2 : 0;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "launch");
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream, Args&&... args) {
  // CTAs of two kernels share a multiprocessor only if both request the same split into L1 cache and shared memory.
  cudaLaunchAttribute carveout{};
  carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  carveout.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  launch_with(carveout, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

// launch() with clusters of `cluster` CTAs; before Hopper without clusters.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), int cluster, dim3 grid, dim3 block, int shared_bytes,
                     cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute clusters{};
  clusters.id = cudaLaunchAttributeClusterDimension;
  clusters.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  launch_with(clusters, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

}  // namespace quire::cuda
