// Plan of decode attention, written by decode_plan.cu and read by decode.cuh: where shares begin, and memory for
// partial results.

#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/attention/decode.h"

namespace quire::cuda {

constexpr int kTile = 16;  // keys

// Shared-memory limit of a CTA in bytes, per architecture that the code is compiled for (900: Hopper).
__host__ __device__ constexpr int shared_limit(int arch) {
  if (arch >= 900 && arch < 1200) return 227 << 10;
  return arch == 800 || arch == 870 ? 163 << 10 : 99 << 10;
}

// Shared memory per warp: `stages` tiles of keys and values in flight, and the results of up to two segments.
__host__ __device__ constexpr int decode_warp_bytes(int head_size, int row_bytes, int n_tiles, int stages) {
  return stages * 2 * kTile * (row_bytes + 16) + 2 * head_size * 8 * n_tiles * static_cast<int>(sizeof(float));
}
constexpr int kDecodeOtherBytes = 3 << 10;  // upper bound of a CTA's other shared memory, in bytes

// Warps per CTA: as many, up to 8, as get two stages of shared memory each.  Equal for all cache dtypes, because these
// share the plan.
__host__ __device__ constexpr int decode_warps(int head_size, int n_tiles, int arch) {
  int warps = 8;
  while (warps * decode_warp_bytes(head_size, 2 * head_size, n_tiles, 2) > shared_limit(arch) - kDecodeOtherBytes) {
    warps /= 2;
  }
  return warps;
}

__host__ __device__ constexpr int decode_stages(int head_size, int row_bytes, int n_tiles, int arch) {
  const int warp_bytes = (shared_limit(arch) - kDecodeOtherBytes) / decode_warps(head_size, n_tiles, arch);
  int stages = 2;
  while (stages < 4 && decode_warp_bytes(head_size, row_bytes, n_tiles, stages + 1) <= warp_bytes) ++stages;
  return stages;
}

__host__ __device__ constexpr int decode_shared_bytes(int head_size, int row_bytes, int n_tiles, int arch) {
  const int stages = decode_stages(head_size, row_bytes, n_tiles, arch);
  return decode_warps(head_size, n_tiles, arch) * decode_warp_bytes(head_size, row_bytes, n_tiles, stages) +
         kDecodeOtherBytes;
}

// A sequence, in 16 bytes that are read by one load.
struct alignas(16) DecodeSeq {
  int token;  // index of the query in q and out; -1: none
  int len;
  int first;  // first key inside the window
  int unused;

  __device__ int first_tile() const { return first / kTile; }
  __device__ int end_tile() const { return (len + kTile - 1) / kTile; }
};

// Consecutive tiles for one warp.  count == 0: no work, and the other fields are undefined.
struct alignas(16) DecodeShare {
  int seq;
  int kv_head, part;    // its first head group: number `part` of KV head kv_head
  int tile;             // tile of that sequence at which the share begins
  DecodeSeq begins_in;  // copy of seqs[seq]; its field `unused` holds the share's tile count
  __host__ __device__ int& count() { return begins_in.unused; }
  __host__ __device__ int count() const { return begins_in.unused; }
};

// Head groups that a CTA shares with other CTAs: its first, if that began in an earlier CTA, and its last, if that
// continues in a later CTA.  A shared head group uses the arrival counter of its first CTA.
struct alignas(16) DecodeEnds {
  int first_owner;  // first CTA of this CTA's first head group; -1: that group begins in this CTA
  int first_last;   // last CTA of this CTA's first head group
  int last_last;    // last CTA of this CTA's last head group; -1: that ends in this CTA, or began in an earlier one
  int unused;
};

struct alignas(16) DecodeHeader {
  int ctas;   // CTAs that have work
  int empty;  // sequences without keys, whose output becomes zeros
};

struct DecodeShape {
  int heads_per_kv;
  int parts_per_kv;  // head groups of a KV head
  int kv_heads;
  int n_tiles;  // mma n tiles (8 heads) per head group: 1 or 2
  int warps;    // warps per CTA
  int grid;     // CTAs
};

inline DecodeShape decode_shape(int heads, int kv_heads, int head_size, int multiprocessors, int arch) {
  const int per_kv = heads / kv_heads;
  // With head sizes over 128 the accumulators of 16 heads do not fit into registers.
  const int n_tiles = per_kv <= 8 || head_size > 128 ? 1 : 2;
  return {.heads_per_kv = per_kv,
          .parts_per_kv = (per_kv + 8 * n_tiles - 1) / (8 * n_tiles),
          .kv_heads = kv_heads,
          .n_tiles = n_tiles,
          .warps = decode_warps(head_size, n_tiles, arch),
          .grid = multiprocessors};
}

// For the current device: `arch` is the architecture of the code compiled for it.
int decode_arch();
DecodeShape decode_shape_here(int heads, int kv_heads, int head_size);

// Layout of the plan's memory.
struct DecodePlan {
  DecodeHeader* header;
  DecodeSeq* seqs;
  DecodeShare* shares;  // [grid, warps]
  DecodeEnds* ends;     // [grid]
  int* arrived;         // [grid] CTAs that are done with the head group that begins in this CTA and ends in another
  // Partial results of a CTA, in register layout: for its first head group, if that began in an earlier CTA, and for
  // its last, if that continues in a later CTA.
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
  // Arrays independent of max_seqs come first, so that the kernels need not know the capacity of the plan.
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
