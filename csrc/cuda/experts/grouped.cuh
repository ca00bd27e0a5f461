// Grouped GEMM of a mixture of experts by TMA and wgmma (sm_90a), for any number of pairs of a token and an expert.
//
//   gate_up   x, gathered in sorted order ──> between [places, inner]      low rows: gate        high rows: up
//   down      between ──> sums [pairs, hidden]          low rows: first half of hidden    high rows: second half
//
//   a place   index of a pair in the order of the sort
//
// Operands are swapped: rows of the weight are the 64 rows of a wgmma, and pairs are its N columns.  So an expert with
// few pairs wastes no tensor core time on empty rows, and one kernel serves one to thousands of pairs per expert.
//
//   a tile    an expert and up to 192 of its pairs, contiguous after the sort (sort.h)
//   an item   a tile, 128 low rows of its expert and the 128 corresponding high rows
//   a stage   64 elements of the contracted dimension, of these 256 rows (32 KB) and of the tile's pairs
//
//   warp 0       takes items by ticket, and copies stages by TMA as far ahead as the ring of 4 allows, across items
//   warps 4-7,   a warpgroup each for 64 low and 64 high rows.  A thread has the sums of a gate row and of its up row for
//   warps 8-11   the same pairs, so the activation needs no shuffles
//
// wgmma's N is 16, 32, 64, 96, .. 192: the smallest that holds the pairs of the tile.  Results accumulate in float32,
// in an order that depends only on `size`, so a token's result does not depend on other tokens.  Results are transposed
// by movmatrix and quad shuffles, so that a thread stores 16 bytes of one pair.
//
// If an expert has one tile, its weights are read once and leave L2 first.  Grid: a CTA per multiprocessor, 225 KB of
// shared memory.  Traffic from L2 per item: size * (256 + pairs) * 2 bytes; FLOPs: size * 256 * pairs * 2.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/experts/grouped.h"
#include "cuda/experts/parts.cuh"
#include "cuda/linear/tensor_map.h"

namespace quire::cuda::grouped {

using namespace hopper;

constexpr int kWarp = 32, kWarpgroup = 128, kGroups = 2;  // kGroups: warpgroups that multiply
constexpr int kThreads = (1 + kGroups) * kWarpgroup, kMultiplyingWarps = kGroups * kWarpgroup / kWarp;
constexpr int kSlab = 64, kSlabBytes = 128;  // elements of the contracted dimension per stage, and their bytes
constexpr int kGroupRows = 64;               // low rows per warpgroup, and high rows
constexpr int kItemRows = kGroups * kGroupRows;
constexpr int kHalfBytes = kItemRows * kSlabBytes, kWeightBytes = 2 * kHalfBytes;
constexpr int kStageBytes = kWeightBytes + kTilePairs * kSlabBytes, kStages = 4;
constexpr int kRoom = kStages * kStageBytes + 1024;
constexpr int kBoxRows = 16;  // rows of x per copy
static_assert(kTilePairs <= kWarp * kBoxRows);

struct Item {
  PairTile tile;  // count 0: no more items
  int row;        // first low row
};

struct Params {
  CUtensorMap weight, x;
  PairOrder order;
  const void* bias;
  void* out;
  int* ticket;
  int blocks, rows, slabs;  // items per tile; low rows per expert; stages per item
  ExpertsArgs experts;
};

struct Shared {
  char* stages;
  uint64_t *full, *empty;
  Item* items;  // [kStages]: for a stage that begins an item, that item
};

// For GPUs before Hopper the kernel's body is empty and these functions are unused: hence [[maybe_unused]].

// -- The warp that copies

// Copies the rows of x of a tile, one box per lane.  The last box may include rows of the next tile or zeros; their
// results are not stored.
[[maybe_unused]] __device__ inline void copy_x(const Params& p, const PairTile& tile, char* to, uint64_t* full,
                                               int slab, int lane) {
  const int at = lane * kBoxRows;
  if (at < tile.count) copy_box(to + at * kSlabBytes, &p.x, full, slab * kSlab, tile.first + at);
}

constexpr int x_bytes(int count) { return (count + kBoxRows - 1) / kBoxRows * kBoxRows * kSlabBytes; }

/* Called by one complete warp.  `down` reads the tiles and copies weights before gate_up has ended.  It may, because:
   - No CTA of `down` starts before every CTA of gate_up has called let_next_kernel_start.  They call it after their
     wait, so the sort has ended and its results are visible in L2, where __ldcg reads them.
   - gate_up writes only its own ticket there, and later kernels write nothing before `down` has ended.
   - No kernel writes weights. */
template <Kind kKind>
__device__ void copy_stages(const Params& p, const Shared& s) {
  const int lane = threadIdx.x % kWarp;
  const int items = __ldcg(p.order.tile_count) * p.blocks;
  const auto tile_of = [&](int item) {
    if (item >= items) return PairTile{};
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(p.order.tiles + item / p.blocks));
    return PairTile{tile.x, tile.y, tile.z, tile.w};
  };
  const auto take = [&] { return lane == 0 ? static_cast<int>(gridDim.x) + atomicAdd(p.ticket, 1) : 0; };
  const auto start_weights = [&](const PairTile& tile, int item, int slab, const Ring& ring) {
    if (lane != 0) return;
    const int row = item % p.blocks * kItemRows;
    if (slab == 0) s.items[ring.at] = {tile, row};
    arrive_expecting(&s.full[ring.at], kWeightBytes + x_bytes(tile.count));
    copy_once(s.stages + ring.at * kStageBytes, &p.weight, &s.full[ring.at], 0, row, 0, slab, tile.expert,
              tile.alone ? kLeavesFirst : kLeavesInTurn);
  };

  int item = blockIdx.x, next = __shfl_sync(~0u, take(), 0);
  PairTile tile = tile_of(item);
  int started = 0;  // slabs of the first item whose weights were copied ahead of the wait
  if constexpr (kKind == Kind::down) {
    if (item < items) {
      Ring ahead;
      for (; started < min(p.slabs, kStages); ++started, ahead.step(kStages)) start_weights(tile, item, started, ahead);
    }
    wait_for_previous_kernels();
  }
  Ring ring;
  while (item < items) {
    const int after = take();
    const PairTile next_tile = tile_of(next);
    for (int slab = 0; slab < p.slabs; ++slab, ring.step(kStages)) {
      if (started > 0) {
        --started;
      } else {
        wait(&s.empty[ring.at], ring.phase ^ 1);  // returns at once during the first pass over the ring
        start_weights(tile, item, slab, ring);
      }
      __syncwarp();
      copy_x(p, tile, s.stages + ring.at * kStageBytes + kWeightBytes, &s.full[ring.at], slab, lane);
    }
    item = next, next = __shfl_sync(~0u, after, 0), tile = next_tile;
  }
  wait(&s.empty[ring.at], ring.phase ^ 1);
  if (lane == 0) {
    s.items[ring.at].tile.count = 0;
    arrive(&s.full[ring.at]);
  }
}

// -- The warpgroups that multiply

// Biases of a thread's two low rows and two high rows: row and row + 8.
struct Biases {
  float low[2] = {}, high[2] = {};
};

template <class T, Kind kKind>
__device__ Biases read_biases(const Params& p, int expert, int row) {
  Biases biases;
  if (p.bias == nullptr) return biases;
  const T* const bias = static_cast<const T*>(p.bias) + static_cast<int64_t>(expert) * 2 * p.rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int at = row + 8 * h;
    if (at >= p.rows) continue;
    biases.low[h] = to_float(bias[kKind == Kind::clamped ? 2 * at : at]);
    biases.high[h] = to_float(bias[kKind == Kind::clamped ? 2 * at + 1 : p.rows + at]);
  }
  return biases;
}

using Sums = float[kTilePairs / 2];  // accumulators of 64 rows x the tile's pairs, in wgmma's layout; N / 2 are used

template <class T>
__device__ uint32_t both(T first, T second) {
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(first)) |
         static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(second)) << 16;
}

// Stores the results of 64 low and 64 high rows with N pairs to `out`; low and high are in wgmma's layout.
template <class T, Kind kKind, int N>
__device__ void store(const Params& p, const Item& item, const Biases& biases, const Sums& low, const Sums& high) {
  const int lane = threadIdx.x % kWarp;
  const int row = item.row + (threadIdx.x / kWarp - kWarpgroup / kWarp) * 16;  // first of this warp's 16 low rows
  T* const out = static_cast<T*>(p.out);
#pragma unroll
  for (int four = 0; four < (N + 31) / 32; ++four) {        // four blocks of 8 pairs per iteration
    const int pair = (four * 4 + lane % 4) * 8 + lane / 4;  // pair that this lane stores
    const bool ours = pair < item.tile.count;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t of_low[4] = {}, of_high[4] = {};
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        const int i = (four * 4 + b) * 4 + 2 * h;
        if (i >= N / 2) continue;
        const float l[2] = {low[i] + biases.low[h], low[i + 1] + biases.low[h]};
        const float u[2] = {high[i] + biases.high[h], high[i + 1] + biases.high[h]};
        if constexpr (kKind == Kind::down) {
          of_low[b] = transpose(pack<T>(l[0], l[1]));
          of_high[b] = transpose(pack<T>(u[0], u[1]));
        } else {
          constexpr Activation kActivation = kKind == Kind::clamped ? Activation::clamped : Activation::silu;
          of_low[b] = transpose(
              both(activated<T, kActivation>(l[0], u[0], p.experts), activated<T, kActivation>(l[1], u[1], p.experts)));
        }
      }
      const uint4 first = gather_block(of_low[0], of_low[1], of_low[2], of_low[3], lane);
      [[maybe_unused]] uint4 second;
      if constexpr (kKind == Kind::down) second = gather_block(of_high[0], of_high[1], of_high[2], of_high[3], lane);
      if (!ours || row + 8 * h >= p.rows) continue;
      if constexpr (kKind == Kind::down) {
        const int64_t to = __ldcg(p.order.order + item.tile.first + pair);
        T* const at = out + to * 2 * p.rows + row + 8 * h;
        *reinterpret_cast<uint4*>(at) = first;
        *reinterpret_cast<uint4*>(at + p.rows) = second;
      } else {
        *reinterpret_cast<uint4*>(out + static_cast<int64_t>(item.tile.first + pair) * p.rows + row + 8 * h) = first;
      }
    }
  }
}

// Computes one item of up to N pairs.
template <class T, Kind kKind, int N>
__device__ void multiply_item(const Params& p, const Shared& s, const Item& item, Ring& ring, Sums& low, Sums& high) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp - kWarpgroup / kWarp, group = warp / 4;
  const Biases biases = read_biases<T, kKind>(p, item.tile.expert, item.row + warp * 16 + lane / 4);
  int before = 0;  // ring index of the stage whose wgmma may still run
  for (int slab = 0; slab < p.slabs; ++slab) {
    wait(&s.full[ring.at], ring.phase);
    const char* const stage = s.stages + ring.at * kStageBytes;
    const uint64_t low_rows = operand(stage + group * kGroupRows * kSlabBytes, 0);
    const uint64_t high_rows = operand(stage + kHalfBytes + group * kGroupRows * kSlabBytes, 0);
    const uint64_t x = operand(stage + kWeightBytes, 0);
    begin_products();
#pragma unroll
    for (int k = 0; k < kSlab / 16; ++k) {
      Wgmma<T, N>::multiply_shared(low, operand_further(low_rows, 32 * k), operand_further(x, 32 * k), slab + k > 0);
      Wgmma<T, N>::multiply_shared(high, operand_further(high_rows, 32 * k), operand_further(x, 32 * k), slab + k > 0);
    }
    end_products();
    wait_for_products<1>();
    if (slab > 0 && lane == 0) arrive(&s.empty[before]);
    before = ring.at;
    ring.step(kStages);
  }
  wait_for_products<0>();
  pin(low);
  pin(high);
  if (lane == 0) arrive(&s.empty[before]);
  store<T, kKind, N>(p, item, biases, low, high);
}

template <class T, Kind kKind>
__device__ void multiply_items(const Params& p, const Shared& s) {
  Ring ring;
  Sums low, high;
  for (;;) {
    forget(low);
    forget(high);
    wait(&s.full[ring.at], ring.phase);
    const Item item = s.items[ring.at];
    const int count = item.tile.count;
    if (count == 0) return;
    if (count <= 16) multiply_item<T, kKind, 16>(p, s, item, ring, low, high);
    else if (count <= 32) multiply_item<T, kKind, 32>(p, s, item, ring, low, high);
    else if (count <= 64) multiply_item<T, kKind, 64>(p, s, item, ring, low, high);
    else if (count <= 96) multiply_item<T, kKind, 96>(p, s, item, ring, low, high);
    else if (count <= 128) multiply_item<T, kKind, 128>(p, s, item, ring, low, high);
    else if (count <= 160) multiply_item<T, kKind, 160>(p, s, item, ring, low, high);
    else multiply_item<T, kKind, 192>(p, s, item, ring, low, high);
  }
}

/* Grid (multiprocessors). */
template <class T, Kind kKind>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ Item items[kStages];
  const Shared s{memory + (-shared_address(memory) & 1023), full, empty, items};  // swizzled rows start at n * 1024
  if (threadIdx.x == 0) {
    prefetch_map(&p.weight);
    prefetch_map(&p.x);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kMultiplyingWarps);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if constexpr (kKind != Kind::down) wait_for_previous_kernels();
  let_next_kernel_start();  // for gate_up not earlier: see copy_stages

  if (threadIdx.x < kWarpgroup) {
    keep_registers<24>();
    if (threadIdx.x < kWarp) copy_stages<kKind>(p, s);
  } else {
    take_registers<240>();
    multiply_items<T, kKind>(p, s);
  }
#endif
}

template <class T>
constexpr CUtensorMapDataType kMapType =
    std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

// TMA map of a weight [experts, 2, rows, size] or, if in_turn, [experts, rows, 2, size], as [experts, slabs, 2, rows,
// kSlab].
template <class T>
CUtensorMap weight_map(const Gemm& g, bool in_turn) {
  const cuuint64_t rows = g.rows, row_bytes = g.size * sizeof(T), half_bytes = rows * row_bytes;
  const cuuint64_t sizes[5] = {kSlab, rows, 2, static_cast<cuuint64_t>(g.size / kSlab),
                               static_cast<cuuint64_t>(g.order.experts)};
  const cuuint64_t strides[4] = {in_turn ? 2 * row_bytes : row_bytes, in_turn ? row_bytes : half_bytes, kSlabBytes,
                                 2 * half_bytes};
  const cuuint32_t box[5] = {kSlab, kItemRows, 2, 1, 1};
  return tensor_map(kMapType<T>, g.weight, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <class T>
CUtensorMap x_map(const Gemm& g) {
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(g.size), static_cast<cuuint64_t>(g.order.pairs)};
  const cuuint64_t strides[1] = {g.size * sizeof(T)};
  const cuuint32_t box[2] = {kSlab, kBoxRows};
  return tensor_map(kMapType<T>, g.x, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <class T, Kind kKind>
void run(const Gemm& g, cudaStream_t stream) {
  static const bool allowed = [] {
    check(cudaFuncSetAttribute(kernel<T, kKind>, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoom), "experts");
    return true;
  }();
  static_cast<void>(allowed);
  const Params p{.weight = weight_map<T>(g, kKind == Kind::clamped),
                 .x = x_map<T>(g),
                 .order = g.order,
                 .bias = g.bias,
                 .out = g.out,
                 .ticket = g.order.ticket(kKind == Kind::down),
                 .blocks = (g.rows + kItemRows - 1) / kItemRows,
                 .rows = g.rows,
                 .slabs = g.size / kSlab,
                 .experts = g.experts};
  launch(kernel<T, kKind>, dim3(device_attribute(cudaDevAttrMultiProcessorCount)), dim3(kThreads), kRoom, stream, p);
}

}  // namespace quire::cuda::grouped
