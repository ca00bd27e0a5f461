#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/layers/layers.h"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32, kMaxThreads = 512;

/* qkv [tokens, heads + 2 * kv_heads, size] T · cos, sin [tokens, size] T · caches [blocks, kv_heads, block_size, size]
 * of Stored.   Rotary embedding (Su 2021) in transformers' layout: element i is rotated with element i + size / 2.
 * kNorm: RMSNorm of every query and key head first.
 * Grid (tokens, parts of the heads), block (lanes, y): a lane holds kPacks packs of each half of kHeads heads,
 * and their cos and sin.  Per token it reads heads + 2 * kv_heads heads, cos and sin, and writes as many heads.
 * The queries of a token with a negative index are rotated, too. */
template <class T, class Stored, int kWidth, int kPacks, int kHeads, bool kNorm>
__global__ void __launch_bounds__(kMaxThreads) rope_kv_write_kernel(RopeArgs a) {
  using Packs = Pack<T, kWidth>[kPacks];
  const int64_t token = blockIdx.x;
  const int half = a.size / 2, all_heads = a.heads + 2 * a.kv_heads;
  const int first_head = blockIdx.y * blockDim.y * kHeads + threadIdx.y;  // then every blockDim.y-th head
  const auto element = [&](int i) { return static_cast<int>(i * blockDim.x + threadIdx.x) * kWidth; };
  const auto load = [&](Packs& low, Packs& high, const T* from) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      low[i] = high[i] = {};
      if (element(i) >= half) continue;
      low[i] = load_pack<kWidth>(from + element(i));
      high[i] = load_pack<kWidth>(from + half + element(i));
    }
  };

  // The norms' weights, which no kernel writes, are loaded while the preceding kernel still runs.
  Packs weight_low, weight_high;
  const auto load_weight = [&](int head) {
    load(weight_low, weight_high, static_cast<const T*>(head < a.heads ? a.q_norm : a.k_norm));
  };
  if constexpr (kNorm && kHeads == 1) load_weight(first_head);
  let_next_kernel_start();
  wait_for_previous_kernels();

  const int64_t kv_index = a.to.kv_indices[token];
  Packs low[kHeads], high[kHeads], cos_low, cos_high, sin_low, sin_high;
  float scale[kHeads];
#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    const int head = first_head + n * blockDim.y;
    if (head >= all_heads) continue;
    load(low[n], high[n], static_cast<T*>(a.qkv.data) + token * a.qkv.token_stride + head * a.qkv.head_stride);
    if (std::is_same_v<Stored, e4m3> && head >= a.heads)
      scale[n] = a.to.scales[head - a.heads];  // key scales, then value scales
  }
  load(cos_low, cos_high, static_cast<const T*>(a.cos) + token * a.cos_stride);
  load(sin_low, sin_high, static_cast<const T*>(a.sin) + token * a.sin_stride);
  const int64_t block = kv_index / a.to.block_size, offset = kv_index % a.to.block_size;

#pragma unroll
  for (int n = 0; n < kHeads; ++n) {
    const int head = first_head + n * blockDim.y;
    const bool is_query = head < a.heads, is_value = head >= a.heads + a.kv_heads, exists = head < all_heads;
    float turned_low[kPacks][kWidth], turned_high[kPacks][kWidth];
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      widen(low[n][i], turned_low[i]);
      widen(high[n][i], turned_high[i]);
    }
    if constexpr (kNorm) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        for (int j = 0; j < kWidth; ++j) {
          squares += turned_low[i][j] * turned_low[i][j] + turned_high[i][j] * turned_high[i][j];
        }
      }
      squares = sum_of_lanes(squares, blockDim.x);
      const float inverse = rsqrtf(squares / static_cast<float>(a.size) + a.eps);
      if constexpr (kHeads > 1) load_weight(head);
      if (!is_value) {
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          float weight[kWidth];
          widen(weight_low[i], weight);
          for (int j = 0; j < kWidth; ++j) turned_low[i][j] = turned_low[i][j] * inverse * (weight[j] + a.norm_offset);
          widen(narrow<T>(turned_low[i]), turned_low[i]);
          widen(weight_high[i], weight);
          for (int j = 0; j < kWidth; ++j)
            turned_high[i][j] = turned_high[i][j] * inverse * (weight[j] + a.norm_offset);
          widen(narrow<T>(turned_high[i]), turned_high[i]);
        }
      }
    }
    if (!exists || (!is_query && kv_index < 0)) continue;

    if (!is_value) {
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        float cos[kWidth], sin[kWidth], from_low[kWidth];
        widen(cos_low[i], cos);
        widen(sin_low[i], sin);
        for (int j = 0; j < kWidth; ++j) {
          from_low[j] = turned_low[i][j];
          turned_low[i][j] = from_low[j] * cos[j] - turned_high[i][j] * sin[j];
        }
        widen(cos_high[i], cos);
        widen(sin_high[i], sin);
        for (int j = 0; j < kWidth; ++j) turned_high[i][j] = turned_high[i][j] * cos[j] + from_low[j] * sin[j];
      }
    }
    const auto store = [&](auto* to) {
      using To = std::remove_reference_t<decltype(*to)>;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (element(i) >= half) continue;
        if constexpr (std::is_same_v<To, e4m3>) {
          for (int j = 0; j < kWidth; ++j) turned_low[i][j] /= scale[n], turned_high[i][j] /= scale[n];
        }
        store_pack(to + element(i), narrow<To>(turned_low[i]));
        store_pack(to + half + element(i), narrow<To>(turned_high[i]));
      }
    };
    if (is_query) {
      store(static_cast<T*>(a.qkv.data) + token * a.qkv.token_stride + head * a.qkv.head_stride);
    } else {
      const int kv_head = head - a.heads - (is_value ? a.kv_heads : 0);
      store(static_cast<Stored*>(is_value ? a.to.v_cache : a.to.k_cache) +
            block * (is_value ? a.to.v_block_stride : a.to.k_block_stride) +
            (kv_head * static_cast<int64_t>(a.to.block_size) + offset) * a.size);
    }
  }
}

template <class T, class Stored, int kWidth, int kHeads>
void launch_rope(const RopeArgs& a, cudaStream_t stream) {
  constexpr int kPacks = kWidth == 1 ? kMaxRope / 2 / kWarp : 1;
  const int packs = (a.size / 2 + kWidth - 1) / kWidth, all_heads = a.heads + 2 * a.kv_heads;
  int lanes = 1;
  while (lanes < packs && lanes < kWarp) lanes *= 2;
  // One thread block has all heads if they fit, otherwise an equal part of them.  Thread blocks consist of complete
  // warps.
  const int y = (all_heads + kHeads - 1) / kHeads, max_rows_per_block = kMaxThreads / lanes,
            parts = (y + max_rows_per_block - 1) / max_rows_per_block;
  const int per_warp = kWarp / lanes, each = ((y + parts - 1) / parts + per_warp - 1) / per_warp * per_warp;
  launch(a.q_norm ? rope_kv_write_kernel<T, Stored, kWidth, kPacks, kHeads, true>
                  : rope_kv_write_kernel<T, Stored, kWidth, kPacks, kHeads, false>,
         dim3(a.tokens, parts), dim3(lanes, each), 0, stream, a);
}

template <class T, class Stored>
void launch_rope(const RopeArgs& a, cudaStream_t stream) {
  constexpr int kWidth = 16 / sizeof(T), kManyTokens = 256;
  const auto aligned = [](const void* data, int64_t stride) { return in_16_bytes(data, stride, sizeof(T)); };
  const bool wide = a.size / 2 % kWidth == 0 && aligned(a.qkv.data, a.qkv.token_stride) &&
                    aligned(a.qkv.data, a.qkv.head_stride) && aligned(a.cos, a.cos_stride) &&
                    aligned(a.sin, a.sin_stride) && aligned(a.to.k_cache, a.to.k_block_stride) &&
                    aligned(a.to.v_cache, a.to.v_block_stride) && aligned(a.q_norm, 0) && aligned(a.k_norm, 0);
  if (!wide) return launch_rope<T, Stored, 1, 1>(a, stream);
  // With few tokens the latency of a token matters, and one head per lane is faster.  With many tokens the bytes in
  // flight matter, and two heads per lane are faster.
  if (a.tokens <= kManyTokens) return launch_rope<T, Stored, kWidth, 1>(a, stream);
  launch_rope<T, Stored, kWidth, 2>(a, stream);
}

}  // namespace

void rope_kv_write(const RopeArgs& a, cudaStream_t stream) {
  if (a.tokens == 0) return;
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    a.stored == Dtype::e4m3 ? launch_rope<T, e4m3>(a, stream) : launch_rope<T, T>(a, stream);
  });
}

}  // namespace quire::cuda
