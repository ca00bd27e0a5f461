// Loads all activations into a CTA's shared memory, for few tokens.  Eight lanes of the consumer warps hold 128
// consecutive elements of a token.  read_x() applies a preceding RMS norm on the way, which saves a kernel.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/linear/linear.cuh"

namespace quire::cuda::linears {

// Chunk: 128 consecutive elements of a token, 16 in each of eight lanes.  The consumer warps load kXChunksAtOnce chunks
// at a time.
constexpr int kXChunk = 128, kXBytes = kXChunk * static_cast<int>(sizeof(bf16));
constexpr int kUnit = 64;  // bytes of half a 128-element chunk
constexpr int kXChunksAtOnce = kConsumerThreads / 8;
// Maximum chunks per thread, because more do not fit into registers.  A token has at least one chunk, so this also
// limits the tokens.
constexpr int kMaxParts = 4, kMaxTokens = kMaxParts;

struct XArgs {
  const void* x;     // [tokens, 128 * chunks] bf16
  int64_t x_stride;  // elements between rows
  const void* norm;  // [128 * chunks] bf16; or null
  float eps;
  int chunks;  // 128-element chunks per token
};

// Chunks per thread.
inline int parts_of(int tokens, int inner) { return tokens * tiles_of(inner / kXChunk, kXChunksAtOnce); }

// Maximum magnitudes of the even and of the odd elements, as bf16 bits in the lower and upper half of the result.
__device__ inline uint32_t largest_of(const uint4& pairs) {
  constexpr uint32_t kMagnitude = 0x7fff7fff;
  return __vmaxu2(__vmaxu2(pairs.x & kMagnitude, pairs.y & kMagnitude),
                  __vmaxu2(pairs.z & kMagnitude, pairs.w & kMagnitude));
}

// A chunk in eight lanes: lane 4 h + t has elements 8 t to 8 t + 7 of both 32-element parts of half h.
struct XChunk {
  uint4 a, b;

  static __device__ int place() { return threadIdx.x % 8 / 4 * kUnit * 2 + threadIdx.x % 4 * 16; }
  __device__ void load(const char* from) {
    a = *reinterpret_cast<const uint4*>(from + place());
    b = *reinterpret_cast<const uint4*>(from + place() + kUnit);
  }
  __device__ void store(char* to) const {
    *reinterpret_cast<uint4*>(to + place()) = a;
    *reinterpret_cast<uint4*>(to + place() + kUnit) = b;
  }
  __device__ uint32_t largest() const { return __vmaxu2(largest_of(a), largest_of(b)); }
  __device__ float squares() const {
    float sum = 0;
    for (const uint4& eight : {a, b}) {
      float x[8];
      widen(reinterpret_cast<const Pack<bf16, 8>&>(eight), x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
    }
    return sum;
  }
  __device__ void multiply(float scale, const XChunk& weight) {
    const auto scale_eight = [scale](uint4& eight, const uint4& by) {
      auto& pack = reinterpret_cast<Pack<bf16, 8>&>(eight);
      float x[8], w[8];
      widen(pack, x);
      widen(reinterpret_cast<const Pack<bf16, 8>&>(by), w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = x[i] * scale * w[i];
      pack = narrow<bf16>(x);
    };
    scale_eight(a, weight.a), scale_eight(b, weight.b);
  }
};

// Calls use(chunk) for each of this thread's chunks of a token.
template <class Use>
__device__ inline void for_parts(int chunks, const Use& use) {
#pragma unroll 1
  for (int chunk = threadIdx.x / 8; chunk < chunks; chunk += kXChunksAtOnce) use(chunk);
}

// Applies the RMS norm to x in shared memory; each thread handles its own chunks.  Called by the consumer warps.
//   squares  scratch in shared memory: sum of squares per token and warp
__device__ inline void norm_x(const XArgs& a, int tokens, char* smem_x, int row_bytes,
                              float (&squares)[kMaxTokens][kWarps]) {
#pragma unroll 1
  for (int token = 0; token < tokens; ++token) {
    float thread_sum = 0;
    for_parts(a.chunks, [&](int chunk) {
      XChunk x;
      x.load(smem_x + token * row_bytes + chunk * kXBytes);
      thread_sum += x.squares();
    });
    const float warp_sum = sum_of_warp(thread_sum);
    if (threadIdx.x % 32 == 0) squares[token][threadIdx.x / 32] = warp_sum;
  }
  sync_consumers();
#pragma unroll 1
  for (int token = 0; token < tokens; ++token) {
    float sum = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += squares[token][warp];
    const float scale = rsqrtf(sum / static_cast<float>(a.chunks * kXChunk) + a.eps);
    for_parts(a.chunks, [&](int chunk) {
      XChunk x, weight;
      char* const place = smem_x + token * row_bytes + chunk * kXBytes;
      weight.load(static_cast<const char*>(a.norm) + chunk * kXBytes);
      x.load(place);
      x.multiply(scale, weight);
      x.store(place);
    });
  }
}

// Waits for the preceding kernels and reads x into `smem_x`, where tokens are row_bytes apart.  Applies the RMS norm if
// a.norm is set.  A thread may read its own chunks immediately, and chunks of other threads only after a barrier.
// Called by the consumer warps.
__device__ inline void read_x(const XArgs& a, int tokens, char* smem_x, int row_bytes,
                              float (&squares)[kMaxTokens][kWarps]) {
  if (a.norm != nullptr) {  // prefetch the norm's weight into L1 while the preceding kernels still run
    for_parts(a.chunks, [&](int chunk) {
      const char* const weight = static_cast<const char*>(a.norm) + chunk * kXBytes + XChunk::place();
      asm volatile("prefetch.global.L1 [%0];" ::"l"(weight));
      asm volatile("prefetch.global.L1 [%0];" ::"l"(weight + kUnit));
    });
  }
  wait_for_previous_kernels();
  for (int token = 0; token < tokens; ++token) {
    for_parts(a.chunks, [&](int chunk) {
      const int place = chunk * kXBytes + XChunk::place();
      const char* const from = static_cast<const char*>(a.x) + token * a.x_stride * sizeof(bf16) + place;
      const uint32_t to = shared_address(smem_x + token * row_bytes + place);
      copy_async_16(to, from, true);
      copy_async_16(to + kUnit, from + kUnit, true);
    });
  }
  wait_for_all_copies();
  if (a.norm != nullptr) norm_x(a, tokens, smem_x, row_bytes, squares);
}

// Prefetches the scales of a tile's rows into shared memory, so that the epilogue does not wait for device memory.
__device__ inline void read_row_scales(const Epilogue& p, int first_feature, const float* scales,
                                       float (&to)[kMaxRows]) {
  const int row = threadIdx.x;
  static_assert(kMaxRows <= kConsumerThreads);
  if (row >= p.rows) return;
  const bool up = row >= p.tile_features;
  const int feature = first_feature + row - (up ? p.tile_features : 0);
  if (feature < p.features) to[row] = scales[feature + (up ? p.features : 0)];
}

}  // namespace quire::cuda::linears
