// Planner of prefill attention: turns lens and q_start, which only the device holds, into the item lists of prefill.h,
// once per step for all layers.
// Grid (lists, kCtas).  Every CTA of a list computes where each sequence's items begin: a warp per sequence reads the
// costs of all other sequences (at most 3072).  Each CTA writes a part of the items, 32 bytes each.

#include <algorithm>
#include <stdexcept>

#include "cuda/attention/prefill.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda {

namespace {

constexpr int kThreads = 512;
constexpr int kCtas = 8;
constexpr int kMaxSeqs = 3072;      // limited by 4 ints per sequence in shared memory
constexpr int kAlign = 128;         // an item's first key is a multiple of this
constexpr int kMinPart = 512;       // minimum keys per part; a shorter part takes longer to merge than it saves
constexpr int kPartOverhead = 300;  // overhead of an item, in keys: the item could process this many more in that time
constexpr int kChoices = 4;
constexpr int kNearbyKv = 36 << 20;  // L2 budget, in bytes, for K and V of tiles that run at the same time

// Capacity of the partial results, in rows.
constexpr int partial_rows(int sms) { return 256 * sms; }

// Tiles of one sequence and one KV head.
struct Tiles {
  int rows, group, window, queries, len;

  __device__ int count() const { return (queries * group + rows - 1) / rows; }
  // One past the last key visible to tile t.
  __device__ int last(int t) const {
    const int query = min(queries - 1, ((t + 1) * rows - 1) / group);
    return max(0, len - queries + query + 1);
  }
  // First key visible to tile t, rounded down.
  __device__ int first(int t) const {
    if (window <= 0) return 0;
    return max(0, len - queries + t * rows / group + 1 - window) / kAlign * kAlign;
  }
  __device__ int keys(int t) const { return max(0, last(t) - first(t)); }
};

__global__ void __launch_bounds__(kThreads) plan_kernel(PrefillPlanArgs args, PrefillPlan plan, int sms) {
  extern __shared__ int shared[];
  const int list = blockIdx.x, seqs = args.seqs - args.first;
  const PrefillTiling tiling = prefill_tiling(list);
  const int group = args.heads / args.kv_heads;
  const int tile_rows = tiling.complete_queries && group <= tiling.rows ? tiling.rows / group * group : tiling.rows;
  int* const cost = shared;              // keys visible to the sequence's last tile
  int* const parts = shared + seqs;      // parts per tile of the sequence
  int* const items = shared + 2 * seqs;  // items of the sequence over all KV heads, before tiles are split
  int* const base = shared + 3 * seqs;   // index of the sequence's first partial result
  __shared__ unsigned long long work;    // keys visible to all tiles together, approximately
  if (threadIdx.x == 0) work = 0;
  __syncthreads();
  wait_for_previous_kernels();
  let_next_kernel_start();

  const auto tiles_of = [&](int s) {
    const int begin = args.q_start[args.first + s], end = args.q_start[args.first + s + 1];
    return Tiles{tile_rows, group, args.window, end - begin, args.lens[args.first + s]};
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  unsigned long long own_work = 0;
  for (int s = threadIdx.x; s < seqs; s += kThreads) {
    const Tiles tiles = tiles_of(s);
    const int n = tiles.count();
    cost[s] = n ? tiles.keys(n - 1) : 0;
    items[s] = n * args.kv_heads;
    if (n) own_work += (0ull + cost[s] + tiles.keys(0)) * items[s] / 2;
  }
  own_work = sum_of_warp(own_work);
  if (lane == 0) atomicAdd(&work, own_work);
  __syncthreads();

  // Long tiles are split into parts of about a CTA's equal share of all keys, or 1/2, 1/4 or 1/8 of that share.  The
  // split with the shortest estimated time is chosen.  With few items, the longest item determines the time; with many
  // items, the CTAs' ends differ by up to half the longest item.
  const int resident = max(1, sms * tiling.parts_per_sm), fair = static_cast<int>(work / resident);
  const int max_partials = plan.rows / tiling.rows;  // capacity of the plan, in partial results
  const auto cut = [&](int s, int choice) {
    const int part_keys = max(kMinPart, fair >> choice);
    const int max_parts = min(kPrefillMaxParts / tile_rows, max(1, max_partials / max(1, items[s])));
    return tiling.parts_per_sm ? min(max(1, (cost[s] + part_keys / 2) / part_keys), max_parts) : 1;
  };
  __shared__ int count[kChoices], longest[kChoices];
  if (threadIdx.x < kChoices) count[threadIdx.x] = longest[threadIdx.x] = 0;
  __syncthreads();
  for (int s = threadIdx.x; s < seqs; s += kThreads) {
    for (int choice = 0; choice < kChoices; ++choice) {
      const int p = cut(s, choice);
      atomicAdd(&count[choice], items[s] * p);
      atomicMax(&longest[choice], cost[s] / p);
    }
  }
  __syncthreads();
  const auto end_of = [&](int choice) {
    const int rounds = (count[choice] + resident - 1) / resident;
    return rounds == 1 ? longest[choice] : fair + longest[choice] / 2 + rounds * kPartOverhead;
  };
  int best = 0;
  for (int choice = 1; choice < kChoices; ++choice) {
    if (end_of(choice) < end_of(best)) best = choice;
  }
  for (int s = threadIdx.x; s < seqs; s += kThreads) parts[s] = cut(s, best);
  __syncthreads();

  // Items of more expensive sequences come first.
  constexpr int kWarps = kThreads / 32;
  const auto sum_before = [&](int s, auto value) {
    int sum = 0;
    for (int other = lane; other < seqs; other += 32) {
      if (cost[other] > cost[s] || (cost[other] == cost[s] && other < s)) sum += value(other);
    }
    return sum_of_warp(sum);
  };
  for (int s = warp; s < seqs; s += kWarps) {
    const int sum = sum_before(s, [&](int other) { return parts[other] > 1 ? items[other] * parts[other] : 0; });
    if (lane == 0) base[s] = sum;
  }
  __syncthreads();
  // A sequence whose partial results exceed the capacity is not split.
  const auto parts_of = [&](int s) { return base[s] + items[s] * parts[s] <= max_partials ? parts[s] : 1; };

  PrefillList& header = *plan.list[list];
  const int writer = blockIdx.y * kWarps + warp;
  constexpr int kWriters = kCtas * kWarps;
  if (writer == 0) {
    int count = 0;
    for (int s = lane; s < seqs; s += 32) count += items[s] * parts_of(s);
    count = sum_of_warp(count);
    if (count > plan.capacity) __trap();  // more tokens or sequences than prefill_plan_bytes was called with
    if (lane == 0) header = {.count = count, .ticket = 0, .finished = 0, .unused = 0};
  }
  if (list == 0) {
    for (int i = blockIdx.y * kThreads + threadIdx.x; i < plan.rows / 64; i += kCtas * kThreads) plan.arrived[i] = 0;
  }

  // With few sequences, several warps share the writing of one sequence's items.
  const int helpers = max(1, kWriters / seqs);
  const int helper = writer / seqs;
  if (helper >= helpers) return;
  for (int s = writer % seqs; s < seqs; s += kWriters) {
    const Tiles tiles = tiles_of(s);
    const int n = tiles.count(), p = parts_of(s);
    PrefillItem* const out =
        plan.items[list] + sum_before(s, [&](int other) { return items[other] * parts_of(other); });
    // Items of KV heads whose K and V fit into L2 together are interleaved, so that long tiles of one head run at the
    // same time as short tiles of another.
    const int kv_bytes = 2 * 2 * args.head_size;  // bytes per key and value, in a 2-byte dtype
    const int heads = max(1, min(args.kv_heads, kNearbyKv / kv_bytes / max(1, cost[s])));
    for (int i = helper * 32 + lane; i < items[s] * p; i += helpers * 32) {
      const int first_head = i / (n * p * heads) * heads;
      const int together = min(heads, args.kv_heads - first_head);
      const int rest = i - first_head * n * p;
      const int tile = n - 1 - rest / (together * p);
      const int head = first_head + rest / p % together;
      const int part = rest % p;
      const int first = tiles.first(tile), last = max(first, tiles.last(tile));
      const int share = (last - first + p * kAlign - 1) / (p * kAlign) * kAlign;
      out[i] = {
          .seq = args.first + s,
          .kv_head = head,
          .row = tile * tiles.rows,
          .first = min(last, first + part * share),
          .last = min(last, first + (part + 1) * share),
          .part = part,
          .parts = p,
          .partial = base[s] + (head * n + tile) * p,
      };
    }
  }
}

int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount); }

}  // namespace

PrefillPlan prefill_plan_layout(void* plan, int64_t bytes, int head_size) {
  char* at = static_cast<char*>(plan);
  const auto take = [&]<class T>(T*& pointer, int64_t count) {
    pointer = reinterpret_cast<T*>(at);
    at += (count * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128;
  };
  PrefillPlan p{};
  p.rows = partial_rows(multiprocessors());
  for (PrefillList*& list : p.list) take(list, 1);
  take(p.arrived, p.rows / 64);
  take(p.max, p.rows);
  take(p.sum, p.rows);
  take(p.acc, int64_t{p.rows} * head_size);
  const int64_t left = static_cast<char*>(plan) + bytes - at;
  p.capacity = static_cast<int>(std::max<int64_t>(0, left / kPrefillLists / 128 * 128 / sizeof(PrefillItem)));
  for (PrefillItem*& items : p.items) take(items, p.capacity);
  return p;
}

int64_t prefill_plan_bytes(int max_seqs, int max_tokens, int heads, int kv_heads, int head_size) {
  const int sms = multiprocessors();
  // Each sequence's last tile may be partly empty; the number of parts is limited by the capacity for their results.
  const int64_t items = int64_t{max_tokens} * heads / 64 + int64_t{max_seqs} * kv_heads + partial_rows(sms) / 64;
  char* const nothing = nullptr;
  const PrefillPlan empty = prefill_plan_layout(nothing, 0, head_size);
  const int64_t before = reinterpret_cast<char*>(empty.items[0]) - nothing;
  return before + kPrefillLists * ((items * static_cast<int64_t>(sizeof(PrefillItem)) + 127) / 128 * 128);
}

void prefill_plan(const PrefillPlanArgs& args, cudaStream_t stream) {
  const int seqs = args.seqs - args.first;
  if (seqs <= 0) return;
  if (seqs > kMaxSeqs) throw std::invalid_argument("prefill: at most 3072 sequences in a step");
  launch(plan_kernel, dim3(kPrefillLists, kCtas), dim3(kThreads), 4 * seqs * static_cast<int>(sizeof(int)), stream,
         args, prefill_plan_layout(args.plan, args.plan_bytes, args.head_size), multiprocessors());
}

}  // namespace quire::cuda
