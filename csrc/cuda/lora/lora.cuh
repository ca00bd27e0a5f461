// Device code that the LoRA kernels share: an adapter's fields, sums of B h in registers, and stores.
#pragma once

#include "cuda/common/packs.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/lora/lora.h"

namespace quire::cuda::loras {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kBlockElements = 32 * 16;                        // elements of a packed block
constexpr int kTokens = 8, kTokenTiles = kLoraRows / kTokens;  // tokens per mma; mmas per tile

__device__ inline const int64_t* fields_of(const LoraRows& a, int slot) {
  return a.table + (static_cast<int64_t>(slot) * a.sites + a.site) * kLoraFields;
}

// Adds up the warps' partial sums of A x for 16 ranks, into h [rows of the tile, stride].  sums: a warp's partial sums
// as mma results, one per token tile; all_sums: scratch in shared memory.
template <int kTiles>
__device__ void add_up_warps(const float (&sums)[kTiles][4], float4 (&all_sums)[kWarps][kTiles][32], int rows, float* h,
                             int stride) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    all_sums[warp][n][lane] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
  }
  __syncthreads();
  // Warp n adds up token tile n: two tokens of ranks g and g + 8 per lane.
  static_assert(kTiles <= kWarps);
  if (warp >= kTiles) return;
  float4 s = all_sums[0][warp][lane];
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
    const float4 more = all_sums[other][warp][lane];
    s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
  }
  const int token = warp * kTokens + lane % 4 * 2;
  float* const to = h + static_cast<int64_t>(token) * stride + lane / 4;
  if (token < rows) to[0] = s.x, to[8] = s.z;
  if (token + 1 < rows) to[stride] = s.y, to[stride + 8] = s.w;
}

// B h of up to 16 * kHalves rows and 32 features of a part, in the registers of a warp.  A lane has 8 features, from
// 8 (lane % 4) on, of rows 16 m + lane / 4 and 16 m + lane / 4 + 8 for m < kHalves.
template <int kHalves>
struct DeltasOf {
  float of[kHalves][4][4];  // m, pair of features, (row, row + 8) x 2 features as an mma result

  __device__ float at(int m, bool further, int feature) const {
    return of[m][feature / 2][(further ? 2 : 0) + feature % 2];
  }

  // Adds B h for 16 ranks.  rows: h of the lane's rows as operand A; low, high: the lane's elements of a block of B.
  template <class T>
  __device__ void add(int m, const uint32_t (&rows)[4], const uint4& low, const uint4& high) {
    mma16816<T>(of[m][0], rows, {low.x, low.y});
    mma16816<T>(of[m][1], rows, {low.z, low.w});
    mma16816<T>(of[m][2], rows, {high.x, high.y});
    mma16816<T>(of[m][3], rows, {high.z, high.w});
  }
};
using Deltas = DeltasOf<kLoraRows / 16>;

// The packed blocks of B of one feature block.
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

  // The lane's elements of a block.
  __device__ void load(int block, uint4& low, uint4& high) const {
    const int lane = threadIdx.x % 32;
    low = block == 0 ? first[0] : __ldg(b + (block * 32 + lane) * 2);
    high = block == 0 ? first[1] : __ldg(b + (block * 32 + lane) * 2 + 1);
  }
};

// The rows of the step that a lane of a warp has in 8 * kCount rows of a tile, from `first` on: of[2 m + r] is row
// first + 16 m + 8 r + lane / 4; -1: none.
template <int kCount = kTokenTiles>
struct LaneRows {
  int of[kCount];

  __device__ LaneRows(const LoraRows& a, const int4& tile, int first = 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = first + 8 * i + threadIdx.x % 32 / 4;
      of[i] = at < tile.z ? a.order[tile.y + at] : -1;
    }
  }

  // Reads eight values per row from `first` [., stride].
  template <class T>
  __device__ void read(Pack<T, 8> (&packs)[kCount], const T* first, int64_t stride) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) packs[i] = of[i] >= 0 ? load_pack<8>(first + of[i] * stride) : Pack<T, 8>{};
  }
};

// Returns eight values of y plus the lane's deltas of its i-th row, rounded.
template <class T, int kHalves>
__device__ Pack<T, 8> sum_of(const Pack<T, 8>& y, const DeltasOf<kHalves>& deltas, int i) {
  float x[8];
  widen(y, x);
#pragma unroll
  for (int f = 0; f < 8; ++f) x[f] += deltas.at(i / 2, i % 2 == 1, f);
  return narrow<T>(x);
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

// Computes out = silu(gate) * up for those of the 32 rows from first_row on that have no adapter; a lane has the eight
// features from `feature` on.
template <class T>
__device__ void activate_plain_rows(const LoraOut& a, int feature, int first_row) {
  const int size = a.features[0];
  if (feature >= size) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = first_row + threadIdx.x % 32 / 4 + 8 * i;
    if (row >= a.rows || a.slot_of_row[row] >= 0) continue;
    const T* const y = static_cast<const T*>(a.y) + row * a.y_stride + feature;
    store_pack(static_cast<T*>(a.out) + row * a.out_stride + feature,
               activated(load_pack<8>(y), load_pack<8>(y + size)));
  }
}

// y += deltas for the rows of a lane.
template <class T, int kCount>
__device__ void add_deltas(const LoraOut& a, const LaneRows<kCount>& rows, const Pack<T, 8> (&y)[kCount],
                           const Deltas& deltas, int column) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (rows.of[i] < 0) continue;
    store_pack(static_cast<T*>(a.y) + rows.of[i] * a.y_stride + column, sum_of(y[i], deltas, i));
  }
}

// to[row] = deltas for the rows of a lane, eight values each.
__device__ inline void store_deltas(const LaneRows<>& rows, const Deltas& deltas, float* to, int64_t stride) {
#pragma unroll
  for (int i = 0; i < kTokenTiles; ++i) {
    if (rows.of[i] < 0) continue;
    float4* const row = reinterpret_cast<float4*>(to + rows.of[i] * stride);
    const auto at = [&](int feature) { return deltas.at(i / 2, i % 2 == 1, feature); };
    row[0] = make_float4(at(0), at(1), at(2), at(3));
    row[1] = make_float4(at(4), at(5), at(6), at(7));
  }
}

// Columns of y: the features of all parts.
__device__ inline int column_count(const LoraOut& a) {
  int columns = 0;
  for (int part = 0; part < a.parts; ++part) columns += a.features[part];
  return columns;
}

// out = silu(gate) * up for the rows of a lane.
template <class T, int kCount>
__device__ void activate(const LoraOut& a, const LaneRows<kCount>& rows, const Pack<T, 8> (&gate)[kCount],
                         const Deltas& gates, const Pack<T, 8> (&up)[kCount], const Deltas& ups, int feature) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (rows.of[i] < 0) continue;
    store_pack(static_cast<T*>(a.out) + rows.of[i] * a.out_stride + feature,
               activated(sum_of(gate[i], gates, i), sum_of(up[i], ups, i)));
  }
}

// A block of 32 features of a site, by its index over all parts.
struct Place {
  int part, block, column;  // part is a.parts past the end; column: first one of the part

  __device__ Place(const LoraOut& a, int number) : part(0), block(number), column(0) {
    for (; part < a.parts; ++part) {
      const int blocks = (a.features[part] + kLoraFeatures - 1) / kLoraFeatures;
      if (block < blocks) break;
      block -= blocks;
      column += a.features[part];
    }
  }
};

}  // namespace quire::cuda::loras
