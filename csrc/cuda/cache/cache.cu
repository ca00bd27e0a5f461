#include "cuda/cache/cache.h"

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"

namespace quire::cuda {
namespace {

/* key, value [tokens, kv_heads, size] T · caches [blocks, kv_heads, block_size, size] of Stored.
 * Grid (packs of a token's keys and values / 256, tokens): a thread moves one pack.  Traffic: each element once in and out. */
template <class T, class Stored, int kWidth>
__global__ void kv_write_kernel(KvWriteArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int packs = a.size / kWidth, token = blockIdx.y;
  int pack = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t kv_index = a.to.kv_indices[token];
  if (kv_index < 0 || pack >= 2 * a.kv_heads * packs) return;
  const bool is_value = pack >= a.kv_heads * packs;
  if (is_value) pack -= a.kv_heads * packs;
  const int head = pack / packs, element = pack % packs * kWidth;
  const TokenRows& rows = is_value ? a.value : a.key;
  const Pack<T, kWidth> from = load_pack<kWidth>(static_cast<const T*>(rows.data) + token * rows.token_stride +
                                                 head * rows.head_stride + element);
  const int64_t block = kv_index / a.to.block_size, offset = kv_index % a.to.block_size;
  Stored* to = static_cast<Stored*>(is_value ? a.to.v_cache : a.to.k_cache) +
               block * (is_value ? a.to.v_block_stride : a.to.k_block_stride) +
               (static_cast<int64_t>(head) * a.to.block_size + offset) * a.size + element;
  Pack<Stored, kWidth> stored;
  if constexpr (std::is_same_v<Stored, e4m3>) {
    const float scale = a.to.scales[is_value * a.kv_heads + head];
    float x[kWidth];
    widen(from, x);
    for (int j = 0; j < kWidth; ++j) x[j] /= scale;
    stored = narrow<e4m3>(x);
  } else {
    stored = from;
  }
  store_pack(to, stored);
}

template <class T, class Stored, int kWidth>
void launch_kv_write(const KvWriteArgs& a, cudaStream_t stream) {
  constexpr int kThreads = 256, kMaxTokens = 65535;  // grid limit
  const int packs = 2 * a.kv_heads * (a.size / kWidth);
  for (int64_t first = 0; first < a.tokens; first += kMaxTokens) {
    KvWriteArgs part = a;
    part.tokens = std::min<int64_t>(kMaxTokens, a.tokens - first);
    part.key.data = static_cast<const T*>(a.key.data) + first * a.key.token_stride;
    part.value.data = static_cast<const T*>(a.value.data) + first * a.value.token_stride;
    part.to.kv_indices = a.to.kv_indices + first;
    launch(kv_write_kernel<T, Stored, kWidth>, dim3((packs + kThreads - 1) / kThreads, part.tokens), kThreads, 0,
           stream, part);
  }
}

// Maximum caches per launch: kernel parameters are limited to 4 KB.
constexpr int kMaxCaches = 256;
struct Caches {
  char* data[kMaxCaches];
  int64_t block_stride;
};

// Calls launch_some(caches, count, index of the first) until all caches are covered.
template <class LaunchSome>
void by_parameters(const BlockArgs& a, const LaunchSome& launch_some) {
  const int all = static_cast<int>(a.caches.size());
  for (int first = 0; first < all; first += kMaxCaches) {
    Caches caches;
    const int some = std::min(kMaxCaches, all - first);
    std::copy_n(a.caches.begin() + first, some, caches.data);
    caches.block_stride = a.block_stride;
    launch_some(caches, some, first);
  }
}

constexpr int kThreads = 256, kAhead = 4;      // units in flight per thread
constexpr int kPart = kThreads * kAhead * 16;  // bytes per part: what a thread block moves per iteration
constexpr int64_t kMaxInGrid = 65535;          // limit of grid y and z

// Moves one part of kPart bytes, or the shorter last part.  Unit: the type of one memory access.
template <class Unit>
__device__ void move_part(char* to, const char* from, int64_t bytes) {
  const int count = static_cast<int>(min(bytes, int64_t{kPart}) / sizeof(Unit));
  for (int first = threadIdx.x; first < count; first += kThreads * kAhead) {
    Unit unit[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kThreads < count) unit[i] = reinterpret_cast<const Unit*>(from)[first + i * kThreads];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i * kThreads < count) reinterpret_cast<Unit*>(to)[first + i * kThreads] = unit[i];
    }
  }
}

/* pairs [count, 2] i64.  Grid (parts of a block, caches, pairs).  Reads and writes block_bytes per cache and pair:
 * PagedAttention's copy-on-write, fused over pairs and layers (SOSP 2023, section 5). */
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    block_copy_kernel(const __grid_constant__ Caches caches, const int64_t* pairs, int64_t block_bytes) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t from = pairs[2 * blockIdx.z], to = pairs[2 * blockIdx.z + 1];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kPart;
  char* cache = caches.data[blockIdx.y] + start;
  move_part<Unit>(cache + to * caches.block_stride, cache + from * caches.block_stride, block_bytes - start);
}

/* blocks [count] i64.  Grid (parts of a block, caches, blocks).  pattern: the element, repeated to fill a Unit. */
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    block_fill_kernel(const __grid_constant__ Caches caches, const int64_t* blocks, int64_t block_bytes, Unit pattern) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kPart;
  Unit* to = reinterpret_cast<Unit*>(caches.data[blockIdx.y] + blocks[blockIdx.z] * caches.block_stride + start);
  const int count = static_cast<int>(min(block_bytes - start, int64_t{kPart}) / sizeof(Unit));
  for (int i = threadIdx.x; i < count; i += kThreads) to[i] = pattern;
}

/* Copies block blocks[i] of cache first + c to buffer[i][first + c], or back.  buffer [count, all_caches, block_bytes].
 * Grid (parts of a block, caches, blocks).  Reads and writes block_bytes per cache and block. */
template <class Unit, bool kBack>
__global__ void __launch_bounds__(kThreads)
    block_gather_kernel(const __grid_constant__ Caches caches, int first, int all_caches, const int64_t* blocks,
                        int64_t block_bytes, char* buffer) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t start = static_cast<int64_t>(blockIdx.x) * kPart;
  char* in_cache = caches.data[blockIdx.y] + blocks[blockIdx.z] * caches.block_stride + start;
  char* in_buffer = buffer + (static_cast<int64_t>(blockIdx.z) * all_caches + first + blockIdx.y) * block_bytes + start;
  move_part<Unit>(kBack ? in_cache : in_buffer, kBack ? in_buffer : in_cache, block_bytes - start);
}

// Bytes of the widest access for which `buffer` and all blocks of all caches are aligned.
int unit_of(const BlockArgs& a, const void* buffer = nullptr) {
  uintptr_t bits = a.block_stride | a.block_bytes | reinterpret_cast<uintptr_t>(buffer);
  for (const char* cache : a.caches) bits |= reinterpret_cast<uintptr_t>(cache);
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

// Calls run(Unit{}) with the type of `bytes` bytes.
template <class Run>
void by_unit(int bytes, const Run& run) {
  switch (bytes) {
    case 16: return run(uint4{});
    case 4: return run(uint32_t{});
    case 2: return run(uint16_t{});
    default: return run(uint8_t{});
  }
}

dim3 grid_of(const BlockArgs& a, int caches, int64_t count) {
  return dim3((a.block_bytes + kPart - 1) / kPart, caches, count);
}

template <bool kBack>
void launch_gather(const BlockArgs& a, const int64_t* blocks, char* buffer, cudaStream_t stream) {
  const int all_caches = static_cast<int>(a.caches.size());
  by_unit(unit_of(a, buffer), [&](auto unit) {
    by_parameters(a, [&](const Caches& caches, int some, int first_cache) {
      for (int64_t first = 0; first < a.count; first += kMaxInGrid) {
        launch(block_gather_kernel<decltype(unit), kBack>, grid_of(a, some, std::min(kMaxInGrid, a.count - first)),
               kThreads, 0, stream, caches, first_cache, all_caches, blocks + first, a.block_bytes,
               buffer + first * all_caches * a.block_bytes);
      }
    });
  });
}

}  // namespace

void kv_write(const KvWriteArgs& a, cudaStream_t stream) {
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = 16 / sizeof(T);
    const auto aligned = [](const void* data, int64_t stride) { return in_16_bytes(data, stride, sizeof(T)); };
    const bool wide = a.size % kWidth == 0 && aligned(a.key.data, a.key.token_stride) &&
                      aligned(a.key.data, a.key.head_stride) && aligned(a.value.data, a.value.token_stride) &&
                      aligned(a.value.data, a.value.head_stride) && aligned(a.to.k_cache, a.to.k_block_stride) &&
                      aligned(a.to.v_cache, a.to.v_block_stride);
    if (a.stored == Dtype::e4m3) {
      wide ? launch_kv_write<T, e4m3, kWidth>(a, stream) : launch_kv_write<T, e4m3, 1>(a, stream);
    } else {
      wide ? launch_kv_write<T, T, kWidth>(a, stream) : launch_kv_write<T, T, 1>(a, stream);
    }
  });
}

void block_copy(const BlockArgs& a, const int64_t* pairs, cudaStream_t stream) {
  by_unit(unit_of(a), [&](auto unit) {
    by_parameters(a, [&](const Caches& caches, int some, int) {
      for (int64_t first = 0; first < a.count; first += kMaxInGrid) {
        launch(block_copy_kernel<decltype(unit)>, grid_of(a, some, std::min(kMaxInGrid, a.count - first)), kThreads, 0,
               stream, caches, pairs + 2 * first, a.block_bytes);
      }
    });
  });
}

void block_fill(const BlockArgs& a, const int64_t* blocks, uint32_t element, int element_bytes, cudaStream_t stream) {
  // Repeats the element to fill four bytes, and these four bytes to fill a Unit.
  uint32_t word = element;
  for (int bytes = element_bytes; bytes < 4; bytes *= 2) word |= word << (8 * bytes);
  by_unit(unit_of(a), [&](auto unit) {
    using Unit = decltype(unit);
    Unit pattern;
    if constexpr (sizeof(Unit) == 16) {
      pattern = {word, word, word, word};
    } else {
      pattern = static_cast<Unit>(word);
    }
    by_parameters(a, [&](const Caches& caches, int some, int) {
      for (int64_t first = 0; first < a.count; first += kMaxInGrid) {
        launch(block_fill_kernel<Unit>, grid_of(a, some, std::min(kMaxInGrid, a.count - first)), kThreads, 0, stream,
               caches, blocks + first, a.block_bytes, pattern);
      }
    });
  });
}

void block_gather(const BlockArgs& a, const int64_t* blocks, char* buffer, cudaStream_t stream) {
  launch_gather<false>(a, blocks, buffer, stream);
}

void block_scatter(const BlockArgs& a, const int64_t* blocks, const char* buffer, cudaStream_t stream) {
  launch_gather<true>(a, blocks, const_cast<char*>(buffer), stream);
}

}  // namespace quire::cuda
