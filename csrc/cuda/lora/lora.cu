#include "cuda/lora/lora.h"

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/lora/lora.cuh"

namespace quire::cuda {
namespace {

using namespace loras;

constexpr int kBlocksAtOnce = 8;                    // packed blocks of A that a warp holds in registers
constexpr int kCtaBlocks = kWarps * kBlocksAtOnce;  // packed blocks of A that a CTA holds

/* Computes A x for 16 ranks (a rank block) of one tile's rows, over a part of the inputs (a split).
 * Grid (rank blocks, splits, tiles).  The four warps share the inputs; A is operand A of mma.m16n8k16, rows of x are
 * operand B.  A lane reads 16 contiguous bytes of each operand: the order of the inputs is free if both operands use the
 * same order.  No kernel writes adapters, so the first blocks of A are read while the preceding kernel still runs. */
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
  float* const h = static_cast<float*>(a.h) + (static_cast<int64_t>(split) * a.rows + tile.y) * a.ranks;
  add_up_warps(sums, all_sums, tile.z, h + block * kLoraRanks, a.ranks);
}

// Returns h of row `row` of a tile, ranks `rank` .. `rank` + 3, in T: the sum over the splits.
template <class T>
__device__ uint2 read_h(const LoraExpandArgs& a, const int4& tile, int row, int rank) {
  if (row >= tile.z) return {};
  const int64_t at = static_cast<int64_t>(tile.y + row) * a.ranks + rank;
  if (a.splits == 0) return *reinterpret_cast<const uint2*>(static_cast<const T*>(a.h) + at);
  float4 sum = {};
#pragma unroll 4
  for (int split = 0; split < a.splits; ++split) {
    const float* const h = static_cast<const float*>(a.h) + static_cast<int64_t>(split) * a.rows * a.ranks + at;
    const float4 more = *reinterpret_cast<const float4*>(h);
    sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
  }
  return {pack<T>(sum.x, sum.y), pack<T>(sum.z, sum.w)};
}

// Adds B h of 16 * kHalves rows of the tile, from `first` on.
template <class T, int kHalves>
__device__ void add_product(const LoraExpandArgs& a, const int4& tile, const Expansion<T>& b, DeltasOf<kHalves>& deltas,
                            int first = 0) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int block = 0; block < b.rank_blocks; ++block) {
    uint4 low, high;
    b.load(block, low, high);
    const int rank = b.first_rank + block * kLoraRanks + 4 * t;
#pragma unroll
    for (int m = 0; m < kHalves; ++m) {
      const int row = first + 16 * m + g;
      if (row - g >= tile.z) break;
      const uint2 near = read_h<T>(a, tile, row, rank), far = read_h<T>(a, tile, row + 8, rank);
      deltas.template add<T>(m, {near.x, far.x, near.y, far.y}, low, high);
    }
  }
}

// Adds B h to y of 16 rows of the tile, from `first` on, in registers; the sums are rounded.
template <class T>
__device__ void add_product(const LoraExpandArgs& a, const int4& tile, const Expansion<T>& b, int first,
                            Pack<T, 8> (&y)[2]) {
  DeltasOf<1> deltas = {};
  add_product(a, tile, b, deltas, first);
#pragma unroll
  for (int i = 0; i < 2; ++i) y[i] = sum_of(y[i], deltas, i);
}

/* y[row] += B h, or deltas[row] = B h.  Grid (feature blocks of all parts / 4, tiles): a warp per feature block. */
template <class T, bool kStoresDeltas>
__global__ void __launch_bounds__(kThreads) expand_kernel(LoraExpandArgs a) {
  let_next_kernel_start();
  const Place place(a, blockIdx.x * kWarps + threadIdx.x / 32);
  const int4 tile = a.tiles[blockIdx.y];
  if (tile.x < 0 || place.part == a.parts) return wait_for_previous_kernels();
  const Expansion<T> b(a, tile.x, place.part, place.block);
  const LaneRows<> rows(a, tile);
  wait_for_previous_kernels();
  const int feature = place.block * kLoraFeatures + threadIdx.x % 4 * 8, column = place.column + feature;
  const bool exists = feature < a.features[place.part];
  Deltas deltas = {};
  if (kStoresDeltas) {
    add_product(a, tile, b, deltas);
    if (exists) store_deltas(rows, deltas, a.deltas + column, column_count(a));
    return;
  }
  if (b.rank_blocks == 0) return;
  Pack<T, 8> y[4];
  if (exists) rows.read(y, static_cast<const T*>(a.y) + column, a.y_stride);
  add_product(a, tile, b, deltas);
  if (exists) add_deltas(a, rows, y, deltas, column);
}

/* out = silu(gate) * up, where y + B h has `features` columns of gate, then as many of up.
 * Grid (feature blocks / 4, tiles).  The CTAs of each tile, of the last tile first, also compute 32 rows of the step
 * without an adapter.  A warp computes 16 rows at a time: with fewer registers, 7 CTAs per multiprocessor, the CTAs of
 * 256 rows run in one wave.  kComplete: splits is 0. */
template <class T, bool kComplete>
__global__ void __launch_bounds__(kThreads, kComplete ? 7 : 4) expand_silu_kernel(LoraExpandArgs a) {
  let_next_kernel_start();
  if (kComplete) a.splits = 0;  // known to the compiler, which then needs fewer registers
  const int size = a.features[0], block = blockIdx.x * kWarps + threadIdx.x / 32;
  const int feature = block * kLoraFeatures + threadIdx.x % 4 * 8;
  const int4 tile = a.tiles[blockIdx.y];
  if (block * kLoraFeatures >= size) return wait_for_previous_kernels();
  const Expansion<T> gate(a, tile.x, 0, block), up(a, tile.x, 1, block);
  wait_for_previous_kernels();
#pragma unroll 1
  for (int first = 0; tile.x >= 0 && first < tile.z; first += 16) {
    const LaneRows<2> rows(a, tile, first);
    Pack<T, 8> gates[2], ups[2];
    if (feature < size) {
      const T* const y = static_cast<const T*>(a.y) + feature;
      rows.read(gates, y, a.y_stride);
      rows.read(ups, y + size, a.y_stride);
    }
    add_product(a, tile, gate, first, gates);
    add_product(a, tile, up, first, ups);
    if (feature >= size) continue;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (rows.of[i] < 0) continue;
      store_pack(static_cast<T*>(a.out) + rows.of[i] * a.out_stride + feature, activated(gates[i], ups[i]));
    }
  }
#pragma unroll 1
  for (int at = gridDim.y - 1 - blockIdx.y; at * kLoraRows < a.rows; at += gridDim.y) {
    activate_plain_rows<T>(a, feature, at * kLoraRows);
  }
}

int ctas_of(int features) { return (features + kLoraFeatures * kWarps - 1) / (kLoraFeatures * kWarps); }

template <class T, bool kStoresDeltas>
void expand_all_parts(const LoraExpandArgs& a, cudaStream_t stream) {
  int blocks = 0;
  for (int part = 0; part < a.parts; ++part) blocks += (a.features[part] + kLoraFeatures - 1) / kLoraFeatures;
  const dim3 grid((blocks + kWarps - 1) / kWarps, a.tile_count);
  launch(expand_kernel<T, kStoresDeltas>, grid, kThreads, 0, stream, a);
}

template <class T>
void expand(const LoraExpandArgs& a, cudaStream_t stream) {
  if (a.out != nullptr) {
    const dim3 grid(ctas_of(a.features[0]), a.tile_count);
    const auto kernel = a.splits == 0 ? expand_silu_kernel<T, true> : expand_silu_kernel<T, false>;
    return launch(kernel, grid, kThreads, 0, stream, a);
  }
  expand_all_parts<T, false>(a, stream);
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

void lora_store_deltas(const LoraExpandArgs& a, cudaStream_t stream) {
  a.dtype == Dtype::fp16 ? expand_all_parts<fp16, true>(a, stream) : expand_all_parts<bf16, true>(a, stream);
}

}  // namespace quire::cuda
