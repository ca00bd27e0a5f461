// y += B A x of up to 32 rows in one launch: few rows wait for launches, not for memory.
//
//   GEMM of the base model   x ──────────────────────────> y
//   this kernel              x ─ A x ─ cluster ─ B A x ─ wait ─> y += B A x
//
// The GEMM lets this kernel start once x is complete (`LinearArgs::share_x`), so all but the last step overlaps it.
//
// A cluster of 8 CTAs, 32 warps, has one tile of rows of one adapter and 32 blocks of features.  The warps share the
// inputs; each CTA adds up the sums of all, and each warp then makes one feature block.  Several clusters compute the
// same A x: another launch, or a wait for other clusters, would take longer.

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

// A CTA must not end while others read its shared memory.  Each calls the first when it has read the others' memory,
// and the second before it ends.
__device__ void done_with_peers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
__device__ void wait_until_peers_are_done() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
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

// Makes sums [rows of the tile, ranks]: this CTA's share of A x.
template <class T>
__device__ void shrink(const LoraAddArgs& a, const int4& tile, const T* weights, int ranks, float* sums_of_cta) {
  __shared__ float4 all_sums[kWarps][kTokenTiles][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int own = blockIdx.x % kCluster * kWarps + warp;
  const int blocks = (a.inner + kLoraInputs - 1) / kLoraInputs;
  int rows[kTokenTiles];
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) rows[n] = n * kTokens + g < tile.z ? a.order[tile.y + n * kTokens + g] : -1;
  for (int rank_block = 0; rank_block < ranks / kLoraRanks; ++rank_block) {
    const uint4* const from =
        reinterpret_cast<const uint4*>(weights + static_cast<int64_t>(rank_block) * blocks * kBlockElements);
    float sums[kTokenTiles][4] = {};
    for (int first = own; first < blocks; first += kInputWarps * kAtOnce) {
      uint4 w[kAtOnce][2];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int at = first + i * kInputWarps;
        w[i][0] = w[i][1] = make_uint4(0, 0, 0, 0);
        if (at < blocks) w[i][0] = __ldg(from + (at * 32 + lane) * 2), w[i][1] = __ldg(from + (at * 32 + lane) * 2 + 1);
      }
#pragma unroll
      for (int n = 0; n < kTokenTiles; ++n) {
        if (n * kTokens >= tile.z) break;
        const T* const x = static_cast<const T*>(a.x) + rows[n] * a.x_stride + t * 8;
        uint4 v[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int input = (first + i * kInputWarps) * kLoraInputs;
          v[i] = make_uint4(0, 0, 0, 0);
          // Past the L1 cache, which may hold what was there before.
          if (rows[n] >= 0 && input + t * 8 < a.inner) v[i] = __ldcg(reinterpret_cast<const uint4*>(x + input));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const uint4 &low = w[i][0], &high = w[i][1];
          mma16816<T>(sums[n], {low.x, high.x, low.y, high.y}, {v[i].x, v[i].y});
          mma16816<T>(sums[n], {low.z, high.z, low.w, high.w}, {v[i].z, v[i].w});
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n) {
      all_sums[warp][n][lane] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
    }
    __syncthreads();
    // Warp n adds up token tile n: two tokens of ranks g and g + 8 per lane.
    static_assert(kTokenTiles == kWarps);
    float4 s = all_sums[0][warp][lane];
#pragma unroll
    for (int other = 1; other < kWarps; ++other) {
      const float4 more = all_sums[other][warp][lane];
      s.x += more.x, s.y += more.y, s.z += more.z, s.w += more.w;
    }
    const int token = warp * kTokens + 2 * t;
    float* const to = sums_of_cta + token * ranks + rank_block * kLoraRanks + g;
    if (token < tile.z) to[0] = s.x, to[8] = s.z;
    if (token + 1 < tile.z) to[ranks] = s.y, to[ranks + 8] = s.w;
    __syncthreads();
  }
}

// Adds B h of the tile's rows.  h [., ranks] lies in shared memory.
template <class T>
__device__ void add_product(const int4& tile, const T* h, int ranks, const Expansion<T>& b, Deltas& deltas) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (int block = 0; block < b.rank_blocks; ++block) {
    uint4 low, high;
    b.load(block, low, high);
    const T* const from = h + b.first_rank + block * kLoraRanks + 4 * t;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      if (16 * m >= tile.z) break;
      const uint2 near = *reinterpret_cast<const uint2*>(from + (16 * m + g) * ranks);
      const uint2 far = *reinterpret_cast<const uint2*>(from + (16 * m + 8 + g) * ranks);
      deltas.add<T>(m, {near.x, far.x, near.y, far.y}, low, high);
    }
  }
}

// One feature block of a tile: with an activation of the gate, and that of the up half.
template <class T, bool kSilu>
struct Feature {
  Place place;
  bool exists;
  Expansion<T> b, up;

  __device__ Feature(const LoraAddArgs& a, int slot, int number)
      : place(a, number),
        exists(place.part < (kSilu ? 1 : a.parts)),
        b(a, exists ? slot : -1, place.part, place.block),
        up(a, kSilu && exists ? slot : -1, 1, place.block) {}

  __device__ void multiply(const int4& tile, const T* h, int ranks, Deltas& deltas, Deltas& ups) const {
    add_product(tile, h, ranks, b, deltas);
    if (kSilu) add_product(tile, h, ranks, up, ups);
  }

  // Once y is complete.
  __device__ void store(const LoraAddArgs& a, const LaneRows& rows, const Deltas& deltas, const Deltas& ups) const {
    const int feature = place.block * kLoraFeatures + threadIdx.x % 4 * 8, column = place.column + feature;
    if (!exists || feature >= a.features[place.part]) return;
    const T* const from = static_cast<const T*>(a.y) + column;
    Pack<T, 8> y[4], up_of[4];
    rows.read(y, from, a.y_stride);
    if (kSilu) {
      rows.read(up_of, from + a.features[0], a.y_stride);
      activate(a, rows, y, deltas, up_of, ups, feature);
    } else if (b.rank_blocks > 0) {
      add_deltas(a, rows, y, deltas, column);
    }
  }
};

/* Grid (warps for feature blocks, in clusters; tiles, then one more with an activation: rows without an adapter).
 * A warp makes every warps-th feature block, the first one before y is complete. */
template <class T, bool kSilu>
__global__ void __launch_bounds__(kThreads) add_kernel(LoraAddArgs a) {
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
  const Feature<T, kSilu> first(a, tile.x, number);
  const LaneRows rows(a, tile);
  if (!a.x_is_ready) wait_for_previous_kernels();

  T* const h = reinterpret_cast<T*>(sums + kLoraRows * a.ranks);
  if (ranks > 0) {
    const T* const weights = static_cast<const T*>(a.weights) + tile.x * a.slot_elements + fields[0];
    shrink<T>(a, tile, weights, ranks, sums);
    sync_cluster();
    for (int i = threadIdx.x; i < tile.z * ranks; i += kThreads) {
      float sum = 0;
#pragma unroll
      for (int rank = 0; rank < kCluster; ++rank) sum += peer_value(sums + i, rank);
      h[i] = from_float<T>(sum);
    }
    __syncthreads();
    done_with_peers();
  }
  Deltas deltas = {}, ups = {};
  first.multiply(tile, h, ranks, deltas, ups);
  wait_for_previous_kernels();
  first.store(a, rows, deltas, ups);
  for (number += warps; Place(a, number).part < (kSilu ? 1 : a.parts); number += warps) {
    const Feature<T, kSilu> next(a, tile.x, number);
    deltas = {}, ups = {};
    next.multiply(tile, h, ranks, deltas, ups);
    next.store(a, rows, deltas, ups);
  }
  __syncwarp();
  if (ranks > 0) wait_until_peers_are_done();
}

template <class T>
void add(const LoraAddArgs& a, cudaStream_t stream) {
  int blocks = 0;
  for (int part = 0; part < (a.out == nullptr ? a.parts : 1); ++part) {
    blocks += (a.features[part] + kLoraFeatures - 1) / kLoraFeatures;
  }
  // Each cluster computes A x of its tile again, so no more than the multiprocessors run together.
  const int together = std::max(1, kCtas / (kCluster * std::max(1, a.tile_count)));
  const int wanted = (blocks + kInputWarps - 1) / kInputWarps, each = (wanted + together - 1) / together;
  const int clusters = (wanted + each - 1) / each;
  const dim3 grid(clusters * kCluster, a.tile_count + (a.out == nullptr ? 0 : 1));
  const int bytes = kLoraRows * a.ranks * static_cast<int>(sizeof(float) + sizeof(T));
  const auto kernel = a.out == nullptr ? add_kernel<T, false> : add_kernel<T, true>;
  launch_clusters_beside(kernel, kCluster, grid, kThreads, bytes, stream, a);
}

}  // namespace

bool fits_lora_add(const LoraRows& a) {
  return a.rows <= kLoraRows && a.ranks <= kLoraAddRanks && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
}

void lora_add(const LoraAddArgs& a, cudaStream_t stream) {
  a.dtype == Dtype::fp16 ? add<fp16>(a, stream) : add<bf16>(a, stream);
}

}  // namespace quire::cuda
