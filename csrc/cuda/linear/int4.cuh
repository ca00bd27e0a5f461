// GEMM of a few tokens with int4 weights (Hopper). int4.h has the layout; linear.cuh has the pipeline and the epilogue.
//
// A CTA computes a tile of p.blocks row blocks (16 rows each) over all of inner.  A stage holds p.depth packed blocks
// of each row block and the activations that they multiply.  The packed blocks of a row block are contiguous, so TMA
// copies them as plain bytes.
//
// The activations are first quantised to 16-bit integers.  Each 128 elements of a token share a power-of-two scale,
// which brings their maximum to 2^14 or more.  The error of an activation is at most 2^-15 of that maximum; the error
// of an int4 weight is up to half of its scale.  With up to four tokens, each CTA quantises all activations into shared
// memory at its start.  With more tokens convert_kernel runs first, and the stages copy its result.
//
// A shift and a mask unpack four int4 weights into bytes.  The tensor cores multiply bytes (mma.m16n8k32), and an
// activation is 256 * high + low, so each token takes two columns of the mma.  Sums within a group are exact integers;
// the scales are applied to them in float32:
//
//   sum (q - zero) x  =  256 * sum q high + sum q low - zero * sum x
//
// Grid (tiles).  Memory traffic: the weight once from memory, tokens * inner * 2 bytes per tile from L2.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/linear/int4.h"
#include "cuda/linear/linear.cuh"
#include "cuda/linear/read_x.cuh"

namespace quire::cuda::linears {

static_assert(kInt4Inputs == kXChunk);
constexpr int kHalves = kInt4Inputs / kUnit;  // halves per packed block; a lane loads 16 weights of a half at once
constexpr int kHalfBytes = kInt4Rows * kUnit / 2;

struct Int4Params : Epilogue {
  const float* row_scale;
  const void* x;  // bf16 activations, if each CTA quantises them
  int64_t x_stride;
  const char* x_scales;  // [k_blocks, tokens] scales of activations quantised by convert_kernel
  int blocks;            // row blocks of 16 per tile; with silu_mul gate blocks, then up blocks
  int k_blocks;          // packed blocks along inner, per row block
  int depth;             // packed blocks along inner per stage
  int count, stages;     // stages per tile; stages in the shared-memory ring
};

// Scale of a token's quantised activations in one packed block, and the negated sums of these activations, for the
// zero-point term.
template <int kGroups>
struct alignas(16) XScale {
  int minus_sum[kGroups];  // -(sum of the integers), per group
  float scale;             // value of one integer step
};
inline __host__ __device__ int x_scale_bytes(int groups) {
  return static_cast<int>(groups == 4 ? sizeof(XScale<4>) : sizeof(XScale<1>));
}

// Whether each CTA quantises the activations itself; otherwise convert_kernel runs first.
template <int kNTiles>
constexpr bool kConverts = kNTiles == 1;

// Whether two CTAs share a multiprocessor, so that the next kernel starts early.  With more than eight tokens the
// registers do not suffice for two CTAs: a GEMM of 16 tokens took 1.8 times as long with two CTAs.
template <int kNTiles>
constexpr bool kShared = kNTiles <= 2;
constexpr int kFullSmemBytes = 190 << 10;
constexpr int int4_smem_bytes(int tokens) { return tokens <= 8 ? kSmemBytes : kFullSmemBytes; }

// Stage layout: x [tokens, depth, 128], then packed blocks [depth, blocks], then x scales [depth, tokens].  If each CTA
// quantises the activations, a stage holds only packed blocks, and x [tokens, k_blocks, 128] and x scales [k_blocks,
// tokens] follow all stages.
inline __host__ __device__ int stage_x_bytes(const Int4Params& p) { return p.tokens * p.depth * kXBytes; }
inline __host__ __device__ int weight_bytes(const Int4Params& p, int groups) {
  return p.blocks * p.depth * int4_block_bytes(groups);
}
inline __host__ __device__ int in_128s(int bytes) { return (bytes + 127) / 128 * 128; }  // alignment of bulk copies
inline __host__ __device__ int stage_bytes(const Int4Params& p, int groups, bool converts) {
  const int x_bytes = converts ? 0 : stage_x_bytes(p) + p.tokens * p.depth * x_scale_bytes(groups);
  return in_128s(weight_bytes(p, groups) + x_bytes);
}
inline __host__ __device__ int converted_bytes(int tokens, int k_blocks, int groups) {
  return tokens * k_blocks * (kXBytes + x_scale_bytes(groups));
}

struct Int4Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};

// The loop of the producer warp.  TMA fills zeros past the end of the weight and of x.
//
// If each CTA quantises x, the next kernel may start once the last weight copy is issued: its first copies then overlap
// the end of this kernel.  An earlier start is no faster.  If convert_kernel quantises x, an early start is no faster
// either.
template <int kNTiles, int kGroups>
__device__ inline void copy_stages(const CUtensorMap* weight_map, const CUtensorMap* x_map, const Int4Params& p,
                                   int first_feature, char* stages, Int4Barriers& barriers) {
  constexpr bool kWithX = !kConverts<kNTiles>;
  const int x_bytes = kWithX ? stage_x_bytes(p) : 0, scale_bytes_per_block = p.tokens * x_scale_bytes(kGroups);
  const auto stage_of = [&](int stage) { return stages + stage * stage_bytes(p, kGroups, kConverts<kNTiles>); };
  const auto copied_scale_bytes = [&](int i) {
    return kWithX ? min(p.depth, p.k_blocks - i * p.depth) * scale_bytes_per_block : 0;
  };
  const auto copy_weight = [&](int i, int stage) {
    hopper::arrive_expecting(&barriers.full[stage], weight_bytes(p, kGroups) + x_bytes + copied_scale_bytes(i));
    hopper::copy_once(stage_of(stage) + x_bytes, weight_map, &barriers.full[stage], 0, first_feature / kInt4Rows, 0,
                      i * p.depth);
  };
  const auto copy_x = [&](int i, int stage) {
    if constexpr (kWithX) {
      hopper::copy_often(stage_of(stage), x_map, &barriers.full[stage], 0, i * p.depth, 0);
      hopper::copy_run(stage_of(stage) + x_bytes + weight_bytes(p, kGroups),
                       p.x_scales + i * p.depth * scale_bytes_per_block, &barriers.full[stage], copied_scale_bytes(i));
    }
  };
  const int early = min(p.count, p.stages);
  for (int i = 0; i < early; ++i) copy_weight(i, i);
  if (!kWithX && early == p.count) let_next_kernel_start();
  if constexpr (kWithX) {
    wait_for_previous_kernels();
    for (int i = 0; i < early; ++i) copy_x(i, i);
  }
  hopper::Ring next;
  for (int i = early; i < p.count; ++i) {
    hopper::wait(&barriers.empty[next.at], next.phase);
    copy_weight(i, next.at);
    copy_x(i, next.at);
    next.step(p.stages);
  }
  if (!kWithX && early < p.count) let_next_kernel_start();
}

// Multiplies four bf16 values by `raise`, rounds to integers, and splits these into signed high and low bytes.
__device__ inline void to_bytes(uint32_t pair, uint32_t next_pair, float raise, uint32_t& high, uint32_t& low) {
  // Adding 1.5 * 2^23 puts the rounded integer into the low mantissa bits.  Adding 128 more makes the second byte the
  // high byte of (integer - signed low byte).
  constexpr float kIntegers = 12582912 + 128;
  const float four[4] = {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000),
                         __uint_as_float(next_pair << 16), __uint_as_float(next_pair & 0xffff0000)};
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) bits[i] = __float_as_uint(fmaf(four[i], raise, kIntegers));
  const uint32_t first = __byte_perm(bits[0], bits[1], 0x5140), second = __byte_perm(bits[2], bits[3], 0x5140);
  low = __byte_perm(first, second, 0x5410) ^ 0x80808080;
  high = __byte_perm(first, second, 0x7632);
}

__device__ inline int sum_of(const uint4& bytes, int begin) {  // sums eight of the 16 bytes
  constexpr int kOnes = 0x01010101;
  return begin == 0 ? __dp4a(static_cast<int>(bytes.x), kOnes, __dp4a(static_cast<int>(bytes.y), kOnes, 0))
                    : __dp4a(static_cast<int>(bytes.z), kOnes, __dp4a(static_cast<int>(bytes.w), kOnes, 0));
}

// Quantises 128 activations of a token.  Of the 128 bytes of each half, the first 64 are high bytes and the last 64 are
// low bytes.
template <int kGroups>
__device__ inline void convert(const XChunk& x, char* to, XScale<kGroups>* x_scale) {
  const unsigned together = 0xffu << (threadIdx.x % 32 & 24);
  const int lane = threadIdx.x % 8, t = lane % 4;
  const auto [a, b] = x;
  uint32_t max_pair = x.largest();
#pragma unroll
  for (int step = 1; step < 8; step *= 2) max_pair = __vmaxu2(max_pair, __shfl_xor_sync(together, max_pair, step));
  const uint32_t largest = max(max_pair & 0xffff, max_pair >> 16);
  // Takes the exponent of the next larger bf16, because a maximum of 255 * 2^7 would overflow the integers by one.
  const int exponent = static_cast<int>(largest + 1 >> 7) - 127;
  const int up = min(14 - exponent, 120);
  constexpr uint32_t kInfinity = 0x7f80;  // bf16 bits of infinity; larger magnitudes are NaN
  const float raise = __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
  const float scale = largest >= kInfinity ? NAN : __uint_as_float(static_cast<uint32_t>(127 - up) << 23);
  uint4 high, low;
  to_bytes(a.x, a.y, raise, high.x, low.x);
  to_bytes(a.z, a.w, raise, high.y, low.y);
  to_bytes(b.x, b.y, raise, high.z, low.z);
  to_bytes(b.z, b.w, raise, high.w, low.w);
  *reinterpret_cast<uint4*>(to + XChunk::place()) = high;
  *reinterpret_cast<uint4*>(to + XChunk::place() + kUnit) = low;
  int first_sum = 256 * sum_of(high, 0) + sum_of(low, 0), second_sum = 256 * sum_of(high, 8) + sum_of(low, 8);
  if constexpr (kGroups < 4) first_sum += second_sum;
#pragma unroll
  for (int step = 1; step < (kGroups == 1 ? 8 : 4); step *= 2) {
    first_sum += __shfl_xor_sync(together, first_sum, step);
    if constexpr (kGroups == 4) second_sum += __shfl_xor_sync(together, second_sum, step);
  }
  if (lane == 0) x_scale->scale = scale;
  if constexpr (kGroups == 4) {
    if (t == 0) x_scale->minus_sum[lane / 2] = -first_sum, x_scale->minus_sum[lane / 2 + 1] = -second_sum;
  } else if (lane % (8 / kGroups) == 0) {
    x_scale->minus_sum[lane / 4] = -first_sum;
  }
}

// Quantises all of x after the preceding kernels have ended; called by the consumer warps.
template <int kGroups>
__device__ inline void convert_all(const Int4Params& p, char* to, char* x_scales) {
  struct Part {
    int token = 0, k_block = threadIdx.x / 8;
  } part[kMaxParts];
#pragma unroll
  for (int i = 0; i + 1 < kMaxParts; ++i) {
    const bool same_token = part[i].k_block + kXChunksAtOnce < p.k_blocks;
    part[i + 1].token = part[i].token + (same_token ? 0 : 1);
    part[i + 1].k_block = same_token ? part[i].k_block + kXChunksAtOnce : threadIdx.x / 8;
  }
  const auto exists = [&](int i) { return part[i].token < p.tokens && part[i].k_block < p.k_blocks; };
  wait_for_previous_kernels();
  XChunk x[kMaxParts];
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) {
    const char* const x_token = static_cast<const char*>(p.x) + part[i].token * p.x_stride * sizeof(bf16);
    if (exists(i)) x[i].load(x_token + part[i].k_block * kXBytes);
  }
#pragma unroll
  for (int i = 0; i < kMaxParts; ++i) {
    if (!exists(i)) continue;
    convert(x[i], to + (part[i].token * p.k_blocks + part[i].k_block) * kXBytes,
            reinterpret_cast<XScale<kGroups>*>(x_scales) + part[i].k_block * p.tokens + part[i].token);
  }
}

// Scales and zero points of a lane's two rows, per group of a half of a packed block (with groups of 128: per packed
// block).
template <int kGroups>
struct GroupScales {
  float scale[kGroups][2];
  int zero[kGroups][2];

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
      zero[k][0] = __byte_perm(bytes, 0, 0x4440 | 2 * k), zero[k][1] = __byte_perm(bytes, 0, 0x4440 | 2 * k + 1);
    }
  }
};

// mma.m16n8k32 on bytes: rows u8, tokens s8. Fragments as in tensor_core.cuh, with four bytes in place of two elements.
__device__ inline void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Token whose sums a lane holds in n tile `tile`.  A token has two mma columns, one for high and one for low bytes.
// With more than one n tile, tokens are ordered so that a lane holds tokens 2 t and 2 t + 1 of eight, as in mma.m16n8k16.
template <int kNTiles>
__device__ inline int token_of(int tile, int pair) {
  return kNTiles == 1 ? pair : tile / 2 * 8 + pair * 2 + tile % 2;
}

// Offsets that a lane needs in every stage.
template <int kNTiles>
struct Int4Lane {
  int x_at[kNTiles];         // offset of this lane's bytes in a quantised k block, per n tile
  int scale_token[kNTiles];  // token whose scale applies to this lane's sums

  // A token past the end reads the last token's data, and its accumulators are never stored.
  __device__ Int4Lane(const Int4Params& p, int x_row_bytes) {
    const int lane = threadIdx.x % 32, column = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < kNTiles; ++f) {
      const int token = min(token_of<kNTiles>(f, column / 2), p.tokens - 1);
      x_at[f] = token * x_row_bytes + column % 2 * kUnit + t * 16;
      scale_token[f] = min(token_of<kNTiles>(f, t), p.tokens - 1);
    }
  }
};

// Adds the scaled integer sums of one group to the float accumulators of a lane's two rows, for one token per n tile.
template <int kNTiles, int kGroups, int kScaleGroups>
__device__ inline void add_group(const int (&group_sums)[kNTiles][4], const GroupScales<kScaleGroups>& s, int k,
                                 int group, const XScale<kGroups>* x_scales, const Int4Lane<kNTiles>& at,
                                 float (&sums)[kNTiles][2]) {
#pragma unroll
  for (int f = 0; f < kNTiles; ++f) {
    const XScale<kGroups>& x_scale = x_scales[at.scale_token[f]];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int all = group_sums[f][2 * r] * 256 + group_sums[f][2 * r + 1];
      const int centred = all + s.zero[k][r] * x_scale.minus_sum[group];
      sums[f][r] += static_cast<float>(centred) * (s.scale[k][r] * x_scale.scale);
    }
  }
}

// Multiplies a packed block of each of kBlocks row blocks and adds the results to the accumulators.  An mma waits for
// the previous mma on the same accumulator, so the row blocks are interleaved.
//   k_block  packed block of the first row block; each further row block lies `step` bytes behind the previous one
//   x        quantised activations of the 128 elements of inner that the packed blocks cover
template <int kNTiles, int kGroups, int kBlocks>
__device__ inline void multiply_blocks(const char* k_block, int step, const char* x, const Int4Lane<kNTiles>& at,
                                       const XScale<kGroups>* x_scales, float (*sums)[kNTiles][2]) {
  constexpr int kGroupsPerHalf = kGroups == 4 ? 2 : 1, kWeightBytes = kHalves * kHalfBytes,
                kValuesPerG = kGroupsPerHalf * 2;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const char* const scales = k_block + kWeightBytes + g * kValuesPerG * sizeof(fp16);
  const char* const zeros = k_block + kWeightBytes + kGroups * kInt4Rows * sizeof(fp16) + g * kValuesPerG;
  int group_sums[kBlocks][kNTiles][4];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    uint4 bytes[kNTiles];
#pragma unroll
    for (int f = 0; f < kNTiles; ++f) bytes[f] = *reinterpret_cast<const uint4*>(x + at.x_at[f] + half * kUnit * 2);
    uint4 words[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      words[b] = *reinterpret_cast<const uint4*>(k_block + b * step + half * kHalfBytes + lane * 16);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 32 inputs per part: the low nibbles, then the high nibbles
      constexpr uint32_t kLow = 0x0f0f0f0f;
      const bool begins = kGroups == 4 || part == 0 && (kGroups == 2 || half == 0);
      const bool ends = kGroups == 4 || part == 1 && (kGroups == 2 || half == 1);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint4 w = words[b];
        const int shift = 4 * part;
        const uint32_t q[4] = {w.x >> shift & kLow, w.y >> shift & kLow, w.z >> shift & kLow, w.w >> shift & kLow};
#pragma unroll
        for (int f = 0; f < kNTiles; ++f) {
          if (begins) {
#pragma unroll
            for (int i = 0; i < 4; ++i) group_sums[b][f][i] = 0;
          }
          multiply_bytes(group_sums[b][f], q, part == 0 ? bytes[f].x : bytes[f].z, part == 0 ? bytes[f].y : bytes[f].w);
        }
      }
      if (!ends) continue;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int place = (kGroups == 1 ? 0 : half) * 8 * kValuesPerG;
        const GroupScales<kGroupsPerHalf> s(scales + b * step + place * sizeof(fp16), zeros + b * step + place);
        const int k = kGroups == 4 ? part : 0;
        add_group<kNTiles, kGroups>(group_sums[b], s, k, kGroups == 1 ? 0 : half * kGroupsPerHalf + k, x_scales, at,
                                    sums[b]);
      }
    }
  }
}

// Splits 0 .. kBlocks - 1 into ranges of at most kMax and calls run(first, count) for each, with integral constants.
template <int kBlocks, int kMax, int kFrom = 0, class Run>
__device__ inline void for_bundles(const Run& run) {
  if constexpr (kFrom < kBlocks) {
    constexpr int kBundles = (kBlocks - kFrom + kMax - 1) / kMax, kSize = (kBlocks - kFrom + kBundles - 1) / kBundles;
    run(std::integral_constant<int, kFrom>{}, std::integral_constant<int, kSize>{});
    for_bundles<kBlocks, kMax, kFrom + kSize>(run);
  }
}

// Reorders the accumulators into mma.m16n8k16's layout.  With one n tile the values of tokens 2 t and 2 t + 1 come from
// two other lanes.
template <int kNTiles, int kBlocks>
__device__ inline void order_sums(const float (&sums)[kBlocks][kNTiles][2],
                                  float (&ordered)[kBlocks][(kNTiles + 1) / 2][4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int e = 0; e < (kNTiles + 1) / 2; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kNTiles == 1) {
          const int lane = threadIdx.x % 32;
          ordered[b][e][i] = __shfl_sync(~0u, sums[b][0][i / 2], (lane & ~3) | (2 * lane + i % 2 & 3));
        } else {
          ordered[b][e][i] = sums[b][2 * e + i % 2][i / 2];
        }
      }
    }
  }
}

// kNTiles: n tiles of four tokens, 1 or even.  kRowWarps: warps along the rows.  kBlocks: row blocks per warp.
// kGroups: groups per packed block.
template <int kNTiles, int kRowWarps, int kBlocks, int kGroups>
__global__ __launch_bounds__(kThreads,
                             kShared<kNTiles> ? 2 : 1) void int4_kernel(const __grid_constant__ CUtensorMap weight_map,
                                                                        const __grid_constant__ CUtensorMap x_map,
                                                                        const __grid_constant__ Int4Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char stages[];
  __shared__ Int4Barriers barriers;
  __shared__ float row_scales[kMaxRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_feature = blockIdx.x * p.tile_features;

  if (threadIdx.x == kConsumerThreads) {
    hopper::prefetch_map(&weight_map);
    hopper::prefetch_map(&x_map);
    for (int i = 0; i < p.stages; ++i) {
      hopper::barrier_init(&barriers.full[i], 1);
      hopper::barrier_init(&barriers.empty[i], kWarps);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (!kConverts<kNTiles>) let_next_kernel_start();
  if (warp == kWarps) {
    if (lane == 0) copy_stages<kNTiles, kGroups>(&weight_map, &x_map, p, first_feature, stages, barriers);
    return;
  }

  constexpr int kKSplits = kWarps / kRowWarps, kBundle = kNTiles == 1 ? 2 : 1, kBlockBytes = int4_block_bytes(kGroups);
  const int k_split = warp / kRowWarps, first_block = warp % kRowWarps;
  constexpr bool kConverting = kConverts<kNTiles>;
  const Int4Lane<kNTiles> at(p, (kConverting ? p.k_blocks : p.depth) * kXBytes);
  const int weight_at = kConverting ? 0 : stage_x_bytes(p), x_scales_at = weight_at + weight_bytes(p, kGroups);
  char* const all_x = stages + p.stages * stage_bytes(p, kGroups, true);
  char* const all_x_scales = all_x + p.tokens * p.k_blocks * kXBytes;

  read_row_scales(p, first_feature, p.row_scale, row_scales);
  if constexpr (kConverting) {
    convert_all<kGroups>(p, all_x, all_x_scales);
    sync_consumers();
  } else {
    wait_for_previous_kernels();
  }
  constexpr bool kEarly = !kShared<kNTiles> || kNTiles * kBlocks <= 4;  // if false, accumulators need its registers
  Pack<bf16, 8> residual = {};
  if (kEarly) residual = read_out<bf16>(p, first_feature);

  float sums[kBlocks][kNTiles][2] = {};
  hopper::Ring next;
  unsigned k_block = k_split;  // this warp's next packed block, relative to the stage's first
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&barriers.full[next.at], next.phase);
    const char* const stage = stages + next.at * stage_bytes(p, kGroups, kConverting);
    const char* const x = kConverting ? all_x + i * p.depth * kXBytes : stage;
    const char* const x_scales =
        kConverting ? all_x_scales + i * p.depth * p.tokens * x_scale_bytes(kGroups) : stage + x_scales_at;
    const unsigned k_blocks = min(p.depth, p.k_blocks - i * p.depth);
    for (; k_block < k_blocks; k_block += kKSplits) {
      const char* const weight = stage + weight_at + (k_block * p.blocks + first_block) * kBlockBytes;
      // Row blocks past the end of the tile read arbitrary data, and their accumulators are never stored.
      for_bundles<kBlocks, kBundle>([&](auto first, auto count) {
        multiply_blocks<kNTiles, kGroups, count>(
            weight + kRowWarps * first * kBlockBytes, kRowWarps * kBlockBytes, x + k_block * kXBytes, at,
            reinterpret_cast<const XScale<kGroups>*>(x_scales) + k_block * p.tokens, sums + first);
      });
    }
    k_block -= p.depth;
    __syncwarp();
    if (lane == 0 && i + p.stages < p.count) hopper::arrive(&barriers.empty[next.at]);
    next.step(p.stages);
  }

  if (!kEarly) residual = read_out<bf16>(p, first_feature);
  float ordered[kBlocks][(kNTiles + 1) / 2][4];
  order_sums(sums, ordered);
  run_epilogue<bf16, kRowWarps>(
      p, first_feature, first_block, ordered, stages, residual, [](int) { return 1.0f; },
      [&](int row) { return row_scales[row]; });
#endif
}

// Launches the kernel instance for p.blocks row blocks per tile and `groups` groups per packed block; defined in
// int4_*.cu.
template <int kNTiles>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int groups, int tiles,
              cudaStream_t stream);

#ifdef QUIRE_INT4_N_TILES
template <int kNTiles, int kRowWarps, int kBlocks, int kGroups>
void start_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int tiles,
                cudaStream_t stream) {
  const auto kernel = int4_kernel<kNTiles, kRowWarps, kBlocks, kGroups>;
  constexpr int kRead = kRowWarps * kBlocks;  // row blocks read, including those past the end of a stage
  constexpr int kOutNTiles = (kNTiles + 1) / 2;
  const int x_bytes = kConverts<kNTiles> ? converted_bytes(p.tokens, p.k_blocks, kGroups) : 0;
  const int stages_bytes =
      p.stages * stage_bytes(p, kGroups, kConverts<kNTiles>) + x_bytes + (kRead - p.blocks) * int4_block_bytes(kGroups);
  const int epilogue_bytes =
      sums_bytes(p.rows, kOutNTiles, kWarps / kRowWarps) + kOutNTiles * 8 * out_tile_stride(p.rows);
  static const bool allowed = [&] {
    constexpr int kMax = (kShared<kNTiles> ? kSmemBytes : kFullSmemBytes) + kRead * int4_block_bytes(kGroups);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMax), "linear_int4");
    return true;
  }();
  static_cast<void>(allowed);
  launch(kernel, dim3(tiles), dim3(kThreads), std::max(stages_bytes, epilogue_bytes), stream, weight_map, x_map, p);
}

template <int kNTiles, int kGroups>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int tiles,
              cudaStream_t stream) {
  const auto with = [&](auto row_warps, auto blocks) {
    start_int4<kNTiles, row_warps, blocks, kGroups>(weight_map, x_map, p, tiles, stream);
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> two;
  if (p.blocks == 1) return with(one, one);
  if (p.blocks == 2) return with(one, two);
  if constexpr (kNTiles <= 2) {
    if (p.blocks == 3) return with(one, integral_constant<int, 3>{});
    if (p.blocks == 4) return with(one, integral_constant<int, 4>{});
    if (p.blocks <= 6) return with(two, integral_constant<int, 3>{});
    if (p.blocks <= 8) return with(two, integral_constant<int, 4>{});
    if (p.blocks <= 10) return with(two, integral_constant<int, 5>{});
    if (p.blocks <= 12) return with(two, integral_constant<int, 6>{});
    with(two, integral_constant<int, 7>{});
  } else {  // with more row blocks the accumulators no longer fit into registers
    if (p.blocks <= 4) return with(two, two);
    if (p.blocks <= 8) return with(integral_constant<int, 4>{}, two);
    with(integral_constant<int, 8>{}, two);
  }
}

template <int kNTiles>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int groups, int tiles,
              cudaStream_t stream) {
  if (groups == 1) return run_int4<kNTiles, 1>(weight_map, x_map, p, tiles, stream);
  if (groups == 2) return run_int4<kNTiles, 2>(weight_map, x_map, p, tiles, stream);
  run_int4<kNTiles, 4>(weight_map, x_map, p, tiles, stream);
}

template void run_int4<QUIRE_INT4_N_TILES>(const CUtensorMap&, const CUtensorMap&, const Int4Params&, int, int,
                                           cudaStream_t);
#endif

}  // namespace quire::cuda::linears
