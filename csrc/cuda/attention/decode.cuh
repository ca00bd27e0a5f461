// Split-KV decode attention (Flash-Decoding, 2023) over a paged KV cache, with equal shares over ragged lengths.
// decode.h defines the terms, decode_plan.cuh the plan.
//
// q, out [tokens, H, D] bf16 or fp16 · caches [blocks, Hkv, block_size, D] of the same or e4m3 · tables i32
//
// Grid: one CTA per multiprocessor, of 8 warps, or fewer if the shared memory of 8 warps does not fit.
//
// Each key and value in a query's range is read once per head group: 2 * len * D elements per KV head.  All other
// traffic is small, so the kernel is bound by memory bandwidth: 4 * len * D bytes in bf16. len == 0 writes zeros.
//
// Each warp streams the keys of its share through its own shared-memory ring, several tiles ahead, without
// synchronising with other warps until the share is done.  A tile is 16 keys and 16 values, copied by cp.async.  Keys
// past the end or outside the window are not read but replaced by zeros, because the cache may hold NaN there; in tests
// it does.
//
// In the mma, keys are rows and heads are columns.  So a head group of 8 heads fills the 8 columns of mma.m16n8k16, and
// a head group of 4 heads fills half of them:
//
//   S^T [16 keys, 8 heads] = K [16 keys, D] Q^T         K by ldmatrix; Q^T stays in registers for a complete segment
//   O^T [D, 8 heads]      += V^T [D, 16 keys] P^T       V^T by ldmatrix.trans, P^T from S^T by movmatrix
//
// An e4m3 cache is widened to fp16, which is exact, between ldmatrix and mma.  ldmatrix moves a pair of e4m3 as one
// 16-bit element, so the lanes get each 16 elements of a head in a permuted order.  For K, Q's fragments use the same
// order.  For V, the results are permuted back when stored.

#pragma once

#include <atomic>
#include <type_traits>

#include "cuda/attention/decode_launch.h"
#include "cuda/attention/softmax_state.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_core.cuh"

namespace quire::cuda {

template <class T, class Cache, int kD, int kNTiles, int kArch>
struct DecodeKernel {
  static constexpr bool kWiden = !std::is_same_v<T, Cache>;
  using Operand = std::conditional_t<kWiden, __half, T>;  // operand type of the mma
  static constexpr int kSteps = kD / 16;                  // k16 steps per head

  // A shared-memory row holds a key.  16 bytes of padding put 8 consecutive rows into different banks.
  static constexpr int kRowBytes = kD * static_cast<int>(sizeof(Cache)), kRow = kRowBytes + 16;
  static constexpr int kTileBytes = kTile * kRow;
  static constexpr int kStageBytes = 2 * kTileBytes;  // keys, then values
  static constexpr int kWarps = decode_warps(kD, kNTiles, kArch);
  static constexpr int kStages = decode_stages(kD, kRowBytes, kNTiles, kArch);
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kHeads = 8 * kNTiles;  // heads per head group, including padding

  // Accumulators of a segment in a lane: [step][n tile] of 4.
  using Acc = float[kSteps][kNTiles][4];
  static constexpr int kAccVectors = kSteps * kNTiles * 32, kStateVectors = kHeads / 2;

  // Flags of a segment.  kBegins: it contains the first keys of its head group.  kEnds: it contains the last keys.
  enum : unsigned { kExists = 1, kBegins = 2, kEnds = 4 };
  struct Segment {
    unsigned flags;
    int kv_head, part, token;
  };

  struct Shared {
    alignas(16) char rings[kWarps][kRingBytes];
    // Two segments per warp: the first of its share, if the share has several, then the last.
    Segment segments[kWarps * 2];
    float4 accs[kWarps * 2][kAccVectors];
    float4 states[kWarps * 2][kStateVectors];  // max and sum of two heads
    bool last_to_arrive[2];
  };
  static_assert(sizeof(Shared) <= decode_shared_bytes(kD, kRowBytes, kNTiles, kArch));

  const DecodeKernelArgs& args;
  const DecodeArgs& a;
  Shared& shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane % 4;

  __device__ DecodeKernel(const DecodeKernelArgs& args, Shared& shared) : args(args), a(args.a), shared(shared) {}

  // Iterates over the tiles of a share.
  struct Walk {
    DecodeSeq seq;
    // tile: next tile.  end: one past this head group's last tile.  left: tiles left in the share.
    int seq_index, kv_head, part, tile, end, left;

    __device__ void start(const DecodeShare& share) {
      seq = share.begins_in;
      seq_index = share.seq;
      kv_head = share.kv_head;
      part = share.part;
      tile = share.tile;
      end = seq.end_tile();
      left = share.count();
    }

    // Moves to the next head group's first tile.  Requires tiles left in the share.
    __device__ void next_group(const DecodeKernelArgs& args) {
      if (++part == args.shape.parts_per_kv) {
        part = 0;
        if (++kv_head == args.shape.kv_heads) {
          kv_head = 0;
          do seq = args.plan.seqs[++seq_index];
          while (seq.len == 0);
          end = seq.end_tile();
        }
      }
      tile = seq.first_tile();
    }
  };

  // ---- Loading: from the cache to the warp's ring, kStages - 1 tiles ahead of the compute.

  struct Fetch {
    Walk at;
    const int32_t* table;    // block table of the sequence
    int64_t k_head, v_head;  // addresses of the KV head in block 0, plus this lane's 16 bytes
    // Block ids that this lane has looked up: low for tile base + lane, next_low for tile base + lane + 32.  With
    // blocks of 8 keys, high and next_high are the ids of those tiles' second blocks.
    int base, low, high, next_low, next_high;
    uint32_t stage;  // stage that the next copy fills
  };

  __device__ void look_up(const Fetch& f, int base, int& low, int& high) const {
    // The key is clamped, because table entries outside of the query's range may be arbitrary.
    const int key = (base + lane) * kTile, last = f.at.seq.len - 1;
    low = f.table[min(max(key, f.at.seq.first), last) >> args.block_shift];
    if (args.block_shift == 3) high = f.table[min(max(key + 8, f.at.seq.first), last) >> 3];
  }

  __device__ void look_ahead(Fetch& f) const {
    if (f.base + 32 < f.at.end) look_up(f, f.base + 32, f.next_low, f.next_high);
  }

  // Starts a head group: looks up its block table from the share's first tile on.
  __device__ void begin_group(Fetch& f) const {
    f.table = a.tables + a.rows[f.at.seq_index] * a.table_stride;
    const int head = ((f.at.kv_head << args.block_shift) * kRowBytes) + lane * 16;
    f.k_head = reinterpret_cast<int64_t>(a.k_cache) + head;
    f.v_head = reinterpret_cast<int64_t>(a.v_cache) + head;
    f.base = f.at.tile;
    look_up(f, f.base, f.low, f.high);
    look_ahead(f);
  }

  // Issues the copies of the next tile, if any, and always commits a cp.async group.
  __device__ void fetch(Fetch& f) const {
    if (f.at.left > 0) {
      if (f.at.tile - f.base == 32) {
        f.base = f.at.tile;
        f.low = f.next_low;
        f.high = f.next_high;
        look_ahead(f);
      }
      const int key = f.at.tile * kTile;
      const int inside = (key & (a.block_size - 1)) * kRowBytes;
      const uint32_t low = __shfl_sync(~0u, f.low, f.at.tile - f.base);
      const char* k_low = reinterpret_cast<const char*>(f.k_head + inside + int64_t{low} * args.k_block_bytes);
      const char* v_low = reinterpret_cast<const char*>(f.v_head + inside + int64_t{low} * args.v_block_bytes);
      const char *k_high = k_low, *v_high = v_low;
      if (args.block_shift == 3) {
        const uint32_t high = __shfl_sync(~0u, f.high, f.at.tile - f.base);
        k_high = reinterpret_cast<const char*>(f.k_head - 8 * kRowBytes + int64_t{high} * args.k_block_bytes);
        v_high = reinterpret_cast<const char*>(f.v_head - 8 * kRowBytes + int64_t{high} * args.v_block_bytes);
      }
      // Chunk i (16 bytes) of the tile is in the query's range of keys if chunk_0 + i, unsigned, is below `wanted`.
      constexpr int kChunks = kRowBytes / 16;
      const unsigned chunk_0 = lane - (f.at.seq.first - key) * kChunks;
      const unsigned wanted = (f.at.seq.len - f.at.seq.first) * kChunks;
#pragma unroll
      for (int i = 0; i * 32 < kTile * kChunks; ++i) {
        const int chunk = i * 32 + lane, row = chunk / kChunks;
        if (kTile * kChunks % 32 != 0 && chunk >= kTile * kChunks) break;
        const uint32_t to = f.stage + row * kRow + chunk % kChunks * 16;
        const bool seen = chunk_0 + i * 32 < wanted;
        copy_async_16(to, (row < 8 ? k_low : k_high) + i * 512, seen);
        copy_async_16(to + kTileBytes, (row < 8 ? v_low : v_high) + i * 512, seen);
      }
      ++f.at.tile;
      if (--f.at.left > 0 && f.at.tile == f.at.end) {
        f.at.next_group(args);
        begin_group(f);
      }
    }
    commit_copies();
    f.stage = next_stage(f.stage);
  }

  __device__ uint32_t ring() const { return shared_address(shared.rings[warp]); }
  __device__ uint32_t next_stage(uint32_t stage) const {
    stage += kStageBytes;
    return stage == ring() + kRingBytes ? ring() : stage;
  }

  // ---- Compute on tiles that have arrived.

  struct Query {
    uint32_t parts[kSteps][kNTiles][2];  // B operands; zeros for padding heads
  };

  __device__ int first_head(int kv_head, int part) const { return kv_head * args.shape.heads_per_kv + part * kHeads; }
  __device__ int heads_in(int part) const { return args.shape.heads_per_kv - part * kHeads; }  // may exceed kHeads

  static __device__ uint32_t operand(uint32_t pair) {
    if constexpr (std::is_same_v<T, Operand>) {
      return pair;
    } else {  // bf16 queries with an e4m3 cache
      const auto clamp = [](float x) { return fminf(fmaxf(x, -65504.f), 65504.f); };
      return pack<__half>(clamp(__uint_as_float(pair << 16)), clamp(__uint_as_float(pair & 0xffff0000u)));
    }
  }

  __device__ void load_query(Query& query, const Walk& at) const {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const int head = n * 8 + g;
      const bool exists = head < heads_in(at.part);
      const T* row = static_cast<const T*>(a.q) + at.seq.token * a.q_token_stride +
                     (first_head(at.kv_head, at.part) + head) * a.q_head_stride + (kWiden ? 4 * t : 2 * t);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int index = step * 16 + half * (kWiden ? 2 : 8);
          query.parts[step][n][half] = exists ? operand(*reinterpret_cast<const uint32_t*>(row + index)) : 0u;
        }
      }
    }
  }

  // Loads the A operand of S^T: elements 16 * step .. 16 * step + 15 of 16 keys.
  __device__ void load_keys(uint32_t (&r)[4], uint32_t keys, int step) const {
    if constexpr (kWiden) {
      uint32_t raw[2];
      load_matrices(raw, keys + (lane & 15) * kRow + step * 16);
      r[0] = widen_e4m3(raw[0]);
      r[1] = widen_e4m3(raw[1]);
      r[2] = widen_e4m3(raw[0] >> 16);
      r[3] = widen_e4m3(raw[1] >> 16);
    } else {
      load_matrices(r, keys + (lane & 15) * kRow + step * 32 + (lane >> 4) * 16);
    }
  }

  // Loads the A operand of O^T: elements 16 * step .. 16 * step + 15 of 16 values.
  __device__ void load_values(uint32_t (&r)[4], uint32_t values, int step) const {
    if constexpr (kWiden) {
      uint32_t raw[2];
      load_transposed(raw, values + (lane & 15) * kRow + step * 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t by_element =
            __byte_perm(raw[half], 0, 0x3120);  // element 2g of two keys, then element 2g + 1 of these keys
        r[2 * half] = widen_e4m3(by_element);
        r[2 * half + 1] = widen_e4m3(by_element >> 16);
      }
    } else {
      load_transposed(r, values + ((lane & 7) + (lane >> 4) * 8) * kRow + step * 32 + (lane >> 3 & 1) * 16);
    }
  }

  // A lane's softmax states of heads 8n + 2t and 8n + 2t + 1: the max over all keys, the sum over rows g and g + 8.
  using States = SoftmaxState[kNTiles][2];

  __device__ void compute(uint32_t stage, const Query& query, const Walk& at, float k_scale, States& states,
                          Acc& acc) const {
    float s[2][kNTiles][4] = {};  // even and odd steps have separate accumulators: shorter chains of dependent mma
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t keys[4];
      load_keys(keys, stage, step);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) mma16816<Operand>(s[step & 1][n], keys, query.parts[step][n]);
    }
    const int key = at.tile * kTile;
    const bool border = key < at.seq.first || key + kTile > at.seq.len;
    uint32_t weights[kNTiles][2];
    float factors[kNTiles][2];
    bool rescaled = false;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      float score[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        score[i] = this->score(s[0][n][i] + s[1][n][i], k_scale);
        if (border) {
          const int place = key + g + i / 2 * 8;
          if (place < at.seq.first || place >= at.seq.len) score[i] = -INFINITY;
        }
      }
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        SoftmaxState& state = states[n][head];
        float max = fmaxf(score[head], score[head + 2]);
#pragma unroll
        for (int other = 4; other < 32; other *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, other));
        max = fmaxf(state.max, max);
        rescaled |= max > state.max;
        factors[n][head] = rescale(state.max, max);
        state.max = max;
        score[head] = exp2_fast(score[head] - max);
        score[head + 2] = exp2_fast(score[head + 2] - max);
        state.sum = state.sum * factors[n][head] + score[head] + score[head + 2];
      }
      weights[n][0] = transpose(pack<Operand>(score[0], score[1]));
      weights[n][1] = transpose(pack<Operand>(score[2], score[3]));
    }
    if (__any_sync(~0u, rescaled)) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) acc[step][n][i] *= factors[n][i & 1];
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t values[4];
      load_values(values, stage + kTileBytes, step);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) mma16816<Operand>(acc[step][n], values, weights[n]);
    }
  }

  __device__ float key_scale(const Walk& at) const {
    return kWiden ? args.score_scale * a.scales[at.kv_head] : args.score_scale;
  }

  // Returns the score, after the soft cap, in units of log2.
  __device__ float score(float raw, float k_scale) const {
    return args.cap > 0 ? soften(raw * k_scale, args.cap) : raw * k_scale;
  }

  // ---- Results.

  // Stores 16 elements of each head's result from O^T, normalised by the softmax sums, to rows of `out`. state: max and
  // sum of heads 8n + 2t and 8n + 2t + 1 of the group.
  __device__ void store(const float (&acc)[4], const float4& state, int n, int step, int token, int kv_head,
                        int part) const {
    const float scale = kWiden ? a.scales[a.kv_heads + kv_head] : 1.f;
    const int head = n * 8 + 2 * t, first = first_head(kv_head, part), last = heads_in(part) - 1;
    const float x = __fdividef(scale, with_sink(state.y, state.x, a.sinks, first + min(head, last)));
    const float y = __fdividef(scale, with_sink(state.w, state.z, a.sinks, first + min(head + 1, last)));
    uint32_t low = transpose(pack<T>(acc[0] * x, acc[1] * y)), high = transpose(pack<T>(acc[2] * x, acc[3] * y));
    if (n * 8 + g >= heads_in(part)) return;
    T* row = static_cast<T*>(a.out) + token * a.out_token_stride +
             (first_head(kv_head, part) + n * 8 + g) * a.out_head_stride + step * 16;
    auto* pairs = reinterpret_cast<uint32_t*>(row);
    if constexpr (kWiden) {  // low: elements 4t and 4t + 2, high: 4t + 1 and 4t + 3
      pairs[2 * t] = __byte_perm(low, high, 0x5410);
      pairs[2 * t + 1] = __byte_perm(low, high, 0x7632);
    } else {
      pairs[t] = low;
      pairs[t + 4] = high;
    }
  }

  // Writes the result of a finished segment: to `out` if it covers all keys of its head group, else to shared memory
  // for merge_segments().
  __device__ void finish_segment(const Walk& at, bool begins, States& states, const Acc& acc) const {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int head = 0; head < 2; ++head) {
        float& sum = states[n][head].sum;
#pragma unroll
        for (int other = 4; other < 32; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
      }
    }
    const bool ends = at.tile == at.end, complete = begins && ends;
    const int segment = warp * 2 + (at.left == 0);
    if (!complete && lane == 0) {
      shared.segments[segment] = {kExists | (begins ? kBegins : 0) | (ends ? kEnds : 0), at.kv_head, at.part,
                                  at.seq.token};
    }
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const auto& [x, y] = states[n];
      if (!complete && g == 0) shared.states[segment][n * 4 + t] = {x.max, x.sum, y.max, y.sum};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const auto& v = acc[step][n];
        if (complete) {
          store(v, {x.max, x.sum, y.max, y.sum}, n, step, at.seq.token, at.kv_head, at.part);
        } else {
          shared.accs[segment][(step * kNTiles + n) * 32 + lane] = {v[0], v[1], v[2], v[3]};
        }
      }
    }
  }

  // Merges, in order, the segments of [first, last] for which exist(i) holds.  state(i, j) and acc(i, j) return float4
  // j of segment i, loaded for kAtOnce segments at a time.  Calls use(state, acc, step, n) with the result of steps
  // first_step, first_step + stride, ...
  template <int kAtOnce, class Exists, class StateAt, class AccAt, class Use>
  __device__ void merge(int first, int last, const Exists& exists, const StateAt& state, const AccAt& acc,
                        int first_step, int stride, const Use& use) const {
#pragma unroll 1
    for (int x = first_step * kNTiles; x < kSteps * kNTiles;
         x += x % kNTiles == kNTiles - 1 ? stride * kNTiles - kNTiles + 1 : 1) {
      const int n = x % kNTiles;
      float4 total = {-INFINITY, 0, -INFINITY, 0};
      float sum[4] = {};
#pragma unroll 1
      for (int begin = first; begin <= last; begin += kAtOnce) {
        float4 s[kAtOnce], v[kAtOnce];
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = begin + j;
          const bool valid = i <= last && exists(i);
          s[j] = {-INFINITY, 0, -INFINITY, 0};
          v[j] = {0, 0, 0, 0};
          if (valid) s[j] = state(i, n * 4 + t);
          if (valid) v[j] = acc(i, x * 32 + lane);
        }
        float max_0 = total.x, max_1 = total.z;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          max_0 = fmaxf(max_0, s[j].x);
          max_1 = fmaxf(max_1, s[j].z);
        }
        const auto add = [&](const float4& s, const float4& v) {
          const float f = rescale(s.x, max_0), h = rescale(s.z, max_1);
          total.y += s.y * f;
          total.w += s.w * h;
          sum[0] += v.x * f;
          sum[1] += v.y * h;
          sum[2] += v.z * f;
          sum[3] += v.w * h;
        };
        const float4 before = {total.x, total.y, total.z, total.w}, sum_before = {sum[0], sum[1], sum[2], sum[3]};
        total = {max_0, 0, max_1, 0};
        sum[0] = sum[1] = sum[2] = sum[3] = 0;
        add(before, sum_before);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) add(s[j], v[j]);
      }
      use(total, sum, x / kNTiles, n);
    }
  }

  // A CTA's partial results in the plan.  begins: those of its last head group, which continues in a later CTA.
  // Otherwise those of its first head group, which began in an earlier CTA.
  __device__ float4* cta_state(int cta, bool begins) const {
    return args.plan.states + (cta * 2 + begins) * kStateVectors;
  }
  __device__ float4* cta_acc(int cta, bool begins) const { return args.plan.accs + (cta * 2 + begins) * kAccVectors; }

  // Merges the segments of this CTA; called after a barrier.  If this CTA is the last one of a shared head group to
  // finish, it also merges the partial results of all CTAs of the group.
  __device__ void merge_segments(const DecodeEnds& cta_ends) const {
    const int cta = blockIdx.x;
    const unsigned flags = lane < 2 * kWarps ? shared.segments[lane].flags : 0;
    const unsigned exist = __ballot_sync(~0u, flags & kExists);
    const unsigned begin = __ballot_sync(~0u, flags & kBegins), end = __ballot_sync(~0u, flags & kEnds);
    // All warps work on all head groups, a few steps each; with many head groups, each warp works on some of them.
    const bool many = __popc(end) > kWarps / 4;
    int began_before = -1, goes_on = -1;  // segments whose head group earlier or later CTAs share; -1: none
    int index = 0;
    for (unsigned left = exist; left != 0; ++index) {
      const unsigned final = left & end & -(left & end);  // bit of the first segment that ends its head group, or 0
      const unsigned segments = left & (final | (final - 1));
      left &= ~segments;
      const int first = __ffs(segments) - 1, last = 31 - __clz(segments);
      const bool begins = begin >> first & 1, complete = begins && final;
      if (!complete) (begins ? goes_on : began_before) = first;
      if (many && index % kWarps != warp) continue;
      const Segment segment = shared.segments[first];
      merge<4>(
          first, last, [&](int i) { return segments >> i & 1; }, [&](int i, int j) { return shared.states[i][j]; },
          [&](int i, int j) { return shared.accs[i][j]; }, many ? 0 : warp, many ? 1 : kWarps,
          [&](const float4& total, const float(&sum)[4], int step, int n) {
            if (complete) {
              store(sum, total, n, step, segment.token, segment.kv_head, segment.part);
            } else {
              if (step == 0 && g == 0) cta_state(cta, begins)[n * 4 + t] = total;
              cta_acc(cta, begins)[(step * kNTiles + n) * 32 + lane] = {sum[0], sum[1], sum[2], sum[3]};
            }
          });
    }
    if (began_before < 0 && goes_on < 0) return;
    __syncthreads();
    if (threadIdx.x < 2) {  // threads 0 and 1: one segment each
      const int owner = threadIdx.x ? cta : cta_ends.first_owner;
      const int others = (threadIdx.x ? cta_ends.last_last : cta_ends.first_last) - owner;
      bool all = false;
      if ((threadIdx.x ? goes_on : began_before) >= 0) {
        fence();  // a CTA that sees the counter also sees this CTA's writes
        all = atomicAdd(args.plan.arrived + owner, 1) == others;
        fence();
        if (all) args.plan.arrived[owner] = 0;  // reset for the next layer
      }
      shared.last_to_arrive[threadIdx.x] = all;
    }
    __syncthreads();
#pragma unroll 1
    for (int begins = 0; begins < 2; ++begins) {
      if (!shared.last_to_arrive[begins]) continue;
      const int owner = begins ? cta : cta_ends.first_owner, last = begins ? cta_ends.last_last : cta_ends.first_last;
      const Segment segment = shared.segments[begins ? goes_on : began_before];
      merge<12>(
          owner, last, [](int) { return true; }, [&](int i, int j) { return __ldcg(cta_state(i, i == owner) + j); },
          [&](int i, int j) { return __ldcg(cta_acc(i, i == owner) + j); }, warp, kWarps,
          [&](const float4& total, const float(&sum)[4], int step, int n) {
            store(sum, total, n, step, segment.token, segment.kv_head, segment.part);
          });
    }
  }

  static __device__ void fence() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

  __device__ void zero_empty_sequences() const {
    for (int s = blockIdx.x; s < a.seqs; s += gridDim.x) {
      const DecodeSeq seq = args.plan.seqs[s];
      if (seq.len > 0 || seq.token < 0) continue;
      for (int i = threadIdx.x; i < a.heads * (kD / 2); i += blockDim.x) {
        T* row = static_cast<T*>(a.out) + seq.token * a.out_token_stride + i / (kD / 2) * a.out_head_stride;
        reinterpret_cast<uint32_t*>(row)[i % (kD / 2)] = 0;
      }
    }
  }

  __device__ void run() {
    // The plan and the tables were complete before the preceding kernel began (see decode.h), so they are read before
    // the wait for that kernel.
    const DecodeHeader header = *args.plan.header;
    const DecodeEnds ends = args.plan.ends[blockIdx.x];
    const DecodeShare share = args.plan.shares[blockIdx.x * kWarps + warp];
    Fetch fetching;
    fetching.stage = ring();
    fetching.at.start(share);
    if (fetching.at.left > 0) begin_group(fetching);
    if (lane < 2) shared.segments[warp * 2 + lane].flags = 0;
    wait_for_previous_kernels();
    let_next_kernel_start();
    if (header.empty > 0) zero_empty_sequences();
    if (static_cast<int>(blockIdx.x) >= header.ctas) return;

    if (share.count() > 0) {
      for (int i = 0; i < kStages - 1; ++i) fetch(fetching);
      uint32_t stage = ring();
      Walk at;
      at.start(share);
      bool begins = at.tile == at.seq.first_tile();
      while (true) {  // one iteration per segment
        Query query;
        load_query(query, at);
        const float k_scale = key_scale(at);
        States states;
        Acc acc = {};
        do {
          wait_for_copies<kStages - 2>();
          __syncwarp();  // every lane's copies have arrived, and no lane still reads the stage filled next
          fetch(fetching);
          compute(stage, query, at, k_scale, states, acc);
          stage = next_stage(stage);
          ++at.tile;
        } while (--at.left > 0 && at.tile < at.end);
        finish_segment(at, begins, states, acc);
        if (at.left == 0) break;
        at.next_group(args);
        begins = true;
      }
    }
    __syncthreads();
    merge_segments(ends);
  }
};

template <class T, class Cache, int kD, int kNTiles>
__global__ void __launch_bounds__(256) decode_kernel(const __grid_constant__ DecodeKernelArgs args) {
#ifdef __CUDA_ARCH__
  extern __shared__ __align__(16) char memory[];
  using Kernel = DecodeKernel<T, Cache, kD, kNTiles, __CUDA_ARCH__>;
  Kernel(args, *reinterpret_cast<typename Kernel::Shared*>(memory)).run();
#endif
}

template <class T, class Cache, int kD, int kNTiles>
void launch_decode(const DecodeKernelArgs& args, cudaStream_t stream) {
  const auto kernel = decode_kernel<T, Cache, kD, kNTiles>;
  const int shared = decode_shared_bytes(kD, kD * static_cast<int>(sizeof(Cache)), kNTiles, decode_arch());
  static std::atomic<uint64_t> configured = 0;  // bit d: this kernel's shared-memory limit is raised on device d
  const uint64_t device = uint64_t{1} << current_device();
  if ((configured & device) == 0) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
    configured |= device;
  }
  launch(kernel, dim3(args.shape.grid), dim3(args.shape.warps * 32), shared, stream, args);
}

template <class T, class Cache, int kD>
void launch_decode(const DecodeKernelArgs& args, cudaStream_t stream) {
  if constexpr (kD <= 128) {
    if (args.shape.n_tiles == 2) return launch_decode<T, Cache, kD, 2>(args, stream);
  }
  launch_decode<T, Cache, kD, 1>(args, stream);
}

template <int kD>
void launch_decode(const DecodeKernelArgs& args, cudaStream_t stream) {
  const bool e4m3 = args.a.cache_dtype == Dtype::e4m3;
  if (args.a.dtype == Dtype::bf16) {
    e4m3 ? launch_decode<__nv_bfloat16, __nv_fp8_e4m3, kD>(args, stream)
         : launch_decode<__nv_bfloat16, __nv_bfloat16, kD>(args, stream);
  } else {
    e4m3 ? launch_decode<__half, __nv_fp8_e4m3, kD>(args, stream) : launch_decode<__half, __half, kD>(args, stream);
  }
}

}  // namespace quire::cuda
