// The product of a few tokens with a weight of 4 bits; int4.h has the layout, linear.cuh the idea and the end.
//
// A multiprocessor's CTA has some 16s of rows, over all of inner.  A stage holds p.depth records of each of them, and the
// tokens' numbers that these meet.  Records of 16 rows follow one another in memory, so both are copied as plain runs of bytes.
//
// The tokens' numbers become 16-bit integers first.  Those of a record and a token have a power of two in common, which brings
// the largest of them to 2^14 and more.  Smaller ones are off by up to 2^-15 of it; a number of the weight was rounded by up
// to half a scale.  Few of them are converted by each CTA at its start, into shared memory; many by a kernel in front, and
// copied with the stages.
//
// Numbers of the weight become bytes by a shift and a mask for four of them.  The tensor cores multiply bytes: such an
// integer is 256 * high + low, so a token takes two columns of mma.m16n8k32.  Sums over a group are integers, thus exact;
// then the scales follow, in float32:
//
//   sum (q - zero) x  =  256 * sum q high + sum q low - zero * sum x
//
// Grid (tiles).  Moves the bytes of the weight from memory, tokens * inner * 2 from L2 for each tile.
#pragma once

#include <type_traits>
#include <utility>

#include "cuda/linear/int4.h"
#include "cuda/linear/linear.cuh"
#include "cuda/linear/read_x.cuh"

namespace quire::cuda::linears {

static_assert(kInt4Inputs == kRecordOfX);
constexpr int kHalves = kInt4Inputs / kUnit;  // of a record; of a half a lane reads 16 numbers of a row at once
constexpr int kHalfBytes = kInt4Rows * kUnit / 2;

struct Int4Params : End {
  const float* row_scale;
  const void* x;  // bf16, for CTAs that convert it
  int64_t x_stride;
  const char* notes;  // [records, tokens] of what was converted before
  int blocks;         // 16s of rows of a tile; with silu_mul gate blocks, then as many up blocks
  int records;        // of a row
  int depth;          // records of a stage
  int count, stages;  // stages of a tile; in shared memory
};

// What the conversion says of a token's numbers in a record.
template <int kGroups>
struct alignas(16) XNote {
  int minus_sum[kGroups];  // of each group
  float unit;              // what the integers count
};
inline __host__ __device__ int note_bytes(int groups) {
  return static_cast<int>(groups == 4 ? sizeof(XNote<4>) : sizeof(XNote<1>));
}

// Whether each CTA converts the tokens' numbers, not a kernel in front.
template <int kFours>
constexpr bool kConverts = kFours == 1;

// Whether CTAs of two kernels share a multiprocessor.  With more than eight tokens the registers that they need do not
// suffice for two; with two, 16 tokens took 1.8 times as long.
template <int kFours>
constexpr bool kShared = kFours <= 2;
constexpr int kWholeRoom = 190 << 10;
constexpr int int4_room(int tokens) { return tokens <= 8 ? kRoom : kWholeRoom; }

// A stage: x [tokens, depth] times 128 numbers, then the records of the weight [depth, blocks], then notes [depth, tokens].
// Where CTAs convert, a stage is records only, and behind all stages there are x [tokens, records] times 128 numbers and
// notes [records, tokens].
inline __host__ __device__ int stage_x_bytes(const Int4Params& p) { return p.tokens * p.depth * kXBytes; }
inline __host__ __device__ int weight_bytes(const Int4Params& p, int groups) {
  return p.blocks * p.depth * int4_record_bytes(groups);
}
inline __host__ __device__ int in_128s(int bytes) { return (bytes + 127) / 128 * 128; }  // where a copy may begin
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

// What the warp that copies does.  What lies past the end of either tensor is read as zeros.
//
// Where CTAs convert, the next kernel may start when the last copy of the weight was started: its own first copies arrive
// while this one ends and the memory would have nothing to do.  Earlier, they would be done by then.  With a kernel that
// converts in between, this gained nothing.
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

// Four numbers of bf16 times `raise`, rounded to integers, as their high and low bytes; both bytes have a sign.
__device__ inline void to_bytes(uint32_t pair, uint32_t next_pair, float raise, uint32_t& high, uint32_t& low) {
  // At 1.5 * 2^23 a float's last bit counts 1.  With 128 more, its second byte is the high byte of number - low.
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

__device__ inline int sum_of(const uint4& bytes, int begin) {  // eight bytes
  constexpr int kOnes = 0x01010101;
  return begin == 0 ? __dp4a(static_cast<int>(bytes.x), kOnes, __dp4a(static_cast<int>(bytes.y), kOnes, 0))
                    : __dp4a(static_cast<int>(bytes.z), kOnes, __dp4a(static_cast<int>(bytes.w), kOnes, 0));
}

// Converts a token's numbers of a record.  High bytes take the place of the first 32 of a half, low bytes that of the others.
template <int kGroups>
__device__ inline void convert(const RecordOfX& x, char* to, XNote<kGroups>* note) {
  const unsigned together = 0xffu << (threadIdx.x % 32 & 24);
  const int lane = threadIdx.x % 8, t = lane % 4;
  const auto [a, b] = x;
  uint32_t most = x.largest();
#pragma unroll
  for (int step = 1; step < 8; step *= 2) most = __vmaxu2(most, __shfl_xor_sync(together, most, step));
  const uint32_t largest = max(most & 0xffff, most >> 16);
  // One more in its bits, since 255 * 2^7 is too much by one.
  const int exponent = static_cast<int>(largest + 1 >> 7) - 127;
  const int up = min(14 - exponent, 120);
  constexpr uint32_t kInfinity = 0x7f80;  // NaN is more
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

// Converts all of x, by the warps that multiply, after the kernels in front have ended.
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

// The scales and zero points of a lane's two rows, of each group of a half (groups of 128: of the record).
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

// mma.m16n8k32 of bytes: rows u8, tokens s8.  Fragments as in tensor_core.cuh, with four bytes where two numbers stood.
__device__ inline void multiply_bytes(int (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Where a lane's part of a four of tokens is.  A token has two columns of a product, its high and its low bytes.  With
// more than four tokens a lane's sums are those that mma.m16n8k16 would leave, of tokens 2 t and 2 t + 1 of eight.
template <int kFours>
__device__ inline int token_of(int four, int pair) {
  return kFours == 1 ? pair : four / 2 * 8 + pair * 2 + four % 2;
}

// What a warp needs to know of its share.
template <int kFours>
struct Int4Lane {
  int x_at[kFours];     // of this lane's bytes, from the start of a record of x
  int note_of[kFours];  // of the token whose sums this lane has

  // A token that isn't there is read from another's place, and its sums are never stored.
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

// Adds a group's sums, times its scales, to those of a lane's two rows and of a token of each four.
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

// Adds the products of a record with kBlocks times 16 rows to their sums.  A product waits for the one before it that adds to
// the same numbers, so those of several blocks are mixed.
//   record  of the first block; the next ones lie `step` bytes apart
//   x       the tokens' bytes that meet it
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
    for (int part = 0; part < 2; ++part) {  // 32s of inputs, in the low and in the high halves of bytes
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

// Calls run(first, count), which are integral constants, for bundles of up to kMost that make up 0 to kBlocks - 1.
template <int kBlocks, int kMost, int kFrom = 0, class Run>
__device__ inline void for_bundles(const Run& run) {
  if constexpr (kFrom < kBlocks) {
    constexpr int kBundles = (kBlocks - kFrom + kMost - 1) / kMost, kSize = (kBlocks - kFrom + kBundles - 1) / kBundles;
    run(std::integral_constant<int, kFrom>{}, std::integral_constant<int, kSize>{});
    for_bundles<kBlocks, kMost, kFrom + kSize>(run);
  }
}

// A lane's sums as mma.m16n8k16 leaves them.  Up to four tokens: those of tokens 2 t and 2 t + 1 are in two other lanes.
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

// kFours: 4s of tokens, 1 or even.  kRowWarps: warps that share the rows.  kBlocks: 16s of rows of each.  kGroups: of a
// record.
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
  constexpr bool kEarly = !kShared<kFours> || kFours * kBlocks <= 4;  // else sums take its registers
  Pack<bf16, 8> old = {};
  if (kEarly) old = read_out<bf16>(p, first_feature);

  float sums[kBlocks][kFours][2] = {};
  hopper::Ring next;
  unsigned record = share;  // of the stage; one past its end lies in a later one
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&barriers.full[next.at], next.phase);
    const char* const stage = stages + next.at * stage_bytes(p, kGroups, kConverting);
    const char* const x = kConverting ? all_x + i * p.depth * kXBytes : stage;
    const char* const notes = kConverting ? all_notes + i * p.depth * p.tokens * note_bytes(kGroups) : stage + notes_at;
    const unsigned records = min(p.depth, p.records - i * p.depth);
    for (; record < records; record += kShares) {
      const char* const weight = stage + weight_at + (record * p.blocks + first_block) * kRecord;
      for_bundles<kBlocks, kBundle>([&](auto first,
                                        auto count) {  // one past the end is read from whatever is there, and
        multiply_blocks<kFours, kGroups, count>(
            weight + kRowWarps * first * kRecord, kRowWarps * kRecord,  // never stored
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

// Launches the kernel for p.blocks, and so many groups of a record; defined in int4_*.cu.
template <int kFours>
void run_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int groups, int tiles,
              cudaStream_t stream);

#ifdef QUIRE_INT4_FOURS
template <int kFours, int kRowWarps, int kBlocks, int kGroups>
void start_int4(const CUtensorMap& weight_map, const CUtensorMap& x_map, const Int4Params& p, int tiles,
                cudaStream_t stream) {
  const auto kernel = int4_kernel<kFours, kRowWarps, kBlocks, kGroups>;
  constexpr int kRead = kRowWarps * kBlocks;  // blocks that are read, where some may lie past the end of a stage
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
  } else {  // with more blocks a warp's sums no longer fit into registers
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
