// Reader of quantised weights for the grouped GEMM (grouped.cuh): they stay packed in shared memory, and each thread
// widens its elements to bf16 in registers, which hold wgmma's left operand.
//
//   a stage   x of the tile's pairs (12 KB), then two row tiles of weights, each a low and a high tile
//             (experts_layout.h)
//   a step    half a slab: 16 registers of widened weights, 4 wgmmas.  There are two sets of registers: while the tensor
//             cores read one, the thread widens the next half slab into the other
// With few pairs per expert, widening dominates the time.  Then twice as many warpgroups hide its latency (kParts 2):
// two per row tile, each for every other slab.
// A warpgroup computes one of the two row tiles.  If the last item of an expert has only one row tile, the results of
// the second warpgroup are not stored.
#pragma once

#include "cuda/experts/grouped.cuh"
#include "experts_layout.h"

namespace quire::cuda::grouped {

namespace layout = experts_layout;

// e2m1 values with a power-of-two scale per 32 elements of a row.  Widening is exact: a value has two significant bits.
struct Mxfp4 {
  static constexpr int kTileBytes = layout::kMxfp4Bytes, kStages = 10, kFewStages = 7;

  uint4 words;
  uint32_t scales;  // 4 bytes: scales of row g for the slab's two groups of 32 columns, then of row g + 8

  __device__ explicit Mxfp4(const char* tile) {
    const int thread = threadIdx.x % kWarpgroup;
    words = reinterpret_cast<const uint4*>(tile)[thread];
    scales = reinterpret_cast<const uint32_t*>(tile + layout::kMxfp4Values)[thread / 4];
  }

  // Widens the left operand of step k.
  __device__ void widen(int k, uint32_t (&a)[4]) const {
    const uint32_t w = k == 0 ? words.x : k == 1 ? words.y : k == 2 ? words.z : words.w;
    const uint32_t of_group = 0x4040 + k / 2 * 0x0101;  // selects the group's scale, for both halves of a word
    const uint32_t first = __byte_perm(scales, 0, of_group) << 7, second = __byte_perm(scales, 0, of_group + 0x0202)
                                                                           << 7;
    constexpr uint32_t kBits = 0x81c081c0;
    a[0] = times(w & kBits, first);
    a[1] = times(w << 3 & kBits, second);
    a[2] = times(w << 6 & kBits, first);
    a[3] = times((w << 1 & 0x80008000) | (w >> 5 & 0x01000100) | (w >> 4 & 0x00c000c0), second);
  }

  // Multiplies two bf16 by two bf16.  Subnormal values are not flushed to zero.
  __device__ static uint32_t times(uint32_t a, uint32_t b) {
    uint32_t result;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
    return result;
  }
};

// e4m3 with a float32 scale per row of the tile.  The product is rounded once, to bf16.
struct Fp8 {
  static constexpr int kTileBytes = layout::kFp8Bytes, kStages = 7, kFewStages = 4;

  uint4 values[2];
  float scales[2];  // scales of rows g and g + 8

  __device__ explicit Fp8(const char* tile) {
    const int thread = threadIdx.x % kWarpgroup, row = thread / kWarp * 16 + thread % kWarp / 4;
    const float* const of_rows = reinterpret_cast<const float*>(tile + layout::kFp8Values);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      values[half] = reinterpret_cast<const uint4*>(tile)[half * kWarpgroup + thread];
      scales[half] = of_rows[row + 8 * half];
    }
  }

  __device__ void widen(int k, uint32_t (&a)[4]) const {
    const uint4 of_half = values[k / 2];
    const uint32_t words[2] = {k % 2 == 0 ? of_half.x : of_half.z, k % 2 == 0 ? of_half.y : of_half.w};
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      uint32_t wide[2];
      widen_four(words[b], wide[0], wide[1]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 two = __half22float2(reinterpret_cast<const __half2&>(wide[h]));
        a[2 * b + h] = pack<bf16>(two.x * scales[h], two.y * scales[h]);
      }
    }
  }
};

template <class Format, int kParts_>
struct PackedRows {
  using T = bf16;
  static constexpr int kParts = kParts_;
  static constexpr int kRowTileBytes = 2 * Format::kTileBytes, kRowTiles = 2;
  static constexpr int kPairs = kParts == 1 ? kPackedTilePairs : kFewTilePairs;
  static constexpr int kX = 0, kWeight = kParts * kPairs * kSlabBytes;
  static constexpr int kStages = kParts == 1 ? Format::kStages : Format::kFewStages;
  static constexpr int kUsed = kWeight + kParts * kRowTiles * kRowTileBytes;
  static constexpr int kStageBytes = (kUsed + 1023) / 1024 * 1024;  // x is swizzled
  static_assert(layout::kRows == kGroupRows && kRowTiles == kGroups && layout::kColumns == kSlab &&
                layout::kTileLanes == kWarpgroup);

  struct Source {
    int bytes, copies;  // bytes per slab of all row tiles; a copy per row tile
    int64_t stride;     // bytes between row tiles
    const char* from;   // the item's first row tile, at its slab 0: the first inputs
    __device__ Source(const Params& p, const PairTile& tile, int row) {
      const int tiles = (p.rows + layout::kRows - 1) / layout::kRows, first = row / layout::kRows;
      copies = min(kRowTiles, tiles - first);
      bytes = copies * kRowTileBytes;
      stride = static_cast<int64_t>(p.slabs) * kRowTileBytes;
      from = p.packed + (static_cast<int64_t>(tile.expert) * tiles + first) * stride;
    }
    __device__ void copy(const Params& p, int slab, int slabs, char* to, uint64_t* full) const {
      const char* const at = from + slab * kRowTileBytes;
      copy_run(to, at, full, slabs * kRowTileBytes);
      if (copies > 1) copy_run(to + kParts * kRowTileBytes, at + stride, full, slabs * kRowTileBytes);
    }
  };

  template <int N, class Between>
  __device__ static void multiply(const char* stage, int slabs, int group, int part, float* low, float* high, bool add,
                                  const Between& between) {
    if (part >= slabs) {  // the last stage may have one slab only, that of part 0
      wait_for_products<0>();
      return between();
    }
    const char* const tile = stage + kWeight + (group * kParts + part) * kRowTileBytes;
    const Format low_tile(tile), high_tile(tile + Format::kTileBytes);
    const uint64_t x = operand(stage + kX + part * kPairs * kSlabBytes, 0);
    uint32_t low_rows[4][4], high_rows[4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 2 * half; k < 2 * half + 2; ++k) {
        low_tile.widen(k, low_rows[k]);
        high_tile.widen(k, high_rows[k]);
      }
      begin_products();
#pragma unroll
      for (int k = 2 * half; k < 2 * half + 2; ++k) {
        Wgmma<T, N>::multiply_rows(low, low_rows[k], operand_further(x, 32 * k), add || k > 0);
        Wgmma<T, N>::multiply_rows(high, high_rows[k], operand_further(x, 32 * k), add || k > 0);
      }
      end_products();
      wait_for_products<1>();
      if (half == 0) between();
    }
  }
};

}  // namespace quire::cuda::grouped
