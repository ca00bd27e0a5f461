// GEMM of a few tokens with a weight matrix, bound by the bandwidth of reading the weight.
//
//   x [tokens, inner] · weight [features, inner] · out [tokens, features], bf16 or fp16, accumulated in float32
//
// Each CTA multiplies by an equal number of weight rows, over all of inner.  Split-K across CTAs would need a reduction
// of 2 to 5 us.
//
//        inner ->
//   f   |----|----|----|----|   tile: p.rows rows of the weight, for one CTA
//   e   |       CTA 0       |   slab: 128 bytes per row of a tile, 64 elements of inner
//   a   |----|----|----|----|   stage: p.depth slabs, copied together
//   t   |       CTA 1       |
//
// In a CTA, one producer warp issues copies as far ahead as its half of the shared memory allows, and 8 consumer warps
// multiply.  The warps split inner in steps of 16 and, if there are many rows, the row blocks of 16 too.  The weight is
// operand A of mma.m16n8k16 and the tokens are operand B, so 8 tokens cost as much as one.
//
// Weight copies start before the preceding kernels have ended, because no kernel writes weights.  Two CTAs fit on a
// multiprocessor, so the next kernel copies its first 100 KB while this kernel ends.
//
// Grid (tiles). Memory traffic: the weight once from memory, tokens * inner * 2 bytes per tile from L2.  Rows, features
// and tokens past the end read as zeros and are not written.

#pragma once

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/linear/linear.h"

namespace quire::cuda::linears {

constexpr int kSlabBytes = 128;  // bytes of a row per slab: the widest swizzle
template <class W>
constexpr int kSlab = kSlabBytes / static_cast<int>(sizeof(W));  // elements of inner per slab
constexpr int kWarps = 8;                                        // warps that multiply
constexpr int kConsumerThreads = kWarps * 32;
constexpr int kThreads = kConsumerThreads + 32;
constexpr int kMaxStages = 12;
constexpr int kMaxRows = 224;  // rows per tile
constexpr int kManyTokensRows =
    32;  // rows per tile of 17 to 32 tokens: with more, the accumulators no longer fit into registers
constexpr int kSmemBytes = 110 << 10;  // shared memory for the stages, in bytes

inline int tiles_of(int n, int size) { return (n + size - 1) / size; }

// Returns the features per tile, a multiple of `unit`.  n CTAs per multiprocessor cover all features, with the smallest
// n that kMaxRows allows; tiles are as small as that n allows.
inline int features_of_tile(int features, bool silu_mul, int unit) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int rounds = tiles_of(tiles_of(features, silu_mul ? kMaxRows / 2 : kMaxRows), multiprocessors);
  return tiles_of(tiles_of(features, rounds * multiprocessors), unit) * unit;
}

// Parameters of the epilogue: what is applied to the accumulators, and where the result is stored.
struct Epilogue {
  const void* bias;
  void* out;
  int64_t out_stride;
  int tokens, features;  // shape of out
  int tile_features;     // columns of out per tile: a multiple of 8
  int rows;              // rows of the weight per tile: tile_features, or 2 * tile_features with silu_mul
  bool add, silu_mul;
  bool float32_out;  // excludes add and silu_mul
};

// Makes the epilogue's parameters from the arguments of any linear layer.  unit: tile_features becomes a multiple of this.
template <class Args>
Epilogue epilogue_of(const Args& a, int unit) {
  const int tile_features = features_of_tile(a.features, a.silu_mul, unit);
  return {.bias = a.bias,
          .out = a.out,
          .out_stride = a.out_stride,
          .tokens = a.tokens,
          .features = a.features,
          .tile_features = tile_features,
          .rows = tile_features * (a.silu_mul ? 2 : 1),
          .add = a.add,
          .silu_mul = a.silu_mul,
          .float32_out = a.float32_out};
}

struct Params : Epilogue {
  int depth;          // slabs per stage
  int count, stages;  // stages per tile; stages in the shared-memory ring
  bool share_x;       // as in LinearArgs
};

// Shared memory of the epilogue: accumulators of every k split, then the output tile [tokens, rows].  Each token's row
// of the output tile has 8 elements of padding, so that tokens start in different banks.
constexpr int out_tile_stride(int rows) { return rows * 2 + 16; }
constexpr int sums_bytes(int rows, int n_tiles, int k_splits) {
  return k_splits * ((rows + 15) / 16) * n_tiles * 32 * 16;
}

__device__ inline void sync_consumers() { hopper::named_sync(1, kConsumerThreads); }

// Applies `of` to a[i] and b[i], widened to float, for all 8 elements.
template <class T, class Of>
__device__ Pack<T, 8> each(const Pack<T, 8>& a, const Pack<T, 8>& b, const Of& of) {
  float x[8], y[8];
  widen(a, x);
  widen(b, y);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = of(x[i], y[i]);
  return narrow<T>(x);
}

// The part of an output tile that a thread stores: 8 features of every token_step-th token.  any: false if the thread
// stores nothing.
template <class T>
struct OutShare {
  int part, first_token, token_step;
  bool any;
  T* out;  // address of the thread's 8 features in the row of token 0

  __device__ OutShare(const Epilogue& p, int first_feature) {
    const int parts = p.tile_features / 8;
    part = threadIdx.x % parts, first_token = threadIdx.x / parts, token_step = kConsumerThreads / parts;
    any = first_token < token_step && first_feature + part * 8 < p.features;
    out = static_cast<T*>(p.out) + first_feature + part * 8;
  }
};

// If p.add, reads the residual: the present values of out for the thread's first token.  Called after the preceding
// kernels have ended and before the main loop, which hides the memory latency.
template <class T>
__device__ Pack<T, 8> read_out(const Epilogue& p, int first_feature) {
  const OutShare<T> share(p, first_feature);
  if (!p.add || !share.any || share.first_token >= p.tokens) return {};
  return load_pack<8>(share.out + share.first_token * p.out_stride);
}

// Stores the output tile, with activation or residual.  out_tile: [tokens, rows], with out_tile_stride bytes per token.
// residual: the result of read_out.
template <class T>
__device__ void store_tile(const Epilogue& p, int first_feature, const char* out_tile, Pack<T, 8> residual) {
  const OutShare<T> share(p, first_feature);
  if (!share.any) return;
  for (int token = share.first_token; token < p.tokens; token += share.token_step) {
    const T* from = reinterpret_cast<const T*>(out_tile + token * out_tile_stride(p.rows)) + share.part * 8;
    Pack<T, 8> y = load_pack<8>(from);
    if (p.silu_mul) {
      y = each(y, load_pack<8>(from + p.tile_features),
               [](float gate, float up) { return gate / (1 + __expf(-gate)) * up; });
    }
    T* const to = share.out + token * p.out_stride;
    if (p.add) {
      if (token > share.first_token) residual = load_pack<8>(to);
      y = each(y, residual, [](float a, float b) { return a + b; });
    }
    store_pack(to, y);
  }
}

// Reduces the accumulators of all k splits and applies scales and bias.  Calls use(token, row, feature, y, next) for a
// lane's rows of the tile; next is y of token + 1.  Tokens and features past the end are included.
template <class T, int kKSplits, int kNTiles, class TokenFactor, class RowFactor, class Use>
__device__ void reduce_k_splits(const Epilogue& p, int first_feature, const float4* all_sums,
                                const TokenFactor& token_factor, const RowFactor& row_factor, const Use& use) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = (p.rows + 15) / 16;
  for (int i = warp; i < blocks * kNTiles; i += kWarps) {
    float4 s = all_sums[i * 32 + lane];
#pragma unroll
    for (int k = 1; k < kKSplits; ++k) {
      const float4 more = all_sums[(k * blocks * kNTiles + i) * 32 + lane];
      s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
    }
    const int token = i % kNTiles * 8 + lane % 4 * 2;
    s.x *= token_factor(token), s.y *= token_factor(token + 1), s.z *= token_factor(token),
        s.w *= token_factor(token + 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = i / kNTiles * 16 + lane / 4 + 8 * r;
      if (row >= p.rows) continue;
      float scale = 1, bias = 0;
      const bool up = row >= p.tile_features;
      const int feature = first_feature + row - (up ? p.tile_features : 0);
      if (feature < p.features) {
        const int at = feature + (up ? p.features : 0);
        scale = row_factor(row);
        if (p.bias != nullptr) bias = to_float(static_cast<const T*>(p.bias)[at]);
      }
      use(token, row, feature, (r == 0 ? s.x : s.z) * scale + bias, (r == 0 ? s.y : s.w) * scale + bias);
    }
  }
}

// The epilogue, for the consumer warps: reduces the k splits, scales, and stores with bias, activation and residual.
// Warp w has the k split number w / kRowWarps and the row blocks first_block, first_block + kRowWarps, ...  `sums`
// holds its accumulators in the C layout of mma.m16n8k16 (rows x tokens).
//   stages        shared memory of the stages, reused: float4 [k splits, blocks, kNTiles, 32], then the output tile
//   token_factor  function of a token: the factor of its accumulators
//   row_factor    function of a row of the tile: the factor of its accumulators
template <class T, int kRowWarps, int kNTiles, int kBlocks, class TokenFactor, class RowFactor>
__device__ void run_epilogue(const Epilogue& p, int first_feature, int first_block,
                             const float (&sums)[kBlocks][kNTiles][4], char* stages, const Pack<T, 8>& residual,
                             const TokenFactor& token_factor, const RowFactor& row_factor) {
  constexpr int kKSplits = kWarps / kRowWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k_split = warp / kRowWarps, blocks = (p.rows + 15) / 16;
  float4* const all_sums = reinterpret_cast<float4*>(stages);
  char* const out_tile = stages + sums_bytes(p.rows, kNTiles, kKSplits);
  sync_consumers();  // all stages have been read
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int block = first_block + kRowWarps * b;
    if (block >= blocks) break;
#pragma unroll
    for (int e = 0; e < kNTiles; ++e) {
      const float* s = sums[b][e];
      all_sums[((k_split * blocks + block) * kNTiles + e) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  sync_consumers();
  if (p.float32_out) {  // separate code: its branches would lengthen the other epilogues by 0.2 us
    reduce_k_splits<T, kKSplits, kNTiles>(
        p, first_feature, all_sums, token_factor, row_factor, [&](int token, int, int feature, float y, float next) {
          if (feature >= p.features) return;
          float* const to = static_cast<float*>(p.out) + token * p.out_stride + feature;
          if (token < p.tokens) to[0] = y;
          if (token + 1 < p.tokens) to[p.out_stride] = next;
        });
    return;
  }
  reduce_k_splits<T, kKSplits, kNTiles>(
      p, first_feature, all_sums, token_factor, row_factor, [&](int token, int row, int, float y, float next) {
        T* const to = reinterpret_cast<T*>(out_tile + token * out_tile_stride(p.rows)) + row;
        to[0] = from_float<T>(y);
        to[out_tile_stride(p.rows) / 2] = from_float<T>(next);
      });
  sync_consumers();
  store_tile(p, first_feature, out_tile, residual);
}

// kNTiles: n tiles of 8 tokens.  kRowWarps: warps along the rows.  kBlocks: row blocks of 16 per warp.
template <class T, int kNTiles, int kRowWarps, int kBlocks>
__global__ __launch_bounds__(kThreads, 2) void linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                                                             const __grid_constant__ CUtensorMap x_map,
                                                             const Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ char shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  char* const stages = shared + (-shared_address(shared) & 1023);  // swizzled rows start at multiples of 1024
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_feature = blockIdx.x * p.tile_features;
  // Stage layout: [depth, rows] of the weight (with silu_mul: the gate rows of all slabs, then the up rows), then
  // [depth, tokens] of x.
  const int weight_bytes = p.depth * p.rows * kSlabBytes;
  const int stage_bytes = weight_bytes + p.depth * kNTiles * 8 * kSlabBytes;

  if (thread == kConsumerThreads) {
    hopper::prefetch_map(&weight_map);
    hopper::prefetch_map(&x_map);
    for (int i = 0; i < p.stages; ++i) {
      hopper::barrier_init(&full[i], 1);
      hopper::barrier_init(&empty[i], kWarps);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (!p.share_x) let_next_kernel_start();

  if (warp == kWarps) {  // the producer warp
    if (lane > 0) return;
    const auto copy_weight = [&](int i, int stage) {
      char* to = stages + stage * stage_bytes;
      hopper::arrive_expecting(&full[stage], stage_bytes);
      hopper::copy_once(to, &weight_map, &full[stage], 0, first_feature, i * p.depth);
      if (p.silu_mul) {
        hopper::copy_once(to + weight_bytes / 2, &weight_map, &full[stage], 0, p.features + first_feature, i * p.depth);
      }
    };
    const auto copy_x = [&](int i, int stage) {
      hopper::copy_often(stages + stage * stage_bytes + weight_bytes, &x_map, &full[stage], 0, 0, i * p.depth);
    };
    const int early = min(p.count, p.stages);
    for (int i = 0; i < early; ++i) copy_weight(i, i);
    wait_for_previous_kernels();
    if (p.share_x) let_next_kernel_start();
    for (int i = 0; i < early; ++i) copy_x(i, i);
    hopper::Ring next;
    for (int i = early; i < p.count; ++i) {
      hopper::wait(&empty[next.at], next.phase);
      copy_weight(i, next.at);
      copy_x(i, next.at);
      next.step(p.stages);
    }
    return;
  }

  // A slab's 128 bytes of a row are four quarters of 32 bytes.  A warp's k split is two quarters of every slab (2
  // splits), one quarter (4 splits), or one quarter of every other slab (8 splits).
  constexpr int kKSplits = kWarps / kRowWarps, kQuarters = kKSplits < 4 ? 4 / kKSplits : 1;
  constexpr int kSlabStep = kKSplits > 4 ? kKSplits / 4 : 1;
  const int k_split = warp / kRowWarps, first_block = warp % kRowWarps;
  const int first_slab = k_split / 4, quarter = k_split % 4 * kQuarters;

  // Byte offset of the lane's operand rows in a stage.  The swizzle puts 16-byte chunk c of row r at chunk c ^ (r % 8).
  const int half = p.silu_mul ? p.tile_features : p.rows;  // contiguous rows
  int w_at[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    // A row block past the end reads the last row, and its accumulators are never used.
    int row = min((first_block + kRowWarps * b) * 16 + lane % 16, p.rows - 1);
    w_at[b] = ((quarter * 2 + lane / 16) ^ row % 8) * 16;
    if (row >= half) row += (p.depth - 1) * half;
    w_at[b] += row * kSlabBytes;
  }
  const int x_row = lane % 8 + (kNTiles > 1 ? lane / 16 * 8 : 0);
  const int x_at = weight_bytes + x_row * kSlabBytes + ((quarter * 2 + lane / 8 % 2) ^ x_row % 8) * 16;

  wait_for_previous_kernels();
  if (p.share_x) let_next_kernel_start();
  const Pack<T, 8> residual = read_out<T>(p, first_feature);

  float sums[kBlocks][kNTiles][4] = {};
  hopper::Ring next;
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&full[next.at], next.phase);
    const uint32_t at = shared_address(stages + next.at * stage_bytes);
#pragma unroll 4
    for (int d = first_slab; d < p.depth; d += kSlabStep) {
#pragma unroll
      for (int k = 0; k < kQuarters; ++k) {
        // The swizzle is an XOR, so the address of quarter k is that of quarter 0 with k * 32 flipped.
        uint32_t x[kNTiles][2];
        const uint32_t x_slab = at + x_at + d * kNTiles * 8 * kSlabBytes;
        if constexpr (kNTiles == 1) {
          load_matrices(x[0], x_slab ^ k * 32);
        } else {
#pragma unroll
          for (int e = 0; e < kNTiles; e += 2) {
            uint32_t two[4];
            load_matrices(two, (x_slab + e * 8 * kSlabBytes) ^ k * 32);
            x[e][0] = two[0], x[e][1] = two[1], x[e + 1][0] = two[2], x[e + 1][1] = two[3];
          }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t w[4];
          load_matrices(w, (at + w_at[b] + d * half * kSlabBytes) ^ k * 32);
#pragma unroll
          for (int e = 0; e < kNTiles; ++e) mma16816<T>(sums[b][e], w, x[e]);
        }
      }
    }
    if (lane == 0 && i + p.stages < p.count) hopper::arrive(&empty[next.at]);
    next.step(p.stages);
  }

  run_epilogue<T, kRowWarps>(
      p, first_feature, first_block, sums, stages, residual, [](int) { return 1.0f; }, [](int) { return 1.0f; });
#endif
}

// Launches the kernel instance for p.rows rows per tile (at most kManyTokensRows for more than 16 tokens); defined in
// linear_*.cu.
template <class T, int kNTiles>
void run(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream);

// Bytes of a slab in a stage: rows of the weight, then rows of x.
constexpr int slab_bytes(int rows, int n_tiles) { return (rows + n_tiles * 8) * kSlabBytes; }

#ifdef QUIRE_LINEAR_N_TILES
template <class T, int kNTiles, int kRowWarps, int kBlocks>
void start(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream) {
  const auto kernel = linear_kernel<T, kNTiles, kRowWarps, kBlocks>;
  const int stages_bytes = p.stages * p.depth * slab_bytes(p.rows, kNTiles);
  const int epilogue_bytes = sums_bytes(p.rows, kNTiles, kWarps / kRowWarps) + kNTiles * 8 * out_tile_stride(p.rows);
  static const bool allowed = [&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes + 1024), "linear");
    return true;
  }();
  static_cast<void>(allowed);
  launch(kernel, dim3(tiles), dim3(kThreads), 1024 + std::max(stages_bytes, epilogue_bytes), stream, weight_map, x_map,
         p);
}

template <class T, int kNTiles>
void run(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream) {
  if (p.rows <= 16) return start<T, kNTiles, 1, 1>(weight_map, x_map, p, tiles, stream);
  if (p.rows <= 32) return start<T, kNTiles, 1, 2>(weight_map, x_map, p, tiles, stream);
  if constexpr (kNTiles <= 2) {
    if (p.rows <= 64) return start<T, kNTiles, 1, 4>(weight_map, x_map, p, tiles, stream);
    if (p.rows <= 128) return start<T, kNTiles, 2, 4>(weight_map, x_map, p, tiles, stream);
    start<T, kNTiles, 4, 4>(weight_map, x_map, p, tiles, stream);
  }
}

template void run<bf16, QUIRE_LINEAR_N_TILES>(const CUtensorMap&, const CUtensorMap&, const Params&, int, cudaStream_t);
template void run<fp16, QUIRE_LINEAR_N_TILES>(const CUtensorMap&, const CUtensorMap&, const Params&, int, cudaStream_t);
#endif

}  // namespace quire::cuda::linears
