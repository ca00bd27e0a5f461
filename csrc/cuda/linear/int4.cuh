// GEMM of a few tokens with int4 weights (Hopper). int4.h has the layout; linear.cuh has the pipeline and the epilogue.
//
// A CTA computes a tile of p.blocks row blocks (16 rows each) over all of inner.  A stage holds p.depth packed blocks
// of each row block and the activations that they multiply.  The packed blocks of a row block are contiguous, so TMA
// copies them as plain bytes.
//
// The activations are first quantised to 16-bit integers, with one power-of-two scale per token and 128 elements of
// inner, chosen so that the maximum reaches 2^14.  The error of an element is at most 2^-15 of that maximum; rounding
// the weight cost up to half a step of its own scale.  Up to four tokens: each CTA quantises all activations into
// shared memory at its start.  More tokens: convert_kernel runs first, and the stages copy its result.
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

static_assert(kInt4Inputs == kRecordOfX);
constexpr int kHalves = kInt4Inputs / kUnit;  // halves per packed block; a lane loads 16 weights of a half at once
constexpr int kHalfBytes = kInt4Rows * kUnit / 2;

struct Int4Params : End {
  const float* row_scale;
  const void* x;  // bf16 activations, if the CTAs convert them
  int64_t x_stride;
  const char* notes;  // [packed blocks along inner, tokens] headers of activations converted by convert_kernel
  int blocks;         // row blocks of 16 per tile; with silu_mul gate blocks, then up blocks
  int records;        // packed blocks per row
  int depth;          // packed blocks along inner per stage
  int count, stages;  // stages per tile; stages in shared memory
};

// Scale of a token's quantised activations in one packed block, and their sums for the zero-point correction.
template <int kGroups>
struct alignas(16) XNote {
  int minus_sum[kGroups];  // -(sum of the integers), per group
  float unit;              // value of one integer step
};
inline __host__ __device__ int note_bytes(int groups) {
  return static_cast<int>(groups == 4 ? sizeof(XNote<4>) : sizeof(XNote<1>));
}

// Whether each CTA quantises the activations itself; otherwise convert_kernel runs first.
template <int kFours>
constexpr bool kConverts = kFours == 1;

// Whether two CTAs share a multiprocessor, so that the next kernel starts early.  With more than eight tokens the
// registers do not suffice for two; forcing two made 16 tokens 1.8 times as slow.
template <int kFours>
constexpr bool kShared = kFours <= 2;
constexpr int kWholeRoom = 190 << 10;
constexpr int int4_room(int tokens) { return tokens <= 8 ? kRoom : kWholeRoom; }

// Stage layout: x [tokens, depth, 128], then packed blocks [depth, blocks], then x scales [depth, tokens].  If the CTAs
// quantise, a stage holds only packed blocks; x [tokens, k_blocks, 128] and x scales [k_blocks, tokens] follow all
// stages.
inline __host__ __device__ int stage_x_bytes(const Int4Params& p) { return p.tokens * p.depth * kXBytes; }
inline __host__ __device__ int weight_bytes(const Int4Params& p, int groups) {
  return p.blocks * p.depth * int4_record_bytes(groups);
}
inline __host__ __device__ int in_128s(int bytes) { return (bytes + 127) / 128 * 128; }  // alignment of a bulk copy
inline __host__ __device__ int stage_bytes(const Int4Params& p, int groups, bool converts) {
  const int of_x = converts ? 0 : stage_x_bytes(p) + p.tokens * p.depth * note_bytes(groups);
  return in_128s(weight_bytes(p, groups) + of_x);
}
inline __host__ __device__ int converted_bytes(int tokens, int records, int groups) {
  return tokens * records * (kXBytes + note_bytes(groups));
}

struct Int4Barriers {
  uint64_t full[kMaxStages], empty[kMaxStages];
};

// The producer warp's loop.  TMA fills zeros past the end of either tensor.
//
// If the CTAs quantise, the next kernel may start once the last weight copy is issued: its first copies then overlap
// this kernel's tail.  An earlier start gains nothing, nor does it help if convert_kernel runs in between.
template <int kFours, int kGroups>
__device__ inline void copy_stages(const CUtensorMap* weight_map, const CUtensorMap* x_map, const Int4Params& p,
                                   int first_feature, char* stages, Int4Barriers& barriers) {
  constexpr bool kWithX = !kConverts<kFours>;
  const int x_bytes = kWithX ? stage_x_bytes(p) : 0, notes_of_record = p.tokens * note_bytes(kGroups);
  const auto stage_of = [&](int stage) { return stages + stage * stage_bytes(p, kGroups, kConverts<kFours>); };
  const auto notes_of = [&](int i) { return kWithX ? min(p.depth, p.records - i * p.depth) * notes_of_record : 0; };
  const auto copy_weight = [&](int i, int stage) {
    hopper::arrive_expecting(&barriers.full[stage], weight_bytes(p, kGroups) + x_bytes + notes_of(i));
    hopper::copy_once(stage_of(stage) + x_bytes, weight_map, &barriers.full[stage], 0, first_feature / kInt4Rows, 0,
                      i * p.depth);
  };
  const auto copy_x = [&](int i, int stage) {
    if constexpr (kWithX) {
      hopper::copy_often(stage_of(stage), x_map, &barriers.full[stage], 0, i * p.depth, 0);
      hopper::copy_run(stage_of(stage) + x_bytes + weight_bytes(p, kGroups), p.notes + i * p.depth * notes_of_record,
                       &barriers.full[stage], notes_of(i));
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

// Rounds four bf16 values times `raise` to integers and splits them into signed high and low bytes.
__device__ inline void to_bytes(uint32_t pair, uint32_t next_pair, float raise, uint32_t& high, uint32_t& low) {
  // At 1.5 * 2^23 the last bit of a float counts 1.  Adding 128 makes its second byte the high byte of (integer - low
  // byte).
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

// Quantises 128 activations of a token.  Of each half, the high bytes fill the first 32 places and the low bytes the
// others.
template <int kGroups>
__device__ inline void convert(const RecordOfX& x, char* to, XNote<kGroups>* note) {
  const unsigned together = 0xffu << (threadIdx.x % 32 & 24);
  const int lane = threadIdx.x % 8, t = lane % 4;
  const auto [a, b] = x;
  uint32_t most = x.largest();
#pragma unroll
  for (int step = 1; step < 8; step *= 2) most = __vmaxu2(most, __shfl_xor_sync(together, most, step));
  const uint32_t largest = max(most & 0xffff, most >> 16);
  // One bf16 step higher, because 255 * 2^7 would overflow the integers by one.
  const int exponent = static_cast<int>(largest + 1 >> 7) - 127;
  const int up = min(14 - exponent, 120);
  constexpr uint32_t kInfinity = 0x7f80;  // bf16 bits; larger ones are NaN
  const float raise = __uint_as_float(static_cast<uint32_t>(up + 127) << 23);
  const float unit = largest >= kInfinity ? NAN : __uint_as_float(static_cast<uint32_t>(127 - up) << 23);
  uint4 high, low;
  to_bytes(a.x, a.y, raise, high.x, low.x);
  to_bytes(a.z, a.w, raise, high.y, low.y);
  to_bytes(b.x, b.y, raise, high.z, low.z);
  to_bytes(b.z, b.w, raise, high.w, low.w);
  *reinterpret_cast<uint4*>(to + RecordOfX::place()) = high;
  *reinterpret_cast<uint4*>(to + RecordOfX::place() + kUnit) = low;
  int of_first = 256 * sum_of(high, 0) + sum_of(low, 0), of_second = 256 * sum_of(high, 8) + sum_of(low, 8);
  if constexpr (kGroups < 4) of_first += of_second;
#pragma unroll
  for (int step = 1; step < (kGroups == 1 ? 8 : 4); step *= 2) {
    of_first += __shfl_xor_sync(together, of_first, step);
    if constexpr (kGroups == 4) of_second += __shfl_xor_sync(together, of_second, step);
  }
  if (lane == 0) note->unit = unit;
  if constexpr (kGroups == 4) {
    if (t == 0) note->minus_sum[lane / 2] = -of_first, note->minus_sum[lane / 2 + 1] = -of_second;
  } else if (lane % (8 / kGroups) == 0) {
    note->minus_sum[lane / 4] = -of_first;
  }
}

// Quantises all of x, by the consumer warps, after the preceding kernels have ended.
template <int kGroups>
__device__ inline void convert_all(const Int4Params& p, char* to, char* notes) {
  struct Part {
    int token = 0, record = threadIdx.x / 8;
  } part[kMostParts];
#pragma unroll
  for (int i = 0; i + 1 < kMostParts; ++i) {
    const bool of_token = part[i].record + kRecordsAtOnce < p.records;
    part[i + 1].token = part[i].token + (of_token ? 0 : 1);
    part[i + 1].record = of_token ? part[i].record + kRecordsAtOnce : threadIdx.x / 8;
  }
  const auto there = [&](int i) { return part[i].token < p.tokens && part[i].record < p.records; };
  wait_for_previous_kernels();
  RecordOfX x[kMostParts];
#pragma unroll
  for (int i = 0; i < kMostParts; ++i) {
    const char* const of_token = static_cast<const char*>(p.x) + part[i].token * p.x_stride * sizeof(bf16);
    if (there(i)) x[i].load(of_token + part[i].record * kXBytes);
  }
#pragma unroll
  for (int i = 0; i < kMostParts; ++i) {
    if (!there(i)) continue;
    convert(x[i], to + (part[i].token * p.records + part[i].record) * kXBytes,
            reinterpret_cast<XNote<kGroups>*>(notes) + part[i].record * p.tokens + part[i].token);
  }
}

// Scales and zero points of a lane's two rows, per group of a half block (groups of 128: per block).
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
// With more than one n tile the order makes the sums match mma.m16n8k16: tokens 2 t and 2 t + 1 of eight.
template <int kFours>
__device__ inline int token_of(int four, int pair) {
  return kFours == 1 ? pair : four / 2 * 8 + pair * 2 + four % 2;
}

// Offsets that a lane needs in every stage.
template <int kFours>
struct Int4Lane {
  int x_at[kFours];     // offset of this lane's bytes in a converted block of each four tokens
  int note_of[kFours];  // token of the header that scales this lane's sums

  // A token past the end reads the last token's data, and its sums are never stored.
  __device__ Int4Lane(const Int4Params& p, int x_row_bytes) {
    const int lane = threadIdx.x % 32, column = lane / 4, t = lane % 4;
#pragma unroll
    for (int f = 0; f < kFours; ++f) {
      const int token = min(token_of<kFours>(f, column / 2), p.tokens - 1);
      x_at[f] = token * x_row_bytes + column % 2 * kUnit + t * 16;
      note_of[f] = min(token_of<kFours>(f, t), p.tokens - 1);
    }
  }
};

// Adds the scaled integer sums of one group to the float accumulators of a lane's two rows, for one token per n tile.
template <int kFours, int kGroups, int kOfScales>
__device__ inline void add_group(const int (&of_group)[kFours][4], const GroupScales<kOfScales>& s, int k, int group,
                                 const XNote<kGroups>* notes, const Int4Lane<kFours>& at, float (&sums)[kFours][2]) {
#pragma unroll
  for (int f = 0; f < kFours; ++f) {
    const XNote<kGroups>& note = notes[at.note_of[f]];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int all = of_group[f][2 * r] * 256 + of_group[f][2 * r + 1];
      const int centred = all + s.zero[k][r] * note.minus_sum[group];
      sums[f][r] += static_cast<float>(centred) * (s.scale[k][r] * note.unit);
    }
  }
}

// Multiplies a packed block of each of kBlocks row blocks and adds the results to the accumulators.  An mma waits for
// the previous mma on the same accumulator, so the row blocks are interleaved.
//   k_block  packed block of the first row block; the next ones lie `step` bytes apart
//   x        quantised activations for these elements of inner
template <int kFours, int kGroups, int kBlocks>
__device__ inline void multiply_blocks(const char* record, int step, const char* x, const Int4Lane<kFours>& at,
                                       const XNote<kGroups>* notes, float (*sums)[kFours][2]) {
  constexpr int kOfHalf = kGroups == 4 ? 2 : 1, kNumbers = kHalves * kHalfBytes, kOfRow = kOfHalf * 2;
  const int lane = threadIdx.x % 32, g = lane / 4;
  const char* const scales = record + kNumbers + g * kOfRow * sizeof(fp16);
  const char* const zeros = record + kNumbers + kGroups * kInt4Rows * sizeof(fp16) + g * kOfRow;
  int of_group[kBlocks][kFours][4];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    uint4 bytes[kFours];
#pragma unroll
    for (int f = 0; f < kFours; ++f) bytes[f] = *reinterpret_cast<const uint4*>(x + at.x_at[f] + half * kUnit * 2);
    uint4 words[kBlocks];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      words[b] = *reinterpret_cast<const uint4*>(record + b * step + half * kHalfBytes + lane * 16);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {  // 32 inputs each: the low, then the high half of each byte
      constexpr uint32_t kLow = 0x0f0f0f0f;
      const bool begins = kGroups == 4 || part == 0 && (kGroups == 2 || half == 0);
      const bool ends = kGroups == 4 || part == 1 && (kGroups == 2 || half == 1);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint4 w = words[b];
        const int shift = 4 * part;
        const uint32_t q[4] = {w.x >> shift & kLow, w.y >> shift & kLow, w.z >> shift & kLow, w.w >> shift & kLow};
#pragma unroll
        for (int f = 0; f < kFours; ++f) {
          if (begins) {
#pragma unroll
            for (int i = 0; i < 4; ++i) of_group[b][f][i] = 0;
          }
          multiply_bytes(of_group[b][f], q, part == 0 ? bytes[f].x : bytes[f].z, part == 0 ? bytes[f].y : bytes[f].w);
        }
      }
      if (!ends) continue;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const int place = (kGroups == 1 ? 0 : half) * 8 * kOfRow;
        const GroupScales<kOfHalf> s(scales + b * step + place * sizeof(fp16), zeros + b * step + place);
        const int k = kGroups == 4 ? part : 0;
        add_group<kFours, kGroups>(of_group[b], s, k, kGroups == 1 ? 0 : half * kOfHalf + k, notes, at, sums[b]);
      }
    }
  }
}

// Calls run(first, count), with integral constants, for runs of at most kMax that cover 0 to kBlocks - 1.
template <int kBlocks, int kMost, int kFrom = 0, class Run>
__device__ inline void for_bundles(const Run& run) {
  if constexpr (kFrom < kBlocks) {
    constexpr int kBundles = (kBlocks - kFrom + kMost - 1) / kMost, kSize = (kBlocks - kFrom + kBundles - 1) / kBundles;
    run(std::integral_constant<int, kFrom>{}, std::integral_constant<int, kSize>{});
    for_bundles<kBlocks, kMost, kFrom + kSize>(run);
  }
}

// Reorders the accumulators into mma.m16n8k16's layout.  With one n tile the values of tokens 2 t and 2 t + 1 come from
// two other lanes.
template <int kFours, int kBlocks>
__device__ inline void order_sums(const float (&sums)[kBlocks][kFours][2],
                                  float (&ordered)[kBlocks][(kFours + 1) / 2][4]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int e = 0; e < (kFours + 1) / 2; ++e) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kFours == 1) {
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
template <int kFours, int kRowWarps, int kBlocks, int kGroups>
__global__ __launch_bounds__(kThreads,
                             kShared<kFours> ? 2 : 1) void int4_kernel(const __grid_constant__ CUtensorMap weight_map,
                                                                       const __grid_constant__ CUtensorMap x_map,
                                                                       const __grid_constant__ Int4Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char stages[];
  __shared__ Int4Barriers barriers;
  __shared__ float row_scales[kMaxRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_feature = blockIdx.x * p.tile_features;

  if (threadIdx.x == kMultipliers) {
    hopper::prefetch_map(&weight_map);
    hopper::prefetch_map(&x_map);
    for (int i = 0; i < p.stages; ++i) {
      hopper::barrier_init(&barriers.full[i], 1);
      hopper::barrier_init(&barriers.empty[i], kWarps);
    }
    hopper::fence_barrier_init();
  }
  __syncthreads();
  if (!kConverts<kFours>) let_next_kernel_start();
  if (warp == kWarps) {
    if (lane == 0) copy_stages<kFours, kGroups>(&weight_map, &x_map, p, first_feature, stages, barriers);
    return;
  }

  constexpr int kShares = kWarps / kRowWarps, kBundle = kFours == 1 ? 2 : 1, kRecord = int4_record_bytes(kGroups);
  const int share = warp / kRowWarps, first_block = warp % kRowWarps;
  constexpr bool kConverting = kConverts<kFours>;
  const Int4Lane<kFours> at(p, (kConverting ? p.records : p.depth) * kXBytes);
  const int weight_at = kConverting ? 0 : stage_x_bytes(p), notes_at = weight_at + weight_bytes(p, kGroups);
  char* const all_x = stages + p.stages * stage_bytes(p, kGroups, true);
  char* const all_notes = all_x + p.tokens * p.records * kXBytes;

  read_row_scales(p, first_feature, p.row_scale, row_scales);
  if constexpr (kConverting) {
    convert_all<kGroups>(p, all_x, all_notes);
    sync_multipliers();
  } else {
    wait_for_previous_kernels();
  }
  constexpr bool kEarly = !kShared<kFours> || kFours * kBlocks <= 4;  // otherwise the accumulators need its registers
  Pack<bf16, 8> old = {};
  if (kEarly) old = read_out<bf16>(p, first_feature);

  float sums[kBlocks][kFours][2] = {};
  hopper::Ring next;
  unsigned record = share;  // index in the stage; past its end: in a later stage
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&barriers.full[next.at], next.phase);
    const char* const stage = stages + next.at * stage_bytes(p, kGroups, kConverting);
    const char* const x = kConverting ? all_x + i * p.depth * kXBytes : stage;
    const char* const notes = kConverting ? all_notes + i * p.depth * p.tokens * note_bytes(kGroups) : stage + notes_at;
    const unsigned records = min(p.depth, p.records - i * p.depth);
    for (; record < records; record += kShares) {
      const char* const weight = stage + weight_at + (record * p.blocks + first_block) * kRecord;
      for_bundles<kBlocks, kBundle>([&](auto first,
                                        auto count) {  // rows past the end of the tile read
        multiply_blocks<kFours, kGroups, count>(
            weight + kRowWarps * first * kRecord, kRowWarps * kRecord,  // arbitrary data and are never stored
            x + record * kXBytes, at, reinterpret_cast<const XNote<kGroups>*>(notes) + record * p.tokens, sums + first);
      });
    }
    record -= p.depth;
    __syncwarp();
    if (lane == 0 && i + p.stages < p.count) hopper::arrive(&barriers.empty[next.at]);
    next.step(p.stages);
  }

  if (!kEarly) old = read_out<bf16>(p, first_feature);
  float ordered[kBlocks][(kFours + 1) / 2][4];
  order_sums(sums, ordered);
  end_of_product<bf16, kRowWarps>(
      p, first_feature, first_block, ordered, stages, old, [](int) { return 1.0f; },
      [&](int row) { return row_scales[row]; });
#endif
}

// Launches the kernel for p.blocks and `groups` groups per packed block; defined in int4_*.cu.
template <int kFours>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int groups, int tiles,
              cudaStream_t stream);

#ifdef QUIRE_INT4_FOURS
template <int kFours, int kRowWarps, int kBlocks, int kGroups>
void start_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int tiles,
                cudaStream_t stream) {
  const auto kernel = int4_kernel<kFours, kRowWarps, kBlocks, kGroups>;
  constexpr int kRead = kRowWarps * kBlocks;  // row blocks read, including those past the end of a stage
  constexpr int kEights = (kFours + 1) / 2;
  const int of_x = kConverts<kFours> ? converted_bytes(p.tokens, p.records, kGroups) : 0;
  const int stages_bytes =
      p.stages * stage_bytes(p, kGroups, kConverts<kFours>) + of_x + (kRead - p.blocks) * int4_record_bytes(kGroups);
  const int way_out_bytes = sums_bytes(p.rows, kEights, kWarps / kRowWarps) + kEights * 8 * product_stride(p.rows);
  static const bool allowed = [&] {
    constexpr int kMost = (kShared<kFours> ? kRoom : kWholeRoom) + kRead * int4_record_bytes(kGroups);
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMost), "linear_int4");
    return true;
  }();
  static_cast<void>(allowed);
  launch(kernel, dim3(tiles), dim3(kThreads), std::max(stages_bytes, way_out_bytes), stream, weight_map, x_map, p);
}

template <int kFours, int kGroups>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int tiles,
              cudaStream_t stream) {
  const auto with = [&](auto row_warps, auto blocks) {
    start_int4<kFours, row_warps, blocks, kGroups>(weight_map, x_map, p, tiles, stream);
  };
  using std::integral_constant;
  constexpr integral_constant<int, 1> one;
  constexpr integral_constant<int, 2> two;
  if (p.blocks == 1) return with(one, one);
  if (p.blocks == 2) return with(one, two);
  if constexpr (kFours <= 2) {
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

template <int kFours>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int groups, int tiles,
              cudaStream_t stream) {
  if (groups == 1) return run_int4<kFours, 1>(weight_map, x_map, p, tiles, stream);
  if (groups == 2) return run_int4<kFours, 2>(weight_map, x_map, p, tiles, stream);
  run_int4<kFours, 4>(weight_map, x_map, p, tiles, stream);
}

template void run_int4<QUIRE_INT4_FOURS>(const CUtensorMap&, const CUtensorMap&, const Int4Params&, int, int,
                                         cudaStream_t);
#endif

}  // namespace quire::cuda::linears
