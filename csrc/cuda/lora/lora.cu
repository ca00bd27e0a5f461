#include "cuda/lora/lora.h"

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/tensor_core.cuh"

namespace quire::cuda {
namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlocksAtOnce = 8;                               // packed blocks of A that a warp holds in registers
constexpr int kCtaBlocks = kWarps * kBlocksAtOnce;             // packed blocks of A that a CTA holds
constexpr int kBlockElements = 32 * 16;                        // elements of a packed block
constexpr int kTokens = 8, kTokenTiles = kLoraRows / kTokens;  // tokens per mma; mmas per tile

__device__ const int64_t* fields_of(const LoraRows& a, int slot) {
  return a.table + (static_cast<int64_t>(slot) * a.sites + a.site) * kLoraFields;
}

/* h[split, i, 16 block ..] = A x over a share of the inputs, for the rows of one tile.
 * Grid (rank blocks, splits, tiles).  The four warps share the inputs; A is operand A of mma.m16n8k16, rows of x are
 * operand B.  A lane reads 16 contiguous bytes of both: any order of the inputs will do if both have it.  No kernel
 * writes adapters, so the first blocks of A are read while the preceding kernel still runs. */
template <class T>
__global__ void __launch_bounds__(kThreads) shrink_kernel(LoraShrinkArgs a) {
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block = blockIdx.x, split = blockIdx.y;
  const int4 tile = a.tiles[blockIdx.z];
  const int64_t* fields = tile.x < 0 ? nullptr : fields_of(a, tile.x);
  if (fields == nullptr || block * kLoraRanks >= fields[1]) return wait_for_previous_kernels();

  const int blocks = (a.inner + kLoraInputs - 1) / kLoraInputs;
  const T* weights = static_cast<const T*>(a.weights) + tile.x * a.slot_elements + fields[0];
  const uint4* from = reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(block) * blocks * kBlockElements);
  const auto block_at = [&](int round, int i) {
    return (round * a.splits + split) * kCtaBlocks + warp * kBlocksAtOnce + i;
  };
  const int rounds = (blocks + a.splits * kCtaBlocks - 1) / (a.splits * kCtaBlocks);
  uint4 w[kBlocksAtOnce][2];
  const auto load_weights = [&](int round) {
#pragma unroll
    for (int i = 0; i < kBlocksAtOnce; ++i) {
      const int at = block_at(round, i);
      w[i][0] = w[i][1] = make_uint4(0, 0, 0, 0);
      if (at < blocks) {
        w[i][0] = __ldg(from + (at * 32 + lane) * 2);
        w[i][1] = __ldg(from + (at * 32 + lane) * 2 + 1);
      }
    }
  };
  load_weights(0);
  int rows[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) rows[n] = n * kTokens + g < tile.z ? a.order[tile.y + n * kTokens + g] : -1;
  wait_for_previous_kernels();

  float sums[kTokenTiles][4] = {};
  for (int round = 0; round < rounds; ++round) {
    if (round > 0) load_weights(round);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      if (n * kTokens >= tile.z) break;
      const T* const x = static_cast<const T*>(a.x) + rows[n] * a.x_stride + t * 8;
      uint4 v[kBlocksAtOnce];
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce; ++i) {
        const int input = block_at(round, i) * kLoraInputs;
        v[i] = make_uint4(0, 0, 0, 0);
        if (rows[n] >= 0 && input + t * 8 < a.inner) v[i] = *reinterpret_cast<const uint4*>(x + input);
      }
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce; ++i) {
        const uint4 &low = w[i][0], &high = w[i][1];
        mma16816<T>(sums[n], {low.x, high.x, low.y, high.y}, {v[i].x, v[i].y});
        mma16816<T>(sums[n], {low.z, high.z, low.w, high.w}, {v[i].z, v[i].w});
      }
    }
  }

  __shared__ float4 all_sums[kWarps][kTokenTiles][32];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    all_sums[warp][n][lane] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
  }
  __syncthreads();
  // Warp n adds up token tile n: two tokens of ranks g and g + 8 per lane.
  static_assert(kTokenTiles == kWarps);
  float4 s = all_sums[0][warp][lane];
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
    const float4 more = all_sums[other][warp][lane];
    s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
  }
  const int first = warp * kTokens + 2 * t;
  float* const to = a.h + (static_cast<int64_t>(split) * a.rows + tile.y + first) * a.ranks + block * kLoraRanks + g;
  if (first < tile.z) to[0] = s.x, to[8] = s.z;
  if (first + 1 < tile.z) to[a.ranks] = s.y, to[a.ranks + 8] = s.w;
}

// B h of up to 32 rows and 32 features of a part, in a warp.  The lane has 8 features from 8 (lane % 4) on, of row
// 16 m + lane / 4 and of the row 8 further.
struct Deltas {
  float of[2][4][4];  // m, pair of features, (row, row + 8) x 2 features as an mma result

  __device__ float at(int m, bool further, int feature) const {
    return of[m][feature / 2][(further ? 2 : 0) + feature % 2];
  }
};

// The packed blocks of B of one feature block, and the sums of h that they are multiplied with.
template <class T>
struct Expansion {
  const uint4* b;  // null: this part adds nothing
  int rank_blocks, first_rank;
  uint4 first[2];  // the lane's elements of the first block, read early

  __device__ Expansion(const LoraRows& a, int slot, int part, int feature_block) : b(nullptr), rank_blocks(0) {
    if (slot < 0) return;
    const int64_t* fields = fields_of(a, slot);
    first_rank = 0;
    for (int p = 0; p < part; ++p) first_rank += static_cast<int>(fields[3 + 4 * p]);
    rank_blocks = static_cast<int>(fields[3 + 4 * part]) / kLoraRanks;
    if (rank_blocks == 0) return;
    const T* weights = static_cast<const T*>(a.weights) + slot * a.slot_elements + fields[2 + 4 * part];
    b = reinterpret_cast<const uint4*>(weights) + static_cast<int64_t>(feature_block) * rank_blocks * 64;
    const int lane = threadIdx.x % 32;
    first[0] = __ldg(b + lane * 2), first[1] = __ldg(b + lane * 2 + 1);
  }

  // Adds B h of the tile's rows.
  __device__ void add(const LoraRows& a, const int4& tile, Deltas& deltas) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    for (int block = 0; block < rank_blocks; ++block) {
      const uint4 low = block == 0 ? first[0] : __ldg(b + (block * 32 + lane) * 2);
      const uint4 high = block == 0 ? first[1] : __ldg(b + (block * 32 + lane) * 2 + 1);
      const float* const h = a.h + first_rank + block * kLoraRanks + 4 * t;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (16 * m >= tile.z) break;
        float4 sums[2] = {};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int row = 16 * m + 8 * r + g;
          if (row >= tile.z) continue;
#pragma unroll 4
          for (int split = 0; split < a.splits; ++split) {
            const float4 more =
                *reinterpret_cast<const float4*>(h + (static_cast<int64_t>(split) * a.rows + tile.y + row) * a.ranks);
            sums[r].x += more.x, sums[r].y += more.y, sums[r].z += more.z, sums[r].w += more.w;
          }
        }
        const uint32_t rows[4] = {pack<T>(sums[0].x, sums[0].y), pack<T>(sums[1].x, sums[1].y),
                                  pack<T>(sums[0].z, sums[0].w), pack<T>(sums[1].z, sums[1].w)};
        mma16816<T>(deltas.of[m][0], rows, {low.x, low.y});
        mma16816<T>(deltas.of[m][1], rows, {low.z, low.w});
        mma16816<T>(deltas.of[m][2], rows, {high.x, high.y});
        mma16816<T>(deltas.of[m][3], rows, {high.z, high.w});
      }
    }
  }
};

// Eight values of y plus the lane's deltas, rounded.
template <class T>
__device__ Pack<T, 8> sum_of(const Pack<T, 8>& y, const Deltas& deltas, int m, bool further) {
  float x[8];
  widen(y, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] += deltas.at(m, further, i);
  return narrow<T>(x);
}

// Calls use(m, further, row) for the rows of a tile that a lane has; `row` is a row of the step.
template <class Use>
__device__ void for_rows(const LoraRows& a, const int4& tile, const Use& use) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int at = 16 * m + 8 * r + g;
      if (at < tile.z) use(m, r == 1, a.order[tile.y + at]);
    }
  }
}

/* y[row] += B h.  Grid (feature blocks of all parts / 4, tiles): a warp per feature block of 32. */
template <class T>
__global__ void __launch_bounds__(kThreads) expand_kernel(LoraExpandArgs a) {
  let_next_kernel_start();
  int block = blockIdx.x * kWarps + threadIdx.x / 32, part = 0, column = 0;
  const int4 tile = a.tiles[blockIdx.y];
  for (; part < a.parts; ++part) {
    const int blocks = (a.features[part] + kLoraFeatures - 1) / kLoraFeatures;
    if (block < blocks) break;
    block -= blocks;
    column += a.features[part];
  }
  if (tile.x < 0 || part == a.parts) return wait_for_previous_kernels();
  const Expansion<T> b(a, tile.x, part, block);
  wait_for_previous_kernels();
  const int feature = block * kLoraFeatures + threadIdx.x % 4 * 8;
  if (b.rank_blocks == 0) return;
  Deltas deltas = {};
  b.add(a, tile, deltas);
  if (feature >= a.features[part]) return;
  for_rows(a, tile, [&](int m, bool further, int row) {
    T* const y = static_cast<T*>(a.y) + row * a.y_stride + column + feature;
    store_pack(y, sum_of(load_pack<8>(y), deltas, m, further));
  });
}

template <class T>
__device__ Pack<T, 8> activated(const Pack<T, 8>& gates, const Pack<T, 8>& ups) {
  float gate[8], up[8];
  widen(gates, gate);
  widen(ups, up);
#pragma unroll
  for (int i = 0; i < 8; ++i) up[i] *= __fdividef(gate[i], 1.0f + expf(-gate[i]));  // as silu_mul does
  return narrow<T>(up);
}

/* out = silu(gate) * up, where y + B h is gate, then up; `features` of each.
 * Grid (feature blocks / 4, tiles, then the step's rows / 32): the last ones compute rows without an adapter. */
template <class T>
__global__ void __launch_bounds__(kThreads) expand_silu_kernel(LoraExpandArgs a) {
  let_next_kernel_start();
  const int size = a.features[0], block = blockIdx.x * kWarps + threadIdx.x / 32;
  const int feature = block * kLoraFeatures + threadIdx.x % 4 * 8;
  const bool plain = static_cast<int>(blockIdx.y) >= a.tile_count;
  const auto y_at = [&](int row) { return static_cast<const T*>(a.y) + row * a.y_stride + feature; };
  const auto out_at = [&](int row) { return static_cast<T*>(a.out) + row * a.out_stride + feature; };
  if (plain) {
    wait_for_previous_kernels();
    if (feature >= size) return;
    const int first = (blockIdx.y - a.tile_count) * kLoraRows + threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + 8 * i;
      if (row >= a.rows || a.slot_of_row[row] >= 0) continue;
      store_pack(out_at(row), activated(load_pack<8>(y_at(row)), load_pack<8>(y_at(row) + size)));
    }
    return;
  }
  const int4 tile = a.tiles[blockIdx.y];
  if (tile.x < 0 || block * kLoraFeatures >= size) return wait_for_previous_kernels();
  const Expansion<T> gate(a, tile.x, 0, block), up(a, tile.x, 1, block);
  wait_for_previous_kernels();
  Deltas gates = {}, ups = {};
  gate.add(a, tile, gates);
  up.add(a, tile, ups);
  if (feature >= size) return;
  for_rows(a, tile, [&](int m, bool further, int row) {
    store_pack(out_at(row), activated(sum_of(load_pack<8>(y_at(row)), gates, m, further),
                                      sum_of(load_pack<8>(y_at(row) + size), ups, m, further)));
  });
}

int ctas_of(int features) { return (features + kLoraFeatures * kWarps - 1) / (kLoraFeatures * kWarps); }

template <class T>
void expand(const LoraExpandArgs& a, cudaStream_t stream) {
  if (a.out != nullptr) {
    const dim3 grid(ctas_of(a.features[0]), a.tile_count + (a.rows + kLoraRows - 1) / kLoraRows);
    return launch(expand_silu_kernel<T>, grid, kThreads, 0, stream, a);
  }
  int blocks = 0;
  for (int part = 0; part < a.parts; ++part) blocks += (a.features[part] + kLoraFeatures - 1) / kLoraFeatures;
  launch(expand_kernel<T>, dim3((blocks + kWarps - 1) / kWarps, a.tile_count), kThreads, 0, stream, a);
}

}  // namespace

void lora_shrink(const LoraShrinkArgs& a, cudaStream_t stream) {
  const dim3 grid(a.ranks / kLoraRanks, a.splits, a.tile_count);
  a.dtype == Dtype::fp16 ? launch(shrink_kernel<fp16>, grid, kThreads, 0, stream, a)
                         : launch(shrink_kernel<bf16>, grid, kThreads, 0, stream, a);
}

void lora_expand(const LoraExpandArgs& a, cudaStream_t stream) {
  a.dtype == Dtype::fp16 ? expand<fp16>(a, stream) : expand<bf16>(a, stream);
}

}  // namespace quire::cuda
