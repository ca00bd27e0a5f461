// Planner of decode attention: computes where the shares of decode.h begin.
//
// Grid: kCtas.  Each CTA computes the prefix sums of all sequences' tiles, at most 4 sequences per thread.  Then each
// thread finds one or two shares by binary search.  Moves about 60 KB: a few microseconds per step.

#include <array>
#include <atomic>
#include <climits>

#include "cuda/attention/decode_plan.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda {

namespace {

constexpr int kThreads = 1024;
constexpr int kCtas = 2;
constexpr int kMinTiles = 16;  // minimum tiles per CTA; with fewer, merging takes longer than it saves
// Tiles per head group up to which one CTA is as fast as several that merge their results: if all lengths are equal,
// and if lengths differ.
constexpr int kUnsplitTiles = 32, kUnsplitUnequalTiles = 64;
// Head groups are split if the longest has more tiles than this many equal shares (all tiles / CTAs): without a split,
// its CTA would end much later than the others.
constexpr int kUnsplitParts = 2;
constexpr int kEvenTiles = 1024;  // tiles per CTA above which four idle multiprocessors cost more time than merging

// Finds the head group and tile at `position`, which counts tiles over all head groups of all sequences.
struct Place {
  int seq, group, tile, tiles;  // tile number `tile` of the head group's `tiles` tiles
};

__device__ Place find(int64_t position, const int* before, int seqs, int groups) {
  int low = 0, high = seqs;  // binary search for the last sequence with tiles that begins at or before the position
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (int64_t{before[middle]} * groups <= position ? low : high) = middle;
  }
  const int tiles = before[low + 1] - before[low];
  const int inside = static_cast<int>(position - int64_t{before[low]} * groups);
  return {low, inside / tiles, inside % tiles, tiles};
}

// Partition of all tiles into one part per CTA.
//
// A head group shared by several CTAs is merged through memory, which takes 3 to 4 us.  To avoid that, parts end at
// head group borders, even if parts then differ in length or CTAs stay idle.
struct Cut {
  enum class Ends {
    kAnywhere,  // parts are equal
    kNearest,   // parts end at the head group border nearest to an equal part's end
    kPerGroup,  // each part is one head group
  };

  const int* before;
  int64_t all;  // tiles of all head groups
  int seqs;
  int groups;  // head groups per sequence
  int ctas;
  Ends ends = Ends::kAnywhere;

  // `filled`: number of sequences with keys; each has min_tiles to max_tiles per head group.
  __device__ Cut(const int* before, int seqs, int groups, int filled, int min_tiles, int max_tiles, int grid)
      : before(before), all(int64_t{before[kDecodeMaxSeqs]} * groups), seqs(seqs), groups(groups) {
    const int head_groups = filled * groups;
    const bool equal = min_tiles == max_tiles;
    ctas = static_cast<int>(min(int64_t{grid}, (all + kMinTiles - 1) / kMinTiles));
    const bool even = !equal && int64_t{max_tiles} * grid <= kUnsplitParts * all;
    const bool first = before[filled] == before[kDecodeMaxSeqs];  // the filled sequences come first
    if (head_groups <= grid && first && (even || max_tiles <= (equal ? kUnsplitTiles : kUnsplitUnequalTiles))) {
      ends = Ends::kPerGroup;
      ctas = head_groups;
    } else if (even) {
      ends = Ends::kNearest;
    } else if (equal && all <= int64_t{kEvenTiles} * ctas) {
      ctas = nearest_even(head_groups, ctas, grid);
    }
  }
  __device__ int64_t begin(int cta) const {
    if (ends == Ends::kPerGroup) {
      const int seq = cta / groups;
      return int64_t{before[seq]} * groups + cta % groups * (before[seq + 1] - before[seq]);
    }
    const int64_t at = all * cta / ctas;
    if (ends == Ends::kAnywhere || cta == 0 || cta == ctas) return at;
    const Place place = find(at, before, seqs, groups);
    return 2 * place.tile < place.tiles ? at - place.tile : at - place.tile + place.tiles;
  }
  // Returns the number of CTAs nearest to `wanted` that divides head_groups or is a multiple.  Use it only if all
  // head groups have the same number of tiles.
  static __device__ int nearest_even(int head_groups, int wanted, int grid) {
    const int lowest = wanted < grid ? wanted / 2 : wanted - wanted / 16;
    for (int step = 0; wanted - step >= lowest; ++step) {
      for (const int ctas : {wanted - step, wanted + step}) {
        if (ctas < 1 || ctas > grid) continue;
        if (head_groups % ctas == 0 || ctas % head_groups == 0) return ctas;
      }
    }
    return wanted;
  }
  // CTA whose part has the tile at `position`; only called if head groups are shared.
  __device__ int cta_of(int64_t position) const { return static_cast<int>(((position + 1) * ctas - 1) / all); }
};

__global__ void __launch_bounds__(kThreads) plan_kernel(DecodePlanArgs args, DecodePlan plan, DecodeShape shape) {
  __shared__ int before[kDecodeMaxSeqs + 1];  // tiles per head group, summed over the preceding sequences
  __shared__ int sums[kThreads / 32];
  __shared__ int empty, filled, min_tiles,
      max_tiles;  // sequences without and with keys; min and max tiles of a head group
  if (threadIdx.x == 0) empty = filled = max_tiles = 0, min_tiles = INT_MAX;
  wait_for_previous_kernels();
  __syncthreads();
  const int groups = shape.kv_heads * shape.parts_per_kv;
  const auto seq_at = [&](int s) {
    const int token = args.q_start[s], queries = args.q_start[s + 1] - token, len = args.lens[s];
    // A sequence without a query has no work; the stored len 0 makes the walk over sequences skip it.
    if (queries <= 0) return DecodeSeq{.token = -1, .len = 0, .first = 0, .unused = 0};
    return DecodeSeq{.token = token, .len = len, .first = args.window > 0 ? max(0, len - args.window) : 0, .unused = 0};
  };

  constexpr int kEach = kDecodeMaxSeqs / kThreads;
  int tiles[kEach], sum = 0, empties = 0, with_keys = 0, low = INT_MAX, high = 0;
  for (int i = 0; i < kEach; ++i) {
    const int s = threadIdx.x * kEach + i;
    tiles[i] = 0;
    if (s >= args.seqs) continue;
    const DecodeSeq seq = seq_at(s);
    if (blockIdx.x == 0) plan.seqs[s] = seq;
    tiles[i] = seq.end_tile() - seq.first_tile();
    sum += tiles[i];
    empties += seq.token >= 0 && seq.len == 0;
    if (tiles[i] == 0) continue;
    ++with_keys;
    low = min(low, tiles[i]);
    high = max(high, tiles[i]);
  }
  if (empties) atomicAdd(&empty, empties);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  with_keys = __reduce_add_sync(~0u, with_keys);
  low = __reduce_min_sync(~0u, low);
  high = __reduce_max_sync(~0u, high);
  if (lane == 0 && with_keys) {
    atomicAdd(&filled, with_keys);
    atomicMin(&min_tiles, low);
    atomicMax(&max_tiles, high);
  }

  const int total = sum_up_to_lane(sum);
  if (lane == 31) sums[warp] = total;
  __syncthreads();
  if (warp == 0) sums[lane] = sum_up_to_lane(sums[lane]);
  __syncthreads();
  int running = total - sum + (warp > 0 ? sums[warp - 1] : 0);
  for (int i = 0; i < kEach; ++i) {
    before[threadIdx.x * kEach + i] = running;
    running += tiles[i];
  }
  if (threadIdx.x == kThreads - 1) before[kDecodeMaxSeqs] = running;
  __syncthreads();

  const int thread = blockIdx.x * kThreads + threadIdx.x;
  constexpr int kAll = kCtas * kThreads;
  const Cut cut(before, args.seqs, groups, filled, min_tiles, max_tiles, shape.grid);
  if (thread == 0) *plan.header = {.ctas = cut.ctas, .empty = empty};
  const auto share_at = [&](int64_t from, int64_t to) {
    DecodeShare share{};
    if (to <= from) return share;
    const Place place = find(from, before, args.seqs, groups);
    const DecodeSeq seq = seq_at(place.seq);
    share = {.seq = place.seq,
             .kv_head = place.group / shape.parts_per_kv,
             .part = place.group % shape.parts_per_kv,
             .tile = seq.first_tile() + place.tile,
             .begins_in = seq};
    share.count() = static_cast<int>(to - from);
    return share;
  };
  for (int i = thread; i < shape.grid * shape.warps; i += kAll) {
    const int cta = i / shape.warps, w = i % shape.warps;
    const int64_t begin = cta < cut.ctas ? cut.begin(cta) : 0, end = cta < cut.ctas ? cut.begin(cta + 1) : 0;
    plan.shares[i] = share_at(begin + (end - begin) * w / shape.warps, begin + (end - begin) * (w + 1) / shape.warps);
  }
  for (int cta = thread; cta < cut.ctas; cta += kAll) {
    DecodeEnds ends{.first_owner = -1, .first_last = -1, .last_last = -1, .unused = 0};
    const int64_t begin = cut.begin(cta), end = cut.begin(cta + 1);
    const Place first = find(begin, before, args.seqs, groups);
    if (first.tile > 0) {
      const int64_t group_begin = begin - first.tile;
      ends.first_owner = cut.cta_of(group_begin);
      ends.first_last = cut.cta_of(group_begin + first.tiles - 1);
    }
    if (end > begin) {  // else the part is empty, because it lies between long head groups
      const Place last = find(end - 1, before, args.seqs, groups);
      const int64_t group_begin = end - 1 - last.tile, group_end = group_begin + last.tiles;
      if (group_begin >= begin && group_end > end) ends.last_last = cut.cta_of(group_end - 1);
    }
    plan.ends[cta] = ends;
    plan.arrived[cta] = 0;
  }
  // decode() reads the plan before it waits for preceding kernels, so it must not start before this kernel has ended.
  __threadfence();
}

}  // namespace

int decode_arch() {
  static std::array<std::atomic<int>, 64> known;  // cached value per device
  std::atomic<int>& arch = known.at(current_device());
  if (arch == 0) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, plan_kernel), "cudaFuncGetAttributes");
    arch = attributes.binaryVersion * 10;
  }
  return arch;
}

DecodeShape decode_shape_here(int heads, int kv_heads, int head_size) {
  return decode_shape(heads, kv_heads, head_size, device_attribute(cudaDevAttrMultiProcessorCount), decode_arch());
}

int64_t decode_plan_bytes(int max_seqs, int heads, int kv_heads, int head_size) {
  return decode_plan_layout(nullptr, max_seqs, decode_shape_here(heads, kv_heads, head_size), head_size).bytes;
}

void decode_plan(const DecodePlanArgs& args, cudaStream_t stream) {
  const DecodeShape shape = decode_shape_here(args.heads, args.kv_heads, args.head_size);
  launch(plan_kernel, dim3(kCtas), dim3(kThreads), 0, stream, args,
         decode_plan_layout(args.plan, args.seqs, shape, args.head_size), shape);
}

}  // namespace quire::cuda
