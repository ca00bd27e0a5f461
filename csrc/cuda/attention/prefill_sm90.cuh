// Prefill attention over a block table with Hopper's wgmma and TMA (the schedule of FlashAttention-3, Shah et al.
// 2024).  See prefill.h for packed rows, tiles and items.
//
//   warp 0       producer: takes items by ticket and loads the tile's queries, one item ahead
//   warps 1, 2   producers: warp 1 loads keys, warp 2 values: 128 at a time, one TMA box per block and 64 columns
//   warps 4-7,   consumers: a warpgroup each for 64 rows of the tile.  They alternate on the tensor cores (ping-pong):
//   warps 8-11   one runs its mma while the other computes its softmax
//
// A warpgroup loops over the key tiles (128 keys) of all its items without a break.  In each iteration it issues
// S(next) = Q K' and O += P(this) V together.  It computes the softmax of S(next) as soon as S(next) is ready, while O
// is still accumulating.  So the tensor cores stay busy at the start and the end of an item.  An item's O is normalised
// and written after the first scores of the next item are ready.
//
// A warpgroup goes from the last key to the first, so the tiles that need masking come first.  Key tiles start at
// multiples of 128 for any chunk, and a row's result depends on its own keys only.  So a row has the same bits in any
// chunk, as long as its keys are not split into parts.
//
// Head sizes 64 and 128, bf16 and fp16, block sizes 8 to 64, G up to 128. Grid: one CTA per SM, 193 KB of shared memory
// at D 128.  FLOPs: 4 * D per query head and visible key.  Each tile of 128 rows reads its keys and values once: 128
// FLOPs per byte from L2.  A sequence with lens 0 gets zeros.

#pragma once

#include "cuda/attention/prefill_sm90.h"
#include "cuda/attention/softmax_state.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda::sm90 {

using namespace hopper;

constexpr int kQueryBuffers = 2;
// Descriptors in the ring.  An item's descriptor is needed until its result is written.  By then the warpgroup has the
// scores of the next item, and the producer may be two more items ahead.
constexpr int kWorks = 8;
constexpr int kThreads = 384;

// Work descriptor of an item, computed by the producer warp that takes it.
struct Work {
  const int32_t* table;  // block table of the sequence
  int token;             // first query of the tile
  int queries;           // queries in the tile
  int position;          // position of the tile's first query
  int kv_head;
  int len;    // keys of the sequence
  int first;  // first key of the item, a multiple of kKeys
  int begin;  // first key of the first block visible to any row; earlier blocks may have been freed
  int end;    // one past the item's last key; 0 if it has none
  int tile;   // first key of the item's last key tile
  int sees_first[2], sees_last[2];  // first and last key visible to all rows of each warpgroup
  int part, parts, partial;         // as in PrefillItem
  bool none;                        // no more items
};

template <class T, int D>
struct Shape {
  static constexpr int kKeys = D <= 128 ? 128 : 64;
  static constexpr int kKeyBuffers = 2, kValueBuffers = 2;
  static constexpr int kHalves = (D + 63) / 64;  // boxes are 64 columns wide
  struct Shared {
    T q[kQueryBuffers][kHalves][kRows][64];
    T k[kKeyBuffers][kHalves][kKeys][64];
    T v[kValueBuffers][kHalves][kKeys][64];
    Work work[kWorks];
    uint64_t work_full[kQueryBuffers], q_full[kQueryBuffers], q_empty[kQueryBuffers];
    uint64_t k_full[kKeyBuffers], k_empty[kKeyBuffers], v_full[kValueBuffers], v_empty[kValueBuffers];
  };
};

// -- Producer warps

template <int kKeys, int kHalves, class Shared>
__device__ void fetch_queries(const Params& p, Shared& shared, int lane) {
  if (lane != 0) return;
  const int count = p.list->count;
  Ring ring;
  for (int i = 0;; ++i, ring.step(kQueryBuffers)) {
    const int ticket = i == 0 ? blockIdx.x : gridDim.x + atomicAdd(&p.list->ticket, 1);
    Work& work = shared.work[i % kWorks];
    work.none = ticket >= count;
    if (!work.none) {
      const PrefillItem item = p.items[ticket];
      const int begin = p.q_start[item.seq], queries = p.q_start[item.seq + 1] - begin, query = item.row / p.group;
      work.len = p.lens[item.seq];
      work.table = p.tables + p.rows[item.seq] * p.table_stride;
      work.token = begin + query;
      work.queries = min(p.tile_queries, queries - query);
      work.position = work.len - queries + query;
      work.kv_head = item.kv_head;
      work.first = item.first / kKeys * kKeys;
      work.begin =
          p.window > 0 ? max(work.position - p.window + 1, work.first) / p.block_size * p.block_size : work.first;
      work.end = item.last > item.first ? item.last : 0;
      work.tile = max(work.end - 1, work.first) / kKeys * kKeys;
      for (int group = 0; group < 2; ++group) {
        const int highest = work.position + (group * 64 + 63) / p.group;
        work.sees_first[group] = p.window > 0 ? highest - p.window + 1 : 0;
        work.sees_last[group] = min(work.position + group * 64 / p.group, work.end - 1);
      }
      work.part = item.part;
      work.parts = item.parts;
      work.partial = item.partial;
    }
    wait(&shared.q_empty[ring.at], ring.phase ^ 1);
    arrive(&shared.work_full[ring.at]);
    if (work.none) {
      arrive(&shared.q_full[ring.at]);
      break;
    }
    arrive_expecting(&shared.q_full[ring.at], kHalves * p.tile_queries * p.group * 128);
    for (int half = 0; half < kHalves; ++half) {
      copy_box(shared.q[ring.at][half], &p.q, &shared.q_full[ring.at], half * 64, 0, work.kv_head, work.token);
    }
  }
  let_next_kernel_start();
  // The last CTA resets the list for the next layer.
  __threadfence();
  if (atomicAdd(&p.list->finished, 1) == static_cast<int>(gridDim.x) - 1) {
    p.list->ticket = 0;
    p.list->finished = 0;
  }
}

// Loads keys or values; `to` is the ring of buffers.
template <int kBuffers, int kHalves, int kKeys, class Shared, class T>
__device__ void fetch_cache(const Params& p, Shared& shared, const CUtensorMap* map, T (*to)[kHalves][kKeys][64],
                            uint64_t* full, uint64_t* empty, int lane) {
  const int blocks = kKeys / p.block_size;  // blocks per key tile; one lane per block and 64 columns
  const int block = lane % blocks, half = lane / blocks;
  const bool ours = half < kHalves;
  Ring ring, items;
  for (int i = 0;; ++i, items.step(kQueryBuffers)) {
    wait(&shared.work_full[items.at], items.phase);
    const Work& work = shared.work[i % kWorks];
    if (work.none) break;
    const bool half_tile = work.end - work.tile <= kKeys / 2;
    const auto id_of = [&](int tile) {
      const int key = tile + block * p.block_size;
      // In the last tile only the half that is computed is loaded; nothing is loaded past the end of the sequence.
      const int end = min(work.len, half_tile && tile == work.tile ? tile + kKeys / 2 : tile + kKeys);
      return ours && key >= work.begin && key < end ? work.table[key / p.block_size] : -1;
    };
    int tile = work.tile;
    int id = id_of(tile);
    for (; tile >= work.first; tile -= kKeys) {
      const int next_id = id_of(tile - kKeys);
      wait(&empty[ring.at], ring.phase ^ 1);
      const int boxes = __popc(__ballot_sync(~0u, id >= 0));
      if (lane == 0) arrive_expecting(&full[ring.at], boxes * p.block_size * 128);
      __syncwarp();
      if (id >= 0)
        copy_box(to[ring.at][half][block * p.block_size], map, &full[ring.at], half * 64, 0, work.kv_head, id);
      id = next_id;
      ring.step(kBuffers);
    }
  }
}

// -- Consumer warpgroups

// exp2 as volatile asm, unlike exp2_fast of softmax_state.cuh, so that the compiler keeps it in its place between the
// wgmma.
__device__ inline float exp2_in_place(float x) {
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Masks all keys outside of from..to, for each of a thread's two rows.
template <int N>
__device__ void mask(float (&s)[N], const int (&from)[2], const int (&to)[2], bool window) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i / 4 * 8 + i % 2 > to[i / 2 % 2]) s[i] = -INFINITY;
  }
  if (!window) return;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i / 4 * 8 + i % 2 < from[i / 2 % 2]) s[i] = -INFINITY;
  }
}

// Computes tanh(s * cap_in) by exp2.  Its absolute error, multiplied by the cap, becomes the relative error of an
// attention weight, which is precise enough.
template <int N>
__device__ void soften(float (&s)[N], float cap_in) {
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = 1.f - __fdividef(2.f, exp2_in_place(s[i] * cap_in * 2.885390082f) + 1.f);
}

// Output addresses of the thread's two rows of a tile.  ours: the row is a query of the sequence.
template <class T>
struct Output {
  T* out[2];
  bool ours[2];
  int head[2];
  __device__ Output(const Params& p, const Work& work, const int (&query)[2], int row) {
    for (int i = 0; i < 2; ++i) {
      head[i] = work.kv_head * p.group + row + 8 * i - query[i] * p.group;
      out[i] = static_cast<T*>(p.out) + (work.token + query[i]) * p.out_token_stride + head[i] * p.out_head_stride;
      ours[i] = query[i] < work.queries;
    }
  }
  // Writes columns 8j .. 8j + 31 of both rows; o is this thread's fragment of these columns.
  __device__ void write(int j, const float (&o)[16], const float (&inverse)[2], int lane) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) x[b] = pack<T>(o[4 * b + 2 * i] * inverse[i], o[4 * b + 2 * i + 1] * inverse[i]);
      const uint4 block = gather_block(x[0], x[1], x[2], x[3], lane);
      if (ours[i]) *reinterpret_cast<uint4*>(out[i] + 8 * (j + lane % 4)) = block;
    }
  }
};

__device__ inline float inverse_sum(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }

// Partial results, in register layout.  Each warp stores its own 16 rows and counts its parts in a byte of its
// warpgroup's counter.  The warp that finishes a tile's last part merges all parts of these rows, in the order of the
// parts.
struct Parts {
  const Params& p;
  const Work& work;
  int thread, lane, group, byte, row;
  __device__ Parts(const Params& p, const Work& work, int row)
      : p(p),
        work(work),
        thread(threadIdx.x - 128),
        lane(thread % 32),
        group(thread / 128),
        byte(thread / 32 % 4 * 8),
        row(row) {}
  __device__ float* acc(int part, int count) const {
    return p.acc + (int64_t{work.partial} + part) * count * 256 + thread;
  }
  __device__ int64_t at(int part) const { return (int64_t{work.partial} + part) * kRows + row; }

  template <int N>
  __device__ void leave(const float (&o)[N], const float (&top)[2], const float (&sums)[2]) const {
    float* const to = acc(work.part, N);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i * 256] = o[i];
    for (int i = 0; i < 2; ++i) {
      p.max[at(work.part) + 8 * i] = top[i];  // all four lanes of a row hold the same value
      p.sum[at(work.part) + 8 * i] = sums[i];
    }
  }
  __device__ bool last() const {
    __threadfence();
    __syncwarp();
    int* const arrived = p.arrived + 2 * work.partial + group;
    int before = 0;
    if (lane == 0) before = atomicAdd(arrived, 1 << byte) >> byte & 0xff;
    if (__shfl_sync(~0u, before, 0) != work.parts - 1) return false;
    if (lane == 0) atomicSub(arrived, work.parts << byte);
    __threadfence();
    return true;
  }
  template <int N, class T>
  __device__ void merge(const Output<T>& to) const {
    float highest[2] = {-INFINITY, -INFINITY}, inverse[2] = {};
    for (int part = 0; part < work.parts; ++part) {
      for (int i = 0; i < 2; ++i) highest[i] = fmaxf(highest[i], __ldcg(&p.max[at(part) + 8 * i]));
    }
    const auto weight = [&](int part, int i) {
      return highest[i] == -INFINITY ? 0.f : exp2_in_place(__ldcg(&p.max[at(part) + 8 * i]) - highest[i]);
    };
    for (int part = 0; part < work.parts; ++part) {
      for (int i = 0; i < 2; ++i) inverse[i] += weight(part, i) * __ldcg(&p.sum[at(part) + 8 * i]);
    }
    for (int i = 0; i < 2; ++i) inverse[i] = inverse_sum(with_sink(inverse[i], highest[i], p.sinks, to.head[i]));
#pragma unroll 1
    for (int j = 0; j < N / 4; j += 4) {
      float o[16] = {};
#pragma unroll 1
      for (int part = 0; part < work.parts; ++part) {
        const float weights[2] = {weight(part, 0), weight(part, 1)};
        const float* const from = acc(part, N) + j * 4 * 256;
#pragma unroll
        for (int i = 0; i < 16; ++i) o[i] += weights[i / 2 % 2] * __ldcg(from + i * 256);
      }
      to.write(j, o, inverse, lane);
    }
  }
};

// One of the two consumer warpgroups: 64 rows of every tile.  kernel() calls run().
template <class T, int D>
struct Warpgroup {
  using Shared = typename Shape<T, D>::Shared;
  static constexpr int kKeys = Shape<T, D>::kKeys, kHalves = Shape<T, D>::kHalves;
  static constexpr int kKeyBuffers = Shape<T, D>::kKeyBuffers, kValueBuffers = Shape<T, D>::kValueBuffers;
  static constexpr int kFirst = kKeys / 4;  // number of a thread's scores for the first half of the keys

  const Params& p;
  Shared& shared;
  const int lane, t;
  const int group;  // warpgroup index: rows [64 * group, + 64) of the tile
  const int row0;   // the thread's other row is row0 + 8

  float s[kKeys / 2];            // scores of 64 rows and kKeys keys
  float o[D / 2] = {};           // output accumulator
  uint32_t probs[kKeys / 4];     // exp2 of scores, as the left operand of O += P V
  float e[kFirst];               // exponentials of the first half of s
  float base[2], limit[2];       // per row: base of the exponents; score above which the base must rise
  float sum[2];                  // this thread's part of each row's sum of exponentials
  bool rebased;                  // the base of some row of the warp has risen, so o must be rescaled
  float rescale[2];              // factors for o if rebased
  bool half_values = false;      // probs cover only the first half of a value tile
  int values_begin, values_end;  // rows of that value tile that were loaded: [values_begin, values_end)
  Ring items, ks, vs;
  int item = 0, len;          // item whose scores are computed; keys of its sequence
  int first, begin;           // as in Work
  int tile;                   // first key of the present key tile
  int sees_first, sees_last;  // first and last key visible to all 64 rows
  bool more;                  // `item` exists; if false, the CTA is done
  bool fresh;                 // the present scores are the item's first
  bool half;                  // no row sees a key in the second half of the key tile
  int query[2];               // index in the tile of the query of each of the thread's rows

  __device__ Warpgroup(const Params& p, Shared& shared, int warp, int lane)
      : p(p),
        shared(shared),
        lane(lane),
        t(lane % 4),
        group(warp / 4 - 1),
        row0(group * 64 + warp % 4 * 16 + lane / 4) {
    for (int i = 0; i < 2; ++i) query[i] = (row0 + 8 * i) / p.group;
  }

  __device__ void begin_item() {
    wait(&shared.q_full[items.at], items.phase);
    const Work& work = shared.work[item % kWorks];
    more = !work.none;
    first = work.first;
    begin = work.begin;
    len = work.len;
    tile = work.tile;
    half = work.end - tile <= kKeys / 2;
    sees_first = work.sees_first[group];
    sees_last = work.sees_last[group];
    fresh = true;
    sum[0] = sum[1] = 0.f;
  }

  // Masks the scores: computes which keys each of the thread's two rows sees, relative to the thread's first column.
  __device__ void mask_scores() {
    const int position = shared.work[item % kWorks].position, end = shared.work[item % kWorks].end;
    int from[2], to[2];
    for (int i = 0; i < 2; ++i) {
      const int start = tile + 2 * t;
      to[i] = min(position + query[i], end - 1) - start;
      from[i] = position + query[i] - p.window + 1 - start;
    }
    mask(s, from, to, p.window > 0);
  }

  __device__ void issue_scores() {
    const uint64_t q = operand(shared.q[items.at][0][group * 64], 0), k = operand(shared.k[ks.at][0][0], 0);
    forget(s);
    begin_products();
#pragma unroll
    for (int i = 0; i < D / 16; ++i) {
      Wgmma<T, kKeys>::multiply_shared(s, operand_further(q, i / 4 * kRows * 128 + i % 4 * 32),
                                       operand_further(k, i / 4 * kKeys * 128 + i % 4 * 32), i > 0);
    }
    end_products();
  }

  __device__ void issue_values() {
    const uint64_t v = operand(shared.v[vs.at][0][0], kKeys * 128);
    if (half_values) {
      begin_products();
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i) {
        Wgmma<T, D>::multiply_registers(o, &probs[4 * i], operand_further(v, i * 2048));
      }
      end_products();
    } else {
      begin_products();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) {
        Wgmma<T, D>::multiply_registers(o, &probs[4 * i], operand_further(v, i * 2048));
      }
      end_products();
    }
  }

  // Releases the key buffer once the scores are computed, and after the item's last scores also the query buffer.
  __device__ void release_keys() {
    if (lane == 0) {
      arrive(&shared.k_empty[ks.at]);
      if (tile <= first) arrive(&shared.q_empty[items.at]);
    }
    ks.step(kKeyBuffers);
  }

  // Zeros the values past the end of a sequence and values that were not loaded: they may be NaN, and 0 * NaN is NaN.
  __device__ void clear_other_values() {
    for (int half = 0; half < kHalves; ++half) {
      for (int chunk = threadIdx.x % 128; chunk < kKeys * 8; chunk += 128) {
        if (chunk / 8 >= values_begin && chunk / 8 < values_end) continue;
        reinterpret_cast<uint4*>(shared.v[vs.at][half])[chunk] = make_uint4(0, 0, 0, 0);
      }
    }
    fence_async_proxy();
    named_sync(3 + group, 128);
  }

  // Probabilities are exp2(score - base).  The base need not be the maximum: if it is at most 8 below, nothing
  // overflows, and the base cancels in the final division.  So the exponentials do not wait for the maximum, which is
  // computed meanwhile.  If the maximum is too high (always in an item's first tile, rarely later), the base rises to
  // it and the first half is computed again.
  __device__ void softmax_first_half() {
    if (p.cap_in != 0.f) soften(s, p.cap_in);
    if (tile + kKeys - 1 > sees_last || tile < sees_first) mask_scores();
    float highest[2];
    const auto find_highest = [&] {
      float h[4] = {s[0], s[1], s[2], s[3]};  // two maxima per row: shorter dependency chains
#pragma unroll
      for (int i = 4; i < kKeys / 2; ++i) h[i % 4] = fmaxf(h[i % 4], s[i]);
      highest[0] = fmaxf(h[0], h[1]);
      highest[1] = fmaxf(h[2], h[3]);
    };
    const auto exponentials = [&] {
#pragma unroll
      for (int i = 0; i < kFirst; ++i) e[i] = exp2_in_place(s[i] * p.scale_log2 - base[i / 2 % 2]);
    };
    if (fresh) {
      find_highest();
      for (int i = 0; i < 2; ++i) {
        const float top = max_of_quad(highest[i]);
        base[i] = top == -INFINITY ? 0.f : top * p.scale_log2;
        limit[i] = top == -INFINITY ? top : top + p.slack;
      }
      exponentials();
    } else {
      exponentials();
      find_highest();
      rebased = __any_sync(~0u, highest[0] > limit[0] || highest[1] > limit[1]);
      if (rebased) {
        for (int i = 0; i < 2; ++i) {
          const float top = max_of_quad(highest[i]);
          rescale[i] = 1.f;
          if (top > limit[i]) {
            rescale[i] = limit[i] == -INFINITY ? 0.f : exp2_in_place(base[i] - top * p.scale_log2);
            base[i] = top * p.scale_log2;
            limit[i] = top + p.slack;
          }
          sum[i] *= rescale[i];
        }
        exponentials();
      }
    }
  }

  __device__ void softmax_second_half() {
    float sums[4] = {sum[0], 0.f, sum[1], 0.f};
    const auto add_first_half = [&] {
#pragma unroll
      for (int i = 0; i < kFirst; ++i) sums[i % 4] += e[i];
#pragma unroll
      for (int i = 0; i < kFirst / 2; ++i) probs[i] = pack<T>(e[2 * i], e[2 * i + 1]);
    };
    half_values = half;
    if (half_values) {
      add_first_half();
    } else {
#pragma unroll
      for (int i = kFirst; i < kKeys / 2; ++i) s[i] = exp2_in_place(s[i] * p.scale_log2 - base[i / 2 % 2]);
      add_first_half();
#pragma unroll
      for (int i = kFirst; i < kKeys / 2; ++i) sums[i % 4] += s[i];
#pragma unroll
      for (int i = kFirst / 2; i < kKeys / 4; ++i) probs[i] = pack<T>(s[2 * i], s[2 * i + 1]);
    }
    sum[0] = sums[0] + sums[1];
    sum[1] = sums[2] + sums[3];
    values_begin = begin - tile;
    values_end = len - tile;
    fresh = half = false;
  }

  // Processes all items of this CTA.
  __device__ void run() {
    begin_item();
    if (!more) return;
    if (group == 1) named_pass(1, 256);
    wait(&shared.k_full[ks.at], ks.phase);
    issue_scores();
    wait_for_products<0>();
    pin(s);
    release_keys();
    softmax_first_half();
    softmax_second_half();

    for (;;) {
      const bool last_tile = tile <= first;
      const float done_sum[2] = {sum[0], sum[1]};
      const float done_top[2] = {limit[0] == -INFINITY ? limit[0] : base[0],
                                 limit[1] == -INFINITY ? limit[1] : base[1]};
      if (last_tile) {
        items.step(kQueryBuffers);
        ++item;
        begin_item();
      } else {
        tile -= kKeys;
      }
      if (more) wait(&shared.k_full[ks.at], ks.phase);
      named_sync(1 + group, 256);
      issue_scores();
      wait(&shared.v_full[vs.at], vs.phase);
      if (values_begin > 0 || values_end < kKeys) clear_other_values();
      issue_values();
      if (more || group == 0) named_pass(2 - group, 256);
      wait_for_products<1>();
      pin(s);
      if (more) {
        release_keys();
        softmax_first_half();
      }
      wait_for_products<0>();
      pin(o);
      if (lane == 0) arrive(&shared.v_empty[vs.at]);
      vs.step(kValueBuffers);
      if (more) softmax_second_half();
      if (last_tile) {
        const Work& done = shared.work[(item - 1) % kWorks];
        const Output<T> to(p, done, query, row0);
        const float sums[2] = {sum_of_quad(done_sum[0]), sum_of_quad(done_sum[1])};
        if (done.parts == 1) {
          float inverse[2];
          for (int i = 0; i < 2; ++i) inverse[i] = inverse_sum(with_sink(sums[i], done_top[i], p.sinks, to.head[i]));
#pragma unroll
          for (int j = 0; j < D / 8; j += 4) to.write(j, reinterpret_cast<const float(&)[16]>(o[4 * j]), inverse, lane);
        } else {
          const Parts parts(p, done, row0);
          parts.leave(o, done_top, sums);
          if (parts.last()) parts.template merge<D / 2>(to);
        }
        if (!more) break;
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] = 0.f;
      } else if (rebased) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) o[i] *= rescale[i / 2 % 2];
      }
    }
  }
};

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 1) kernel(const __grid_constant__ Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)  // other GPUs use prefill_mma
  using Shape = Shape<T, D>;
  using Shared = typename Shape::Shared;
  constexpr int kKeys = Shape::kKeys, kHalves = Shape::kHalves;
  constexpr int kKeyBuffers = Shape::kKeyBuffers, kValueBuffers = Shape::kValueBuffers;
  extern __shared__ __align__(1024) char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    prefetch_map(&p.q);
    prefetch_map(&p.k);
    prefetch_map(&p.v);
    for (int i = 0; i < kQueryBuffers; ++i) {
      barrier_init(&shared.work_full[i], 1);
      barrier_init(&shared.q_full[i], 1);
      barrier_init(&shared.q_empty[i], 8);
    }
    for (int i = 0; i < kKeyBuffers; ++i) {
      barrier_init(&shared.k_full[i], 1);
      barrier_init(&shared.k_empty[i], 8);
    }
    for (int i = 0; i < kValueBuffers; ++i) {
      barrier_init(&shared.v_full[i], 1);
      barrier_init(&shared.v_empty[i], 8);
    }
    fence_barrier_init();
  }
  __syncthreads();
  wait_for_previous_kernels();

  if (warp < 4) {
    keep_registers<40>();
    if (warp == 0) fetch_queries<kKeys, kHalves>(p, shared, lane);
    if (warp == 1) fetch_cache<kKeyBuffers>(p, shared, &p.k, shared.k, shared.k_full, shared.k_empty, lane);
    if (warp == 2) fetch_cache<kValueBuffers>(p, shared, &p.v, shared.v, shared.v_full, shared.v_empty, lane);
  } else {
    take_registers<232>();
    Warpgroup<T, D>(p, shared, warp, lane).run();
  }
#endif
}

template <class T, int D>
void run(const Params& params, int sms, cudaStream_t stream) {
  constexpr int kBytes = sizeof(typename Shape<T, D>::Shared);
  static_assert(kBytes <= 227 * 1024);
  check(cudaFuncSetAttribute(kernel<T, D>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "shared memory");
  launch(kernel<T, D>, sms, kThreads, kBytes, stream, params);
}

}  // namespace quire::cuda::sm90
