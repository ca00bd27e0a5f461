// GEMM of up to four tokens with e4m3 weights, bound by the bandwidth of reading them.  linear.cuh has the pipeline,
// the layout of stages and the epilogue; here a slab is 128 elements of inner.
//
// Weights are widened to fp16 in registers, two per instruction, right before the mma.  So the activations must be
// fp16, too: each CTA converts all of them at its start, into shared memory.
//
// Per k16 step a lane loads four consecutive k values of A and B, where the mma expects two and two: permuting k in A
// and B alike leaves the result unchanged.  In shared memory x is ordered so that a lane loads its values of two k16
// steps at once.
//
// Grid (tiles).  Memory traffic: the weight once from memory, tokens * inner * 2 bytes per tile from L2.
#include "cuda/linear/linear_fp8.h"

#include <algorithm>
#include <utility>

#include "cuda/linear/linear.cuh"
#include "cuda/linear/read_x.cuh"
#include "cuda/linear/slabs.h"

namespace quire::cuda {
namespace {

using namespace linears;

constexpr int kSlabOfW = kSlab<e4m3>;
constexpr int kXPadding = 64;    // bytes between tokens, so that they start in different banks
constexpr int kQuarterOfX = 64;  // bytes of 32 fp16 activations, which are multiplied by 32 bytes of a weight row

struct Fp8Params : Epilogue {
  XArgs x;
  const float* scale;
  int x_at, table_at;        // byte offsets from the start of the stages
  int slabs;                 // slabs per row
  int depth, count, stages;  // slabs per stage; stages per tile; stages in the shared-memory ring
};

inline __host__ __device__ int x_row_bytes(int inner) { return inner * static_cast<int>(sizeof(fp16)) + kXPadding; }

// For GPUs before Hopper the kernel's body is empty and these functions are unused: hence [[maybe_unused]].

// Table of a tile's block scales, [kMaxSets, slabs]; a slab is as wide as a scale block.  A set is one row of scale
// blocks.  The 224 rows of a tile touch at most 3 sets; with silu_mul, 112 gate rows touch 2, and 112 up rows 2 more.
constexpr int kBlock = 128, kMaxSets = 4;
constexpr int sets_per_half(bool silu_mul) { return silu_mul ? 2 : 3; }

[[maybe_unused]] __device__ void fill_table(const Fp8Params& p, int first_feature, float* table) {
  const int sets = sets_per_half(p.silu_mul), halves = p.silu_mul ? 2 : 1;
  for (int i = threadIdx.x; i < halves * sets * p.slabs; i += kConsumerThreads) {
    const int set = i / p.slabs, slab = i % p.slabs, half = set / sets;
    const int block = (first_feature + half * p.features) / kBlock + set % sets;
    table[i] = block < halves * p.features / kBlock ? p.scale[block * p.slabs + slab] : 0;
  }
}

// Finds, for each row block, the table indices of the scales of the lane's two rows.  A group of 8 rows never crosses a
// border of scale blocks.
template <int kRowWarps, int kBlocks>
__device__ void find_scales(const Fp8Params& p, int first_feature, int first_block, int (&scale_at)[kBlocks][2]) {
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row =
          min((first_block + kRowWarps * b) * 16 + static_cast<int>(threadIdx.x) % 32 / 4 + 8 * r, p.rows - 1);
      const bool up = row >= p.tile_features;
      const int feature = first_feature + row - (up ? p.tile_features : 0);
      const int set = (up ? sets_per_half(p.silu_mul) : 0) + feature / kBlock - first_feature / kBlock;
      scale_at[b][r] = set * p.slabs;
    }
  }
}

// bf16 has a wider exponent range than fp16, so each token of x is multiplied by a power of two that brings its maximum
// magnitude to between 2^14 and 2^15.  Elements down to 2^-29 of the maximum keep all of their bits; elements below
// 2^-39 of it become 0.
struct TokenScales {
  uint32_t raise;  // factor of x: a power of two as bf16, in both halves of the word
  float lower;     // 1 / raise: factor of the accumulators
};

__device__ TokenScales scales_of(uint32_t largest) {  // largest: a bf16 magnitude, as bits
  const int exponent = static_cast<int>(largest >> 7) - 127;
  const int up = largest == 0 ? 0 : min(14 - exponent, 120);
  return {static_cast<uint32_t>(up + 127) * 0x00800080u, exp2f(static_cast<float>(-up))};
}

__device__ uint32_t to_fp16(uint32_t pair, uint32_t raise) {  // two bf16 values
  asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(raise));
  return pack<fp16>(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
}

// Shared memory for the conversion of x.
struct Conversion {
  float squares[kMaxTokens][kWarps];
  uint32_t largest[kMaxTokens];  // maximum magnitude per token, as bits; initially 0
  float lower[8];                // TokenScales::lower per token, padded with 0 to 8 tokens
};

// Stores this lane's 8 elements of a 32-element quarter as fp16, in fragment order: elements 8 t to 8 t + 7 are the k
// values of two lanes, four each.
__device__ void store_fp16(const uint4& eight, uint32_t raise, char* quarter) {
  const int t = threadIdx.x % 4, k16 = t / 2, lane = t % 2 * 2;
  char* const to = quarter + lane * 16 + k16 * 8;
  *reinterpret_cast<uint2*>(to) = make_uint2(to_fp16(eight.x, raise), to_fp16(eight.y, raise));
  *reinterpret_cast<uint2*>(to + 16) = make_uint2(to_fp16(eight.z, raise), to_fp16(eight.w, raise));
}

// Reads all of x and converts it to fp16; called by the consumer warps.
[[maybe_unused]] __device__ void convert_all(const Fp8Params& p, char* to, Conversion& shared) {
  const int row_bytes = x_row_bytes(p.x.chunks * kXChunk);
  const unsigned together = 0xffu << (threadIdx.x % 32 & 24);  // the eight lanes that hold a chunk
  read_x(p.x, p.tokens, to, row_bytes, shared.squares);
#pragma unroll 1
  for (int token = 0; token < p.tokens; ++token) {
    uint32_t max_pair = 0;
    for_parts(p.x.chunks, [&](int chunk) {
      XChunk x;
      x.load(to + token * row_bytes + chunk * kXBytes);
      max_pair = __vmaxu2(max_pair, x.largest());
    });
    const uint32_t warp_max = __reduce_max_sync(~0u, max(max_pair & 0xffff, max_pair >> 16));
    if (threadIdx.x % 32 == 0) atomicMax(&shared.largest[token], warp_max);
  }
  sync_consumers();
#pragma unroll 1
  for (int token = 0; token < p.tokens; ++token) {
    const uint32_t raise = scales_of(shared.largest[token]).raise;
    for_parts(p.x.chunks, [&](int chunk) {
      XChunk x;
      char* const place = to + token * row_bytes + chunk * kXBytes;
      x.load(place);
      __syncwarp(together);  // all lanes have loaded the chunk before any lane overwrites it
      char* const half = place + threadIdx.x % 8 / 4 * 2 * kQuarterOfX;
      store_fp16(x.a, raise, half);
      store_fp16(x.b, raise, half + kQuarterOfX);
    });
  }
  if (threadIdx.x < 8) {
    const bool exists = threadIdx.x < p.tokens;
    shared.lower[threadIdx.x] = exists ? scales_of(shared.largest[threadIdx.x]).lower : 0;
  }
  sync_consumers();
}

// The loop of the producer warp.  The next kernel may start once the last copy is issued: its first copies then overlap
// the end of this kernel.  An earlier start is no faster.
[[maybe_unused]] __device__ void copy_stages(const CUtensorMap* map, const Fp8Params& p, int first_feature,
                                             char* stages, uint64_t* full, uint64_t* empty) {
  const int stage_bytes = p.depth * p.rows * kSlabBytes;
  hopper::Ring next;
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&empty[next.at], next.phase ^ 1);  // returns at once during the first pass over the ring
    char* const to = stages + next.at * stage_bytes;
    hopper::arrive_expecting(&full[next.at], stage_bytes);
    hopper::copy_once(to, map, &full[next.at], 0, first_feature, i * p.depth);
    if (p.silu_mul) {
      hopper::copy_once(to + stage_bytes / 2, map, &full[next.at], 0, p.features + first_feature, i * p.depth);
    }
    next.step(p.stages);
  }
  let_next_kernel_start();
}

// kRowWarps: warps along the rows.  kBlocks: row blocks per warp.  kGrid: the weight has one scale per 128 x 128 block.
template <int kRowWarps, int kBlocks, bool kGrid>
__global__ __launch_bounds__(kThreads, 2) void linear_fp8_kernel(const __grid_constant__ CUtensorMap weight_map,
                                                                 const __grid_constant__ Fp8Params p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ char shared[];
  __shared__ uint64_t full[kMaxStages], empty[kMaxStages];
  __shared__ float row_scales[kGrid ? 1 : kMaxRows];
  __shared__ Conversion conversion;
  char* const stages = shared + (-shared_address(shared) & 1023);  // swizzled rows start at multiples of 1024
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int first_feature = blockIdx.x * p.tile_features;

  if (thread == kConsumerThreads) {
    hopper::prefetch_map(&weight_map);
    for (int i = 0; i < p.stages; ++i) {
      hopper::barrier_init(&full[i], 1);
      hopper::barrier_init(&empty[i], kWarps);
    }
    hopper::fence_barrier_init();
  }
  if (thread < kMaxTokens) conversion.largest[thread] = 0;
  __syncthreads();
  if (warp == kWarps) {
    if (lane == 0) copy_stages(&weight_map, p, first_feature, stages, full, empty);
    return;
  }

  // A slab's 128 bytes of a row are four quarters of 32 bytes.  A warp's k split is two quarters of every slab (2
  // splits), one quarter (4 splits), or one quarter of every other slab (8 splits).
  constexpr int kKSplits = kWarps / kRowWarps, kQuarters = kKSplits < 4 ? 4 / kKSplits : 1;
  constexpr int kSlabStep = kKSplits > 4 ? kKSplits / 4 : 1;
  const int k_split = warp / kRowWarps, first_block = warp % kRowWarps;
  const int first_slab = k_split / 4, quarter = k_split % 4 * kQuarters;

  // Byte offset of the lane's rows in a stage.  The swizzle puts 16-byte chunk c of row r at chunk c ^ (r % 8).
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

  float* const table = reinterpret_cast<float*>(stages + p.table_at);
  [[maybe_unused]] int scale_at[kBlocks][2];
  if constexpr (kGrid) {
    fill_table(p, first_feature, table);
    find_scales<kRowWarps>(p, first_feature, first_block, scale_at);
  } else {
    read_row_scales(p, first_feature, p.scale, row_scales);
  }

  convert_all(p, stages + p.x_at, conversion);
  const Pack<bf16, 8> residual = read_out<bf16>(p, first_feature);
  // A token past the end reads the last token's data, and its accumulators are never stored.
  const char* const x = stages + p.x_at + min(lane / 4, p.tokens - 1) * x_row_bytes(p.slabs * kSlabOfW) +
                        lane % 4 * 16 + quarter * kQuarterOfX;

  float sums[kBlocks][1][4] = {};
  hopper::Ring next;
  for (int i = 0; i < p.count; ++i) {
    hopper::wait(&full[next.at], next.phase);
    const uint32_t at = shared_address(stages + next.at * (p.depth * p.rows * kSlabBytes));
    const int first = i * p.depth, slabs = min(p.depth, p.slabs - first);
#pragma unroll 4
    for (int d = first_slab; d < slabs; d += kSlabStep) {
      [[maybe_unused]] float slab_sums[kGrid ? kBlocks : 1][4] = {};
#pragma unroll
      for (int k = 0; k < kQuarters; ++k) {
        const auto x_values = *reinterpret_cast<const uint4*>(x + (first + d) * kXBytes + k * kQuarterOfX);
        const uint32_t first_four[2] = {x_values.x, x_values.y}, second_four[2] = {x_values.z, x_values.w};
        // An mma waits for the previous mma on the same accumulator, so the row blocks are interleaved.
        uint32_t bytes[kBlocks][4];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {  // XOR with k * 32 selects quarter k under the swizzle
          load_matrices(bytes[b], (at + w_at[b] + d * half * kSlabBytes) ^ k * 32);
        }
#pragma unroll
        for (int k16 = 0; k16 < 2; ++k16) {
#pragma unroll
          for (int b = 0; b < kBlocks; ++b) {
            uint32_t w[4];
            widen_four(bytes[b][2 * k16], w[0], w[2]);
            widen_four(bytes[b][2 * k16 + 1], w[1], w[3]);
            float(&to)[4] = [&]() -> float(&)[4] {
              if constexpr (kGrid) return slab_sums[b];
              else return sums[b][0];
            }();
            mma16816<fp16>(to, w, k16 == 0 ? first_four : second_four);
          }
        }
      }
      if constexpr (kGrid) {
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int r = 0; r < 4; ++r) sums[b][0][r] += slab_sums[b][r] * table[scale_at[b][r / 2] + first + d];
        }
      }
    }
    __syncwarp();
    if (lane == 0) hopper::arrive(&empty[next.at]);
    next.step(p.stages);
  }

  run_epilogue<bf16, kRowWarps>(
      p, first_feature, first_block, sums, stages, residual, [&](int token) { return conversion.lower[token]; },
      [&](int row) { return kGrid ? 1.0f : row_scales[row]; });
#endif
}

// Shared memory after the stages: x, then the table of block scales.
int table_bytes(const LinearFp8Args& a) {
  return a.blocks ? kMaxSets * (a.inner / kSlabOfW) * static_cast<int>(sizeof(float)) : 0;
}
int bytes_after_stages(const LinearFp8Args& a) { return a.tokens * x_row_bytes(a.inner) + table_bytes(a); }

Fp8Params params_of(const LinearFp8Args& a) {
  constexpr int kUnit = 8;  // tile_features is a multiple of this
  Fp8Params p{epilogue_of(a, kUnit)};
  p.x = {.x = a.x, .x_stride = a.x_stride, .norm = a.norm, .eps = a.eps, .chunks = a.inner / kXChunk};
  p.scale = a.scale;
  p.slabs = a.inner / kSlabOfW;
  // Copies are small (about 16 KB), because the compute after the last copy is not hidden.
  constexpr int kCopyBytes = 16 << 10;
  const int slab_bytes = p.rows * kSlabBytes;
  p.depth = std::clamp(kCopyBytes / slab_bytes, 1, p.slabs);
  p.count = tiles_of(p.slabs, p.depth);
  p.stages = std::min({kMaxStages, p.count, (kSmemBytes - bytes_after_stages(a)) / (slab_bytes * p.depth)});
  return p;
}

template <int kRowWarps, int kBlocks, bool kGrid>
void start(const CUtensorMap& map, const LinearFp8Args& a, Fp8Params p, cudaStream_t stream) {
  const auto kernel = linear_fp8_kernel<kRowWarps, kBlocks, kGrid>;
  const int epilogue_bytes = sums_bytes(p.rows, 1, kWarps / kRowWarps) + 8 * out_tile_stride(p.rows);
  p.x_at = std::max(p.stages * p.depth * p.rows * kSlabBytes, (epilogue_bytes + 15) / 16 * 16);
  p.table_at = p.x_at + a.tokens * x_row_bytes(a.inner);
  static const bool allowed = [&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes + 1024), "linear_fp8");
    return true;
  }();
  static_cast<void>(allowed);
  launch(kernel, dim3(tiles_of(a.features, p.tile_features)), dim3(kThreads), 1024 + p.table_at + table_bytes(a),
         stream, map, p);
}

template <bool kGrid>
void run(const LinearFp8Args& a, cudaStream_t stream) {
  const Fp8Params p = params_of(a);
  const CUtensorMap map =
      map_slabs<e4m3>(a.inner, a.weight, a.silu_mul ? 2 * a.features : a.features, a.inner, p.tile_features, p.depth);
  if (p.rows <= 16) return start<1, 1, kGrid>(map, a, p, stream);
  if (p.rows <= 32) return start<1, 2, kGrid>(map, a, p, stream);
  if (p.rows <= 64) return start<1, 4, kGrid>(map, a, p, stream);
  if (p.rows <= 128) return start<2, 4, kGrid>(map, a, p, stream);
  start<4, 4, kGrid>(map, a, p, stream);
}

}  // namespace

bool fits_linear_fp8(const LinearFp8Args& a) {
  return a.tokens > 0 && a.features > 0 && a.features % 8 == 0 && a.inner % kSlabOfW == 0 &&
         parts_of(a.tokens, a.inner) <= kMaxParts && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
         (!a.blocks || a.features % kBlock == 0) && in_16_bytes(a.x, a.x_stride, 2) && in_16_bytes(a.norm, 0, 2) &&
         in_16_bytes(a.weight, a.inner, 1) && in_16_bytes(a.out, a.out_stride, 2);
}

void linear_fp8(const LinearFp8Args& a, cudaStream_t stream) {
  a.blocks ? run<true>(a, stream) : run<false>(a, stream);
}

}  // namespace quire::cuda
