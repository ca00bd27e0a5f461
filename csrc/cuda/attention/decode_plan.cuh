// What decode_plan.cu writes and decode.cuh reads: where the shares of decode.h begin, and room for partial results.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/attention/decode.h"

namespace quire::cuda {

constexpr int kTile = 16;  // keys

// What a CTA may hold in shared memory, by the architecture that code was compiled for (900: Hopper).
__host__ __device__ constexpr int shared_limit(int arch) {
  if (arch >= 900 && arch < 1200) return 227 << 10;
  return arch == 800 || arch == 870 ? 163 << 10 : 99 << 10;
}

// Shared memory of a warp: `stages` tiles on their way, keys and values, and the results of up to two pieces.
__host__ __device__ constexpr int decode_warp_bytes(int head_size, int row_bytes, int n_tiles, int stages) {
  return stages * 2 * kTile * (row_bytes + 16) + 2 * head_size * 8 * n_tiles * static_cast<int>(sizeof(float));
}
constexpr int kDecodeOtherBytes = 3 << 10;  // at most, of a CTA in addition

// Warps of a CTA: as many as fit with two stages each; the same for all dtypes, because the plan depends on it.
__host__ __device__ constexpr int decode_warps(int head_size, int n_tiles, int arch) {
  int warps = 8;
  while (warps * decode_warp_bytes(head_size, 2 * head_size, n_tiles, 2) > shared_limit(arch) - kDecodeOtherBytes) {
    warps /= 2;
  }
  return warps;
}

__host__ __device__ constexpr int decode_stages(int head_size, int row_bytes, int n_tiles, int arch) {
  const int room = (shared_limit(arch) - kDecodeOtherBytes) / decode_warps(head_size, n_tiles, arch);
  int stages = 2;
  while (stages < 4 && decode_warp_bytes(head_size, row_bytes, n_tiles, stages + 1) <= room) ++stages;
  return stages;
}

__host__ __device__ constexpr int decode_shared_bytes(int head_size, int row_bytes, int n_tiles, int arch) {
  const int stages = decode_stages(head_size, row_bytes, n_tiles, arch);
  return decode_warps(head_size, n_tiles, arch) * decode_warp_bytes(head_size, row_bytes, n_tiles, stages) +
         kDecodeOtherBytes;
}

// One sequence: 16 bytes, read at once.
struct alignas(16) DecodeSeq {
  int token;  // the query's place in q and out; -1: there is none
  int len;
  int first;  // key; those before it are outside the window
  int unused;

  __device__ int first_tile() const { return first / kTile; }
  __device__ int end_tile() const { return (len + kTile - 1) / kTile; }
};

// Consecutive tiles for one warp.  count == 0: nothing to do, and the other fields are undefined.
struct alignas(16) DecodeShare {
  int seq;
  int kv_head, part;    // its head group: the `part`th of those of the KV head
  int tile;             // of that sequence, where the share begins
  DecodeSeq begins_in;  // seqs[seq]; `unused` of it holds the count
  __host__ __device__ int& count() { return begins_in.unused; }
  __host__ __device__ int count() const { return begins_in.unused; }
};

// Which CTAs share head groups with this one: its first, if that began in an earlier CTA, and its last, if that continues
// in a later one.  The first CTA of a group owns its counter of arrivals.
struct alignas(16) DecodeEnds {
  int first_owner;  // -1: the first head group begins here
  int first_last;
  int last_last;  // -1: the last head group ends here, or began before (see the two above)
  int unused;
};

struct alignas(16) DecodeHeader {
  int ctas;   // that have work
  int empty;  // sequences without keys whose output must become zeros
};

struct DecodeShape {
  int heads_per_kv;
  int parts_per_kv;  // head groups of a KV head
  int kv_heads;
  int n_tiles;  // of 8 heads in a head group: 1 or 2
  int warps;    // of a CTA
  int grid;     // CTAs
};

inline DecodeShape decode_shape(int heads, int kv_heads, int head_size, int multiprocessors, int arch) {
  const int per_kv = heads / kv_heads;
  // Head sizes over 128 have no registers for the results of 16 heads.
  const int n_tiles = per_kv <= 8 || head_size > 128 ? 1 : 2;
  return {.heads_per_kv = per_kv,
          .parts_per_kv = (per_kv + 8 * n_tiles - 1) / (8 * n_tiles),
          .kv_heads = kv_heads,
          .n_tiles = n_tiles,
          .warps = decode_warps(head_size, n_tiles, arch),
          .grid = multiprocessors};
}

// For the current device: `arch` is that of the code compiled for it.
int decode_arch();
DecodeShape decode_shape_here(int heads, int kv_heads, int head_size);

// Where everything lies in the plan.
struct DecodePlan {
  DecodeHeader* header;
  DecodeSeq* seqs;
  DecodeShare* shares;  // [grid, warps]
  DecodeEnds* ends;     // [grid]
  int* arrived;         // [grid] CTAs done with the head group that begins in this one and ends in another
  // Results of a CTA's first head group, if it began before, and of its last one, if it goes on: as lanes hold them.
  float4* states;  // [grid, 2, n_tiles * 4] max and sum of two heads
  float4* accs;    // [grid, 2, head_size / 16, n_tiles, 32]

  int64_t bytes;
};

inline DecodePlan decode_plan_layout(void* plan, int max_seqs, const DecodeShape& shape, int head_size) {
  int64_t at = 0;
  const auto take = [&]<class T>(T*& pointer, int64_t count) {
    pointer = reinterpret_cast<T*>(static_cast<char*>(plan) + at);
    at += (count * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128;
  };
  const int64_t ctas = shape.grid;
  DecodePlan p{};
  // What does not depend on max_seqs comes first, so that the kernels need not know what the plan was sized for.
  take(p.header, 1);
  take(p.shares, ctas * shape.warps);
  take(p.ends, ctas);
  take(p.arrived, ctas);
  take(p.states, ctas * 2 * shape.n_tiles * 4);
  take(p.accs, ctas * 2 * (head_size / 16) * shape.n_tiles * 32);
  take(p.seqs, max_seqs);
  p.bytes = at;
  return p;
}

}  // namespace quire::cuda
