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
//   a tile    an expert and up to 192 of its pairs (packed: 96), contiguous after the sort (sort.h)
//   an item   a tile, 128 low rows of its expert and the 128 corresponding high rows
//   a stage   64 elements of the contracted dimension, of these 256 rows (32 KB) and of the tile's pairs
//
//   warp 0       takes items by ticket, and copies stages by TMA as far ahead as the ring allows, across items
//   warps 4-7,   a warpgroup each for 64 low and 64 high rows.  A thread has the sums of a low row and of its high
//   warps 8-11   row for the same pairs, so the activation needs no shuffles
//
// wgmma's N is 16, 32, 64, 96, .. 192: the smallest that holds the pairs of the tile.  Results accumulate in float32,
// in an order that depends only on `size`, so a token's result does not depend on other tokens.  Results are transposed
// by movmatrix and quad shuffles, so that a thread stores 16 bytes of one pair.
// A reader of weights defines their layout in a stage, and how a warpgroup multiplies a slab: PlainRows here, and
// PackedRows of packed.cuh for quantised weights.
//
// The weights of an expert with one tile are read once, so L2 evicts them first.  Grid: a CTA per multiprocessor, 225
// KB of shared memory.  Traffic from L2 per item: size * (256 + pairs) * 2 bytes; FLOPs: size * 256 * pairs * 2.
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

constexpr int kWarp = 32, kWarpgroup = 128, kGroups = 2;  // kGroups: warpgroups with different rows
constexpr int kSlab = 64, kSlabBytes = 128;  // elements of the contracted dimension per stage, and their bytes
constexpr int kGroupRows = 64;               // low rows per warpgroup, and high rows
constexpr int kItemRows = kGroups * kGroupRows;
constexpr int kBoxRows = 16;  // rows of x per copy
static_assert(kPlainTilePairs <= kWarp * kBoxRows && kPackedTilePairs <= kWarp * kBoxRows);

// For each of the kGroups there are kParts warpgroups.  They share a stage of kParts slabs, one slab each, and add up
// their results after each item.
template <class Rows>
constexpr int kMultipliers = Rows::kParts * kGroups * kWarpgroup;
template <class Rows>
constexpr int kThreads = kWarpgroup + kMultipliers<Rows>;

struct Item {
  PairTile tile;  // count 0: no more items
  int row;        // first low row
};

struct Params {
  CUtensorMap weight, x;  // weight: set for PlainRows
  const char* packed;     // packed weights, for PackedRows; else null
  PairOrder order;
  const void* bias;
  void* out;
  int* ticket;
  int blocks, rows, slabs;  // items per tile; low rows (see above) per expert; slabs per item
  ExpertsArgs experts;
};

struct Shared {
  char* stages;
  uint64_t *full, *empty;
  Item* items;      // [kStages]: the item that begins in the stage; other entries are not read
  float* partials;  // [results per thread][kGroups * kWarpgroup], if kParts is 2
};

// For GPUs before Hopper the kernel's body is empty and these functions are unused: hence [[maybe_unused]].

// -- The warp that copies

// Copies `slabs` slabs of the rows of x of a tile, one box of a slab per lane.  The last box may include rows of the
// next tile or zeros; their results are not stored.
template <class Rows>
__device__ void copy_x(const Params& p, const PairTile& tile, char* to, uint64_t* full, int slab, int slabs, int lane) {
  const int at = lane / Rows::kParts * kBoxRows, part = lane % Rows::kParts;
  if (at >= tile.count || part >= slabs) return;
  copy_box(to + (part * Rows::kPairs + at) * kSlabBytes, &p.x, full, (slab + part) * kSlab, tile.first + at);
}

constexpr int x_bytes(int count) { return (count + kBoxRows - 1) / kBoxRows * kBoxRows * kSlabBytes; }

// Weights in bf16 or fp16: TMA copies 128 low and 128 high rows, swizzled, and wgmma reads them from shared memory.
template <class T_>
struct PlainRows {
  using T = T_;
  static constexpr int kHalfBytes = kItemRows * kSlabBytes, kWeightBytes = 2 * kHalfBytes, kStages = 4, kParts = 1;
  static constexpr int kPairs = kPlainTilePairs, kX = kWeightBytes, kWeight = 0;  // offsets of x and weights in a stage
  static constexpr int kStageBytes = kWeightBytes + kPairs * kSlabBytes;

  // An item's weights in device memory: computed once per item, because one thread starts all copies.
  struct Source {
    int bytes = kWeightBytes, row, expert;  // bytes: per slab
    uint64_t policy;
    __device__ Source(const Params& p, const PairTile& tile, int row)
        : row(row), expert(tile.expert), policy(tile.alone ? kLeavesFirst : kLeavesInTurn) {}
    __device__ void copy(const Params& p, int slab, int slabs, char* to, uint64_t* full) const {
      copy_once(to, &p.weight, full, 0, row, 0, slab, expert, policy);
    }
  };

  // Multiplies a slab; `between` is called once the wgmmas of the slab before have ended.
  template <int N, class Between>
  __device__ static void multiply(const char* stage, int slabs, int group, int part, float* low, float* high, bool add,
                                  const Between& between) {
    const uint64_t low_rows = operand(stage + kWeight + group * kGroupRows * kSlabBytes, 0);
    const uint64_t high_rows = operand(stage + kWeight + kHalfBytes + group * kGroupRows * kSlabBytes, 0);
    const uint64_t x = operand(stage + kX, 0);
    begin_products();
#pragma unroll
    for (int k = 0; k < kSlab / 16; ++k) {
      Wgmma<T, N>::multiply_shared(low, operand_further(low_rows, 32 * k), operand_further(x, 32 * k), add || k > 0);
      Wgmma<T, N>::multiply_shared(high, operand_further(high_rows, 32 * k), operand_further(x, 32 * k), add || k > 0);
    }
    end_products();
    wait_for_products<1>();
    between();
  }
};

/* Called by one complete warp.  `down` reads the tiles and copies weights before gate_up has ended.  That is safe because:
   - No CTA of `down` starts before every CTA of gate_up has called let_next_kernel_start.  They call it after their
     wait, so the sort has ended and its results are visible in L2, where __ldcg reads them.
   - Of the memory of the tiles gate_up writes only its own ticket, and later kernels write nothing before `down` has ended.
   - No kernel writes weights. */
template <class Rows, Kind kKind>
__device__ void copy_stages(const Params& p, const Shared& s) {
  const int lane = threadIdx.x % kWarp;
  const int items = __ldcg(p.order.tile_count) * p.blocks;
  const auto tile_of = [&](int item) {
    if (item >= items) return PairTile{};
    const int4 tile = __ldcg(reinterpret_cast<const int4*>(p.order.tiles + item / p.blocks));
    return PairTile{tile.x, tile.y, tile.z, tile.w};
  };
  const auto take = [&] { return lane == 0 ? static_cast<int>(gridDim.x) + atomicAdd(p.ticket, 1) : 0; };
  using Source = typename Rows::Source;
  const auto row_of = [&](int item) { return item % p.blocks * kItemRows; };
  const auto start_weights = [&](const Source& source, const PairTile& tile, int row, int slab, const Ring& ring) {
    if (lane != 0) return;
    if (slab == 0) s.items[ring.at] = {tile, row};
    const int slabs = min(Rows::kParts, p.slabs - slab);
    arrive_expecting(&s.full[ring.at], slabs * (source.bytes + x_bytes(tile.count)));
    source.copy(p, slab, slabs, s.stages + ring.at * Rows::kStageBytes + Rows::kWeight, &s.full[ring.at]);
  };

  int item = blockIdx.x, next = __shfl_sync(~0u, take(), 0);
  PairTile tile = tile_of(item);
  int started = 0;  // stages of the first item whose weights were copied ahead of the wait
  if constexpr (kKind == Kind::down) {
    if (item < items) {
      Ring ahead;
      const int row = row_of(item);
      const Source source(p, tile, row);
      for (; started < Rows::kStages && started * Rows::kParts < p.slabs; ++started, ahead.step(Rows::kStages)) {
        start_weights(source, tile, row, started * Rows::kParts, ahead);
      }
    }
    wait_for_previous_kernels();
  }
  Ring ring;
  while (item < items) {
    const int after = take();
    const PairTile next_tile = tile_of(next);
    const int row = row_of(item);
    const Source source(p, tile, row);
    for (int slab = 0; slab < p.slabs; slab += Rows::kParts, ring.step(Rows::kStages)) {
      if (started > 0) {
        --started;
      } else {
        wait(&s.empty[ring.at], ring.phase ^ 1);  // returns at once during the first pass over the ring
        start_weights(source, tile, row, slab, ring);
      }
      __syncwarp();
      char* const to = s.stages + ring.at * Rows::kStageBytes + Rows::kX;
      copy_x<Rows>(p, tile, to, &s.full[ring.at], slab, min(Rows::kParts, p.slabs - slab), lane);
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

// Biases of a thread's rows `row` and `row + 8`, for the low rows and for the corresponding high rows.
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

// Accumulators of 64 rows x the tile's pairs, in wgmma's layout; N / 2 are used.
template <class Rows>
using Sums = float[Rows::kPairs / 2];

template <class T>
__device__ uint32_t both(T first, T second) {
  return static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(first)) |
         static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(second)) << 16;
}

// Stores the results of 64 low and 64 high rows with N pairs to `out`; low and high are in wgmma's layout.  row: first
// of this warp's 16 low rows.
template <class T, Kind kKind, int N>
__device__ void store(const Params& p, const Item& item, int row, const Biases& biases, const float* low,
                      const float* high) {
  const int lane = threadIdx.x % kWarp;
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

// Adds the results of the second part to those of the first, in shared memory.  Returns true for the second part, which
// has nothing left to do.
template <class Rows, int N>
__device__ bool add_parts(float* partials, int slabs, int part, float* low, float* high) {
  constexpr int kStep = kGroups * kWarpgroup, kWritten = 1, kRead = 2;  // kWritten, kRead: ids of named barriers
  float* const at = partials + threadIdx.x % kStep;
  if (part == 1) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) at[i * kStep] = low[i], at[(N / 2 + i) * kStep] = high[i];
  }
  named_sync(kWritten, kMultipliers<Rows>);
  if (part == 0 && slabs > 1) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) low[i] += at[i * kStep], high[i] += at[(N / 2 + i) * kStep];
  }
  named_sync(kRead, kMultipliers<Rows>);
  return part == 1;
}

// Computes one item of up to N pairs.
template <class Rows, Kind kKind, int N>
__device__ void multiply_item(const Params& p, const Shared& s, const Item& item, Ring& ring, Sums<Rows>& low,
                              Sums<Rows>& high) {
  using T = typename Rows::T;
  const int lane = threadIdx.x % kWarp, warpgroup = threadIdx.x / kWarpgroup - 1;
  const int group = warpgroup % kGroups, part = warpgroup / kGroups;
  const int row = item.row + (group * kWarpgroup + threadIdx.x % kWarpgroup) / kWarp * 16;  // first of the warp's 16
  const Biases biases = read_biases<T, kKind>(p, item.tile.expert, row + lane / 4);
  int before = 0;  // ring index of the stage whose wgmma may still run
  for (int slab = 0; slab < p.slabs; slab += Rows::kParts) {
    wait(&s.full[ring.at], ring.phase);
    const char* const stage = s.stages + ring.at * Rows::kStageBytes;
    Rows::template multiply<N>(stage, p.slabs - slab, group, part, low, high, slab > 0, [&] {
      if (slab > 0 && lane == 0) arrive(&s.empty[before]);
    });
    before = ring.at;
    ring.step(Rows::kStages);
  }
  wait_for_products<0>();
  pin(low);
  pin(high);
  if (lane == 0) arrive(&s.empty[before]);
  if constexpr (Rows::kParts == 2) {
    if (add_parts<Rows, N>(s.partials, p.slabs, part, low, high)) return;
  }
  store<T, kKind, N>(p, item, row, biases, low, high);
}

template <class Rows, Kind kKind>
__device__ void multiply_items(const Params& p, const Shared& s) {
  Ring ring;
  Sums<Rows> low, high;
  for (;;) {
    forget(low);
    forget(high);
    wait(&s.full[ring.at], ring.phase);
    const Item item = s.items[ring.at];
    const int count = item.tile.count;
    if (count == 0) return;
    if (count <= 16) multiply_item<Rows, kKind, 16>(p, s, item, ring, low, high);
    else if (Rows::kPairs <= 32 || count <= 32) multiply_item<Rows, kKind, 32>(p, s, item, ring, low, high);
    else if constexpr (Rows::kPairs > 32) {
      if (count <= 64) multiply_item<Rows, kKind, 64>(p, s, item, ring, low, high);
      else if (Rows::kPairs <= 96 || count <= 96) multiply_item<Rows, kKind, 96>(p, s, item, ring, low, high);
      else if constexpr (Rows::kPairs > 96) {
        if (count <= 128) multiply_item<Rows, kKind, 128>(p, s, item, ring, low, high);
        else if (count <= 160) multiply_item<Rows, kKind, 160>(p, s, item, ring, low, high);
        else multiply_item<Rows, kKind, 192>(p, s, item, ring, low, high);
      }
    }
  }
}

/* Grid (multiprocessors). */
template <class Rows, Kind kKind>
__global__ void __launch_bounds__(kThreads<Rows>, 1) kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char memory[];
  __shared__ uint64_t full[Rows::kStages], empty[Rows::kStages];
  __shared__ Item items[Rows::kStages];
  char* const stages = memory + (-shared_address(memory) & 1023);  // swizzled rows start at n * 1024
  float* const partials = reinterpret_cast<float*>(stages + Rows::kStages * Rows::kStageBytes);
  const Shared s{stages, full, empty, items, partials};
  if (threadIdx.x == 0) {
    if (p.packed == nullptr) prefetch_map(&p.weight);
    prefetch_map(&p.x);
    for (int i = 0; i < Rows::kStages; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kMultipliers<Rows> / kWarp);
    }
    fence_barrier_init();
  }
  __syncthreads();
  if constexpr (kKind != Kind::down) wait_for_previous_kernels();
  let_next_kernel_start();  // for gate_up not earlier: see copy_stages

  if (threadIdx.x < kWarpgroup) {
    keep_registers<24>();
    if (threadIdx.x < kWarp) copy_stages<Rows, kKind>(p, s);
  } else {
    take_registers<Rows::kParts == 1 ? 240 : 112>();  // the CTA has 384 * 168 or 640 * 96 registers
    multiply_items<Rows, kKind>(p, s);
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

template <class Rows, Kind kKind>
void run(const Gemm& g, cudaStream_t stream) {
  using T = typename Rows::T;
  constexpr bool kPlain = std::is_same_v<Rows, PlainRows<T>>;
  constexpr int kPartials =
      Rows::kParts == 1 ? 0 : Rows::kPairs * kGroups * kWarpgroup * static_cast<int>(sizeof(float));
  constexpr int kRoom = Rows::kStages * Rows::kStageBytes + kPartials + 1024;
  static const bool allowed = [] {
    check(cudaFuncSetAttribute(kernel<Rows, kKind>, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoom), "experts");
    return true;
  }();
  static_cast<void>(allowed);
  Params p{.weight = {},
           .x = x_map<T>(g),
           .packed = kPlain ? nullptr : static_cast<const char*>(g.weight),
           .order = g.order,
           .bias = g.bias,
           .out = g.out,
           .ticket = g.order.ticket(kKind == Kind::down),
           .blocks = (g.rows + kItemRows - 1) / kItemRows,
           .rows = g.rows,
           .slabs = g.size / kSlab,
           .experts = g.experts};
  if constexpr (kPlain) p.weight = weight_map<T>(g, kKind == Kind::clamped);
  launch(kernel<Rows, kKind>, dim3(device_attribute(cudaDevAttrMultiProcessorCount)), dim3(kThreads<Rows>), kRoom,
         stream, p);
}

}  // namespace quire::cuda::grouped
