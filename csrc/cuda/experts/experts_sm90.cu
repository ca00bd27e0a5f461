// The GEMMs of `experts` on Hopper and later, bound by the bandwidth of reading the chosen experts' weights.
//
//   gate_up   x ──> between [pairs, inner]         low rows: gate                     high rows: up
//   down      between ──> sums [pairs, hidden]     low rows: first half of hidden     high rows: second half
//
// So both weights have the shape [experts, 2, rows, size] (gpt-oss interleaves gate and up: [experts, rows, 2, size]).
//
//   an item   a chosen expert, 16 of its low rows and the 16 corresponding high rows
//   a slab    64 elements, 128 bytes, of each of the 32 rows
//   a stage   4 slabs, 16 KB, copied at once by TMA
//
// Every multiprocessor gets one CTA, and CTA i takes items i, i + CTAs, ...  So the CTAs read neighbouring rows at the
// same time, and share the slower items of an expert with many pairs.  A producer warp starts copies as far ahead as
// the ring of stages allows, across items, and 8 warps multiply.  Each of them takes half a slab of every stage, 32
// elements:
//
//   low, high rows   lane 4g + t: elements 8t .. 8t + 7 of a low and of a high row      A of two mma16816, twice
//   8 pairs          lane 4g + t: the same elements of pair g, from device memory        B, loaded a stage ahead
//
// A dot product may add its terms in any order.  So the first mma takes four of a lane's eight elements as columns 2t,
// 2t + 1, 2t + 8 and 2t + 9, and the second mma takes the other four.  At the end of an item the accumulators of the 8
// warps are added in warp order, in float32: the order of summation depends only on `size`.
//
// If an expert has more than 32 pairs, a CTA repeats the item for each 32 of them; its rows are then copied from L2.
#include <cuda.h>

#include <type_traits>

#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/parts.cuh"
#include "cuda/linear/tensor_map.h"

namespace quire::cuda {
namespace {

enum class Kind { silu, clamped, down };  // what is computed from the results of a low and a high row

constexpr int kWarp = 32, kWarps = 8, kMultipliers = kWarps * kWarp, kThreads = kMultipliers + kWarp;
constexpr int kSlab = 64, kSlabBytes = 128;
constexpr int kRows = 16, kBlocks = kRows / 8;  // low rows per item, and high rows; row blocks of 8
constexpr int kDepth = 4, kStages = 10;         // slabs per stage, shared by the 8 warps; stages of the ring
constexpr int kHalfBytes = kRows * kSlabBytes;  // bytes of the low or the high rows of a slab
constexpr int kStageBytes = kDepth * 2 * kHalfBytes;
constexpr int kRoom = kStages * kStageBytes + 1024;
constexpr int kOfWarp = kSlab / 2;  // elements of a stage per warp
constexpr int kOfStage = kDepth * kSlab;
constexpr int kTile = 8, kMaxTiles = 4, kMaxAtOnce = kMaxTiles * kTile;  // pairs per tile; tiles and pairs per pass
static_assert(kOfStage == kWarps * kOfWarp);

struct Product {
  const void* x;     // gate_up: [tokens, size], down: [pairs, size]
  const void* bias;  // [all rows], in the order of the weight, or null
  int rows, size;    // rows: low rows per expert; size: contracted dimension
};

struct Chosen {
  uint16_t expert, first, count;  // its pairs are order[first], ..., order[first + count - 1]
};

struct Pairs {
  int starts[kMaxExperts];    // per expert: first its pair count, then the index of its first pair in `order`
  uint16_t order[kMaxPairs];  // pairs sorted by expert; the order within an expert differs between CTAs
  Chosen chosen[kMaxPairs];   // experts that have pairs, ascending
  int count;                  // number of experts that have pairs
};

// Accumulators of one tile, per warp, row block (8 low and 8 high rows) and lane.
using Partial = float4[kWarps][kBlocks][kWarp];

// For GPUs before Hopper the kernel's body is empty and these functions are unused: hence [[maybe_unused]].
[[maybe_unused]] __device__ void sync_multipliers() { hopper::named_sync(1, kMultipliers); }

// Lists the chosen experts, and turns counts of pairs into start indices.  Called by all lanes of one warp.
[[maybe_unused]] __device__ void list_chosen(int experts, Pairs& pairs) {
  const int lane = threadIdx.x % kWarp, of_lane = (experts + kWarp - 1) / kWarp;
  const int first = min(lane * of_lane, experts), end = min(first + of_lane, experts);
  int sum = 0;  // low 16 bits: pairs; high bits: experts that have pairs
  for (int expert = first; expert < end; ++expert) {
    const int count = pairs.starts[expert];
    sum += count + (count > 0 ? 1 << 16 : 0);
  }
  const int through = sum_up_to_lane(sum), before = through - sum;
  int start = before & 0xffff, at = before >> 16;
  for (int expert = first; expert < end; ++expert) {
    const int count = pairs.starts[expert];
    pairs.starts[expert] = start;
    if (count == 0) continue;
    pairs.chosen[at++] = {static_cast<uint16_t>(expert), static_cast<uint16_t>(start), static_cast<uint16_t>(count)};
    start += count;
  }
  if (lane == kWarp - 1) pairs.count = through >> 16;
  __syncwarp();
}

// Row, in a block of 8 rows, that a lane reads.  Lanes 4g to 4g + 7 read 16 bytes each at the same time.  In the
// swizzled layout the bytes of rows r and r + 4 are in different banks; those of neighbouring rows are not.
[[maybe_unused]] __device__ int row_of_lane() {
  const int g = threadIdx.x % kWarp / 4;
  return g / 2 + g % 2 * 4;
}

// Items of this CTA: first, first + step, ... below end.  item / blocks is the index of its chosen expert, item %
// blocks the index of its row block.
struct Share {
  int blocks, first, step, end;
  __device__ Share(int chosen, int rows)
      : blocks(rows / kRows), first(blockIdx.x), step(gridDim.x), end(chosen * blocks) {}
};

// Issues all weight copies of this CTA; called by one thread.
[[maybe_unused]] __device__ void copy_weights(const CUtensorMap& map, const Product& p, const Pairs& pairs,
                                              char* stages, uint64_t* full, uint64_t* empty) {
  const Share share(pairs.count, p.rows);
  hopper::Ring ring;
  for (int item = share.first; item < share.end; item += share.step) {
    const Chosen chosen = pairs.chosen[item / share.blocks];
    const int row = item % share.blocks * kRows;
    for (int pair = 0; pair < chosen.count; pair += kMaxAtOnce) {
      for (int slab = 0; slab < p.size / kSlab; slab += kDepth) {
        hopper::wait(&empty[ring.at], ring.phase ^ 1);  // returns at once during the first pass over the ring
        hopper::arrive_expecting(&full[ring.at], kStageBytes);
        hopper::copy_once(stages + ring.at * kStageBytes, &map, &full[ring.at], 0, row, 0, slab, chosen.expert);
        ring.step(kStages);
      }
    }
  }
}

struct Stages {
  const char* stages;
  uint64_t *full, *empty;
  hopper::Ring ring;
};

// A lane's elements of x for one stage: 16 bytes of pair g of each tile.
template <int kTiles>
struct Inputs {
  uint4 of_tile[kTiles];
};

// Offset of a lane's elements of stage 0 from the start of the pair's row of x.
[[maybe_unused]] __device__ int place_in_stage() { return threadIdx.x / kWarp * kOfWarp + threadIdx.x % 4 * 8; }

// Loads a lane's elements of x for a stage.  If the warp's elements lie past `size`, y keeps its old contents.
template <class T, int kTiles>
__device__ void load_inputs(const T* x, const int (&from)[kTiles], int tiles, int stage, int size, Inputs<kTiles>& y) {
  if (stage + place_in_stage() >= size) return;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n < tiles) y.of_tile[n] = *reinterpret_cast<const uint4*>(x + (from[n] + stage + place_in_stage()));
  }
}

// sums[n][b]: results of row block b (8 low and 8 high rows) with the pairs of tile n, over this warp's share of the
// contracted dimension.  x + from[n]: input of pair g of tile n.  first: elements of x for the first stage.  A lane's
// sums: its low row with pairs 2t and 2t + 1, then its high row with the same pairs.
template <class T, int kTiles>
__device__ void multiply(const T* x, const int (&from)[kMaxTiles], const Inputs<kMaxTiles>& first, int size, Stages& s,
                         float (&sums)[kTiles][kBlocks][4]) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = row_of_lane();
  const int chunk = warp % 2 * 4 + lane % 4;  // 16-byte chunk of a slab's row, stored at chunk ^ (row % 8)
  const int at = warp / 2 * 2 * kHalfBytes + row * kSlabBytes + (chunk ^ row) * 16;
  Inputs<kMaxTiles> next = first;
  for (int stage = 0; stage < size; stage += kOfStage) {
    const Inputs<kMaxTiles> y = next;
    load_inputs(x, from, kTiles, stage + kOfStage, size, next);
    hopper::wait(&s.full[s.ring.at], s.ring.phase);
    if (stage + warp * kOfWarp < size) {
      const char* const rows = s.stages + s.ring.at * kStageBytes + at;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        const uint4 low = *reinterpret_cast<const uint4*>(rows + b * 8 * kSlabBytes);
        const uint4 high = *reinterpret_cast<const uint4*>(rows + b * 8 * kSlabBytes + kHalfBytes);
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const uint4 of_tile = y.of_tile[n];
          mma16816<T>(sums[n][b], {low.x, high.x, low.y, high.y}, {of_tile.x, of_tile.y});
          mma16816<T>(sums[n][b], {low.z, high.z, low.w, high.w}, {of_tile.z, of_tile.w});
        }
      }
    }
    __syncwarp();
    if (lane == 0) hopper::arrive(&s.empty[s.ring.at]);
    s.ring.step(kStages);
  }
}

// Adds the accumulators of all warps, tile by tile.  Calls use(i, low, high) for each pair i below count, with the
// results of the lane's low and high row of block warp % 2.  Two warps make these calls for a tile while the other
// warps continue.
//
// `round` counts tiles, which alternate between two buffers.  A warp writes a tile to a buffer only after the barrier
// of the tile before, which warps reach only after they have read this buffer.
template <int kTiles, class Use>
__device__ void add_up(const float (&sums)[kTiles][kBlocks][4], int count, Partial (&partials)[2], int& round,
                       const Use& use) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    if (n * kTile >= count) break;
    Partial& partial = partials[round % 2];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const float* const s = sums[n][b];
      partial[warp][b][lane] = make_float4(s[0], s[1], s[2], s[3]);
    }
    sync_multipliers();
    if (warp / kBlocks == round % (kWarps / kBlocks)) {
      float4 sum = partial[0][warp % kBlocks][lane];
#pragma unroll
      for (int other = 1; other < kWarps; ++other) {
        const float4 more = partial[other][warp % kBlocks][lane];
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      const int i = n * kTile + lane % 4 * 2;
      if (i < count) use(i, sum.x, sum.z);
      if (i + 1 < count) use(i + 1, sum.y, sum.w);
    }
    ++round;
  }
}

constexpr int tiles_of(int count) { return (count + kTile - 1) / kTile; }

// Calls run(tiles{}) with the number of tiles that `count` pairs need: 1, 2 or kMaxTiles.
template <class Run>
__device__ void by_tiles(int count, const Run& run) {
  if (count <= kTile) return run(std::integral_constant<int, 1>{});
  if (count <= 2 * kTile) return run(std::integral_constant<int, 2>{});
  run(std::integral_constant<int, kMaxTiles>{});
}

// Stores a pair's results for a low row and its high row.  low, high: results with the biases added.
template <class T, Kind kKind>
__device__ void store(const ExpertsArgs& a, int64_t pair, int row, float low, float high) {
  if constexpr (kKind == Kind::down) {
    float* const to = static_cast<float*>(a.sums) + pair * a.hidden;
    to[row] = low, to[a.hidden / 2 + row] = high;
  } else {
    constexpr Activation kActivation = kKind == Kind::clamped ? Activation::clamped : Activation::silu;
    static_cast<T*>(a.between)[pair * a.inner + row] = activated<T, kActivation>(low, high, a);
  }
}

// One pass over an item, for up to kMaxAtOnce pairs of its expert.
struct Pass {
  int item, first;  // first: index, among the expert's pairs, of the pass's first pair
  Chosen chosen;
  const uint16_t* order;
  int count;
  int from[kMaxTiles];  // pair g of each tile: offset of its row in x; at most 512 * size

  // pairs_of_input: number of consecutive pairs that share a row of x.
  __device__ Pass(int item, int first, const Share& share, const Pairs& pairs, int size, int pairs_of_input)
      : item(item), first(first), chosen(pairs.chosen[item / share.blocks]) {
    order = pairs.order + chosen.first + first;
    count = min(chosen.count - first, kMaxAtOnce);
#pragma unroll
    for (int n = 0; n < kMaxTiles; ++n) {
      const int pair = order[min(n * kTile + static_cast<int>(threadIdx.x) % kWarp / 4, count - 1)];
      from[n] = pair / pairs_of_input * size;
    }
  }
  __device__ bool last_of_item() const { return first + count == chosen.count; }
};

// Computes all items of this CTA; called by the warps that multiply.
template <class T, Kind kKind>
__device__ void multiply_items(const Product& p, const ExpertsArgs& a, const Pairs& pairs, Stages s,
                               Partial (&partials)[2]) {
  const Share share(pairs.count, p.rows);
  if (share.first >= share.end) return;
  const int warp = threadIdx.x / kWarp;
  const T* const x = static_cast<const T*>(p.x);
  const auto pass_at = [&](int item, int first) {
    return Pass(item, first, share, pairs, p.size, kKind == Kind::down ? 1 : a.top);
  };
  int round = 0;
  Pass pass = pass_at(share.first, 0);
  Inputs<kMaxTiles> first = {};
  load_inputs(x, pass.from, tiles_of(pass.count), 0, p.size, first);
  while (true) {
    // Low row whose results this lane stores.
    const int row = pass.item % share.blocks * kRows + warp % kBlocks * 8 + row_of_lane();
    float low_bias = 0, high_bias = 0;
    if (p.bias != nullptr) {
      const T* const bias = static_cast<const T*>(p.bias) + static_cast<int64_t>(pass.chosen.expert) * 2 * p.rows;
      low_bias = to_float(bias[kKind == Kind::clamped ? 2 * row : row]);
      high_bias = to_float(bias[kKind == Kind::clamped ? 2 * row + 1 : p.rows + row]);
    }
    const bool more = pass.last_of_item() ? pass.item + share.step < share.end : true;
    Pass next = pass;
    by_tiles(pass.count, [&](auto tiles) {
      constexpr int kTiles = tiles;
      float sums[kTiles][kBlocks][4] = {};
      multiply<T>(x, pass.from, first, p.size, s, sums);
      if (more) {  // load x for the next pass before this pass ends, because the loads take long
        next = pass.last_of_item() ? pass_at(pass.item + share.step, 0) : pass_at(pass.item, pass.first + pass.count);
        load_inputs(x, next.from, tiles_of(next.count), 0, p.size, first);
      }
      add_up(sums, pass.count, partials, round, [&](int i, float low, float high) {
        store<T, kKind>(a, pass.order[i], row, low + low_bias, high + high_bias);
      });
    });
    if (!more) return;
    pass = next;
  }
}

/* Grid (multiprocessors).  Memory traffic: the weights of chosen experts, once; from L2 the inputs of the pairs, per item.

   `down` reads `chosen` and starts copies before gate_up has ended.  That is safe for these reasons:
   - No CTA of `down` starts before every CTA of gate_up has called let_next_kernel_start.  They call it after their
     wait, so all kernels before gate_up have ended.  `chosen` is written, and visible in L2, where __ldcg reads it.
   - gate_up does not write `chosen`, and kernels after `down` in the stream write nothing before `down` has ended.  So
     no kernel overwrites `chosen` while `down` reads it.
   - No kernel writes weights. */
template <class T, Kind kKind>
__global__ void __launch_bounds__(kThreads, 1)
    product_kernel(const __grid_constant__ CUtensorMap map, const Product p, const ExpertsArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ char shared[];
  __shared__ uint64_t full[kStages], empty[kStages];
  __shared__ Pairs pairs;
  __shared__ Partial partials[2];
  char* const stages = shared + (-shared_address(shared) & 1023);  // swizzled rows start at multiples of 1024
  const int thread = threadIdx.x, warp = thread / kWarp;
  if (thread == kMultipliers) {
    hopper::prefetch_map(&map);
    for (int i = 0; i < kStages; ++i) {
      hopper::barrier_init(&full[i], 1);
      hopper::barrier_init(&empty[i], kWarps);
    }
    hopper::fence_barrier_init();
  }
  for (int expert = thread; expert < a.experts; expert += kThreads) pairs.starts[expert] = 0;
  __syncthreads();
  if constexpr (kKind != Kind::down) wait_for_previous_kernels();
  let_next_kernel_start();  // for gate_up not earlier: see above

  constexpr int kOfThread = kMaxPairs / kMultipliers, kListed = 2;  // pairs per thread; id of a named barrier
  int expert[kOfThread], place[kOfThread];
  const int count = a.tokens * a.top;
  if (warp < kWarps) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const int pair = i * kMultipliers + thread;
      if (pair < count) expert[i] = __ldcg(a.chosen + pair);
    }
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      if (i * kMultipliers + thread < count) place[i] = atomicAdd(&pairs.starts[expert[i]], 1);
    }
  }
  __syncthreads();
  if (warp == kWarps) {
    list_chosen(a.experts, pairs);
    hopper::named_pass(kListed, kThreads);
    if (thread == kMultipliers) copy_weights(map, p, pairs, stages, full, empty);
    return;
  }
  hopper::named_sync(kListed, kThreads);
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int pair = i * kMultipliers + thread;
    if (pair < count) pairs.order[pairs.starts[expert[i]] + place[i]] = static_cast<uint16_t>(pair);
  }
  sync_multipliers();
  if constexpr (kKind == Kind::down) wait_for_previous_kernels();
  multiply_items<T, kKind>(p, a, pairs, {stages, full, empty, {}}, partials);
#endif
}

// TMA map of a weight [experts, 2, rows, size] or, if in_turn, [experts, rows, 2, size], as [experts, slabs, 2, rows,
// kSlab].
template <class T>
CUtensorMap map_of(const void* weight, int experts, const Product& p, bool in_turn) {
  constexpr auto kType = std::is_same_v<T, bf16> ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t rows = p.rows, row_bytes = p.size * sizeof(T), half_bytes = rows * row_bytes;
  const cuuint64_t sizes[5] = {kSlab, rows, 2, static_cast<cuuint64_t>(p.size / kSlab),
                               static_cast<cuuint64_t>(experts)};
  const cuuint64_t strides[4] = {in_turn ? 2 * row_bytes : row_bytes, in_turn ? row_bytes : half_bytes, kSlabBytes,
                                 2 * half_bytes};
  const cuuint32_t box[5] = {kSlab, kRows, 2, kDepth, 1};
  return tensor_map(kType, weight, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <class T, Kind kKind>
void start(const void* weight, const Product& p, const ExpertsArgs& a, cudaStream_t stream) {
  const auto kernel = product_kernel<T, kKind>;
  static const bool allowed = [&] {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kRoom), "experts");
    return true;
  }();
  static_cast<void>(allowed);
  launch(kernel, dim3(device_attribute(cudaDevAttrMultiProcessorCount)), dim3(kThreads), kRoom, stream,
         map_of<T>(weight, a.experts, p, kKind == Kind::clamped), p, a);
}

}  // namespace

bool fits_experts_sm90(const ExpertsArgs& a) {
  return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 && a.hidden % kSlab == 0 && a.inner % kSlab == 0 &&
         in_16_bytes(a.gate_up, 0, 2) && in_16_bytes(a.down, 0, 2);
}

void experts_sm90(const ExpertsArgs& a, cudaStream_t stream) {
  const Product gate_up{.x = a.x, .bias = a.gate_up_bias, .rows = a.inner, .size = a.hidden};
  const Product down{.x = a.between, .bias = a.down_bias, .rows = a.hidden / 2, .size = a.inner};
  by_half_dtype(a.dtype, [&](auto number) {
    using T = decltype(number);
    a.activation == Activation::clamped ? start<T, Kind::clamped>(a.gate_up, gate_up, a, stream)
                                        : start<T, Kind::silu>(a.gate_up, gate_up, a, stream);
    start<T, Kind::down>(a.down, down, a, stream);
  });
}

}  // namespace quire::cuda
