// How each CTA of a product reads x, where tokens are so few that it holds all of x: into registers of the warps that multiply,
// which convert it and leave it in shared memory.  An RMS norm in front of the product is computed on the way.  That saves
// a kernel, and what the weight of the norm says is there before the kernels in front have ended.
#pragma once

#include "cuda/common/warp.cuh"
#include "cuda/linear/linear.cuh"

namespace quire::cuda::linears {

// Eight lanes hold 128 neighbouring numbers of a token, a record, 16 each.  The multipliers take so many records at once.
constexpr int kRecordOfX = 128, kXBytes = kRecordOfX * static_cast<int>(sizeof(bf16));
constexpr int kUnit = 64;  // half a record
constexpr int kRecordsAtOnce = kMultipliers / 8;
// CTAs hold x if no thread has more parts of it than this, 16 numbers each.  So there are at most as many tokens.
constexpr int kMostParts = 4, kMostTokens = kMostParts;

struct XArgs {
  const void* x;        // [tokens, 128 * records] bf16
  int64_t x_stride;     // numbers
  const void* norm;     // [128 * records] bf16; or null
  float eps;
  int records;  // of a token
};

// Parts of x that a thread has.
inline int parts_of(int tokens, int inner) { return tokens * tiles_of(inner / kRecordOfX, kRecordsAtOnce); }

__device__ inline uint32_t largest_of(const uint4& pairs) {  // the largest magnitudes of even and of odd numbers, in bits
  constexpr uint32_t kMagnitude = 0x7fff7fff;
  return __vmaxu2(__vmaxu2(pairs.x & kMagnitude, pairs.y & kMagnitude),
                  __vmaxu2(pairs.z & kMagnitude, pairs.w & kMagnitude));
}

// A token's numbers of a record, in eight lanes: lane 4 h + t has numbers 8 t to 8 t + 7 of each 32 of half h.
struct RecordOfX {
  uint4 a, b;

  static __device__ int place() { return threadIdx.x % 8 / 4 * kUnit * 2 + threadIdx.x % 4 * 16; }
  __device__ void load(const char* from) {
    a = *reinterpret_cast<const uint4*>(from + place());
    b = *reinterpret_cast<const uint4*>(from + place() + kUnit);
  }
  __device__ void store(char* to) const {
    *reinterpret_cast<uint4*>(to + place()) = a;
    *reinterpret_cast<uint4*>(to + place() + kUnit) = b;
  }
  __device__ uint32_t largest() const { return __vmaxu2(largest_of(a), largest_of(b)); }
  __device__ float squares() const {
    float sum = 0;
    for (const uint4& eight : {a, b}) {
      float x[8];
      widen(reinterpret_cast<const Pack<bf16, 8>&>(eight), x);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += x[i] * x[i];
    }
    return sum;
  }
  __device__ void multiply(float scale, const RecordOfX& weight) {
    const auto product = [scale](uint4& eight, const uint4& by) {
      auto& pack = reinterpret_cast<Pack<bf16, 8>&>(eight);
      float x[8], w[8];
      widen(pack, x);
      widen(reinterpret_cast<const Pack<bf16, 8>&>(by), w);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = x[i] * scale * w[i];
      pack = narrow<bf16>(x);
    };
    product(a, weight.a), product(b, weight.b);
  }
};

// Calls use(i, token, record) for each part that this thread has, i below kMostParts.
template <class Use>
__device__ inline void for_parts(int tokens, int records, const Use& use) {
  int token = 0, record = threadIdx.x / 8;
#pragma unroll
  for (int i = 0; i < kMostParts; ++i) {
    if (token < tokens && record < records) use(i, token, record);
    record += kRecordsAtOnce;
    if (record < records) continue;
    ++token;
    record = threadIdx.x / 8;
  }
}

// Waits for the kernels in front and reads x, by the warps that multiply.
//   room     shared memory for [records] of a token.  Whoever writes there afterwards must first synchronise its warp
//   squares  shared memory: of each token and warp.  Used only if there is a norm
__device__ inline void read_x(const XArgs& a, int tokens, char* room, float (&squares)[kMostTokens][kWarps],
                              RecordOfX (&x)[kMostParts]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (a.norm != nullptr) {
    for (int record = threadIdx.x / 8; record < a.records; record += kRecordsAtOnce) {
      RecordOfX weight;
      weight.load(static_cast<const char*>(a.norm) + record * kXBytes);
      weight.store(room + record * kXBytes);
    }
  }
  wait_for_previous_kernels();
  for_parts(tokens, a.records, [&](int i, int token, int record) {
    x[i].load(static_cast<const char*>(a.x) + token * a.x_stride * sizeof(bf16) + record * kXBytes);
  });
  if (a.norm == nullptr) return;
  float of_thread[kMostTokens] = {};
  for_parts(tokens, a.records, [&](int i, int token, int) {
    const float sum = x[i].squares();
#pragma unroll
    for (int t = 0; t < kMostTokens; ++t) of_thread[t] += t == token ? sum : 0;
  });
#pragma unroll
  for (int token = 0; token < kMostTokens; ++token) {
    if (token >= tokens) break;
    const float of_warp = sum_of_warp(of_thread[token]);
    if (lane == 0) squares[token][warp] = of_warp;
  }
  sync_multipliers();
  const float size = static_cast<float>(a.records * kRecordOfX);
  for_parts(tokens, a.records, [&](int i, int token, int record) {
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += squares[token][w];
    RecordOfX weight;  // as this thread left it
    weight.load(room + record * kXBytes);
    x[i].multiply(rsqrtf(sum / size + a.eps), weight);
  });
}

// Scales of a tile's rows, into shared memory: read at the end, they would take as long as any read from memory.
__device__ inline void read_row_scales(const End& p, int first_feature, const float* scales, float (&to)[kMaxRows]) {
  const int row = threadIdx.x;
  static_assert(kMaxRows <= kMultipliers);
  if (row >= p.rows) return;
  const bool up = row >= p.tile_features;
  const int feature = first_feature + row - (up ? p.tile_features : 0);
  if (feature < p.features) to[row] = scales[feature + (up ? p.features : 0)];
}

}  // namespace quire::cuda::linears
