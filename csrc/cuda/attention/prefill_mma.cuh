// Prefill attention over the paged KV cache with mma.sync, for any GPU since Ampere.  It combines the tiling of
// FlashAttention-2 (Dao 2023, arXiv:2307.08691) with the block tables of PagedAttention (Kwon et al.  2023,
// arXiv:2309.06180).
//
//   grid   as many CTAs of 4 warps as fit on the GPU; each takes items of the plan (prefill.h) until none are left
//   CTA    kRows = 64 or 128 packed query rows, 16 or 32 per warp. A warp holds its queries, scores and accumulators in
//          registers, so warps synchronise once per key tile only, to share the loaded keys
//   keys   tiles of kKeys; K and V of the next tile are in flight (cp.async) while this one is computed
//
// FLOPs: 4 * head size per row and visible key.  L2 traffic: keys and values once per tile of rows; at 128 rows and 2
// bytes per element, one byte per 128 FLOPs.
//
// Keys past the sequence's end, and keys outside of every row's window, are not read.  Shared memory gets zeros
// instead: a NaN in an unused cache entry would survive a weight of 0.
//
// An e4m3 cache is widened to fp16, exactly, between shared memory and the tensor cores.  Queries become fp16 too, and
// the scales enter the softmax and the final division.

#pragma once

#include <limits>

#include "cuda/attention/prefill.h"
#include "cuda/attention/softmax_state.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda::mma {

constexpr int kWarps = 4;
constexpr int kThreads = 32 * kWarps;
constexpr float kNone = -std::numeric_limits<float>::infinity();

// T: operand type of the mma.  kE4m3: the cache is e4m3 and T is fp16.  D: head size.  M: m16 row blocks per warp.
template <class T_, bool kE4m3_, int D_, int M_>
struct Config {
  using T = T_;
  static constexpr bool kE4m3 = kE4m3_;
  static constexpr int D = D_, M = M_;
  static constexpr int kRows = 16 * M * kWarps;
  static constexpr int kWarpRows = 16 * M;
  static constexpr int kKeys = D > 128 || (D == 128 && M == 2) ? 32 : 64;
  static constexpr int kList = kRows == 64 ? 0 : 2;
  static_assert(prefill_tiling(kList).rows == kRows);
  static constexpr int kSteps = D / 16;  // k16 steps along the head
  // Shared-memory rows, in chunks of 16 bytes.  An odd pitch puts any 8 consecutive rows into different banks.  So
  // ldmatrix needs no swizzle, and its addresses are one register plus constants.
  static constexpr int kQChunks = D / 8, kQPitch = 16 * (kQChunks | 1);
  static constexpr int kKvBytes = kE4m3 ? 1 : 2;
  static constexpr int kKvChunks = D * kKvBytes / 16, kKvPitch = 16 * (kKvChunks | 1);
  static constexpr int kQSize = kRows * kQPitch;
  static constexpr int kTileSize = kKeys * kKvPitch;  // bytes of K, or of V
  static constexpr int kStages = 2;
  static constexpr int kShared = kQSize + 2 * kStages * kTileSize;
  static constexpr bool kQInRegisters = M * D <= 128;
  // Offset of the work descriptor that thread 0 broadcasts: it lies in the padding of the first query rows.
  static constexpr int kWord = 16 * kQChunks;
  static constexpr int kCtasPerSm = 2;
};

// Work queue of a CTA.  The CTA takes its next item only while it computes the last key tiles of the present item, so
// that CTAs that become idle earlier get it.
template <class C>
class Queue {
 public:
  struct alignas(16) Work {
    PrefillItem item;  // seq < 0: none left
    int q_begin, q_end, len, table_row;
  };

  __device__ Queue(const PrefillArgs& args, const PrefillPlan& plan, char* shared)
      : a_(args), list_(*plan.list[C::kList]), items_(plan.items[C::kList]), shared_(shared) {}

  // Takes the CTA's first item.
  __device__ void open() {
    count_ = list_.count;
    ticket_ = blockIdx.x;
    fetch_item();
    wait_for_all_copies();
    fetch_sequence();
  }

  // draw(), fetch_item() and fetch_sequence() take the next item in three steps.  All threads call them in this order,
  // spread over the computation of the present item.
  __device__ void draw() {
    if (threadIdx.x == 0) ticket_ = gridDim.x + atomicAdd(&list_.ticket, 1);
  }
  __device__ void fetch_item() {
    if (threadIdx.x != 0) return;
    if (ticket_ < count_) {
      const PrefillItem* item = items_ + ticket_;
      copy_async_16(address(0), item, true);
      copy_async_16(address(1), reinterpret_cast<const char*>(item) + 16, true);
    } else {
      word(0)->x = -1;
    }
  }
  __device__ void fetch_sequence() {  // call after wait_for_all_copies()
    if (threadIdx.x != 0) return;
    const int seq = word(0)->x;
    if (seq < 0) return;
    copy_async_4(address(2), a_.q_start + seq);
    copy_async_4(address(2) + 4, a_.q_start + seq + 1);
    copy_async_4(address(2) + 8, a_.lens + seq);
    copy_async_4(address(2) + 12, a_.rows + seq);
  }

  // Waits for the next item's descriptor, and until all warps are done with the present item.  Returns false if no item
  // is left.
  __device__ bool get() {
    wait_for_all_copies();
    __syncthreads();
    int4* const work = reinterpret_cast<int4*>(&work_);
#pragma unroll
    for (int i = 0; i < 3; ++i) work[i] = *word(i);
    turn_ ^= 1;
    return work_.item.seq >= 0;
  }
  __device__ const Work& work() const { return work_; }

  // The last CTA resets the list for the next layer.
  __device__ void close() {
    if (threadIdx.x == 0 && atomicAdd(&list_.finished, 1) == static_cast<int>(gridDim.x) - 1) {
      list_.ticket = 0;
      list_.finished = 0;
    }
  }

 private:
  // Descriptors are double-buffered, so that thread 0 does not overwrite a descriptor that other warps still have to
  // read.
  __device__ int4* word(int i) const {
    return reinterpret_cast<int4*>(shared_ + C::kWord + (1 + 3 * turn_ + i) * C::kQPitch);
  }
  __device__ uint32_t address(int i) const { return shared_address(word(i)); }

  const PrefillArgs& a_;
  PrefillList& list_;
  const PrefillItem* const items_;
  char* const shared_;
  int turn_ = 0, count_, ticket_;
  Work work_;
};

// Computation of one item.
template <class C>
class Item {
 public:
  using T = typename C::T;

  __device__ Item(const PrefillArgs& args, const PrefillPlan& plan, Queue<C>& queue, char* shared)
      : a_(args), plan_(plan), queue_(queue), item_(queue.work().item), token_(queue.work().q_begin), shared_(shared) {
    const int queries = queue.work().q_end - token_;
    group_ = a_.heads / a_.kv_heads;
    rows_of_sequence_ = queries * group_;
    before_ = queue.work().len - queries;
    table_ = a_.tables + queue.work().table_row * a_.table_stride;
    low_ = oldest(item_.row);
    block_shift_ = 31 - __clz(a_.block_size);
    few_ = kFew && item_.parts > 1 && rows_of_sequence_ - item_.row <= C::kWarpRows;
    row_ = item_.row + (few_ ? 0 : warp_ * C::kWarpRows);
    rows_ = min(C::kWarpRows, rows_of_sequence_ - row_);  // may be negative
    query_at_ = at((warp_ * C::kWarpRows + lane_ % 16) * C::kQPitch + lane_ / 16 * 16);
  }

  __device__ void run() {
    load_queries();
    if (item_.first < item_.last) {
      look_up(item_.first);
      for (int step = 0; step < kLoadSteps; ++step) issue_load(item_.first, 0, step);
      look_up(item_.first + C::kKeys);
    }
    wait_for_all_copies();
    __syncwarp();
    if constexpr (C::kQInRegisters) {
#pragma unroll
      for (int m = 0; m < C::M; ++m) {
#pragma unroll
        for (int step = 0; step < C::kSteps; ++step) load_query(query_[m][step], m, step);
      }
    }
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max_[m][h] = kNone;
        sum_[m][h] = 0;
      }
#pragma unroll
      for (int n = 0; n < C::D / 8; ++n) acc_[m][n][0] = acc_[m][n][1] = acc_[m][n][2] = acc_[m][n][3] = 0;
    }
    // In units of log2: score = q k * factor_.
    factor_ = a_.scale * kLog2E;
    if constexpr (C::kE4m3) factor_ *= a_.scales[item_.kv_head];
    const int end = rows_ > 0 ? position(row_ + rows_ - 1) + 1 : 0;  // past the last key visible to this warp's rows
    // Every row of the warp sees every key in [common_begin_, common_end_).
    common_begin_ = oldest(row_ + rows_ - 1);
    common_end_ = position(row_) + 1;

    const int draw_key = max(item_.first, (item_.last - 1) / C::kKeys * C::kKeys - C::kKeys);
    int stage = 0;
    for (int key = item_.first; key < item_.last; key += C::kKeys, stage ^= 1) {
      wait_for_all_copies();
      __syncthreads();  // all warps have loaded this tile, and none still reads the previous tile
      if (key == draw_key) queue_.draw();
      if (key + C::kKeys >= item_.last) queue_.fetch_item();
      const auto load_next = [&](int step) { issue_load(key + C::kKeys, stage ^ 1, step); };
      const int offset = few_ ? warp_ * kShare : 0;
      if (key + offset >= end) {
        for (int step = 0; step < kLoadSteps; ++step) load_next(step);
      } else if (kFew && few_) {
        for (int step = 0; step < kLoadSteps; ++step) load_next(step);
        if constexpr (kFew) attend<kShare>(key + offset, offset, stage, [](int) {});
      } else {
        // The next tile is loaded in small steps between the mma of P V, when registers are free.
        attend<C::kKeys>(key, 0, stage, load_next);
      }
      look_up(key + 2 * C::kKeys);
    }
    if (item_.first >= item_.last) {
      queue_.draw();
      queue_.fetch_item();
    }
    wait_for_all_copies();  // the zero-filled tile after the last must not land in the next item's stage
    queue_.fetch_sequence();

#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max_[m][h] *= factor_;
        sum_[m][h] = sum_of_quad(sum_[m][h]);
      }
    }
    item_.parts == 1 ? write() : finish_part();
  }

 private:
  __device__ int position(int row) const { return before_ + row / group_; }
  __device__ int head_of(int row) const { return item_.kv_head * group_ + row % group_; }
  // First key visible to a row.
  __device__ int oldest(int row) const { return a_.window > 0 ? max(0, position(row) + 1 - a_.window) : 0; }

  __device__ uint32_t at(int offset) const { return shared_address(shared_) + offset; }

  // A tile of a long context may have rows for one warp only.  Then all warps process these rows, each for its share of
  // every key tile, and the plan gets kWarps times as many partial results.
  static constexpr int kShare = C::kKeys / kWarps;
  static constexpr bool kFew = C::M == 1 && kShare % 16 == 0;

  // Element offset of this lane's row in q or out.
  __device__ int64_t offset_of_own_row(int64_t token_stride, int64_t head_stride) const {
    const int row = row_ + lane_ % C::kWarpRows;
    const int64_t token = token_ + row / group_, head = item_.kv_head * group_ + row % group_;
    return token * token_stride + head * head_stride;
  }

  // Each warp loads its own rows; zeros for rows past the end of the sequence.
  __device__ void load_queries() const {
    const int64_t own = offset_of_own_row(a_.q_token_stride, a_.q_head_stride);
#pragma unroll
    for (int i = 0; i < C::kWarpRows * C::kQChunks / 32; ++i) {
      const int row = (i * 32 + lane_) / C::kQChunks, chunk = (i * 32 + lane_) % C::kQChunks;
      const int64_t offset = __shfl_sync(~0u, own, row);
      const bool wanted = row < rows_;
      const uint16_t* from = static_cast<const uint16_t*>(a_.q) + (wanted ? offset + 8 * chunk : 0);
      const int to = (warp_ * C::kWarpRows + row) * C::kQPitch;
      if constexpr (!C::kE4m3) {
        copy_async_16(at(to + 16 * chunk), from, wanted);
      } else {
        // ldmatrix gives a lane four consecutive e4m3 elements of a key, but only two and two 2-byte elements of a
        // query. The order of elements along a head is free if both operands use the same order.  So a query's pairs 0
        // 1 2 3 4 5 6 7 of 16 elements are stored in the order 0 2 4 6 1 3 5 7.
        uint4 x = wanted ? *reinterpret_cast<const uint4*>(from) : uint4{};
        if (a_.dtype == Dtype::bf16) x = {to_half(x.x), to_half(x.y), to_half(x.z), to_half(x.w)};
        char* const into = shared_ + to + chunk / 2 * 32 + chunk % 2 * 8;
        *reinterpret_cast<uint2*>(into) = {x.x, x.z};
        *reinterpret_cast<uint2*>(into + 16) = {x.y, x.w};
      }
    }
  }

  __device__ static uint32_t to_half(uint32_t two_bf16) {
    const float low = __uint_as_float(two_bf16 << 16), high = __uint_as_float(two_bf16 & 0xffff0000u);
    constexpr float kMax = 65504;
    return pack<__half>(fminf(fmaxf(low, -kMax), kMax), fminf(fmaxf(high, -kMax), kMax));
  }

  __device__ void load_query(uint32_t (&q)[4], int m, int step) const {
    load_matrices(q, query_at_ + 16 * m * C::kQPitch + 32 * step);
  }

  // A warp loads every kWarps-th group of 8 keys; a group lies in one block for any block size.
  static constexpr int kGroups = C::kKeys / 8 / kWarps;
  __device__ int group_key(int key, int i) const { return key + 8 * (warp_ + kWarps * i); }

  // Loads the block ids of the tile at `key` into block_. It runs one tile ahead, because the key loads need the ids.
  __device__ void look_up(int key) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int k = group_key(key, i);
      block_[i] = k < item_.last && k + 8 > low_ ? table_[k >> block_shift_] : 0;
    }
  }

  // Issues step `step` of kLoadSteps that load the tile at `key` into `stage`: the key groups first, then the value
  // groups.
  static constexpr int kLoadSteps = 2 * kGroups;
  static_assert(kLoadSteps == C::kKeys / 16);  // attend() calls `between` kKeys / 16 times
  __device__ void issue_load(int key, int stage, int step) {
    const int group = step % kGroups;
    const bool values = step >= kGroups;
    const int k = group_key(key, group);
    asm volatile(
        ""
        : "+r"(block_[group]));  // keeps the compiler from using the block id, and waiting for it, right after its load
    const int64_t in_block = (item_.kv_head * a_.block_size + (k & (a_.block_size - 1))) * int64_t{C::D};
    const int64_t offset = block_[group] * (values ? a_.v_block_stride : a_.k_block_stride) + in_block;
    const char* from = static_cast<const char*>(values ? a_.v_cache : a_.k_cache) + offset * C::kKvBytes + 16 * lane_;
    const uint32_t to = at((values ? kValuesAt : kKeysAt) + stage * C::kTileSize + (k - key) * C::kKvPitch);
    // 16-byte chunks of 8 keys, which are contiguous.
    constexpr int kChunks = 8 * C::kKvChunks;
#pragma unroll
    for (int j = 0; j < (kChunks + 31) / 32; ++j) {
      if (kChunks % 32 != 0 && 32 * j + lane_ >= kChunks) break;
      int r, place;  // key of the chunk, and its byte offset in the stage
      if constexpr (32 % C::kKvChunks == 0) {
        constexpr int kEach = 32 / C::kKvChunks;
        r = lane_ / C::kKvChunks + j * kEach;
        place = lane_ / C::kKvChunks * C::kKvPitch + lane_ % C::kKvChunks * 16 + j * kEach * C::kKvPitch;
      } else {
        r = (32 * j + lane_) / C::kKvChunks;
        place = r * C::kKvPitch + (32 * j + lane_) % C::kKvChunks * 16;
      }
      copy_async_16(to + place, from + 512 * j, k + r >= low_ && k + r < item_.last);
    }
  }

  template <int N>
  using Score = float[C::M][N / 8][4];

  // Adds keys [key, key + N), stored at `offset` in `stage`, to max_, sum_ and acc_.  Calls between(i) before the mma
  // that multiplies the i-th 16 weights by their values.
  template <int N, class Between>
  __device__ void attend(int key, int offset, int stage, const Between& between) {
    Score<N> score;
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int n = 0; n < N / 8; ++n) score[m][n][0] = score[m][n][1] = score[m][n][2] = score[m][n][3] = 0;
    }
    if constexpr (C::kE4m3) {
      multiply_e4m3<N>(score, offset, stage);
    } else {
      multiply_keys<N>(score, offset, stage);
    }
    if (a_.soft_cap > 0) cap<N>(score);
    if (key < common_begin_ || key + N > common_end_) mask<N>(score, key);
    weigh<N>(score);
    if constexpr (C::kE4m3) {
      add_values_e4m3<N>(score, offset, stage, between);
    } else {
      add_values<N>(score, offset, stage, between);
    }
  }

  // score += q * k^T
  template <int N>
  __device__ void multiply_keys(Score<N>& score, int offset, int stage) const {
    const uint32_t keys =
        at(kKeysAt + stage * C::kTileSize + (offset + lane_ / 16 * 8 + lane_ % 8) * C::kKvPitch + lane_ / 8 % 2 * 16);
    constexpr int kPairs = N / 16;
    uint32_t k[2][4];  // [this step and the next][8 keys x both halves of k16, then the next 8 keys]
    load_matrices(k[0], keys);
#pragma unroll
    for (int step = 0; step < C::kSteps; ++step) {
      uint32_t q[C::M][4];
#pragma unroll
      for (int m = 0; m < C::M; ++m) get_query(q[m], m, step);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int i = step * kPairs + pair, next = i + 1;
        if (next < C::kSteps * kPairs) {
          load_matrices(k[next % 2], keys + 16 * (next % kPairs) * C::kKvPitch + 32 * (next / kPairs));
        }
#pragma unroll
        for (int m = 0; m < C::M; ++m) {
          mma16816<T>(score[m][2 * pair], q[m], {k[i % 2][0], k[i % 2][1]});
          mma16816<T>(score[m][2 * pair + 1], q[m], {k[i % 2][2], k[i % 2][3]});
        }
      }
    }
  }

  // multiply_keys for e4m3, two k16 steps at a time: 16 elements of a key are 16 bytes.
  template <int N>
  __device__ void multiply_e4m3(Score<N>& score, int offset, int stage) const {
    const uint32_t keys = at(kKeysAt + stage * C::kTileSize + (offset + lane_ / 16 * 8 + lane_ % 8) * C::kKvPitch);
#pragma unroll
    for (int step = 0; step < C::kSteps; step += 2) {
      constexpr int kLast = C::kSteps - 1;
      const int chunk = step == kLast ? step : step + lane_ / 8 % 2;
      uint32_t q[2][C::M][4];
#pragma unroll
      for (int e = 0; e < 2 && step + e < C::kSteps; ++e) {
#pragma unroll
        for (int m = 0; m < C::M; ++m) get_query(q[e][m], m, step + e);
      }
#pragma unroll
      for (int n = 0; n < N / 8; n += 2) {
        uint32_t k[4];  // this step and the next of keys 8n .. 8n + 7, then of the next 8 keys
        load_matrices(k, keys + 8 * n * C::kKvPitch + 16 * chunk);
#pragma unroll
        for (int e = 0; e < 2 && step + e < C::kSteps; ++e) {
#pragma unroll
          for (int next = 0; next < 2; ++next) {
            const uint32_t b[2] = {widen_e4m3(k[2 * next + e] & 0xffff), widen_e4m3(k[2 * next + e] >> 16)};
#pragma unroll
            for (int m = 0; m < C::M; ++m) mma16816<T>(score[m][n + next], q[e][m], b);
          }
        }
      }
    }
  }

  __device__ void get_query(uint32_t (&q)[4], int m, int step) const {
    if constexpr (C::kQInRegisters) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = query_[m][step][i];
    } else {
      load_query(q, m, step);
    }
  }

  // Applies the soft cap, scaled so that weigh() uses the same factor with and without a cap.
  template <int N>
  __device__ void cap(Score<N>& score) const {
    const float k_scale = C::kE4m3 ? a_.scales[item_.kv_head] : 1.0f;
    const float in = a_.scale * k_scale / a_.soft_cap;
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) score[m][n][i] = soften(score[m][n][i] * (in * 2 * kLog2E), 1 / in);
      }
    }
  }

  template <int N>
  __device__ void mask(Score<N>& score, int key) const {
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int end = position(row_ + 16 * m + i / 2 * 8 + lane_ / 4) + 1;  // the row sees keys [begin, end)
        const int begin = a_.window > 0 ? end - a_.window : 0;
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
          const int k = key + 8 * n + lane_ % 4 * 2 + i % 2;
          if (k < begin || k >= end) score[m][n][i] = kNone;
        }
      }
    }
  }

  // Turns scores into weights 2^(score - max_).
  template <int N>
  __device__ void weigh(Score<N>& score) {
    float top[C::M][2];
    bool grows = false;
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) top[m][h] = max_[m][h];
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) top[m][i / 2] = fmaxf(top[m][i / 2], score[m][n][i]);
      }
    }
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        top[m][h] = max_of_quad(top[m][h]);
        grows |= (top[m][h] - max_[m][h]) * factor_ > 8;
      }
    }
    // Any reference near the maximum works if no weight overflows.  So max_ and acc_ are rescaled only when the new
    // maximum exceeds max_ by 8 in log2 (Zadouri et al.  2025, FlashAttention-4), which is rare after the first tile.
    if (__any_sync(~0u, grows)) {
#pragma unroll
      for (int m = 0; m < C::M; ++m) {
        float shrink[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          shrink[h] = top[m][h] == kNone ? 1.0f : exp2_fast((max_[m][h] - top[m][h]) * factor_);
          max_[m][h] = top[m][h];
          sum_[m][h] *= shrink[h];
        }
#pragma unroll
        for (int n = 0; n < C::D / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc_[m][n][i] *= shrink[i / 2];
        }
      }
    }
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
      const float base[2] = {max_[m][0] == kNone ? 0.0f : max_[m][0] * factor_,
                             max_[m][1] == kNone ? 0.0f : max_[m][1] * factor_};
      float sum[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < N / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          score[m][n][i] = exp2_fast(fmaf(score[m][n][i], factor_, -base[i / 2]));
          sum[i / 2] += score[m][n][i];
        }
      }
      sum_[m][0] += sum[0];
      sum_[m][1] += sum[1];
    }
  }

  // The score layout of lane (g, t) matches operand A for 16 keys, so no exchange between lanes is needed.
  template <int N>
  __device__ void get_weights(uint32_t (&w)[C::M][4], const Score<N>& score, int n) const {
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[m][i] = pack<T>(score[m][n + i / 2][i % 2 * 2], score[m][n + i / 2][i % 2 * 2 + 1]);
    }
  }

  // acc_ += weights * v
  template <int N, class Between>
  __device__ void add_values(const Score<N>& score, int offset, int stage, const Between& between) {
    const uint32_t values =
        at(kValuesAt + stage * C::kTileSize + (offset + lane_ % 16) * C::kKvPitch + lane_ / 16 * 16);
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      between(n / 2);
      uint32_t w[C::M][4];
      get_weights<N>(w, score, n);
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        uint32_t v[4];  // 8 elements of the 16 keys, in two halves of 8 keys; then the next 8 elements
        load_transposed(v, values + 8 * n * C::kKvPitch + 32 * step);
#pragma unroll
        for (int m = 0; m < C::M; ++m) {
          mma16816<T>(acc_[m][2 * step], w[m], {v[0], v[1]});
          mma16816<T>(acc_[m][2 * step + 1], w[m], {v[2], v[3]});
        }
      }
    }
  }

  // ldmatrix transposes pairs of bytes here, so a lane gets elements 2g and 2g + 1 of keys 2t and 2t + 1.  The even
  // elements of 16 go into one mma and the odd ones into another: acc_[2 * step] has columns 0 2 4 ... 14 of 16.
  template <int N, class Between>
  __device__ void add_values_e4m3(const Score<N>& score, int offset, int stage, const Between& between) {
    const uint32_t values = at(kValuesAt + stage * C::kTileSize + (offset + lane_ % 16) * C::kKvPitch);
#pragma unroll
    for (int n = 0; n < N / 8; n += 2) {
      between(n / 2);
      uint32_t w[C::M][4];
      get_weights<N>(w, score, n);
#pragma unroll
      for (int step = 0; step < C::kSteps; step += 2) {
        constexpr int kLast = C::kSteps - 1;
        const int chunk = step == kLast ? step : step + lane_ / 16;
        uint32_t v[4];  // 16 elements of the 16 keys, in two halves of 8 keys; then the next 16 elements
        load_transposed(v, values + 8 * n * C::kKvPitch + 16 * chunk);
#pragma unroll
        for (int e = 0; e < 2 && step + e < C::kSteps; ++e) {
          const uint32_t near = __byte_perm(v[2 * e], 0, 0x3120), far = __byte_perm(v[2 * e + 1], 0, 0x3120);
          const uint32_t even[2] = {widen_e4m3(near & 0xffff), widen_e4m3(far & 0xffff)};
          const uint32_t odd[2] = {widen_e4m3(near >> 16), widen_e4m3(far >> 16)};
#pragma unroll
          for (int m = 0; m < C::M; ++m) {
            mma16816<T>(acc_[m][2 * (step + e)], w[m], even);
            mma16816<T>(acc_[m][2 * (step + e) + 1], w[m], odd);
          }
        }
      }
    }
  }

  // Stores this part's result in the plan; the last CTA to finish merges all parts of the tile.
  __device__ void finish_part() {
    int64_t own = (int64_t{item_.partial} + item_.part) * C::kRows + warp_ * C::kWarpRows + lane_ / 4;
#pragma unroll
    for (int r = 0; r < 2 * C::M; ++r, own += 8) {
      const int m = r / 2, h = r % 2;
      if (8 * r + lane_ / 4 >= rows_) break;
      if (lane_ % 4 == 0) {
        plan_.max[own] = max_[m][h];
        plan_.sum[own] = sum_[m][h];
      }
      float* const acc = plan_.acc + own * C::D;
#pragma unroll
      for (int step = 0; step < C::kSteps; ++step) {
        const float a = acc_[m][2 * step][2 * h], b = acc_[m][2 * step][2 * h + 1];
        const float c = acc_[m][2 * step + 1][2 * h], d = acc_[m][2 * step + 1][2 * h + 1];
        if constexpr (C::kE4m3) {
          *reinterpret_cast<float4*>(acc + 16 * step + lane_ % 4 * 4) = {a, c, b, d};
        } else {
          *reinterpret_cast<float2*>(acc + 16 * step + lane_ % 4 * 2) = {a, b};
          *reinterpret_cast<float2*>(acc + 16 * step + 8 + lane_ % 4 * 2) = {c, d};
        }
      }
    }
    int* const last = reinterpret_cast<int*>(shared_ + C::kWord);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      *last = atomicAdd(&plan_.arrived[item_.partial], 1) == item_.parts - 1;
      if (*last) plan_.arrived[item_.partial] = 0;
    }
    __syncthreads();
    if (*last) {
      __threadfence();
      merge_parts();
    }
  }

  // Merges in the order of the parts, so that the result does not depend on which part finished last.
  __device__ void merge_parts() const {
    const int rows = min(C::kRows, rows_of_sequence_ - item_.row);
    const int parts = few_ ? item_.parts * kWarps : item_.parts;
    const int pitch = few_ ? C::kWarpRows : C::kRows;  // rows between partial results
    // Factor of each part and row: [parts, pitch], in the keys' shared memory.
    float* const weights = reinterpret_cast<float*>(shared_ + kKeysAt);
    static_assert(kPrefillMaxParts * sizeof(float) <= C::kShared - kKeysAt);
    const float v_scale = C::kE4m3 ? a_.scales[a_.kv_heads + item_.kv_head] : 1.0f;
    const int64_t first = int64_t{item_.partial} * C::kRows;
    for (int row = threadIdx.x; row < rows; row += kThreads) {
      const float* const max = plan_.max + first + row;
      const float* const sum = plan_.sum + first + row;
      float top = kNone, total = 0;
      for (int p = 0; p < parts; ++p) top = fmaxf(top, __ldcg(max + p * pitch));
      for (int p = 0; p < parts; ++p) {
        const float weight = rescale(__ldcg(max + p * pitch), top);
        weights[p * pitch + row] = weight;
        total += weight * __ldcg(sum + p * pitch);
      }
      total = with_sink(total, top, a_.sinks, head_of(item_.row + row));
      const float share = total == 0 ? 0.0f : v_scale / total;
      for (int p = 0; p < parts; ++p) weights[p * pitch + row] *= share;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * C::D / 4; i += kThreads) {
      const int row = i / (C::D / 4), column = i % (C::D / 4) * 4;
      const float* const acc = plan_.acc + (first + row) * C::D + column;
      float4 sum = {0, 0, 0, 0};
#pragma unroll 8
      for (int p = 0; p < parts; ++p) {
        const float4 part = __ldcg(reinterpret_cast<const float4*>(acc + int64_t{p} * pitch * C::D));
        const float weight = weights[p * pitch + row];
        sum = {fmaf(weight, part.x, sum.x), fmaf(weight, part.y, sum.y), fmaf(weight, part.z, sum.z),
               fmaf(weight, part.w, sum.w)};
      }
      const int r = item_.row + row;
      const int64_t to = static_cast<int64_t>(token_ + r / group_) * a_.out_token_stride +
                         (item_.kv_head * group_ + r % group_) * a_.out_head_stride + column;
      *reinterpret_cast<uint2*>(static_cast<uint16_t*>(a_.out) + to) =
          a_.dtype == Dtype::bf16 ? uint2{pack<__nv_bfloat16>(sum.x, sum.y), pack<__nv_bfloat16>(sum.z, sum.w)}
                                  : uint2{pack<__half>(sum.x, sum.y), pack<__half>(sum.z, sum.w)};
    }
  }

  // Stores acc_ / sum_ to out, through the warp's query rows in shared memory, so that stores are 16 bytes wide.
  __device__ void write() {
    const float v_scale = C::kE4m3 ? a_.scales[a_.kv_heads + item_.kv_head] : 1.0f;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < C::M; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = with_sink(sum_[m][h], max_[m][h], a_.sinks, head_of(row_ + 16 * m + 8 * h + lane_ / 4));
        const float share = sum == 0 ? 0.0f : v_scale / sum;  // no key: zeros
        char* const row = shared_ + (warp_ * C::kWarpRows + 16 * m + 8 * h + lane_ / 4) * C::kQPitch;
#pragma unroll
        for (int step = 0; step < C::kSteps; ++step) {
          const float a = acc_[m][2 * step][2 * h] * share, b = acc_[m][2 * step][2 * h + 1] * share;
          const float c = acc_[m][2 * step + 1][2 * h] * share, d = acc_[m][2 * step + 1][2 * h + 1] * share;
          if constexpr (C::kE4m3) {
            const bool bf16 = a_.dtype == Dtype::bf16;
            *reinterpret_cast<uint2*>(row + 32 * step + lane_ % 4 * 8) =
                bf16 ? uint2{pack<__nv_bfloat16>(a, c), pack<__nv_bfloat16>(b, d)}
                     : uint2{pack<__half>(a, c), pack<__half>(b, d)};
          } else {
            *reinterpret_cast<uint32_t*>(row + 32 * step + lane_ % 4 * 4) = pack<T>(a, b);
            *reinterpret_cast<uint32_t*>(row + 32 * step + 16 + lane_ % 4 * 4) = pack<T>(c, d);
          }
        }
      }
    }
    __syncwarp();
    const int64_t own = offset_of_own_row(a_.out_token_stride, a_.out_head_stride);
#pragma unroll
    for (int i = 0; i < C::kWarpRows * C::kQChunks / 32; ++i) {
      const int row = (i * 32 + lane_) / C::kQChunks, chunk = (i * 32 + lane_) % C::kQChunks;
      const int64_t offset = __shfl_sync(~0u, own, row);
      const char* from = shared_ + (warp_ * C::kWarpRows + row) * C::kQPitch + 16 * chunk;
      if (row < rows_) {
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(a_.out) + offset + 8 * chunk) =
            *reinterpret_cast<const uint4*>(from);
      }
    }
    __syncwarp();
  }

  static constexpr int kKeysAt = C::kQSize;
  static constexpr int kValuesAt = kKeysAt + C::kStages * C::kTileSize;

  const PrefillArgs& a_;
  const PrefillPlan& plan_;
  Queue<C>& queue_;
  const PrefillItem& item_;
  const int token_;  // index of the sequence's first token
  char* const shared_;
  const int warp_ = threadIdx.x / 32, lane_ = threadIdx.x % 32;

  int group_;  // query heads that share a KV head
  int rows_of_sequence_;
  int before_;  // position of the sequence's first query
  const int32_t* table_;
  int low_;  // first key that any row of the tile sees
  int block_shift_;
  bool few_;
  int row_, rows_;     // the warp's packed rows [row_, row_ + rows_)
  uint32_t query_at_;  // shared memory address of this lane's part of the warp's queries
  float factor_;
  int block_[kGroups];

  uint32_t query_[C::kQInRegisters ? C::M : 1][C::kSteps][4];
  int common_begin_, common_end_;
  float max_[C::M][2], sum_[C::M][2];
  float acc_[C::M][C::D / 8][4];
};

template <class C>
__global__ void __launch_bounds__(kThreads, C::kCtasPerSm)
    prefill_kernel(const __grid_constant__ PrefillArgs args, const __grid_constant__ PrefillPlan plan) {
  extern __shared__ __align__(128) char shared[];
  Queue<C> queue(args, plan, shared);
  wait_for_previous_kernels();
  let_next_kernel_start();
  queue.open();
  while (queue.get()) Item<C>(args, plan, queue, shared).run();
  queue.close();
}

template <class C>
void launch_prefill(const PrefillArgs& args, cudaStream_t stream) {
  static const int ctas = [] {
    const auto kernel = prefill_kernel<C>;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::kShared), "prefill");
    int per_sm;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, kThreads, C::kShared), "prefill");
    return per_sm * device_attribute(cudaDevAttrMultiProcessorCount);
  }();
  launch(prefill_kernel<C>, dim3(ctas), dim3(kThreads), C::kShared, stream, args,
         prefill_plan_layout(args.plan, args.plan_bytes, args.head_size));
}

// Tiles of 128 rows halve the L2 reads of keys; tiles of 64 fill the GPU with half the queries.
template <class T, bool kE4m3, int D>
void launch_prefill(const PrefillArgs& args, cudaStream_t stream) {
  if constexpr (D <= 128) {
    using Large = Config<T, kE4m3, D, 2>;
    const bool many =
        int64_t{args.tokens} * args.heads >= int64_t{4} * 128 * device_attribute(cudaDevAttrMultiProcessorCount);
    if (many && Large::kShared <= device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) {
      return launch_prefill<Large>(args, stream);
    }
  }
  launch_prefill<Config<T, kE4m3, D, 1>>(args, stream);
}

// Instantiated by each prefill_mma_<head size>.cu.
template <int D>
void launch_prefill(const PrefillArgs& args, cudaStream_t stream) {
  if (args.cache_dtype == Dtype::e4m3) return launch_prefill<__half, true, D>(args, stream);
  if (args.dtype == Dtype::fp16) return launch_prefill<__half, false, D>(args, stream);
  launch_prefill<__nv_bfloat16, false, D>(args, stream);
}

}  // namespace quire::cuda::mma
