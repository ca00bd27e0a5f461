// The product of a few tokens with a weight of 4 bits; int4.h has the layout, linear.cuh the idea and the end.
//
// A multiprocessor's CTA has some 16s of rows, over all of inner.  A stage holds p.depth records of each of them, and the
// tokens' numbers that these meet.  Records of 16 rows follow one another in memory, so both are copied as plain runs of bytes.
//
//            inputs ->
//   16s  |  128  |  128  | ..     a record: 16 rows, 128 inputs
//   of   |-------|-------|-
//   rows |       |       |        a unit: half a record, 64 inputs, of all rows of a warp.  Units go round among the warps
//                                 that share the same rows
//
// A number q becomes 128 + q in bf16 by one instruction for two, after a shift: 0x4300 is 128, and the last bit of its
// mantissa is 1.  x stays bf16.  So the tensor cores sum (128 + q) x over a group, and with rows of ones they sum x:
//
//   sum (q - zero) x  =  sum (128 + q) x  -  (128 + zero) sum x
//
// which is multiplied by the group's scale and added, in float32.  The difference is exact to 2^-16 of the largest |x| of the
// group, times the scale; a number's own rounding to 4 bits is up to half a scale.
//
// Grid (tiles).  Moves the bytes of the weight from memory, tokens * inner * 2 from L2 for each tile.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/linear/int4.h"
#include "cuda/linear/linear.cuh"

namespace quire::cuda::linears {

constexpr int kUnit = 64;                     // inputs
constexpr int kHalves = kInt4Inputs / kUnit;  // of a record
constexpr int kHalfBytes = kInt4Rows * kUnit / 2;
constexpr int kXBytes = kInt4Inputs * 2;  // of a token, that meet a record

struct Int4Params : End {
  const float* row_scale;
  int blocks;         // 16s of rows of a tile; with silu_mul gate blocks, then as many up blocks
  int records;        // of a row
  int depth;          // records of a stage
  int count, stages;  // stages of a tile; in shared memory
};

inline __host__ __device__ int x_row_bytes(const Int4Params& p) { return p.depth * kXBytes; }
inline __host__ __device__ int stage_bytes(const Int4Params& p, int groups) {  // the copies begin at multiples of 128
  return (p.tokens * x_row_bytes(p) + p.blocks * p.depth * int4_record_bytes(groups) + 127) / 128 * 128;
}

// What the warp that copies does.  Of a stage: x [tokens, depth] times 128 numbers, then the records of the weight
// [depth, blocks].  What lies past the end of either is read as zeros.
template <int kGroups>
__device__ inline void copy_stages(const CUtensorMap* weight_map, const CUtensorMap* x_map, const Int4Params& p,
                                   int first_feature, char* stages, uint64_t* full, uint64_t* empty) {
  const int x_bytes = p.tokens * x_row_bytes(p), weight_bytes = p.blocks * p.depth * int4_record_bytes(kGroups);
  const auto copy_weight = [&](int i, int stage) {
    hopper::arrive_expecting(&full[stage], x_bytes + weight_bytes);
    hopper::copy_once(stages + stage * stage_bytes(p, kGroups) + x_bytes, weight_map, &full[stage], 0,
                      first_feature / kInt4Rows, 0, i * p.depth);
  };
  const auto copy_x = [&](int i, int stage) {
    hopper::copy_often(stages + stage * stage_bytes(p, kGroups), x_map, &full[stage], 0, i * p.depth, 0);
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
}

// The scales of a tile's rows, into shared memory: read at the end, they would take as long as any read from memory.
__device__ inline void read_row_scales(const Int4Params& p, int first_feature, float* row_scales) {
  const int row = threadIdx.x;
  static_assert(kMaxRows <= kMultipliers);
  if (row >= p.rows) return;
  const bool up = row >= p.tile_features;
  const int feature = first_feature + row - (up ? p.tile_features : 0);
  if (feature < p.features) row_scales[row] = p.row_scale[feature + (up ? p.features : 0)];
}

// Two of the numbers of a word, those at bits 0 and 16, as 128 + q in bf16.
__device__ inline uint32_t widen_int4(uint32_t word) {
  uint32_t pair;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(pair) : "r"(word), "r"(0x000f000f), "r"(0x43004300));  // (a & b) | c
  return pair;
}

// 128 + byte i of zeros, in float32.
__device__ inline float widen_zero(uint32_t zeros, int i) {
  return __uint_as_float(__byte_perm(zeros, 0x43000000, 0x7044 | i << 8));
}

// The scales and zero points of a lane's two rows, of each group of a piece.
template <int kGroups>
struct GroupScales {
  float scale[kGroups][2], zero[kGroups][2];  // zero: 128 + zero point

  __device__ GroupScales(const char* scales, const char* zeros) {
    uint32_t pairs[kGroups], bytes;
    if constexpr (kGroups == 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(scales);
      pairs[0] = two.x, pairs[1] = two.y;
      bytes = *reinterpret_cast<const uint32_t*>(zeros);
    } else {
      pairs[0] = *reinterpret_cast<const uint32_t*>(scales);
      bytes = *reinterpret_cast<const uint16_t*>(zeros);
    }
#pragma unroll
    for (int k = 0; k < kGroups; ++k) {
      const float2 wide = __half22float2(reinterpret_cast<const __half2&>(pairs[k]));
      scale[k][0] = wide.x, scale[k][1] = wide.y;
      zero[k][0] = widen_zero(bytes, 2 * k), zero[k][1] = widen_zero(bytes, 2 * k + 1);
    }
  }
};

// A lane's part of x in a piece of a unit: of token 8 e + lane / 4 four numbers for each of kWords products, and the sums over
// each group, of tokens 8 e + lane % 4 * 2 and the one after it: the first two numbers of four.
template <int kEights, int kGroups, int kWords>
struct PieceOfX {
  uint32_t pairs[kEights][kWords][2];
  float sums[kEights][kGroups][4] = {};

  __device__ PieceOfX(const char* piece, const int (&x_at)[kEights]) {
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
#pragma unroll
      for (int j = 0; j < kWords; j += 2) {
        const uint4 four = *reinterpret_cast<const uint4*>(piece + x_at[e] + j / 2 * kUnit);
        pairs[e][j][0] = four.x, pairs[e][j][1] = four.y, pairs[e][j + 1][0] = four.z, pairs[e][j + 1][1] = four.w;
      }
    }
  }
};

// A lane's part of 16 rows in a piece.
template <int kGroups, int kWords>
struct PieceOfBlock {
  Pack<uint32_t, kWords> words;
  GroupScales<kGroups> scales;

  __device__ PieceOfBlock(const char* words_at, const char* scales_at, const char* zeros_at)
      : words(*reinterpret_cast<const Pack<uint32_t, kWords>*>(words_at)), scales(scales_at, zeros_at) {}
};

// Calls run(integral constants b, b + 1, ..) for all of 0 to kBlocks - 1, in bundles of up to kMost.
template <int kBlocks, int kMost, int kFrom = 0, class Run>
__device__ inline void for_bundles(const Run& run) {
  if constexpr (kFrom < kBlocks) {
    constexpr int kBundles = (kBlocks - kFrom + kMost - 1) / kMost, kSize = (kBlocks - kFrom + kBundles - 1) / kBundles;
    [&]<int... more>(std::integer_sequence<int, more...>) {
      run(std::integral_constant<int, kFrom + more>{}...);
    }(std::make_integer_sequence<int, kSize>{});
    for_bundles<kBlocks, kMost, kFrom + kSize>(run);
  }
}

// Adds a piece's products with kBlocks times 16 rows to their sums; kSumX: also finds the sums of x.  A product waits for the
// one before it that adds to the same numbers, so those of several blocks are mixed.
template <bool kSumX, int kBlocks, int kEights, int kGroups, int kWords>
__device__ inline void multiply_blocks(const PieceOfBlock<kGroups, kWords> (&blocks)[kBlocks],
                                       PieceOfX<kEights, kGroups, kWords>& x, float (*sums)[kEights][4]) {
  constexpr uint32_t kOnes = 0x3f803f80, ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
  for (int k = 0; k < kGroups; ++k) {
    float of_group[kBlocks][kEights][4] = {};
#pragma unroll
    for (int j = k * kWords / kGroups; j < (k + 1) * kWords / kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < kEights && kSumX; ++e) mma16816<bf16>(x.sums[e][k], ones, x.pairs[e][j]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint32_t word = blocks[b].words.at[j];
        const uint32_t w[4] = {widen_int4(word), widen_int4(word >> 4), widen_int4(word >> 8), widen_int4(word >> 12)};
#pragma unroll
        for (int e = 0; e < kEights; ++e) mma16816<bf16>(of_group[b][e], w, x.pairs[e][j]);
      }
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const GroupScales<kGroups>& s = blocks[b].scales;
#pragma unroll
      for (int e = 0; e < kEights; ++e) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float centred = of_group[b][e][i] - s.zero[k][i / 2] * x.sums[e][k][i % 2];
          sums[b][e][i] += centred * s.scale[k][i / 2];
        }
      }
    }
  }
}

// kEights: 8s of tokens.  kRowWarps: warps that share the rows.  kBlocks: 16s of rows of each.  kGroups: of a record.
template <int kEights, int kRowWarps, int kBlocks, int kGroups>
__global__ __launch_bounds__(kThreads, 2) void int4_kernel(const __grid_constant__ CUtensorMap weight_map,
                                                           const __grid_constant__ CUtensorMap x_map,
                                                           const __grid_constant__ Int4Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char stages[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ float row_scales[kMaxRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_feature = blockIdx.x * p.tile_features;

  if (threadIdx.x == kMultipliers) {
    hopper::prefetch_map(&weight_map);
    hopper::prefetch_map(&x_map);
    for (int i = 0; i < p.stages; ++i) {
      hopper::barrier_init(&full[i], 1);
      hopper::barrier_init(&empty[i], kWarps);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  let_next_kernel_start();
  if (warp == kWarps) {
    if (lane == 0) copy_stages<kGroups>(&weight_map, &x_map, p, first_feature, stages, full, empty);
    return;
  }

  // With many groups, and tokens or rows, a unit is computed in two pieces, which need fewer registers.
  constexpr int kOfUnit = kGroups == 4 ? 2 : 1, kPieces = kEights > 1 || kBlocks > 3 ? kOfUnit : 1, kWords = 4 / kPieces;
  constexpr int kShares = kWarps / kRowWarps, kBundle = kEights > 1 ? 1 : kBlocks <= 3 ? 3 : 2;
  const int share = warp / kRowWarps, first_block = warp % kRowWarps, g = lane / 4;
  // A token that isn't there is read from another's place, and its sums are never stored.
  int x_at[kEights];
#pragma unroll
  for (int e = 0; e < kEights; ++e) x_at[e] = min(e * 8 + g, p.tokens - 1) * x_row_bytes(p) + lane % 4 * 16;
  // From the start of a record to what belongs to this lane, and from one half to the other.
  constexpr int kPair = 2 * sizeof(fp16), kRecord = int4_record_bytes(kGroups), kNumbers = kHalves * kHalfBytes;
  constexpr int kScaleStep = kGroups == 1 ? 0 : 8 * kOfUnit * kPair, kZeros = kNumbers + kGroups * kInt4Rows * 2;
  const int weight_at = p.tokens * x_row_bytes(p) + first_block * kRecord;

  read_row_scales(p, first_feature, row_scales);
  wait_for_previous_kernels();
  constexpr bool kEarly = kEights * kBlocks <= 4;  // else sums take its registers
  Pack<bf16, 8> old = {};
  if (kEarly) old = read_out<bf16>(p, first_feature);

  float sums[kBlocks][kEights][4] = {};
  hopper::Ring next;
  unsigned unit = share;  // of the stage; those past its end lie in a later one
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&full[next.at], next.phase);
    const char* const stage = stages + next.at * stage_bytes(p, kGroups);
    const unsigned units = min(p.depth, p.records - i * p.depth) * kHalves;
    for (; unit < units; unit += kShares) {
      const unsigned half = unit % kHalves;
      const char* const record = stage + weight_at + unit / kHalves * p.blocks * kRecord;
      const char* const words = record + half * kHalfBytes + lane * 16;
      const char* const scales = record + kNumbers + half * kScaleStep + g * kOfUnit * kPair;
      const char* const zeros = record + kZeros + half * (kScaleStep / 2) + g * kOfUnit * 2;
#pragma unroll 1
      for (int piece = 0; piece < kPieces; ++piece) {
        PieceOfX<kEights, kOfUnit / kPieces, kWords> x(stage + unit * kUnit * 2 + piece * kUnit, x_at);
        const auto block = [&](int b) {  // one past the end is read from whatever is there, and its sums are never used
          const int at = kRowWarps * b * kRecord;
          return PieceOfBlock<kOfUnit / kPieces, kWords>(words + at + piece * kWords * 4, scales + at + piece * kPair,
                                                         zeros + at + piece * 2);
        };
        for_bundles<kBlocks, kBundle>([&](auto first, auto... more) {
          const PieceOfBlock<kOfUnit / kPieces, kWords> bundle[] = {block(first), block(more)...};
          multiply_blocks<first == 0>(bundle, x, sums + first);
        });
      }
    }
    unit -= p.depth * kHalves;
    __syncwarp();
    if (lane == 0 && i + p.stages < p.count) hopper::arrive(&empty[next.at]);
    next.step(p.stages);
  }

  if (!kEarly) old = read_out<bf16>(p, first_feature);
  end_of_product<bf16, kRowWarps>(
      p, first_feature, first_block, sums, stages, old, [](int) { return 1.0f; },
      [&](int row, int) { return row_scales[row]; });
#endif
}

// Launches the kernel for p.blocks, and so many groups of a record; defined in int4_*.cu.
template <int kEights>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int groups, int tiles,
              cudaStream_t stream);

#ifdef QUIRE_INT4_EIGHTS
template <int kEights, int kRowWarps, int kBlocks, int kGroups>
void start_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int tiles, cudaStream_t stream) {
  const auto kernel = int4_kernel<kEights, kRowWarps, kBlocks, kGroups>;
  constexpr int kRead = kRowWarps * kBlocks;  // blocks that are read, where some may lie past the end of a stage
  const int stages_bytes = p.stages * stage_bytes(p, kGroups) + (kRead - p.blocks) * int4_record_bytes(kGroups);
  const int way_out_bytes = sums_bytes(p.rows, kEights, kWarps / kRowWarps) + kEights * 8 * product_stride(p.rows);
  static const bool allowed = [&] {
    constexpr int kMost = kRoom + kRead * int4_record_bytes(kGroups);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost), "linear_int4");
    return true;
  }();
  static_cast<void>(allowed);
  launch(kernel, dim3(tiles), dim3(kThreads), std::max(stages_bytes, way_out_bytes), stream, weight_map, x_map, p);
}

template <int kEights, int kGroups>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int tiles, cudaStream_t stream) {
  const auto with = [&](auto row_warps, auto blocks) {
    start_int4<kEights, row_warps, blocks, kGroups>(weight_map, x_map, p, tiles, stream);
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> two;
  if (p.blocks == 1) return with(one, one);
  if (p.blocks == 2) return with(one, two);
  if constexpr (kEights == 1) {
    if (p.blocks == 3) return with(one, integral_constant<int, 3>{});
    if (p.blocks == 4) return with(one, integral_constant<int, 4>{});
    if (p.blocks <= 6) return with(two, integral_constant<int, 3>{});
    if (p.blocks <= 8) return with(two, integral_constant<int, 4>{});
    if (p.blocks <= 10) return with(two, integral_constant<int, 5>{});
    if (p.blocks <= 12) return with(two, integral_constant<int, 6>{});
    with(two, integral_constant<int, 7>{});
  } else {  // with more blocks a warp's sums no longer fit into registers
    if (p.blocks <= 4) return with(two, two);
    if (p.blocks <= 8) return with(integral_constant<int, 4>{}, two);
    with(integral_constant<int, 8>{}, two);
  }
}

template <int kEights>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int groups, int tiles,
              cudaStream_t stream) {
  if (groups == 1) return run_int4<kEights, 1>(weight_map, x_map, p, tiles, stream);
  if (groups == 2) return run_int4<kEights, 2>(weight_map, x_map, p, tiles, stream);
  run_int4<kEights, 4>(weight_map, x_map, p, tiles, stream);
}

template void run_int4<QUIRE_INT4_EIGHTS>(const CUtensorMap&, const CUtensorMap&, const Int4Params&, int, int, cudaStream_t);
#endif

}  // namespace quire::cuda::linears
