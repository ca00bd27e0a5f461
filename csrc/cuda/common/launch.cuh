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
// dependent launch, since Hopper).  On older GPUs the two device functions below are empty.
//
// The kernel must call wait_for_previous_kernels() before it touches memory that an earlier kernel may still write or
// read; in practice, before its first access to device memory other than weights.  After the call, the work of all
// earlier kernels is done and visible.
__device__ inline void wait_for_previous_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the stream's next kernel start once all CTAs have called this.  That kernel then runs up to its call of
// wait_for_previous_kernels().
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Launches kernel(args...).  The kernel must call the two functions above, because it may start while its predecessor
// runs.  `others` are further launch attributes; on GPUs before Hopper no attribute is set.
template <int n, class... Params, class... Args>
void launch_with(const cudaLaunchAttribute (&others)[n], void (*kernel)(Params...), dim3 grid, dim3 block,
                 int shared_bytes, cudaStream_t stream, Args&&... args) {
  cudaLaunchAttribute attributes[1 + n]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  for (int i = 0; i < n; ++i) attributes[1 + i] = others[i];
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? 1 + n : 0;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "launch");
}

// CTAs of two kernels share a multiprocessor only if both request the same split into L1 cache and shared memory.
inline cudaLaunchAttribute same_split() {
  cudaLaunchAttribute carveout{};
  carveout.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
  carveout.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  return carveout;
}

inline cudaLaunchAttribute clusters_of(int ctas) {
  cudaLaunchAttribute clusters{};
  clusters.id = cudaLaunchAttributeClusterDimension;
  clusters.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  return clusters;
}

template <class... Params, class... Args>
void launch(void (*kernel)(Params...), dim3 grid, dim3 block, int shared_bytes, cudaStream_t stream, Args&&... args) {
  launch_with({same_split()}, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

// launch() with clusters of `cluster` CTAs; on GPUs before Hopper without clusters.
template <class... Params, class... Args>
void launch_clusters(void (*kernel)(Params...), int cluster, dim3 grid, dim3 block, int shared_bytes,
                     cudaStream_t stream, Args&&... args) {
  launch_with({clusters_of(cluster)}, kernel, grid, block, shared_bytes, stream, std::forward<Args>(args)...);
}

// launch_clusters() for a kernel whose CTAs should run on the same multiprocessors as its predecessor's CTAs.
template <class... Params, class... Args>
void launch_clusters_beside(void (*kernel)(Params...), int cluster, dim3 grid, dim3 block, int shared_bytes,
                            cudaStream_t stream, Args&&... args) {
  launch_with({clusters_of(cluster), same_split()}, kernel, grid, block, shared_bytes, stream,
              std::forward<Args>(args)...);
}

}  // namespace quire::cuda
