// Sampling for a complete batch in one launch.
//
// logits [rows, size] f32, bf16, fp16 · slots, known, tokens [rows] i64 · outcome [rows] u8 · table [slots]
//
// A row belongs to a cluster of CTAs; each warp of the cluster processes one slice of the vocabulary, in order.  Grid:
// rows x cluster.  Few rows get large clusters, so that a row does not wait for one SM.
//
//   1  read the logits (rows x size x 2 or 4 bytes: the minimum traffic) and find the maximum over the cluster.  A row
//      without a temperature takes that token and ends here
//   2  with top_k or top_p: histograms of w by its leading bits, merged over the cluster, show which bucket holds the
//      floor.  A second pass over that bucket's members uses their next 9 bits, a third pass the last 9 bits.  This is
//      a radix select: nothing is sorted
//   3  draw: the sums of each warp's kept weights tell in which slice the running sum exceeds the drawn value; sums per
//      tile then find the token
//
// Each later pass over the row recomputes w from the logits, which then are in L2.  That takes 20 instructions per kept
// weight and a comparison per other one.  Caching w in shared memory was slower from 32 rows on, because a row then
// takes 8 CTAs (docs/notes/kernels/sampling.md).
// Weights are integers: a float sum depends on its order, so the token would depend on how the row is sliced.  With
// integers the tokens equal those of cpu/sampling.cpp.

#include "cuda/sampling/sampling.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda {
namespace {

using sampling::key_of;
using sampling::place_of;
using sampling::Settings;
using sampling::value_of;

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kVector = 8;           // elements per lane and load
constexpr int kTile = 32 * kVector;  // elements per warp and load
constexpr int kMaxCluster = 8;       // larger clusters are not portable
constexpr int kFine = 512;           // buckets of the second and third pass
constexpr int kFineBits = 9;
constexpr unsigned kAll = 0xffffffff;
static_assert(sampling::kBucketShift == 2 * kFineBits && sampling::kBuckets % kThreads == 0 && kFine % kThreads == 0);

// --- clusters -------------------------------------------------------------------------------------------------------

__device__ int cluster_rank() {
#if __CUDA_ARCH__ >= 900
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
#else
  return 0;
#endif
}

__device__ int cluster_size() {
#if __CUDA_ARCH__ >= 900
  int size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
#else
  return 1;
#endif
}

// Barrier of all threads of the cluster, which makes their writes to shared memory visible.
__device__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// A CTA must not end while other CTAs read its shared memory.  Each CTA calls done_with_peers() after its last read of
// another CTA's memory, and wait_until_peers_are_done() before it ends.  (The arrive is a release, so that the reads
// come before it.)
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

// The variable `mine` of CTA `rank` of the cluster, in that CTA's shared memory.
template <class T>
__device__ const T& peer_value(const T& mine, int rank) {
#if __CUDA_ARCH__ >= 900
  const T* theirs;
  asm("mapa.u64 %0, %1, %2;" : "=l"(theirs) : "l"(&mine), "r"(rank));
  return *theirs;
#else
  return mine;
#endif
}

// --- small arithmetic -----------------------------------------------------------------------------------------------

// exp2 of cpu/simd.h for x <= 0, with the same operations.  The result is at least 2^-126, where cpu/simd.h returns 0;
// that changes no weight and no floor.
__device__ float exp2_as_cpu(float x) {
  const float shifted =
      __fadd_rn(fmaxf(x, -126.0f), 0x1.8p23f);  // adding the constant leaves the nearest integer in the low bits
  const float f = __fsub_rn(fmaxf(x, -126.0f), __fsub_rn(shifted, 0x1.8p23f));
  float p = 1.535336188319500e-4f;
  p = __fmaf_rn(p, f, 1.339887440266574e-3f);
  p = __fmaf_rn(p, f, 9.618437357674640e-3f);
  p = __fmaf_rn(p, f, 5.550332471162809e-2f);
  p = __fmaf_rn(p, f, 2.402264791363012e-1f);
  p = __fmaf_rn(p, f, 6.931472028550421e-1f);
  p = __fmaf_rn(p, f, 1.0f);
  return __fmul_rn(p, __int_as_float((__float_as_int(shifted) + 127) << 23));
}

// Maximum of a and b, or NaN if either is NaN.
__device__ float larger(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

__device__ uint32_t weight(float w) {
  return static_cast<uint32_t>(static_cast<int32_t>(__fmaf_rn(w, sampling::kOne, sampling::kRounding)));
}

// --- histograms -----------------------------------------------------------------------------------------------------

struct Tally {
  uint64_t sum;  // sum of weights
  uint32_t count;
};
__device__ Tally operator+(Tally a, Tally b) { return {a.sum + b.sum, a.count + b.count}; }

template <int buckets>
struct Histogram {
  uint32_t counts[buckets];
  // 64-bit sums in two words, because atomicAdd in shared memory is fast only for 32 bits.  The order of the words
  // alternates every 16 buckets, to spread over all banks.
  uint2 sums[buckets];

  __device__ static bool swapped(int bucket) { return bucket & 16; }

  __device__ void clear() {
    for (int i = threadIdx.x; i < buckets; i += kThreads) counts[i] = 0, sums[i] = {0, 0};
  }
  __device__ void add(int bucket, uint32_t weight, bool counted, bool summed) {
    if (counted) atomicAdd(&counts[bucket], 1);
    if (!summed) return;
    uint32_t* words = reinterpret_cast<uint32_t*>(&sums[bucket]);
    if (atomicAdd(words + swapped(bucket), weight) > ~weight) atomicAdd(words + !swapped(bucket), 1);
  }
  // Tally of a bucket, summed over the cluster.
  __device__ Tally total(int bucket, bool counted, bool summed) const {
    switch (cluster_size()) {  // one case per size, so that all loads are in flight at once
      case 1: return total_of<1>(bucket, counted, summed);
      case 2: return total_of<2>(bucket, counted, summed);
      case 4: return total_of<4>(bucket, counted, summed);
      default: return total_of<8>(bucket, counted, summed);
    }
  }

 private:
  template <int ranks>
  __device__ Tally total_of(int bucket, bool counted, bool summed) const {
    Tally tally{0, 0};
    if (summed) {
      uint2 words[ranks];
#pragma unroll
      for (int rank = 0; rank < ranks; ++rank) words[rank] = peer_value(sums[bucket], rank);
      uint64_t sum_x = 0, sum_y = 0;
#pragma unroll
      for (int rank = 0; rank < ranks; ++rank) sum_x += words[rank].x, sum_y += words[rank].y;
      tally.sum = swapped(bucket) ? (sum_x << 32) + sum_y : (sum_y << 32) + sum_x;
    }
    if (counted) {
      uint32_t count[ranks];
#pragma unroll
      for (int rank = 0; rank < ranks; ++rank) count[rank] = peer_value(counts[bucket], rank);
#pragma unroll
      for (int rank = 0; rank < ranks; ++rank) tally.count += count[rank];
    }
    return tally;
  }
};

struct Shared {
  Histogram<sampling::kBuckets> coarse;
  Histogram<kFine> fine[2];
  uint64_t warp_best[kWarps], warp_sums[kWarps], tile_sums[kWarps];
  Tally warp_tallies[2][kWarps];
  struct {
    int bucket;
    Tally above, inside;
  } crossings[4];  // one per pass, then the coarse crossings of top_k and top_p
};
constexpr int kTopK = 2, kTopP = 3;

// Running totals over the cluster's buckets, from the most probable bucket down; each thread holds a few buckets.
template <int buckets>
struct BucketScan {
  static constexpr int kEach = buckets / kThreads;
  Tally above;  // buckets of the preceding threads
  Tally own[kEach];
  Tally total;

  __device__ static int bucket(int i) { return buckets - 1 - (static_cast<int>(threadIdx.x) * kEach + i); }

  // Call after a cluster_sync() that follows the last add().  `turn` alternates from call to call.
  __device__ BucketScan(const Histogram<buckets>& mine, bool counted, bool summed, Shared& shared, int turn) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Tally sum{0, 0};
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      own[i] = mine.total(bucket(i), counted, summed);
      sum = sum + own[i];
    }
    Tally upto = sum;  // tally of this thread and the preceding lanes
    for (int step = 1; step < 32; step *= 2) {
      const Tally before{__shfl_up_sync(kAll, upto.sum, step), __shfl_up_sync(kAll, upto.count, step)};
      if (lane >= step) upto = upto + before;
    }
    if (lane == 31) shared.warp_tallies[turn][warp] = upto;
    __syncthreads();
    above = {upto.sum - sum.sum, upto.count - sum.count};
    total = {0, 0};
    for (int i = 0; i < kWarps; ++i) {
      const Tally one = shared.warp_tallies[turn][i];
      if (i < warp) above = above + one;
      total = total + one;
    }
  }
};

struct Wanted {
  bool by_count;
  uint64_t target;  // number of tokens, or sum of weights
  __device__ bool reached(Tally t) const { return (by_count ? t.count : t.sum) >= target; }
};

// The bucket in which the running total reaches the target, with the totals above and inside; uniform over all threads.
struct Crossing {
  int bucket;
  Tally above, inside;

  // Requires that above + scan.total reaches the target.
  template <int buckets>
  __device__ Crossing(const BucketScan<buckets>& scan, Tally above_all, Wanted wanted, Shared& shared, int place) {
    Tally before = above_all + scan.above;
    for (int i = 0; i < BucketScan<buckets>::kEach; ++i) {
      const Tally upto = before + scan.own[i];
      if (!wanted.reached(before) && wanted.reached(upto)) {
        shared.crossings[place] = {BucketScan<buckets>::bucket(i), before, scan.own[i]};
      }
      before = upto;
    }
    __syncthreads();
    bucket = shared.crossings[place].bucket;
    above = shared.crossings[place].above;
    inside = shared.crossings[place].inside;
  }
};

// --- rows -----------------------------------------------------------------------------------------------------------

// A warp's slice of a row: consecutive tiles.
struct Slice {
  int first, tiles;

  __device__ Slice(int size, int warp) {  // warp: index over all warps of the cluster
    const int warps = cluster_size() * kWarps, all = (size + kTile - 1) / kTile, each = (all + warps - 1) / warps;
    first = warp * each;
    tiles = max(0, min(each, all - first));
  }
};

// Eight consecutive elements, packed as in memory: unpacked, each would take a register.
template <class T>
struct Eight {
  static constexpr int kPerWord = 4 / sizeof(T);
  alignas(16) uint32_t words[kVector / kPerWord];

  __device__ float at(int i) const {
    const uint32_t word = words[i / kPerWord];
    if constexpr (std::is_same_v<T, float>) return __uint_as_float(word);
    if constexpr (std::is_same_v<T, bf16>) return __uint_as_float(i % 2 ? word & 0xffff0000u : word << 16);
    if constexpr (std::is_same_v<T, fp16>) return to_float(__ushort_as_half(i % 2 ? word >> 16 : word & 0xffffu));
  }
  // Maximum of the eight elements, or NaN if one of them is NaN.
  __device__ float largest() const {
    if constexpr (std::is_same_v<T, float>) {
      return larger(larger(larger(at(0), at(1)), larger(at(2), at(3))),
                    larger(larger(at(4), at(5)), larger(at(6), at(7))));
    } else {
      using Pair = std::conditional_t<std::is_same_v<T, bf16>, __nv_bfloat162, __half2>;
      const auto pair = [&](int i) { return *reinterpret_cast<const Pair*>(&words[i]); };
      const Pair two = __hmax2_nan(__hmax2_nan(pair(0), pair(1)), __hmax2_nan(pair(2), pair(3)));
      return larger(to_float(two.x), to_float(two.y));
    }
  }
};

template <class T>
struct Row {
  const T* logits;
  int size;
  bool packs;  // 16-byte loads are possible

  // First element of a lane in a tile.
  __device__ static int at(int tile) { return tile * kTile + static_cast<int>(threadIdx.x) % 32 * kVector; }

  __device__ bool complete(int tile) const { return packs && tile < size / kTile; }

  __device__ Eight<T> read_complete(int tile) const {
    Eight<T> eight;
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof eight / 16); ++i) {
      reinterpret_cast<uint4*>(eight.words)[i] = reinterpret_cast<const uint4*>(logits + at(tile))[i];
    }
    return eight;
  }

  // Reads a tile with scalar loads; elements past the end are -inf.
  __device__ Eight<T> read(int tile) const {
    Eight<T> eight;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const T nothing = from_float<T>(-std::numeric_limits<float>::infinity());
      reinterpret_cast<T*>(eight.words)[i] = at(tile) + i < size ? logits[at(tile) + i] : nothing;
    }
    return eight;
  }

  // Calls use(tile, eight) for the tiles of a slice, with the next loads in flight.
  template <class Use>
  __device__ void each(Slice slice, const Use& use) const {
    constexpr int kAhead = 2;
    int tile = slice.first;
    const int end = complete_end(slice);
    if (tile < end) {
      Eight<T> next[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) next[i] = read_complete(min(tile + i, end - 1));
      for (; tile < end; ++tile) {
        const Eight<T> now = next[0];
#pragma unroll
        for (int i = 0; i + 1 < kAhead; ++i) next[i] = next[i + 1];
        next[kAhead - 1] = read_complete(min(tile + kAhead, end - 1));
        use(tile, now);
      }
    }
    for (; tile < slice.first + slice.tiles; ++tile) use(tile, read(tile));
  }

  // each() with an unrolled loop, for a `use` of a few instructions.
  template <class Use>
  __device__ void each_quickly(Slice slice, const Use& use) const {
    constexpr int kTogether = 8 / sizeof(T);
    int tile = slice.first;
    const int end = complete_end(slice);
    for (; tile + kTogether <= end; tile += kTogether) {
      Eight<T> eights[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) eights[i] = read_complete(tile + i);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) use(tile + i, eights[i]);
    }
    for (; tile < slice.first + slice.tiles; ++tile) use(tile, complete(tile) ? read_complete(tile) : read(tile));
  }

 private:
  // End of a slice's complete tiles.
  __device__ int complete_end(Slice slice) const {
    return packs ? min(slice.first + slice.tiles, size / kTile) : slice.first;
  }
};

// Maximum key over the cluster, returned to all threads.
__device__ uint64_t cluster_max(uint64_t key, Shared& shared) {
  const int lane = threadIdx.x % 32;
  key = max_of_warp(key);
  if (lane == 0) shared.warp_best[threadIdx.x / 32] = key;
  cluster_sync();
  for (int i = lane; i < cluster_size() * kWarps; i += 32) {
    key = max(key, peer_value(shared.warp_best[i % kWarps], i / kWarps));
  }
  return max_of_warp(key);
}

// Maximum key of a lane's raw logits.
template <class T>
__device__ uint64_t best_of(const Row<T>& row, Slice slice) {
  float top = -std::numeric_limits<float>::infinity(), all = top;
  int best = slice.first;
  row.each_quickly(slice, [&](int tile, const Eight<T>& eight) {
    const float one = eight.largest();
    all = larger(all, one);
    if (one > top) top = one, best = tile;
  });
  if (all != all) return key_of(all, 0);
  if (top == -std::numeric_limits<float>::infinity()) return 0;
  // Reloading eight elements is cheaper than tracking the position of the maximum in the loop.
  const Eight<T> eight = row.complete(best) ? row.read_complete(best) : row.read(best);
  int place = 0;
#pragma unroll
  for (int i = kVector - 1; i >= 0; --i) {
    if (eight.at(i) == top) place = row.at(best) + i;
  }
  return key_of(top + 0.0f, place);  // + 0: turns -0 into 0
}

struct Choice {
  int token;
  uint8_t outcome;
};
__device__ Choice choice_of(uint64_t key) {
  const bool finite = isfinite(value_of(key));
  return {finite ? static_cast<int>(place_of(key)) : 0, finite ? sampling::kChosen : sampling::kNotFinite};
}

// --- weights --------------------------------------------------------------------------------------------------------

// A row whose logits are adjusted, or from which a token is drawn.
template <class T>
struct Weights {
  const Row<T>& row;
  const Slice slice;
  const Settings& settings;
  const bool early;  // fewer than min_tokens tokens are in the output
  const float scale;
  float peak;  // maximum adjusted logit

  __device__ bool adjusts() const { return settings.marks || settings.bias || settings.mask; }

  __device__ void adjust(int at, const Eight<T>& raw, float (&x)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = raw.at(i);
    if (!adjusts() || at >= row.size) return;
    if (settings.mask) {
      const uint32_t allowed = settings.mask[at / 32] >> at % 32;  // the bits of eight consecutive tokens
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (!(allowed >> i & 1)) x[i] = -std::numeric_limits<float>::infinity();
      }
    }
    if (!settings.marks && !settings.bias) return;
    alignas(16) uint32_t marks[kVector] = {};
    alignas(16) float bias[kVector] = {};
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {  // marks and bias are padded to a multiple of kVector
      if (settings.marks)
        *reinterpret_cast<uint4*>(marks + i) = *reinterpret_cast<const uint4*>(settings.marks + at + i);
      if (settings.bias)
        *reinterpret_cast<float4*>(bias + i) = *reinterpret_cast<const float4*>(settings.bias + at + i);
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (at + i < row.size) x[i] = sampling::adjusted(x[i], marks[i], bias[i], settings, early);
    }
  }

  // Maximum key of a lane.  Its index is valid only if adjusts(); otherwise a draw follows, which does not need the
  // index.
  __device__ uint64_t best() const {
    float top = -std::numeric_limits<float>::infinity(), all = top;
    int place = 0;
    if (adjusts()) {
      row.each(slice, [&](int tile, const Eight<T>& raw) {
        float x[kVector];
        adjust(row.at(tile), raw, x);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          all = larger(all, x[i]);
          if (x[i] > top) top = x[i], place = row.at(tile) + i;
        }
      });
    } else {
      row.each_quickly(slice, [&](int, const Eight<T>& raw) { all = larger(all, raw.largest()); });
    }
    return key_of(all + 0.0f, place);  // + 0: turns -0 into 0
  }

  // log2 of w, before rounding.
  __device__ void scaled(int at, const Eight<T>& raw, float (&y)[kVector]) const {
    adjust(at, raw, y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) y[i] = __fmul_rn(__fsub_rn(y[i], peak), scale);
  }
  // Returns a bound: elements with a smaller y certainly have w < min_weight.  The margin covers exp2's relative error
  // of 1e-6.
  __device__ static float coldest(float min_weight) { return log2f(min_weight) - 1e-3f; }

  // --- the floor

  struct Upper {
    float floor;
    uint64_t sum;  // sum of weights in the floor's bucket and in all buckets above it
  };

  // Exact floor within a bucket of the coarse histogram, by two finer histograms.
  __device__ Upper descend(Crossing at, Wanted wanted, bool counted, Shared& shared, int& turn) const {
    uint32_t prefix = at.bucket + sampling::kBucketBase;
    for (int shift = sampling::kBucketShift; shift > 0; counted = true) {
      // If the bucket has one member, or all of its members are kept, the bucket's lower edge is as good a floor as their
      // minimum does.
      if (counted && (at.inside.count == 1 || (wanted.by_count && at.above.count + at.inside.count == wanted.target))) {
        return {__uint_as_float(prefix << shift), at.above.sum + at.inside.sum};
      }
      turn ^= 1;
      Histogram<kFine>& fine = shared.fine[turn];  // a cluster_sync() has followed its last reads, two passes ago
      fine.clear();
      __syncthreads();
      const uint32_t lowest = prefix << shift;
      const float cold = coldest(__uint_as_float(lowest)), hot = log2f(__uint_as_float(lowest + (1u << shift))) + 1e-3f;
      row.each(slice, [&](int tile, const Eight<T>& raw) {
        float y[kVector];
        scaled(row.at(tile), raw, y);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          if (y[i] < cold || y[i] > hot) continue;
          const float w = exp2_as_cpu(y[i]);
          const uint32_t rest = __float_as_uint(w) - lowest;
          if (rest < 1u << shift) fine.add(rest >> (shift - kFineBits), weight(w), true, true);
        }
      });
      cluster_sync();
      at = Crossing(BucketScan<kFine>(fine, true, true, shared, turn), at.above, wanted, shared, turn);
      shift -= kFineBits;
      prefix = prefix << kFineBits | at.bucket;
    }
    return {__uint_as_float(prefix), at.above.sum + at.inside.sum};
  }

  // Floor of w required by top_k and top_p.
  __device__ float floor(Shared& shared) const {
    const bool counted = settings.top_k > 0, summed = settings.top_p < 1;
    row.each(slice, [&](int tile, const Eight<T>& raw) {
      float y[kVector];
      scaled(row.at(tile), raw, y);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float w = exp2_as_cpu(y[i]);
        const int bucket = sampling::bucket(__float_as_uint(w));
        if (bucket > 0) shared.coarse.add(bucket, weight(w), counted, summed);
      }
    });
    cluster_sync();
    int turn = 0;
    const BucketScan<sampling::kBuckets> scan(shared.coarse, counted, summed, shared, turn);
    Upper kept{0.0f, scan.total.sum};
    const Wanted k{true, static_cast<uint64_t>(settings.top_k)};
    if (counted && k.reached(scan.total)) {
      kept = descend(Crossing(scan, {0, 0}, k, shared, kTopK), k, counted, shared, turn);
    }
    if (!summed) return kept.floor;
    const Wanted p{false, sampling::share(settings.top_p, kept.sum)};
    return fmaxf(kept.floor, descend(Crossing(scan, {0, 0}, p, shared, kTopP), p, counted, shared, turn).floor);
  }

  // --- the draw

  // A lane's sum of kept weights in a tile.
  __device__ uint64_t sum(int tile, const Eight<T>& raw, float floor, float cold) const {
    float y[kVector];
    uint32_t one[kVector];
    scaled(row.at(tile), raw, y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      one[i] = 0;
      if (y[i] < cold) continue;
      const float w = exp2_as_cpu(y[i]);
      if (w >= floor) one[i] = weight(w);
    }
    return uint64_t{one[0] + one[1] + one[2]} + (one[3] + one[4] + one[5]) +
           (one[6] + one[7]);  // 32 bits hold the sum of three weights
  }

  // Returns the token at which the running sum of kept weights exceeds the drawn value, in one thread of the cluster;
  // -1 in the other threads.
  __device__ int draw(float floor, uint64_t hash, Shared& shared) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float cold = coldest(floor);
    uint64_t own = 0;
    row.each(slice, [&](int tile, const Eight<T>& raw) { own += sum(tile, raw, floor, cold); });
    own = sum_of_warp(own);
    if (lane == 0) shared.warp_sums[warp] = own;
    cluster_sync();
    // Sums of the cluster's warps, in the order of their slices: a few per lane.
    constexpr int kEach = kMaxCluster * kWarps / 32;
    uint64_t sums[kEach], upto = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int other = lane * kEach + i;
      sums[i] = other < cluster_size() * kWarps ? peer_value(shared.warp_sums[other % kWarps], other / kWarps) : 0;
      upto += sums[i];
    }
    done_with_peers();
    const uint64_t lane_sum = upto;
    upto = sum_up_to_lane(upto);
    const uint64_t goal = sampling::goal(hash, __shfl_sync(kAll, upto, 31));
    // winner: the warp whose slice holds the drawn value.  left: the remainder of that value inside the slice.
    uint64_t left = goal - (upto - lane_sum);
    int winner = -1;
    if (goal < upto && goal >= upto - lane_sum) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        if (winner < 0 && left < sums[i]) winner = lane * kEach + i;
        if (winner < 0) left -= sums[i];
      }
    }
    const int knows = __ffs(__ballot_sync(kAll, winner >= 0)) - 1;
    winner = __shfl_sync(kAll, winner, knows);
    left = __shfl_sync(kAll, left, knows);
    if (winner / kWarps != cluster_rank()) return -1;
    return find(Slice(row.size, winner), left, floor, shared);
  }

  // Finds the token in a slice, with all warps of the CTA.
  __device__ int find(Slice among, uint64_t left, float floor, Shared& shared) const {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const float cold = coldest(floor);
    for (int first = among.first;; first += kWarps) {
      uint64_t own = 0;
      Eight<T> raw;
      if (first + warp < among.first + among.tiles) {
        raw = row.complete(first + warp) ? row.read_complete(first + warp) : row.read(first + warp);
        own = sum(first + warp, raw, floor, cold);
      }
      const uint64_t upto = sum_up_to_lane(own);
      if (lane == 31) shared.tile_sums[warp] = upto;
      __syncthreads();
      int tile = 0;
      while (tile < kWarps && left >= shared.tile_sums[tile]) left -= shared.tile_sums[tile++];
      __syncthreads();
      if (tile == kWarps) continue;
      if (tile != warp || left >= upto || left < upto - own) return -1;
      left -= upto - own;
      float y[kVector];
      scaled(row.at(first + warp), raw, y);
      int token = -1;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float w = exp2_as_cpu(y[i]);
        const uint64_t one = w >= floor ? weight(w) : 0;
        if (token < 0 && left < one) token = row.at(first + warp) + i;
        left -= one;
      }
      return token;
    }
  }
};

// --- the kernel -----------------------------------------------------------------------------------------------------

__device__ void write(const SampleArgs& a, int row, Choice choice) {
  a.tokens[row] = choice.token;
  a.outcome[row] = choice.outcome;
}

template <class T>
__device__ void greedy(const SampleArgs& a, const Row<T>& row, Slice slice, int index, Shared& shared) {
  const uint64_t best = cluster_max(best_of(row, slice), shared);
  done_with_peers();
  if (cluster_rank() == 0 && threadIdx.x == 0)
    write(a, index, a.slots[index] < 0 ? Choice{0, sampling::kChosen} : choice_of(best));
  wait_until_peers_are_done();
}

// Returns the outcome of a row without finite adjusted logits, which depends on its raw logits.  Not inlined, and with
// arguments by value, so that it costs other rows no registers.
template <class T>
__device__ __noinline__ uint8_t explain(Row<T> row, Slice slice, Shared& shared) {
  cluster_sync();  // all threads have read `warp_best` before it is overwritten
  const Choice raw = choice_of(cluster_max(best_of(row, slice), shared));
  return raw.outcome == sampling::kChosen ? sampling::kNothingAllowed : raw.outcome;
}

template <class T, bool general>
__global__ void __launch_bounds__(kThreads, general ? 2 : 4) sample_kernel(SampleArgs a, bool packs) {
  __shared__ Shared shared;
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int index = blockIdx.x / cluster_size();
  const Row<T> row{static_cast<const T*>(a.logits) + index * a.row_stride, a.size, packs};
  const Slice slice(a.size, cluster_rank() * kWarps + static_cast<int>(threadIdx.x) / 32);
  if constexpr (!general) return greedy(a, row, slice, index, shared);

  const bool speaker = cluster_rank() == 0 && threadIdx.x == 0;
  const int64_t slot = a.slots[index];
  if (slot < 0) {
    if (speaker) write(a, index, {0, sampling::kChosen});
    return;
  }
  const Settings settings = a.table[slot];
  if (settings.scale == 0 && !settings.marks && !settings.bias && !settings.mask)
    return greedy(a, row, slice, index, shared);
  const int64_t position = a.known[index] - settings.prompt_len;
  const bool filtered = settings.top_k > 0 || settings.top_p < 1;
  if (filtered) shared.coarse.clear();
  Weights<T> weights{row, slice, settings, position < settings.min_tokens, settings.scale, 0.0f};
  const uint64_t best = cluster_max(weights.best(), shared);
  weights.peak = value_of(best);
  Choice best_choice = choice_of(best);
  const bool sound = best_choice.outcome == sampling::kChosen;  // uniform over all threads of the cluster
  if (!sound && weights.adjusts()) best_choice.outcome = explain(row, slice, shared);
  int token = speaker ? best_choice.token : -1;
  if (settings.scale != 0 && sound) {
    float floor = settings.min_p;  // the maximum w is 1, so min_p is the floor itself
    if (filtered) floor = fmaxf(floor, weights.floor(shared));
    token = weights.draw(floor, sampling::hash(settings.seed, settings.sibling, position), shared);
  } else {
    done_with_peers();
  }
  if (token >= 0) {
    write(a, index, {token, best_choice.outcome});
    if (settings.marks && sound) settings.marks[token] += 1;
  }
  __syncwarp();
  wait_until_peers_are_done();
}

template <class T>
__global__ void __launch_bounds__(kThreads, 4) argmax_kernel(ArgmaxArgs a, bool packs) {
  __shared__ Shared shared;
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int index = blockIdx.x / cluster_size();
  const Row<T> row{static_cast<const T*>(a.logits) + index * a.row_stride, a.size, packs};
  const Slice slice(a.size, cluster_rank() * kWarps + static_cast<int>(threadIdx.x) / 32);
  const uint64_t best = cluster_max(best_of(row, slice), shared);
  done_with_peers();
  if (cluster_rank() == 0 && threadIdx.x == 0) {
    a.keys[index] = sampling::to_signed(best == 0 ? 0 : key_of(value_of(best), a.first + place_of(best)));
  }
  wait_until_peers_are_done();
}

__global__ void __launch_bounds__(kThreads) chosen_kernel(const int64_t* keys, SampleArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= a.rows) return;
  write(a, row, a.slots[row] < 0 ? Choice{0, sampling::kChosen} : choice_of(sampling::from_signed(keys[row])));
}

// Returns the CTAs per row.  Few rows get many CTAs, but larger clusters synchronise more slowly; in measurements with
// 1 to 1024 rows this rule picked the best size.  If rows are read several times (`again`), each gets two CTAs or more,
// so that the active rows fit into L2.
int cluster_of(int64_t rows, bool again) {
  const int max_cluster = device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 ? kMaxCluster : 1;
  const int sms = device_attribute(cudaDevAttrMultiProcessorCount);
  int cluster = again ? std::min(2, max_cluster) : 1;
  while (cluster < max_cluster && rows * cluster * cluster <= sms) cluster *= 2;
  return cluster;
}

}  // namespace

void argmax(const ArgmaxArgs& a, cudaStream_t stream) {
  if (a.rows == 0) return;
  const int cluster = cluster_of(a.rows, false);
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    launch_clusters(argmax_kernel<T>, cluster, static_cast<int>(a.rows) * cluster, kThreads, 0, stream, a,
                    in_16_bytes(a.logits, a.row_stride, sizeof(T)));
  });
}

void chosen(const int64_t* keys, const int64_t* slots, int64_t* tokens, uint8_t* outcome, int64_t rows,
            cudaStream_t stream) {
  if (rows == 0) return;
  const SampleArgs a{.slots = slots, .tokens = tokens, .outcome = outcome, .rows = rows};
  launch(chosen_kernel, dim3(static_cast<int>((rows + kThreads - 1) / kThreads)), dim3(kThreads), 0, stream, keys, a);
}

void sample(const SampleArgs& a, cudaStream_t stream) {
  if (a.rows == 0) return;
  const int cluster = cluster_of(a.rows, a.general);
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    const auto kernel = a.general ? sample_kernel<T, true> : sample_kernel<T, false>;
    launch_clusters(kernel, cluster, static_cast<int>(a.rows) * cluster, kThreads, 0, stream, a,
                    in_16_bytes(a.logits, a.row_stride, sizeof(T)));
  });
}

}  // namespace quire::cuda
