// The GEMMs of `experts` on any GPU since Ampere, for any sizes.
//
//   gate_up   x ──> between [pairs, inner] = silu(gate) * up       grid (blocks of inner, max chosen experts)
//   down      between ──> sums [pairs, hidden], with biases         grid (blocks of hidden, max chosen experts)
//
// CTAs with blockIdx.y == n compute all pairs of the n-th chosen expert.  So that expert's rows are read from memory
// once for up to 32 pairs.  A group of warps multiplies 16 rows by the pairs, 8 pairs at a time, on tensor cores. Each
// warp of a group takes every kSlices-th chunk of the contracted dimension.  Its lanes load both operands straight into
// registers:
//
//   16 rows   lane 4g + t: elements 8t .. 8t + 7 of every 32, of rows g and g + 8    A of two mma16816
//   8 pairs   lane 4g + t: the same elements of pair g                               B
//
// A dot product may add its terms in any order.  So the first mma takes four of a lane's eight elements as columns 2t,
// 2t + 1, 2t + 8 and 2t + 9, and the second mma takes the other four.
#include <algorithm>
#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/tensor_core.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/experts/experts.h"
#include "cuda/experts/parts.cuh"

namespace quire::cuda {
namespace {

constexpr int kWarp = 32, kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kWidth = 8;                        // elements per load of a lane
constexpr int kStep = 4 * kWidth, kSteps = 4;    // elements of a row that a warp loads at once; loads in flight
constexpr int kChunk = kSteps * kStep;           // elements of a row per iteration of a warp
constexpr int kPairs = 8, kMaxTiles = 4;         // pairs per tile; tiles per loaded weight
constexpr int kGateSlices = 4, kDownSlices = 2;  // warps that split a row's elements
constexpr int kGateRows = 8, kDownRows = 16;     // rows of `between` and of `sums` per group of warps
constexpr int kGatesOfCta = kWarps / kGateSlices * kGateRows, kDownsOfCta = kWarps / kDownSlices * kDownRows;
constexpr int kManyCtas = 1024, kMaxTurns = 4;  // a CTA takes CTAs / kManyCtas row blocks, at most kMaxTurns

struct Pairs {
  uint32_t chosen[kMaxExperts / kWarp];  // bit e: a token has chosen expert e
  int counts[kMaxPairs / kWarp];
  int list[kMaxPairs];  // pairs of one expert, in ascending order
};

// Lists the pairs of the n-th chosen expert, n = blockIdx.y.  Returns their number, or 0 if fewer experts are chosen.
__device__ int find_pairs(const int* chosen, int pairs, Pairs& found, int& expert) {
  constexpr int kRounds = kMaxPairs / kThreads, kWords = kMaxExperts / kWarp;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (threadIdx.x < kWords) found.chosen[threadIdx.x] = 0;
  __syncthreads();
  int of_pair[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int pair = round * kThreads + threadIdx.x;
    of_pair[round] = pair < pairs ? chosen[pair] : -1;
    if (of_pair[round] >= 0) atomicOr(&found.chosen[of_pair[round] / kWarp], 1u << of_pair[round] % kWarp);
  }
  __syncthreads();
  expert = -1;
  for (int word = 0, left = blockIdx.y; word < kWords && expert < 0; ++word) {
    uint32_t bits = found.chosen[word];
    if (left >= __popc(bits)) {
      left -= __popc(bits);
      continue;
    }
    for (; left > 0; --left) bits &= bits - 1;
    expert = word * kWarp + __ffs(bits) - 1;
  }
  if (expert < 0) return 0;
  unsigned with_expert[kRounds];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    with_expert[round] = __ballot_sync(kAllLanes, of_pair[round] == expert);
    if (lane == 0) found.counts[round * kWarps + warp] = __popc(with_expert[round]);
  }
  __syncthreads();
  int count = 0;
#pragma unroll
  for (int i = 0; i < kRounds * kWarps; ++i) {
    const int round = i / kWarps;
    if (i % kWarps == warp && with_expert[round] >> lane & 1) {
      found.list[count + __popc(with_expert[round] & ((1u << lane) - 1))] = round * kThreads + threadIdx.x;
    }
    count += found.counts[i];
  }
  __syncthreads();
  return count;
}

// Loads 16 bytes at p, or returns zeros unless `inside`.  Does not branch, so the lanes stay converged for the mma.
__device__ uint4 load_inputs(const void* p, bool inside) {
  uint4 numbers;
  asm("{\n.reg .pred inside;\nsetp.ne.b32 inside, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@inside ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(numbers.x), "=&r"(numbers.y), "=&r"(numbers.z), "=&r"(numbers.w)
      : "l"(p), "r"(static_cast<int>(inside)));
  return numbers;
}

// load_inputs() for weights.  Each weight is read once, by one lane, so L1 does not keep it.
__device__ uint4 load_weights(const void* p, bool inside) {
  uint4 numbers;
  asm("{\n.reg .pred inside;\nsetp.ne.b32 inside, %5, 0;\nmov.b32 %0, 0;\nmov.b32 %1, 0;\nmov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n@inside ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
      : "=&r"(numbers.x), "=&r"(numbers.y), "=&r"(numbers.z), "=&r"(numbers.w)
      : "l"(p), "r"(static_cast<int>(inside)));
  return numbers;
}

// Multiplies 16 rows by the pairs of each tile n, over this warp's chunks of the `size` elements, and adds the results
// to sums[n].  low, high: weights of rows g and g + 8.  x[n]: input of pair g of tile n.  A lane's four sums: row g
// with pairs 2t and 2t + 1, then row g + 8 with the same pairs.
template <int kSlices, class T, int kTiles>
__device__ void multiply(const T* low, const T* high, const T* const (&x)[kTiles], int size, int slice,
                         float (&sums)[kTiles][4]) {
  const int of_lane = threadIdx.x % 4 * kWidth;
  for (int chunk = slice * kChunk; chunk < size; chunk += kSlices * kChunk) {
    uint4 of_low[kSteps], of_high[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = chunk + step * kStep + of_lane;
      of_low[step] = load_weights(low + at, at < size);
      of_high[step] = load_weights(high + at, at < size);
    }
    constexpr int kAhead = kTiles > 2 ? 1 : kSteps;  // steps for which x fits into registers
#pragma unroll
    for (int first = 0; first < kSteps; first += kAhead) {
      uint4 of_x[kAhead][kTiles];
#pragma unroll
      for (int i = 0; i < kAhead * kTiles; ++i) {
        const int at = chunk + (first + i / kTiles) * kStep + of_lane;
        of_x[i / kTiles][i % kTiles] = load_inputs(x[i % kTiles] + at, at < size);
      }
#pragma unroll
      for (int i = 0; i < kAhead * kTiles; ++i) {
        const uint4 l = of_low[first + i / kTiles], h = of_high[first + i / kTiles], y = of_x[i / kTiles][i % kTiles];
        mma16816<T>(sums[i % kTiles], {l.x, h.x, l.y, h.y}, {y.x, y.y});
        mma16816<T>(sums[i % kTiles], {l.z, h.z, l.w, h.w}, {y.z, y.w});
      }
    }
  }
}

using Partial = float[kWarps][kMaxTiles * 4][kWarp];  // accumulators per warp and lane

// Multiplies 16 rows by all pairs of an expert.  of_pair(i): input of pair i of the list.  For each i one of the
// kSlices warps that share a tile calls use(i, low, high) with the results of rows lane / 4 and lane / 4 + 8.  All
// threads of the CTA must call this.
template <int kSlices, class T, class OfPair, class Use>
__device__ void for_all_pairs(int count, const T* low, const T* high, int size, Partial& partial, const OfPair& of_pair,
                              const Use& use) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, slice = warp % kSlices;
  const auto run = [&](auto tiles, int first) {
    constexpr int kTiles = tiles;
    const T* x[kTiles];
    float sums[kTiles][4] = {};
#pragma unroll
    for (int n = 0; n < kTiles; ++n) x[n] = of_pair(min(first + n * kPairs + lane / 4, count - 1));
    multiply<kSlices>(low, high, x, size, slice, sums);
    if (slice > 0) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) partial[warp][i][lane] = sums[i / 4][i % 4];
    }
    __syncthreads();
    if (slice == 0) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) {
#pragma unroll
        for (int other = 1; other < kSlices; ++other) sums[i / 4][i % 4] += partial[warp + other][i][lane];
      }
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int pair = first + n * kPairs + lane % 4 * 2 + j;
          if (pair < count) use(pair, sums[n][j], sums[n][2 + j]);
        }
      }
    }
    __syncthreads();  // the next iteration overwrites `partial`
  };
  for (int first = 0; first < count;) {
    if (count - first <= kPairs) {
      run(std::integral_constant<int, 1>{}, first), first += kPairs;
    } else if (count - first <= 2 * kPairs) {
      run(std::integral_constant<int, 2>{}, first), first += 2 * kPairs;
    } else {
      run(std::integral_constant<int, kMaxTiles>{}, first), first += kMaxTiles * kPairs;
    }
  }
}

// Rows g and g + 8 of the 16 are a gate row and its up row.
template <class T, Activation kActivation>
__global__ void __launch_bounds__(kThreads, 2) gate_up_kernel(ExpertsArgs a) {
  __shared__ Pairs found;
  __shared__ Partial partial;
  let_next_kernel_start();
  wait_for_previous_kernels();
  int expert;
  const int count = find_pairs(a.chosen, a.tokens * a.top, found, expert);
  if (count == 0) return;
  constexpr bool kInTurn = kActivation == Activation::clamped;
  const int group = threadIdx.x / kWarp / kGateSlices, lane = threadIdx.x % kWarp;
  const int64_t first_row = static_cast<int64_t>(expert) * 2 * a.inner;
  const T* const weight = static_cast<const T*>(a.gate_up);
  const T* const bias = static_cast<const T*>(a.gate_up_bias);
  for (int first = blockIdx.x * kGatesOfCta; first < a.inner; first += gridDim.x * kGatesOfCta) {
    const int row = first + group * kGateRows + lane / 4, inside = min(row, a.inner - 1);
    const int gate = kInTurn ? 2 * inside : inside, up = gate + (kInTurn ? 1 : a.inner);
    const float gate_bias = bias == nullptr ? 0 : to_float(bias[first_row + gate]);
    const float up_bias = bias == nullptr ? 0 : to_float(bias[first_row + up]);
    for_all_pairs<kGateSlices>(
        count, weight + (first_row + gate) * a.hidden, weight + (first_row + up) * a.hidden, a.hidden, partial,
        [&](int i) { return static_cast<const T*>(a.x) + static_cast<int64_t>(found.list[i] / a.top) * a.hidden; },
        [&](int i, float of_gate, float of_up) {
          if (row >= a.inner) return;
          T* const to = static_cast<T*>(a.between) + static_cast<int64_t>(found.list[i]) * a.inner;
          to[row] = activated<T, kActivation>(of_gate + gate_bias, of_up + up_bias, a);
        });
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 2) down_kernel(ExpertsArgs a) {
  __shared__ Pairs found;
  __shared__ Partial partial;
  let_next_kernel_start();
  wait_for_previous_kernels();
  int expert;
  const int count = find_pairs(a.chosen, a.tokens * a.top, found, expert);
  if (count == 0) return;
  const int group = threadIdx.x / kWarp / kDownSlices, lane = threadIdx.x % kWarp;
  const int64_t first_row = static_cast<int64_t>(expert) * a.hidden;
  const T* const weight = static_cast<const T*>(a.down);
  const T* const bias = static_cast<const T*>(a.down_bias);
  for (int first = blockIdx.x * kDownsOfCta; first < a.hidden; first += gridDim.x * kDownsOfCta) {
    const int low = first + group * kDownRows + lane / 4, high = low + kDownRows / 2;
    const int64_t low_row = first_row + min(low, a.hidden - 1), high_row = first_row + min(high, a.hidden - 1);
    const float low_bias = bias == nullptr ? 0 : to_float(bias[low_row]);
    const float high_bias = bias == nullptr ? 0 : to_float(bias[high_row]);
    for_all_pairs<kDownSlices>(
        count, weight + low_row * a.inner, weight + high_row * a.inner, a.inner, partial,
        [&](int i) { return static_cast<const T*>(a.between) + static_cast<int64_t>(found.list[i]) * a.inner; },
        [&](int i, float of_low, float of_high) {
          float* const to = static_cast<float*>(a.sums) + static_cast<int64_t>(found.list[i]) * a.hidden;
          if (low < a.hidden) to[low] = of_low + low_bias;
          if (high < a.hidden) to[high] = of_high + high_bias;
        });
  }
}

unsigned parts(int n, int size) { return static_cast<unsigned>((n + size - 1) / size); }

// Returns the number of CTAs that share the `blocks` row blocks of each expert.  If there are many blocks, a CTA takes
// several, so that it lists its pairs only once.
unsigned shares(unsigned blocks, unsigned experts) {
  const unsigned turns = std::clamp<unsigned>(blocks * experts / kManyCtas, 1, kMaxTurns);
  return (blocks + turns - 1) / turns;
}

}  // namespace

void experts_mma(const ExpertsArgs& a, cudaStream_t stream) {
  const unsigned most = std::min(a.tokens * a.top, a.experts);  // maximum of chosen experts
  by_half_dtype(a.dtype, [&](auto number) {
    using T = decltype(number);
    const auto gate_up = a.activation == Activation::clamped ? gate_up_kernel<T, Activation::clamped>
                                                             : gate_up_kernel<T, Activation::silu>;
    launch(gate_up, dim3(shares(parts(a.inner, kGatesOfCta), most), most), dim3(kThreads), 0, stream, a);
    launch(down_kernel<T>, dim3(shares(parts(a.hidden, kDownsOfCta), most), most), dim3(kThreads), 0, stream, a);
  });
}

}  // namespace quire::cuda
