// A step of few tokens is as fast as the weights of its experts can be read, each of them once.
//
//   logits [tokens, experts] ── route ──> chosen, weights [tokens, top]: a pair is a token and one of its experts
//
//   gate_up   x ──> between [pairs, inner] = silu(gate) * up       grid (rows of inner, pairs)
//   down      between ──> sums [pairs, hidden], with biases         grid (rows of hidden, pairs)
//   combine   out += sum over a token's pairs of weight * sums      grid (parts of hidden, tokens)
//
// The CTAs of the first pair with an expert compute all pairs with it, the others leave at once.  So an expert's rows are
// read from memory once, 8 pairs at a time.  A warp takes a few rows, over their whole length.  Sums are float32, in one
// order: results do not depend on the other tokens.
#include "cuda/experts/experts.h"

#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/numbers.cuh"
#include "cuda/common/warp.cuh"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32, kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kWidth = 8;                   // numbers that a lane reads at once
constexpr int kGateRows = 2, kDownRows = 4;  // rows of `between` and of `sums` that a warp makes

__device__ float sum_of_warp(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ float max_of_warp(float x) {
  for (int step = kWarp / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// Orders numbers by size, NaN apart, and equal ones by their place.  No two are equal, and none is 0.
__device__ uint64_t order_of(float x, int place) {
  const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 becomes 0
  const uint32_t ordered = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return static_cast<uint64_t>(ordered) << 32 | static_cast<uint32_t>(~place);
}

/* Grid (tokens), a warp each, a lane for kPerLane experts.  Moves the logits. */
template <class T, int kPerLane>
__global__ void route_kernel(RouteArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int token = blockIdx.x, lane = threadIdx.x;
  const T* const row = static_cast<const T*>(a.logits) + static_cast<int64_t>(token) * a.experts;
  float x[kPerLane], largest = -INFINITY, sum = 0;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = i * kWarp + lane;
    x[i] = expert < a.experts ? to_float(row[expert]) : -INFINITY;
    largest = fmaxf(largest, x[i]);
  }
  largest = max_of_warp(largest);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) sum += i * kWarp + lane < a.experts ? expf(x[i] - largest) : 0;
  sum = sum_of_warp(sum);

  uint32_t taken = 0;  // bit i: x[i]
  float mine = 0, chosen_sum = 0;
  int expert_of_mine = 0;
  for (int k = 0; k < a.top; ++k) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = i * kWarp + lane;
      if (expert < a.experts && !(taken >> i & 1)) best = max(best, order_of(x[i], expert));
    }
    for (int step = kWarp / 2; step > 0; step /= 2) best = max(best, __shfl_xor_sync(kAllLanes, best, step));
    const int expert = static_cast<int>(~static_cast<uint32_t>(best));
    float weight = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i * kWarp + lane != expert) continue;
      taken |= 1u << i;
      weight = expf(x[i] - largest) / sum;
    }
    weight = __shfl_sync(kAllLanes, weight, expert % kWarp);
    chosen_sum += weight;
    if (lane == k) mine = weight, expert_of_mine = expert;
  }
  if (lane >= a.top) return;
  if (a.normalise) mine /= chosen_sum;
  if (a.rounded) mine = to_float(from_float<T>(mine));
  a.chosen[token * a.top + lane] = expert_of_mine;
  a.weights[token * a.top + lane] = mine;
}

// The pairs with the expert of pair blockIdx.y, rising, in list[result]; 0 if an earlier one has it, too.
__device__ int find_pairs(const int* chosen, int pairs, int* list, int (&counts)[kMostPairs / kWarp]) {
  constexpr int kRounds = kMostPairs / kThreads;
  const int expert = chosen[blockIdx.y], warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  unsigned found[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int pair = round * kThreads + threadIdx.x;
    found[round] = __ballot_sync(kAllLanes, pair < pairs && chosen[pair] == expert);
    if (lane == 0) counts[round * kWarps + warp] = __popc(found[round]);
  }
  __syncthreads();
  int count = 0;
#pragma unroll
  for (int i = 0; i < kRounds * kWarps; ++i) {
    const int round = i / kWarps;
    if (i % kWarps == warp && found[round] >> lane & 1) {
      list[count + __popc(found[round] & ((1u << lane) - 1))] = round * kThreads + threadIdx.x;
    }
    count += counts[i];
  }
  __syncthreads();
  return list[0] == static_cast<int>(blockIdx.y) ? count : 0;
}

// sums[r][t] = w[r] . x[t] over `size` numbers, in every lane.
template <class T, int kRows, int kTokens>
__device__ void multiply(const T* const (&w)[kRows], const T* const (&x)[kTokens], int size,
                         float (&sums)[kRows][kTokens]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[r][t] = 0;
  }
#pragma unroll 2
  for (int at = threadIdx.x % kWarp * kWidth; at < size; at += kWarp * kWidth) {
    Pack<T, kWidth> rows[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) rows[r] = load_pack<kWidth>(w[r] + at);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      float of_token[kWidth];
      widen(load_pack<kWidth>(x[t] + at), of_token);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float of_row[kWidth];
        widen(rows[r], of_row);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) sums[r][t] += of_row[i] * of_token[i];
      }
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[r][t] = sum_of_warp(sums[r][t]);
  }
}

// Adds to the sums of row r, in every lane, the bias that lane r holds.
template <int kRows, int kTokens>
__device__ void add_biases(float bias_of_lane, float (&sums)[kRows][kTokens]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float bias = __shfl_sync(kAllLanes, bias_of_lane, r);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) sums[r][t] += bias;
  }
}

// Calls make(width{}, first) for pairs first, first + 1, ... of the list, up to width at once.
template <class Make>
__device__ void in_groups(int count, const Make& make) {
  for (int first = 0; first < count;) {
    if (count - first == 1) {
      make(std::integral_constant<int, 1>{}, first), first += 1;
    } else if (count - first <= 4) {
      make(std::integral_constant<int, 4>{}, first), first += 4;
    } else {
      make(std::integral_constant<int, 8>{}, first), first += 8;
    }
  }
}

// What an expert makes of these sums.  `silu` rounds as a chain of operators in T would, `clamped` once, at the end.
template <class T, Activation kActivation>
__device__ T activated(float gate, float up, const ExpertsArgs& a) {
  if constexpr (kActivation == Activation::silu) {
    gate = to_float(from_float<T>(gate)), up = to_float(from_float<T>(up));
    return from_float<T>(to_float(from_float<T>(gate / (1 + __expf(-gate)))) * up);
  }
  // Not by fminf and fmaxf, which would hide NaN.
  gate = gate > a.limit ? a.limit : gate;
  up = up > a.limit ? a.limit : up < -a.limit ? -a.limit : up;
  return from_float<T>((up + 1) * gate / (1 + __expf(-a.alpha * gate)));
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 2) gate_up_kernel(ExpertsArgs a) {
  constexpr bool kInTurn = kActivation == Activation::clamped;
  __shared__ int list[kMostPairs], counts[kMostPairs / kWarp];
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int count = find_pairs(a.chosen, a.tokens * a.top, list, counts), lane = threadIdx.x % kWarp;
  const int first_row = (blockIdx.x * kWarps + threadIdx.x / kWarp) * kGateRows;
  if (count == 0 || first_row >= a.inner) return;
  const int64_t first_of_expert = static_cast<int64_t>(a.chosen[blockIdx.y]) * 2 * a.inner;
  const T* const weight = static_cast<const T*>(a.gate_up) + first_of_expert * a.hidden;
  const T* const bias = a.gate_up_bias == nullptr ? nullptr : static_cast<const T*>(a.gate_up_bias) + first_of_expert;
  const int to_up = kInTurn ? 1 : a.inner;  // rows from a gate row to its up row
  const auto gate_row = [&](int r) { return min(first_row + r, a.inner - 1) * (kInTurn ? 2 : 1); };
  float bias_of_lane = 0;
  if (bias != nullptr && lane < 2 * kGateRows) {
    bias_of_lane = to_float(bias[gate_row(lane % kGateRows) + lane / kGateRows * to_up]);
  }
  const T* rows[2 * kGateRows];
#pragma unroll
  for (int r = 0; r < kGateRows; ++r) {
    rows[r] = weight + static_cast<int64_t>(gate_row(r)) * a.hidden;
    rows[kGateRows + r] = rows[r] + static_cast<int64_t>(to_up) * a.hidden;
  }
  in_groups(count, [&](auto width, int first) {
    constexpr int kTokens = width;
    const T* x[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const int token = list[min(first + t, count - 1)] / a.top;
      x[t] = static_cast<const T*>(a.x) + static_cast<int64_t>(token) * a.hidden;
    }
    float sums[2 * kGateRows][kTokens];
    multiply(rows, x, a.hidden, sums);
    add_biases(bias_of_lane, sums);
    if (lane > 0) return;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (first + t >= count) continue;
      T* const to = static_cast<T*>(a.between) + static_cast<int64_t>(list[first + t]) * a.inner;
#pragma unroll
      for (int r = 0; r < kGateRows; ++r) {
        if (first_row + r >= a.inner) continue;
        const float gate = sums[r][t], up = sums[kGateRows + r][t];
        to[first_row + r] = activated<T, kActivation>(gate, up, a);
      }
    }
  });
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) down_kernel(ExpertsArgs a) {
  __shared__ int list[kMostPairs], counts[kMostPairs / kWarp];
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int count = find_pairs(a.chosen, a.tokens * a.top, list, counts), lane = threadIdx.x % kWarp;
  const int first_row = (blockIdx.x * kWarps + threadIdx.x / kWarp) * kDownRows;
  if (count == 0 || first_row >= a.hidden) return;
  const int64_t first_of_expert = static_cast<int64_t>(a.chosen[blockIdx.y]) * a.hidden;
  const T* const weight = static_cast<const T*>(a.down) + first_of_expert * a.inner;
  const T* const bias = a.down_bias == nullptr ? nullptr : static_cast<const T*>(a.down_bias) + first_of_expert;
  const auto row_at = [&](int i) { return min(first_row + i, a.hidden - 1); };
  const float bias_of_lane = bias != nullptr && lane < kDownRows ? to_float(bias[row_at(lane)]) : 0;
  const T* rows[kDownRows];
#pragma unroll
  for (int r = 0; r < kDownRows; ++r) rows[r] = weight + static_cast<int64_t>(row_at(r)) * a.inner;
  in_groups(count, [&](auto width, int first) {
    constexpr int kTokens = width;
    const T* x[kTokens];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      x[t] = static_cast<const T*>(a.between) + static_cast<int64_t>(list[min(first + t, count - 1)]) * a.inner;
    }
    float sums[kDownRows][kTokens];
    multiply(rows, x, a.inner, sums);
    add_biases(bias_of_lane, sums);
    if (lane > 0) return;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (first + t >= count) continue;
      float* const to = a.sums + static_cast<int64_t>(list[first + t]) * a.hidden;
#pragma unroll
      for (int r = 0; r < kDownRows; ++r) {
        if (first_row + r < a.hidden) to[first_row + r] = sums[r][t];
      }
    }
  });
}

template <class T>
__global__ void combine_kernel(ExpertsArgs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int at = (blockIdx.x * blockDim.x + threadIdx.x) * kWidth, token = blockIdx.y;
  if (at >= a.hidden) return;
  T* const out = static_cast<T*>(a.out) + static_cast<int64_t>(token) * a.hidden + at;
  float y[kWidth], total[kWidth] = {};
  for (int k = 0; k < a.top; ++k) {
    const int pair = token * a.top + k;
    const float weight = a.weights[pair];
    const float4* const sums = reinterpret_cast<const float4*>(a.sums + static_cast<int64_t>(pair) * a.hidden + at);
    const float4 first = sums[0], second = sums[1];
    const float of_pair[kWidth] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int i = 0; i < kWidth; ++i) total[i] += weight * of_pair[i];
  }
  widen(load_pack<kWidth>(out), y);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) y[i] += to_float(from_float<T>(total[i]));
  store_pack(out, narrow<T>(y));
}

unsigned parts(int n, int size) { return static_cast<unsigned>((n + size - 1) / size); }

template <class Run>
void by_half_dtype(Dtype dtype, const Run& run) {
  dtype == Dtype::fp16 ? run(fp16{}) : run(bf16{});
}

}  // namespace

void route(const RouteArgs& a, cudaStream_t stream) {
  if (a.tokens == 0) return;
  by_half_dtype(a.dtype, [&](auto number) {
    using T = decltype(number);
    const auto kernel = a.experts <= 2 * kWarp   ? route_kernel<T, 2>
                        : a.experts <= 4 * kWarp ? route_kernel<T, 4>
                        : a.experts <= 8 * kWarp ? route_kernel<T, 8>
                                                 : route_kernel<T, kMostExperts / kWarp>;
    launch(kernel, dim3(a.tokens), dim3(kWarp), 0, stream, a);
  });
}

void experts(const ExpertsArgs& a, cudaStream_t stream) {
  if (a.tokens == 0) return;
  const unsigned pairs = a.tokens * a.top;
  by_half_dtype(a.dtype, [&](auto number) {
    using T = decltype(number);
    const auto gate_up = a.activation == Activation::clamped ? gate_up_kernel<T, Activation::clamped>
                                                             : gate_up_kernel<T, Activation::silu>;
    launch(gate_up, dim3(parts(a.inner, kWarps * kGateRows), pairs), dim3(kThreads), 0, stream, a);
    launch(down_kernel<T>, dim3(parts(a.hidden, kWarps * kDownRows), pairs), dim3(kThreads), 0, stream, a);
    constexpr int kSmall = 128;
    launch(combine_kernel<T>, dim3(parts(a.hidden, kSmall * kWidth), a.tokens), dim3(kSmall), 0, stream, a);
  });
}

}  // namespace quire::cuda
