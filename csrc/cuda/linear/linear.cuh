// The product of a few tokens with a weight matrix, at the speed at which the weight can be read.
//
//   x [tokens, inner] · weight [features, inner] · out [tokens, features], bf16 or fp16, sums in float32
//
// Every multiprocessor gets one CTA and an equal share of the weight's rows, over all of inner.  So no sums are added up
// between CTAs, which would take 2 to 5 us.
//
//        inner ->
//   f   |----|----|----|----|   a tile: p.rows rows of the weight, for one CTA
//   e   |       CTA 0       |   a slab: 64 numbers of inner (128 bytes a row) of a tile
//   a   |----|----|----|----|   a stage: p.depth slabs, copied at once
//   t   |       CTA 1       |
//
// In a CTA, one warp starts copies as far ahead as its half of the shared memory allows, and 8 warps multiply.  Each takes
// its share of the 16s of inner, and of the 16s of rows if there are many.  The weight is the left operand of
// mma.m16n8k16 and the tokens are the right one: 8 of them take as long as one.
//
// Copies of the weight start before the kernels in front have ended, because no kernel writes weights.  Two CTAs fit on a
// multiprocessor.  So while one kernel ends, the next one's 100 KB are already copied or on their way.
//
// Grid (tiles).  Moves features * inner * 2 bytes from memory, tokens * inner * 2 from L2 for each tile.  Rows, features
// and tokens past the end are read as zeros and not written.

#pragma once

#include <cuda.h>

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/linear/linear.h"
#include "cuda/common/numbers.cuh"
#include "cuda/common/tensor_core.cuh"

namespace quire::cuda::linears {

constexpr int kSlab = 64;           // numbers of inner: 128 bytes, the widest swizzle
constexpr int kWarps = 8;           // that multiply
constexpr int kMultipliers = kWarps * 32;
constexpr int kThreads = kMultipliers + 32;
constexpr int kMaxStages = 12;
constexpr int kMaxRows = 224;       // of a tile
constexpr int kManyTokensRows = 32;  // of a tile of 17 to 32 tokens: with more, sums no longer fit into registers
constexpr int kRoom = 110 << 10;    // of shared memory, for the stages

struct Params {
  const void* bias;
  void* out;
  int64_t out_stride;
  int tokens, features;  // of out
  int tile_features;     // of out that a tile makes: a multiple of 8
  int rows;              // of the weight that a tile reads: tile_features, or with silu_mul twice as many
  int depth;             // slabs of a stage
  int count, stages;     // stages of a tile; in shared memory
  bool add, silu_mul;
};

// Shared memory on the way out: sums of every share, then the product [tokens, rows].  It has 8 numbers of padding, so
// that tokens start in different banks.
constexpr int product_stride(int rows) { return rows * 2 + 16; }
constexpr int sums_bytes(int rows, int eights, int shares) { return shares * ((rows + 15) / 16) * eights * 32 * 16; }

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

// kEights: 8s of tokens.  kRowWarps: warps that share the rows.  kBlocks: 16s of rows of each.
template <class T, int kEights, int kRowWarps, int kBlocks>
__global__ __launch_bounds__(kThreads, 2) void linear_kernel(const __grid_constant__ CUtensorMap weight_map,
                                                             const __grid_constant__ CUtensorMap x_map,
                                                             const Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ char shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  char* const stages = shared + (-shared_address(shared) & 1023);  // swizzled rows start at multiples of 1024
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_feature = blockIdx.x * p.tile_features;
  // Of a stage: [depth, rows] of the weight (with silu_mul: the gate rows of all slabs, then the up rows), then
  // [depth, tokens] of x.
  const int weight_bytes = p.depth * p.rows * 128, stage_bytes = weight_bytes + p.depth * kEights * 8 * 128;

  if (thread == kMultipliers) {
    hopper::prefetch_map(&weight_map);
    hopper::prefetch_map(&x_map);
    for (int i = 0; i < p.stages; ++i) {
      hopper::barrier_init(&full[i], 1);
      hopper::barrier_init(&empty[i], kMultipliers / 32);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();

  if (warp == kMultipliers / 32) {  // the warp that copies
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

  // What this thread stores: 8 features of every so many tokens, if any.
  const int parts = p.tile_features / 8, first_token = thread / parts, part = thread % parts;
  const int token_step = kMultipliers / parts;
  const bool stores = first_token < token_step && first_feature + part * 8 < p.features;
  const auto out = [&](int token) {
    return static_cast<T*>(p.out) + token * p.out_stride + first_feature + part * 8;
  };

  // A slab has four 16s of inner: a share is two of them, or one, or one of every other slab.
  constexpr int kShares = kWarps / kRowWarps, kSixteens = kShares < 4 ? 4 / kShares : 1;
  constexpr int kSlabStep = kShares > 4 ? kShares / 4 : 1;
  const int first_block = warp % kRowWarps, share = warp / kRowWarps, blocks = (p.rows + 15) / 16;
  const int first_slab = share / 4, chunk = share % 4 * kSixteens * 2;

  // Where the lane's rows of the operands stand in a stage: 16-byte chunk c of row r at chunk c ^ (r % 8).
  const int half = p.silu_mul ? p.tile_features : p.rows;  // rows that stand together
  int w_at[kBlocks];
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    // A block that isn't there is read from another's place, and its sums are never used.
    int row = min((first_block + kRowWarps * b) * 16 + lane % 16, p.rows - 1);
    w_at[b] = ((chunk + lane / 16) ^ row % 8) * 16;
    if (row >= half) row += (p.depth - 1) * half;
    w_at[b] += row * 128;
  }
  constexpr int kXLoads = (kEights + 1) / 2;
  const int x_row = lane % 8 + (kEights > 1 ? lane / 16 * 8 : 0);
  const int x_at = weight_bytes + x_row * 128 + ((chunk + lane / 8 % 2) ^ x_row % 8) * 16;

  wait_for_previous_kernels();
  Pack<T, 8> old = {};
  if (p.add && stores && first_token < p.tokens) old = load_pack<8>(out(first_token));

  float sums[kBlocks][kEights][4] = {};
  hopper::Ring next;
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&full[next.at], next.phase);
    const uint32_t at = shared_address(stages + next.at * stage_bytes);
#pragma unroll 4
    for (int d = first_slab; d < p.depth; d += kSlabStep) {
#pragma unroll
      for (int k = 0; k < kSixteens; ++k) {
        const uint32_t further = k * 32;  // by two chunks; among the bits that the swizzle only turns over
        uint32_t x[kXLoads][kEights > 1 ? 4 : 2];
#pragma unroll
        for (int e = 0; e < kXLoads; ++e) load_matrices(x[e], (at + x_at + (d * kEights * 8 + e * 16) * 128) ^ further);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          uint32_t w[4];
          load_matrices(w, (at + w_at[b] + d * half * 128) ^ further);
#pragma unroll
          for (int e = 0; e < kEights; ++e) {
            mma16816<T>(sums[b][e], w, reinterpret_cast<const uint32_t(&)[2]>(x[e / 2][e % 2 * 2]));
          }
        }
      }
    }
    if (lane == 0 && i + p.stages < p.count) hopper::arrive(&empty[next.at]);
    next.step(p.stages);
  }

  // The shares meet where the stages were: [kShares, blocks, kEights, 32 lanes] of 4 sums.
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
  for (int i = warp; i < blocks * kEights; i += kMultipliers / 32) {
    float4 s = all_sums[i * 32 + lane];
#pragma unroll
    for (int k = 1; k < kShares; ++k) {
      const float4 more = all_sums[(k * blocks * kEights + i) * 32 + lane];
      s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
    }
    const int token = i % kEights * 8 + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = i / kEights * 16 + lane / 4 + 8 * r;
      if (row >= p.rows) continue;
      float bias = 0;
      if (p.bias != nullptr) {
        const bool up = row >= p.tile_features;
        const int feature = first_feature + row - (up ? p.tile_features : 0);
        if (feature < p.features) bias = to_float(static_cast<const T*>(p.bias)[feature + (up ? p.features : 0)]);
      }
      T* const to = reinterpret_cast<T*>(product + token * product_stride(p.rows)) + row;
      to[0] = from_float<T>((r == 0 ? s.x : s.z) + bias);
      to[product_stride(p.rows) / 2] = from_float<T>((r == 0 ? s.y : s.w) + bias);
    }
  }
  sync_multipliers();
  if (!stores) return;
  for (int token = first_token; token < p.tokens; token += token_step) {
    const T* from = reinterpret_cast<const T*>(product + token * product_stride(p.rows)) + part * 8;
    Pack<T, 8> y = load_pack<8>(from);
    if (p.silu_mul) {
      y = each(y, load_pack<8>(from + p.tile_features),
               [](float gate, float up) { return gate / (1 + __expf(-gate)) * up; });
    }
    if (p.add) {
      if (token > first_token) old = load_pack<8>(out(token));
      y = each(y, old, [](float a, float b) { return a + b; });
    }
    store_pack(out(token), y);
  }
#endif
}

// Launches the kernel for p.rows, which with over 16 tokens are at most kManyTokensRows; defined in linear_*.cu.
template <class T, int kEights>
void run(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream);

#ifdef QUIRE_LINEAR_EIGHTS
template <class T, int kEights, int kRowWarps, int kBlocks>
void start(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream) {
  const auto kernel = linear_kernel<T, kEights, kRowWarps, kBlocks>;
  const int stages_bytes = p.stages * p.depth * (p.rows + kEights * 8) * 128;
  const int way_out_bytes = sums_bytes(p.rows, kEights, kWarps / kRowWarps) + kEights * 8 * product_stride(p.rows);
  static const bool allowed = [&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoom + 1024), "linear");
    return true;
  }();
  static_cast<void>(allowed);
  const int bytes = 1024 + std::max(stages_bytes, way_out_bytes);
  launch(kernel, dim3(tiles), dim3(kThreads), bytes, stream, weight_map, x_map, p);
}

template <class T, int kEights>
void run(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Params& p, int tiles, cudaStream_t stream) {
  if (p.rows <= 16) return start<T, kEights, 1, 1>(weight_map, x_map, p, tiles, stream);
  if (p.rows <= 32) return start<T, kEights, 1, 2>(weight_map, x_map, p, tiles, stream);
  if constexpr (kEights <= 2) {
    if (p.rows <= 64) return start<T, kEights, 1, 4>(weight_map, x_map, p, tiles, stream);
    if (p.rows <= 128) return start<T, kEights, 2, 4>(weight_map, x_map, p, tiles, stream);
    start<T, kEights, 4, 4>(weight_map, x_map, p, tiles, stream);
  }
}

template void run<bf16, QUIRE_LINEAR_EIGHTS>(const CUtensorMap&, const CUtensorMap&, const Params&, int, cudaStream_t);
template void run<fp16, QUIRE_LINEAR_EIGHTS>(const CUtensorMap&, const CUtensorMap&, const Params&, int, cudaStream_t);
#endif

}  // namespace quire::cuda::linears
