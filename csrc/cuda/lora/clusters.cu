// LoRA adapters on Hopper, in clusters of CTAs.  For up to 32 rows one launch computes y += B A x; for more rows
// lora_shrink_in_clusters computes A x.  With few rows, launches take longer than memory accesses:
//
//   GEMM of the base model   x ──────────────────────────> y
//   this kernel              x ─ A x ─ cluster ─ B A x ─ wait ─> y += B A x
//
// The GEMM lets this kernel start once x is complete (`LinearArgs::share_x`), so all but the last step overlaps it.
// A cluster of 8 CTAs (32 warps) has one tile of rows of one adapter and 32 blocks of features.  The warps share the
// inputs; each CTA adds up the sums of all warps, and each warp then computes one feature block.  Several clusters
// compute the same A x, because another launch, or a wait for other clusters, would take longer.

#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/lora/lora.cuh"

namespace quire::cuda {
namespace {

using namespace loras;

constexpr int kCluster = 8;                     // CTAs
constexpr int kInputWarps = kCluster * kWarps;  // warps that share the inputs
constexpr int kAtOnce = 4;                      // packed blocks of A that a warp holds in registers
constexpr int kCtas = 264;                      // CTAs that run together: 2 on each of 132 multiprocessors

// Barrier of all threads of the cluster, which makes their writes to shared memory visible.
__device__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The value at `mine` in the shared memory of another CTA of the cluster.
__device__ float peer_value(const float* mine, int rank) {
  float value = 0;
#if __CUDA_ARCH__ >= 900
  const uint32_t address = shared_address(mine);
  uint32_t theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(theirs) : "memory");
#endif
  return value;
}

// Calls use(block) for those of the `blocks` packed blocks of a rank block of A that this warp of the cluster
// multiplies.
template <class Use>
__device__ void for_own_blocks(int blocks, const Use& use) {
  const int own = blockIdx.x % kCluster * kWarps + threadIdx.x / 32;
  for (int block = own; block < blocks; block += kInputWarps) use(block);
}

template <class Args>
__device__ int blocks_of(const Args& a) {
  return (a.inner + kLoraInputs - 1) / kLoraInputs;
}

__device__ inline void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Starts to read A of a rank block into L2.
template <class T, class Args>
__device__ void prefetch_a(const Args& a, const T* weights, int rank_block) {
  const int blocks = blocks_of(a), lane = threadIdx.x % 32;
  for_own_blocks(blocks, [&](int block) {
    prefetch(weights + (static_cast<int64_t>(rank_block) * blocks + block) * kBlockElements + lane * 16);
  });
}

// Computes sums [rows of the tile, stride], stored from `sums` on: this CTA's share of A x for 16 ranks.  Tiles have up
// to 8 * kTiles rows.
template <class T, int kTiles, class Args>
__device__ void shrink(const Args& a, const int4& tile, const T* weights, int rank_block, float* sums_of_cta,
                       int stride) {
  __shared__ float4 all_sums[kWarps][kTiles][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own = blockIdx.x % kCluster * kWarps + warp, blocks = blocks_of(a);
  const T* x[kTiles];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const int at = n * kTokens + g;
    x[n] = at < tile.z ? static_cast<const T*>(a.x) + a.order[tile.y + at] * a.x_stride + t * 8 : nullptr;
  }
  const uint4* const from =
      reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(rank_block) * blocks * kBlockElements);
  float sums[kTiles][4] = {};
  for (int first = own; first < blocks; first += kInputWarps * kAtOnce) {
    uint4 w[kAtOnce][2], v[kTiles][kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kInputWarps;
      w[i][0] = w[i][1] = make_uint4(0, 0, 0, 0);
      if (at < blocks) w[i][0] = __ldg(from + (at * 32 + lane) * 2), w[i][1] = __ldg(from + (at * 32 + lane) * 2 + 1);
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {  // all loads before the first use
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int input = (first + i * kInputWarps) * kLoraInputs;
        v[n][i] = make_uint4(0, 0, 0, 0);
        // Bypasses the L1 cache, which may have stale values.
        if (x[n] != nullptr && input + t * 8 < a.inner) v[n][i] = __ldcg(reinterpret_cast<const uint4*>(x[n] + input));
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n * kTokens >= tile.z) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const uint4 &low = w[i][0], &high = w[i][1];
        mma16816<T>(sums[n], {low.x, high.x, low.y, high.y}, {v[n][i].x, v[n][i].y});
        mma16816<T>(sums[n], {low.z, high.z, low.w, high.w}, {v[n][i].z, v[n][i].w});
      }
    }
  }
  add_up_warps(sums, all_sums, tile.z, sums_of_cta, stride);
  __syncthreads();
}

__device__ float sum_of_cluster(const float* mine) {
  float sum = 0;
#pragma unroll
  for (int rank = 0; rank < kCluster; ++rank) sum += peer_value(mine, rank);
  return sum;
}

/* h = A x for any number of rows.  Grid (8, rank blocks, tiles): a cluster of 8 CTAs per rank block and tile. */
template <class T>
__global__ void __launch_bounds__(kThreads) shrink_in_clusters_kernel(LoraShrinkArgs a) {
  __shared__ float sums[kLoraRows * kLoraRanks];
  let_next_kernel_start();
  const int block = blockIdx.y;
  const int4 tile = a.tiles[blockIdx.z];
  const int64_t* const fields = tile.x < 0 ? nullptr : fields_of(a, tile.x);
  if (fields == nullptr || block * kLoraRanks >= fields[1]) return wait_for_previous_kernels();
  const T* const weights = static_cast<const T*>(a.weights) + tile.x * a.slot_elements + fields[0];
  prefetch_a(a, weights, block);
  wait_for_previous_kernels();
  shrink<T, kTokenTiles>(a, tile, weights, block, sums, kLoraRanks);
  sync_cluster();
  constexpr int kShare = kLoraRows * kLoraRanks / kCluster;  // elements that a CTA adds up
  static_assert(kShare <= kThreads);
  const int i = blockIdx.x * kShare + threadIdx.x, row = i / kLoraRanks;
  if (threadIdx.x < kShare && row < tile.z) {
    static_cast<T*>(a.h)[static_cast<int64_t>(tile.y + row) * a.ranks + block * kLoraRanks + i % kLoraRanks] =
        from_float<T>(sum_of_cluster(sums + i));
  }
  __syncwarp();
  sync_cluster();  // a CTA must not end while other CTAs read its sums
}

// Adds B h of the tile's rows.  h [., ranks] lies in shared memory.
template <class T, int kTiles>
__device__ void add_product(const int4& tile, const T* h, int ranks, const Expansion<T>& b, Deltas& deltas) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int block = 0; block < b.rank_blocks; ++block) {
    uint4 low, high;
    b.load(block, low, high);
    const T* const from = h + b.first_rank + block * kLoraRanks + 4 * t;
#pragma unroll
    for (int m = 0; m < (kTiles + 1) / 2; ++m) {
      if (16 * m >= tile.z) break;
      const uint2 near = *reinterpret_cast<const uint2*>(from + (16 * m + g) * ranks);
      const uint2 far = *reinterpret_cast<const uint2*>(from + (16 * m + 8 + g) * ranks);
      deltas.add<T>(m, {near.x, far.x, near.y, far.y}, low, high);
    }
  }
}

// One feature block of a tile; with an activation, the blocks of the gate half and of the up half.
template <class T, bool kSilu, int kTiles>
struct Feature {
  Place place;
  bool exists;
  Expansion<T> b, up;

  __device__ Feature(const LoraAddArgs& a, int slot, int number)
      : place(a, number),
        exists(place.part < (kSilu ? 1 : a.parts)),
        b(a, exists ? slot : -1, place.part, place.block),
        up(a, kSilu && exists ? slot : -1, 1, place.block) {}

  // Starts to read B into L2.
  __device__ void prefetch_b() const {
    const int lane = threadIdx.x % 32;
    for (int block = 0; block < b.rank_blocks; ++block) prefetch(b.b + (block * 32 + lane) * 2);
    for (int block = 0; block < up.rank_blocks; ++block) prefetch(up.b + (block * 32 + lane) * 2);
  }

  __device__ void multiply(const int4& tile, const T* h, int ranks, Deltas& deltas, Deltas& ups) const {
    add_product<T, kTiles>(tile, h, ranks, b, deltas);
    if (kSilu) add_product<T, kTiles>(tile, h, ranks, up, ups);
  }

  __device__ int feature() const { return place.block * kLoraFeatures + threadIdx.x % 4 * 8; }

  // Reads the lane's elements of y, which must be complete.  Returns false if this block adds nothing to them.
  __device__ bool read(const LoraAddArgs& a, const LaneRows<kTiles>& rows, Pack<T, 8> (&y)[kTiles],
                       Pack<T, 8> (&up_of)[kTiles]) const {
    if (!exists || feature() >= a.features[place.part] || (!kSilu && b.rank_blocks == 0)) return false;
    const T* const from = static_cast<const T*>(a.y) + place.column + feature();
    rows.read(y, from, a.y_stride);
    if (kSilu) rows.read(up_of, from + a.features[0], a.y_stride);
    return true;
  }

  __device__ void store(const LoraAddArgs& a, const LaneRows<kTiles>& rows, const Pack<T, 8> (&y)[kTiles],
                        const Deltas& deltas, const Pack<T, 8> (&up_of)[kTiles], const Deltas& ups) const {
    if (kSilu) {
      activate(a, rows, y, deltas, up_of, ups, feature());
    } else {
      add_deltas(a, rows, y, deltas, place.column + feature());
    }
  }
};

/* Grid (CTAs for the feature blocks, in clusters; tiles).  With an activation, one more tile has the rows without an adapter.
 * A warp computes every n-th feature block, where n is the number of warps; B A x of its first block before y is complete. */
template <class T, bool kSilu, int kTiles>
__global__ void __launch_bounds__(kThreads, kTiles == 1 ? 4 : 3) add_kernel(LoraAddArgs a) {
  extern __shared__ float sums[];  // [32, ranks], then h [32, ranks] of T
  let_next_kernel_start();
  const int warps = gridDim.x * kWarps;
  int number = blockIdx.x * kWarps + threadIdx.x / 32;
  if (kSilu && static_cast<int>(blockIdx.y) >= a.tile_count) {
    wait_for_previous_kernels();
    for (; number * kLoraFeatures < a.features[0]; number += warps) {
      activate_plain_rows<T>(a, number * kLoraFeatures + threadIdx.x % 4 * 8, 0);
    }
    return;
  }
  const int4 tile = a.tiles[blockIdx.y];
  if (tile.x < 0) return wait_for_previous_kernels();
  const int64_t* const fields = fields_of(a, tile.x);
  const int ranks = static_cast<int>(fields[1]);  // equal in all CTAs of the cluster
  if (!kSilu && ranks == 0) return wait_for_previous_kernels();
  const Feature<T, kSilu, kTiles> first(a, tile.x, number);
  const LaneRows<kTiles> rows(a, tile);
  const T* const weights = static_cast<const T*>(a.weights) + tile.x * a.slot_elements + fields[0];
  const int parts = kSilu ? 1 : a.parts;
  if (!a.x_is_ready) {
    for (int block = 0; block < ranks / kLoraRanks; ++block) prefetch_a(a, weights, block);
    for (int next = number + warps; Place(a, next).part < parts; next += warps) {
      Feature<T, kSilu, kTiles>(a, tile.x, next).prefetch_b();
    }
    wait_for_previous_kernels();
  }

  T* const h = reinterpret_cast<T*>(sums + kLoraRows * a.ranks);
  if (ranks > 0) {
    for (int block = 0; block < ranks / kLoraRanks; ++block) {
      shrink<T, kTiles>(a, tile, weights, block, sums + block * kLoraRanks, ranks);
    }
    sync_cluster();
    for (int i = threadIdx.x; i < tile.z * ranks; i += kThreads) h[i] = from_float<T>(sum_of_cluster(sums + i));
    __syncthreads();
    sync_cluster();  // a CTA must not end while other CTAs read its sums
  }
  Deltas deltas = {}, ups = {};
  Pack<T, 8> y[kTiles], up_of[kTiles];
  first.multiply(tile, h, ranks, deltas, ups);
  wait_for_previous_kernels();
  if (first.read(a, rows, y, up_of)) first.store(a, rows, y, deltas, up_of, ups);
  for (number += warps; Place(a, number).part < parts; number += warps) {
    const Feature<T, kSilu, kTiles> next(a, tile.x, number);
    const bool any = next.read(a, rows, y, up_of);
    deltas = {}, ups = {};
    next.multiply(tile, h, ranks, deltas, ups);
    if (any) next.store(a, rows, y, deltas, up_of, ups);
  }
}

template <class T, int kTiles>
void add(const LoraAddArgs& a, cudaStream_t stream) {
  int blocks = 0;
  for (int part = 0; part < (a.out == nullptr ? a.parts : 1); ++part) {
    blocks += (a.features[part] + kLoraFeatures - 1) / kLoraFeatures;
  }
  // Each cluster of a tile repeats its A x, so there are no more clusters than the multiprocessors run at once.
  const int together = std::max(1, kCtas / (kCluster * std::max(1, a.tile_count)));
  const int wanted = (blocks + kInputWarps - 1) / kInputWarps, each = (wanted + together - 1) / together;
  const int clusters = (wanted + each - 1) / each;
  const dim3 grid(clusters * kCluster, a.tile_count + (a.out == nullptr ? 0 : 1));
  const int bytes = kLoraRows * a.ranks * static_cast<int>(sizeof(float) + sizeof(T));
  const auto kernel = a.out == nullptr ? add_kernel<T, false, kTiles> : add_kernel<T, true, kTiles>;
  launch_clusters_beside(kernel, kCluster, grid, kThreads, bytes, stream, a);
}

template <class T>
void add(const LoraAddArgs& a, cudaStream_t stream) {
  a.rows <= kTokens ? add<T, 1>(a, stream) : add<T, kTokenTiles>(a, stream);
}

}  // namespace

bool fits_lora_add(const LoraRows& a) {
  return a.rows <= kLoraRows && a.ranks <= kLoraAddRanks && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
}

bool fits_shrink_in_clusters() { return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9; }

void lora_shrink_in_clusters(const LoraShrinkArgs& a, cudaStream_t stream) {
  const dim3 grid(kCluster, a.ranks / kLoraRanks, a.tile_count);
  const auto kernel = a.dtype == Dtype::fp16 ? shrink_in_clusters_kernel<fp16> : shrink_in_clusters_kernel<bf16>;
  launch_clusters_beside(kernel, kCluster, grid, kThreads, 0, stream, a);
}

void lora_add(const LoraAddArgs& a, cudaStream_t stream) {
  a.dtype == Dtype::fp16 ? add<fp16>(a, stream) : add<bf16>(a, stream);
}

}  // namespace quire::cuda
