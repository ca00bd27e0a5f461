// Sorts pairs by expert.  One CTA sorts up to kChunk pairs.  For more pairs there is one CTA per chunk: it counts the
// chunk's pairs per expert, adds up the counts of all chunks, and scatters its own pairs.  Each expert's range of
// places does not depend on the chunks, and a pair's result does not depend on its place.
#include "cuda/experts/sort.h"

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/experts/experts.h"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32, kThreads = 1024;
constexpr int kChunk = 8192;  // pairs per CTA
constexpr int kHeader = 4;    // ints: number of tiles, two tickets, and padding that aligns the tiles

int chunks_of(int pairs) { return (pairs + kChunk - 1) / kChunk; }
int max_tiles(int pairs, int experts, int tile_pairs) { return std::min(pairs, experts) + pairs / tile_pairs; }

// Counts the pairs of this CTA's chunk per expert.  counts: in shared memory, initially 0.
__device__ void count_chunk(const int* chosen, int pairs, int* counts) {
  const int end = min(pairs, (static_cast<int>(blockIdx.x) + 1) * kChunk);
#pragma unroll 4
  for (int pair = blockIdx.x * kChunk + threadIdx.x; pair < end; pair += kThreads) atomicAdd(&counts[chosen[pair]], 1);
}

/* Grid (chunks). */
__global__ void __launch_bounds__(kThreads) count_kernel(const int* chosen, PairOrder to) {
  __shared__ int counts[kMaxExperts];
  if (threadIdx.x < kMaxExperts) counts[threadIdx.x] = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernels();
  count_chunk(chosen, to.pairs, counts);
  __syncthreads();
  if (threadIdx.x < to.experts) to.counts[blockIdx.x * to.experts + threadIdx.x] = counts[threadIdx.x];
}

// Turns the pair counts of experts into first places, in `counts`.  CTA 0 also writes the tiles.  Called by all lanes
// of one warp.
__device__ void place_experts(int* counts, const PairOrder& to) {
  const int lane = threadIdx.x % kWarp, of_lane = (to.experts + kWarp - 1) / kWarp;
  const int first = min(lane * of_lane, to.experts), end = min(first + of_lane, to.experts);
  int pairs = 0, tiles = 0;
  for (int expert = first; expert < end; ++expert) {
    pairs += counts[expert];
    tiles += (counts[expert] + to.tile_pairs - 1) / to.tile_pairs;
  }
  const int tiles_through = sum_up_to_lane(tiles);
  int place = sum_up_to_lane(pairs) - pairs, tile = tiles_through - tiles;
  for (int expert = first; expert < end; ++expert) {
    const int count = counts[expert];
    counts[expert] = place;
    if (blockIdx.x == 0) {
      for (int at = 0; at < count; at += to.tile_pairs) {
        to.tiles[tile++] = {expert, place + at, min(to.tile_pairs, count - at), count <= to.tile_pairs};
      }
    }
    place += count;
  }
  if (blockIdx.x == 0 && lane == kWarp - 1) {
    to.tile_count[0] = tiles_through;
    to.tile_count[1] = to.tile_count[2] = 0;
  }
}

/* Grid (chunks).  kAlone: there is one chunk, and this kernel counts its pairs, too. */
template <bool kAlone>
__global__ void __launch_bounds__(kThreads) scatter_kernel(const int* chosen, PairOrder to) {
  __shared__ int next[kMaxExperts];    // pairs per expert, later the expert's next free place
  __shared__ int before[kMaxExperts];  // pairs of the expert in chunks before this one
  const int thread = threadIdx.x, chunk = blockIdx.x;
  if (thread < kMaxExperts) next[thread] = before[thread] = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernels();
  if constexpr (kAlone) {
    count_chunk(chosen, to.pairs, next);
  } else if (thread < to.experts) {
    int sum = 0, sum_before = 0;
    for (int other = 0; other < static_cast<int>(gridDim.x); ++other) {
      const int count = to.counts[other * to.experts + thread];
      sum += count;
      sum_before += other < chunk ? count : 0;
    }
    next[thread] = sum, before[thread] = sum_before;
  }
  __syncthreads();
  if (thread < kWarp) place_experts(next, to);
  __syncthreads();
  if constexpr (!kAlone) {
    if (thread < to.experts) next[thread] += before[thread];
    __syncthreads();
  }
  const int end = min(to.pairs, (chunk + 1) * kChunk);
#pragma unroll 4
  for (int pair = chunk * kChunk + thread; pair < end; pair += kThreads) {
    to.order[atomicAdd(&next[chosen[pair]], 1)] = pair;
  }
}

/* Grid (places / 8), one warp per place.  Copies each row of x once per expert of its token. */
constexpr int kGatherWarps = 8;
__global__ void __launch_bounds__(kGatherWarps* kWarp)
    gather_kernel(const uint4* x, int packs, int top, const int* order, int pairs, uint4* sorted) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int place = blockIdx.x * kGatherWarps + threadIdx.x / kWarp;
  if (place >= pairs) return;
  const uint4* const from = x + static_cast<int64_t>(order[place] / top) * packs;
  uint4* const to = sorted + static_cast<int64_t>(place) * packs;
#pragma unroll 4
  for (int i = threadIdx.x % kWarp; i < packs; i += kWarp) to[i] = from[i];
}

}  // namespace

int64_t pair_order_bytes(int pairs, int experts, int tile_pairs) {
  const int64_t chunks = chunks_of(pairs) > 1 ? chunks_of(pairs) : 0;
  return sizeof(int) * (kHeader + pairs + chunks * experts) + sizeof(PairTile) * max_tiles(pairs, experts, tile_pairs);
}

PairOrder pair_order_at(void* memory, int pairs, int experts, int tile_pairs) {
  PairOrder made{.pairs = pairs, .experts = experts, .tile_pairs = tile_pairs};
  made.tile_count = static_cast<int*>(memory);
  made.tiles = reinterpret_cast<PairTile*>(made.tile_count + kHeader);
  made.order = reinterpret_cast<int*>(made.tiles + max_tiles(pairs, experts, tile_pairs));
  made.counts = made.order + pairs;
  return made;
}

void sort_pairs(const int* chosen, const PairOrder& to, cudaStream_t stream) {
  const int chunks = chunks_of(to.pairs);
  if (chunks == 1) return launch(scatter_kernel<true>, dim3(1), dim3(kThreads), 0, stream, chosen, to);
  launch(count_kernel, dim3(chunks), dim3(kThreads), 0, stream, chosen, to);
  launch(scatter_kernel<false>, dim3(chunks), dim3(kThreads), 0, stream, chosen, to);
}

void gather_rows(const void* x, int row_bytes, int top, const PairOrder& by, void* sorted, cudaStream_t stream) {
  launch(gather_kernel, dim3((by.pairs + kGatherWarps - 1) / kGatherWarps), dim3(kGatherWarps * kWarp), 0, stream,
         static_cast<const uint4*>(x), row_bytes / static_cast<int>(sizeof(uint4)), top, by.order, by.pairs,
         static_cast<uint4*>(sorted));
}

}  // namespace quire::cuda
