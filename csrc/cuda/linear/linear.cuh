// The product of a few tokens with a weight matrix, at the speed at which the weight can be read.
//
//   x [tokens, inner] · weight [features, inner] · out [tokens, features], bf16 or fp16, sums in float32
//   or, with x and out in bf16, a weight in e4m3 with a scale for each row, or for each 128 x 128 numbers: half of the bytes
//
// Every multiprocessor gets one CTA and an equal share of the weight's rows, over all of inner.  So no sums are added up
// between CTAs, which would take 2 to 5 us.
//
//        inner ->
//   f   |----|----|----|----|   a tile: p.rows rows of the weight, for one CTA
//   e   |       CTA 0       |   a slab: 128 bytes a row of a tile, 64 numbers of inner (e4m3: 128)
//   a   |----|----|----|----|   a stage: p.depth slabs, copied at once
//   t   |       CTA 1       |
//
// In a CTA, one warp starts copies as far ahead as its half of the shared memory allows, and 8 warps multiply.  Each takes
// its share of the 16s of inner, and of the 16s of rows if there are many.  The weight is the left operand of
// mma.m16n8k16 and the tokens are the right one: 8 of them take as long as one.
//
// Numbers in e4m3 become fp16 in registers, by one instruction for two of them, right before they are multiplied.  So x
// becomes fp16, too.  Of 16 numbers of inner a lane takes four neighbours for both operands; mma.m16n8k16 would have it take
// two pairs, but their order does not change the sum.
//
// Copies of the weight start before the kernels in front have ended, because no kernel writes weights.  Two CTAs fit on a
// multiprocessor.  So while one kernel ends, the next one's 100 KB are already copied or on their way.
//
// Grid (tiles).  Moves the bytes of the weight from memory, tokens * inner * 2 from L2 for each tile.  Rows, features
// and tokens past the end are read as zeros and not written.

#pragma once

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/linear/linear.h"
#include "cuda/common/numbers.cuh"
#include "cuda/common/tensor_core.cuh"

namespace quire::cuda::linears {

constexpr int kSlabBytes = 128;     // of a row: the widest swizzle
template <class W>
constexpr int kSlab = kSlabBytes / static_cast<int>(sizeof(W));  // numbers of inner
constexpr int kWarps = 8;           // that multiply
constexpr int kMultipliers = kWarps * 32;
constexpr int kThreads = kMultipliers + 32;
constexpr int kMaxStages = 12;
constexpr int kMaxRows = 224;       // of a tile
constexpr int kManyTokensRows = 32;  // of a tile of 17 to 32 tokens: with more, sums no longer fit into registers
constexpr int kFewTokens = 4;       // most with an e4m3 weight: every CTA reads all of x once more
constexpr int kRoom = 110 << 10;    // of shared memory, for the stages

inline int tiles_of(int n, int size) { return (n + size - 1) / size; }

// Features of a tile, a multiple of `unit`: as few as will do to get by with one CTA on each multiprocessor, or with two, ...
inline int features_of_tile(int features, bool silu_mul, int unit) {
  const int multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount);
  const int rounds = tiles_of(tiles_of(features, silu_mul ? kMaxRows / 2 : kMaxRows), multiprocessors);
  return tiles_of(tiles_of(features, rounds * multiprocessors), unit) * unit;
}

// What becomes of a product's sums.
struct End {
  const void* bias;
  void* out;
  int64_t out_stride;
  int tokens, features;  // of out
  int tile_features;     // of out that a tile makes: a multiple of 8
  int rows;              // of the weight that a tile reads: tile_features, or with silu_mul twice as many
  bool add, silu_mul;
};

struct Params : End {
  const void* x;
  int64_t x_stride;
  int inner;
  const float* scale;  // of an e4m3 weight: [rows], or [rows / 128, inner / 128]
  int table_at;          // of a table of blocks' scales, in bytes after the stages' start
  int depth;             // slabs of a stage
  int count, stages;     // stages of a tile; in shared memory
};

// Shared memory on the way out: sums of every share, then the product [tokens, rows].  It has 8 numbers of padding, so
// that tokens start in different banks.
constexpr int product_stride(int rows) { return rows * 2 + 16; }
constexpr int sums_bytes(int rows, int eights, int shares) { return shares * ((rows + 15) / 16) * eights * 32 * 16; }

// The scales of the blocks that a tile's rows lie in, [kMostSets, slabs]: a slab is as wide as a block.  First those of its
// rows, or gate rows, which lie in at most 3 (224 rows) or 2 (112) blocks, then those of its up rows.
constexpr int kBlock = 128, kMostSets = 4;
constexpr int sets_of_half(bool silu_mul) { return silu_mul ? 2 : 3; }
inline __host__ __device__ int table_slabs(const Params& p) { return p.count * p.depth; }
inline int table_bytes(const Params& p) { return kMostSets * table_slabs(p) * static_cast<int>(sizeof(float)); }

__device__ inline void sync_multipliers() { hopper::named_sync(1, kMultipliers); }

// of(a[i], b[i]) in float, for the 8 numbers of each.
template <class T, class Of>
__device__ Pack<T, 8> each(const Pack<T, 8>& a, const Pack<T, 8>& b, const Of& of) {
  float x[8], y[8];
  widen(a, x);
  widen(b, y);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = of(x[i], y[i]);
  return narrow<T>(x);
}

// The part of a tile of out that a thread stores: 8 features of every so many tokens, if any.
template <class T>
struct OutShare {
  int part, first_token, token_step;
  bool any;
  T* out;  // of token 0

  __device__ OutShare(const End& p, int first_feature) {
    const int parts = p.tile_features / 8;
    part = threadIdx.x % parts, first_token = threadIdx.x / parts, token_step = kMultipliers / parts;
    any = first_token < token_step && first_feature + part * 8 < p.features;
    out = static_cast<T*>(p.out) + first_feature + part * 8;
  }
};

// What out holds of the first of these tokens, if it is added to.  Read before the product, because it takes as long as any
// read from memory, but only after the kernels in front have ended.
template <class T>
__device__ Pack<T, 8> read_out(const End& p, int first_feature) {
  const OutShare<T> share(p, first_feature);
  if (!p.add || !share.any || share.first_token >= p.tokens) return {};
  return load_pack<8>(share.out + share.first_token * p.out_stride);
}

// product: of the tile, [tokens, rows], in rows of product_stride.  old: as read_out returned it.
template <class T>
__device__ void store_product(const End& p, int first_feature, const char* product, Pack<T, 8> old) {
  const OutShare<T> share(p, first_feature);
  if (!share.any) return;
  for (int token = share.first_token; token < p.tokens; token += share.token_step) {
    const T* from = reinterpret_cast<const T*>(product + token * product_stride(p.rows)) + share.part * 8;
    Pack<T, 8> y = load_pack<8>(from);
    if (p.silu_mul) {
      y = each(y, load_pack<8>(from + p.tile_features),
               [](float gate, float up) { return gate / (1 + __expf(-gate)) * up; });
    }
    T* const to = share.out + token * p.out_stride;
    if (p.add) {
      if (token > share.first_token) old = load_pack<8>(to);
      y = each(y, old, [](float a, float b) { return a + b; });
    }
    store_pack(to, y);
  }
}

// The end of a product, for the warps that multiply: the sums of all shares of inner are added, scaled, and stored with
// bias, activation and addition.  Warp w has share w / kRowWarps of inner, and of each of its 16s of rows, first_block and
// every kRowWarps-th after it, the sums that mma.m16n8k16 leaves: rows times tokens.
//   stages       shared memory that nobody copies to any more: [shares, blocks, kEights, 32 lanes] of 4 sums, then the product
//   of_token     what the sums of a token are multiplied by
//   of_row       what those of a row of the tile, which is a row of the weight, are multiplied by
template <class T, int kRowWarps, int kEights, int kBlocks, class OfToken, class OfRow>
__device__ void end_of_product(const End& p, int first_feature, int first_block, const float (&sums)[kBlocks][kEights][4],
                               char* stages, const Pack<T, 8>& old, const OfToken& of_token, const OfRow& of_row) {
  constexpr int kShares = kWarps / kRowWarps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, share = warp / kRowWarps, blocks = (p.rows + 15) / 16;
  float4* const all_sums = reinterpret_cast<float4*>(stages);
  char* const product = stages + sums_bytes(p.rows, kEights, kShares);
  sync_multipliers();  // all stages have been read
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    const int block = first_block + kRowWarps * b;
    if (block >= blocks) break;
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const float* s = sums[b][e];
      all_sums[((share * blocks + block) * kEights + e) * 32 + lane] = make_float4(s[0], s[1], s[2], s[3]);
    }
  }
  sync_multipliers();
  for (int i = warp; i < blocks * kEights; i += kWarps) {
    float4 s = all_sums[i * 32 + lane];
#pragma unroll
    for (int k = 1; k < kShares; ++k) {
      const float4 more = all_sums[(k * blocks * kEights + i) * 32 + lane];
      s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
    }
    const int token = i % kEights * 8 + lane % 4 * 2;
    s.x *= of_token(token), s.y *= of_token(token + 1), s.z *= of_token(token), s.w *= of_token(token + 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = i / kEights * 16 + lane / 4 + 8 * r;
      if (row >= p.rows) continue;
      float scale = 1, bias = 0;
      const bool up = row >= p.tile_features;
      const int feature = first_feature + row - (up ? p.tile_features : 0);
      if (feature < p.features) {
        const int at = feature + (up ? p.features : 0);
        scale = of_row(row, at);
        if (p.bias != nullptr) bias = to_float(static_cast<const T*>(p.bias)[at]);
      }
      T* const to = reinterpret_cast<T*>(product + token * product_stride(p.rows)) + row;
      to[0] = from_float<T>((r == 0 ? s.x : s.z) * scale + bias);
      to[product_stride(p.rows) / 2] = from_float<T>((r == 0 ? s.y : s.w) * scale + bias);
    }
  }
  sync_multipliers();
  store_product(p, first_feature, product, old);
}

// bf16 has more exponents than fp16.  So each token of x is multiplied by a power of two that brings its largest number
// between 2^14 and 2^15.  Numbers 2^29 times as small still keep all of their bits, and only those 2^39 times as small
// are lost.
struct TokenScales {
  uint32_t raise;  // two of bf16: what x is multiplied by
  float lower;     // what the sums are multiplied by
};

__device__ inline TokenScales scales_of(uint32_t largest) {  // the magnitude of a bf16, in its bits
  const int exponent = static_cast<int>(largest >> 7) - 127;
  const int up = largest == 0 ? 0 : min(14 - exponent, 120);
  return {static_cast<uint32_t>(up + 127) * 0x00800080u, exp2f(static_cast<float>(-up))};
}

__device__ inline uint32_t to_fp16(uint32_t pair, uint32_t raise) {  // two of bf16
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(raise));
  return pack<fp16>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

// The largest magnitude of each token of x, in largest[p.tokens], which held zeros.  All tokens at once: one after another,
// each would take the time of a read from L2.
__device__ inline void find_largest(const Params& p, uint32_t* largest) {
  uint32_t most[kFewTokens] = {};
#pragma unroll 4
  for (int i = threadIdx.x; i < p.inner / 8; i += kMultipliers) {
#pragma unroll
    for (int token = 0; token < kFewTokens; ++token) {
      if (token >= p.tokens) break;
      const uint4 x = reinterpret_cast<const uint4*>(static_cast<const bf16*>(p.x) + token * p.x_stride)[i];
      for (const uint32_t two : {x.x, x.y, x.z, x.w}) most[token] = __vmaxu2(most[token], two & 0x7fff7fff);
    }
  }
#pragma unroll
  for (int token = 0; token < kFewTokens; ++token) {
    if (token >= p.tokens) break;
    const uint32_t of_warp = __reduce_max_sync(~0u, max(most[token] & 0xffff, most[token] >> 16));
    if (threadIdx.x % 32 == 0) atomicMax(&largest[token], of_warp);
  }
}

// A slab past the end of the weight is read as zeros.  It gets the scale 0, because 0 times whatever is in shared memory
// might be NaN.
__device__ inline void fill_table(const Params& p, int first_feature, float* table) {
  const int sets = sets_of_half(p.silu_mul), slabs = table_slabs(p), halves = p.silu_mul ? 2 : 1;
  for (int i = threadIdx.x; i < halves * sets * slabs; i += kMultipliers) {
    const int set = i / slabs, slab = i % slabs, half = set / sets;
    const int block = (first_feature + half * p.features) / kBlock + set % sets;
    const bool there = slab < p.inner / kBlock && block < halves * p.features / kBlock;
    table[i] = there ? p.scale[block * (p.inner / kBlock) + slab] : 0;
  }
}

// kEights: 8s of tokens.  kRowWarps: warps that share the rows.  kBlocks: 16s of rows of each.  kGrid: scales are of blocks.
template <class T, class W, int kEights, int kRowWarps, int kBlocks, bool kGrid>
__global__ __launch_bounds__(kThreads, 2) void linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                                                             const __grid_constant__ CUtensorMap x_map,
                                                             const Params p) {
#if __CUDA_ARCH__ >= 900
  constexpr int kXSlabs = sizeof(T) / sizeof(W);  // of x, for one of the weight
  extern __shared__ char shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ uint32_t largest[kEights * 8];  // of a token
  __shared__ float lower[kEights * 8];
  char* const stages = shared + (-shared_address(shared) & 1023);  // swizzled rows start at multiples of 1024
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_feature = blockIdx.x * p.tile_features;
  // Of a stage: [depth, rows] of the weight (with silu_mul: the gate rows of all slabs, then the up rows), then
  // [depth, tokens] of x.
  const int weight_bytes = p.depth * p.rows * kSlabBytes;
  const int stage_bytes = weight_bytes + p.depth * kXSlabs * kEights * 8 * kSlabBytes;

  if (thread == kMultipliers) {
    hopper::prefetch_map(&weight_map);
    hopper::prefetch_map(&x_map);
    for (int i = 0; i < p.stages; ++i) {
      hopper::barrier_init(&full[i], 1);
      hopper::barrier_init(&empty[i], kWarps);
    }
    hopper::fence_barrier_init();
  }
  if (thread < kEights * 8) largest[thread] = 0;
  __syncthreads();
  let_next_kernel_start();

  if (warp == kWarps) {  // the warp that copies
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
      hopper::copy_often(stages + stage * stage_bytes + weight_bytes, &x_map, &full[stage], 0, 0,
                         i * p.depth * kXSlabs);
    };
    const int early = min(p.count, p.stages);
    for (int i = 0; i < early; ++i) copy_weight(i, i);
    wait_for_previous_kernels();
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

  // A row of a slab has four quarters of 32 bytes: a share is two of them, or one, or one of every other slab.
  constexpr int kShares = kWarps / kRowWarps, kQuarters = kShares < 4 ? 4 / kShares : 1;
  constexpr int kSlabStep = kShares > 4 ? kShares / 4 : 1;
  // Of a scheduler's warps (every fourth), those of other shares take other rows: some have a block less to widen.
  const int share = warp / kRowWarps, blocks = (p.rows + 15) / 16;
  const int first_block = (warp + share * kRowWarps / 2) % kRowWarps;
  const int first_slab = share / 4, quarter = share % 4 * kQuarters;

  // Where the lane's rows of the operands stand in a stage: 16-byte chunk c of row r at chunk c ^ (r % 8).
  const int half = p.silu_mul ? p.tile_features : p.rows;  // rows that stand together
  int w_at[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    // A block that isn't there is read from another's place, and its sums are never used.
    int row = min((first_block + kRowWarps * b) * 16 + lane % 16, p.rows - 1);
    w_at[b] = ((quarter * 2 + lane / 16) ^ row % 8) * 16;
    if (row >= half) row += (p.depth - 1) * half;
    w_at[b] += row * kSlabBytes;
  }
  // A quarter of the weight meets kXSlabs quarters of x.
  const bool four = kXSlabs > 1;  // a lane reads four neighbours of its token; else two pairs, as ldmatrix gives them
  const int x_row = four ? lane / 4 : lane % 8 + (kEights > 1 ? lane / 16 * 8 : 0), x_quarter = quarter * kXSlabs;
  const int x_chunk = x_quarter % 4 * 2 + (four ? lane % 4 / 2 : lane / 8 % 2);
  const int x_at = weight_bytes + (x_quarter / 4 * kEights * 8 + x_row) * kSlabBytes + (x_chunk ^ x_row % 8) * 16 +
                   (four ? lane % 2 * 8 : 0);

  // Where the scales of the lane's two rows of each block of 16 stand in the table.  8 rows never lie in two blocks.
  const float* const table = reinterpret_cast<const float*>(stages + p.table_at);
  [[maybe_unused]] int scale_at[kBlocks][2];
  if constexpr (kGrid) {
    fill_table(p, first_feature, reinterpret_cast<float*>(stages + p.table_at));
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = min((first_block + kRowWarps * b) * 16 + lane / 4 + 8 * r, p.rows - 1);
        const bool up = row >= p.tile_features;
        const int feature = first_feature + row - (up ? p.tile_features : 0);
        const int set = (up ? sets_of_half(p.silu_mul) : 0) + feature / kBlock - first_feature / kBlock;
        scale_at[b][r] = set * table_slabs(p);
      }
    }
    sync_multipliers();
  }

  wait_for_previous_kernels();
  uint32_t raise[kEights];
  if constexpr (kXSlabs > 1) {
    find_largest(p, largest);
    sync_multipliers();
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
      const TokenScales scales = scales_of(largest[e * 8 + lane / 4]);
      raise[e] = scales.raise;
      if (lane % 4 == 0) lower[e * 8 + lane / 4] = scales.lower;  // every warp writes the same
    }
  }
  const Pack<T, 8> old = read_out<T>(p, first_feature);

  float sums[kBlocks][kEights][4] = {};
  hopper::Ring next;
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&full[next.at], next.phase);
    const uint32_t at = shared_address(stages + next.at * stage_bytes);
#pragma unroll 4
    for (int d = first_slab; d < p.depth; d += kSlabStep) {
      [[maybe_unused]] float of_slab[kGrid ? kBlocks : 1][kEights][4] = {};
#pragma unroll
      for (int k = 0; k < kQuarters; ++k) {
        // Further quarters differ in bits that the swizzle only turns over.
        uint32_t x[kXSlabs][kEights][2];
#pragma unroll
        for (int q = 0; q < kXSlabs; ++q) {
          const uint32_t further = (k * kXSlabs + q) * 32;
          const uint32_t x_slab = at + x_at + d * kXSlabs * kEights * 8 * kSlabBytes;
          if constexpr (kXSlabs > 1) {
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              load_eight_bytes(x[q][e], (x_slab + e * 8 * kSlabBytes) ^ further);
              for (uint32_t& pair : x[q][e]) pair = to_fp16(pair, raise[e]);
            }
          } else if constexpr (kEights == 1) {
            load_matrices(x[q][0], x_slab ^ further);
          } else {
#pragma unroll
            for (int e = 0; e < kEights; e += 2) {
              uint32_t two[4];
              load_matrices(two, (x_slab + e * 8 * kSlabBytes) ^ further);
              x[q][e][0] = two[0], x[q][e][1] = two[1], x[q][e + 1][0] = two[2], x[q][e + 1][1] = two[3];
            }
          }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (kXSlabs > 1 && b > 0 && first_block + kRowWarps * b >= blocks) break;
          uint32_t read[4], w[kXSlabs][4];
          load_matrices(read, (at + w_at[b] + d * half * kSlabBytes) ^ k * 32);
          if constexpr (kXSlabs == 1) {
#pragma unroll
            for (int r = 0; r < 4; ++r) w[0][r] = read[r];
          } else {
#pragma unroll
            for (int r = 0; r < 4; ++r) widen_four(read[r], w[r / 2][r % 2], w[r / 2][r % 2 + 2]);
          }
#pragma unroll
          for (int q = 0; q < kXSlabs; ++q) {
#pragma unroll
            for (int e = 0; e < kEights; ++e) {
              float(&to)[4] = [&]() -> float(&)[4] {
                if constexpr (kGrid) return of_slab[b][e];
                else return sums[b][e];
              }();
              mma16816<std::conditional_t<(kXSlabs > 1), fp16, T>>(to, w[q], x[q][e]);
            }
          }
        }
      }
      if constexpr (kGrid) {
        const float* const scales = table + i * p.depth + d;
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const float first = scales[scale_at[b][0]], second = scales[scale_at[b][1]];
#pragma unroll
          for (int e = 0; e < kEights; ++e) {
            sums[b][e][0] += of_slab[b][e][0] * first, sums[b][e][1] += of_slab[b][e][1] * first;
            sums[b][e][2] += of_slab[b][e][2] * second, sums[b][e][3] += of_slab[b][e][3] * second;
          }
        }
      }
    }
    if (lane == 0 && i + p.stages < p.count) hopper::arrive(&empty[next.at]);
    next.step(p.stages);
  }

  end_of_product<T, kRowWarps>(
      p, first_feature, first_block, sums, stages, old, [&](int token) { return kXSlabs > 1 ? lower[token] : 1.0f; },
      [&](int, int row) { return kXSlabs > 1 && !kGrid ? p.scale[row] : 1.0f; });
#endif
}

// Launches the kernel for p.rows, which with over 16 tokens are at most kManyTokensRows; defined in linear_*.cu.
template <class T, class W, int kEights, bool kGrid>
void run(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream);

// Of a stage's slab: the weight's, and those of x that it meets.
template <class T, class W>
constexpr int slab_bytes(int rows, int eights) {
  return (rows + static_cast<int>(sizeof(T) / sizeof(W)) * eights * 8) * kSlabBytes;
}

#ifdef QUIRE_LINEAR_EIGHTS
template <class T, class W, int kEights, int kRowWarps, int kBlocks, bool kGrid>
void start(const CUtensorMap& weight_map, const CUtensorMap& x_map, Params p, int tiles, cudaStream_t stream) {
  const auto kernel = linear_kernel<T, W, kEights, kRowWarps, kBlocks, kGrid>;
  const int stages_bytes = p.stages * p.depth * slab_bytes<T, W>(p.rows, kEights);
  const int way_out_bytes = sums_bytes(p.rows, kEights, kWarps / kRowWarps) + kEights * 8 * product_stride(p.rows);
  static const bool allowed = [&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoom + 1024), "linear");
    return true;
  }();
  static_cast<void>(allowed);
  p.table_at = (std::max(stages_bytes, way_out_bytes) + 15) / 16 * 16;
  const int bytes = 1024 + p.table_at + (kGrid ? table_bytes(p) : 0);
  launch(kernel, dim3(tiles), dim3(kThreads), bytes, stream, weight_map, x_map, p);
}

template <class T, class W, int kEights, bool kGrid>
void run(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream) {
  if (p.rows <= 16) return start<T, W, kEights, 1, 1, kGrid>(weight_map, x_map, p, tiles, stream);
  if (p.rows <= 32) return start<T, W, kEights, 1, 2, kGrid>(weight_map, x_map, p, tiles, stream);
  if constexpr (kEights <= 2) {
    if (p.rows <= 64) return start<T, W, kEights, 1, 4, kGrid>(weight_map, x_map, p, tiles, stream);
    if (p.rows <= 128) return start<T, W, kEights, 2, 4, kGrid>(weight_map, x_map, p, tiles, stream);
    start<T, W, kEights, 4, 4, kGrid>(weight_map, x_map, p, tiles, stream);
  }
}

#define QUIRE_RUN(T, W, kGrid)                                                                                       \
  template void run<T, W, QUIRE_LINEAR_EIGHTS, kGrid>(const CUtensorMap&, const CUtensorMap&, const Params&, int, \
                                                      cudaStream_t)
QUIRE_RUN(bf16, bf16, false);
QUIRE_RUN(fp16, fp16, false);
#if QUIRE_LINEAR_EIGHTS == 1
QUIRE_RUN(bf16, e4m3, false);
QUIRE_RUN(bf16, e4m3, true);
#endif
#undef QUIRE_RUN
#endif

}  // namespace quire::cuda::linears
