#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/recurrent/recurrent.h"

namespace quire::cuda {
namespace {

constexpr int kThreads = 128;      // channels per CTA
constexpr int kMostTokens = 16;    // maximum tokens per CTA
constexpr int kTokenShares = 128;  // shares of the tokens, so that short steps occupy all multiprocessors

// Returns the last sequence that starts at or before the token.
__device__ int sequence_of(const Packed& packed, int token) {
  const int32_t* starts = packed.starts;
  // Sequences of one token come first, so in a decode step no token needs the search below.
  if (token < packed.sequences && starts[token] == token && starts[token + 1] > token) return token;
  int low = 0, high = packed.sequences;  // starts[low] <= token, and token < starts[high] or high is the end
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (starts[middle] <= token ? low : high) = middle;
  }
  return low;
}

__device__ float silu_of(float x) { return x / (1.0f + __expf(-x)); }

/* One channel of one sequence: the inputs of this step, and before them those in the state.
 * Only the CTA that holds the sequence's first token reads and writes its state. */
template <class T, int kPast>
struct Channel {
  const T* x;  // first input of this step
  int64_t x_stride;
  T old[kPast];  // the state before the step

  // Input i of the step; i < 0: an earlier input, from the state.
  __device__ T input(int i) const {
    if (i >= 0) return x[i * x_stride];
    T value = old[0];
#pragma unroll
    for (int j = 1; j < kPast; ++j) {
      if (kPast + i == j) value = old[j];
    }
    return value;
  }

  // Writes the newest inputs before the step's token `end` to a state.
  __device__ void save(T* state, int64_t channels, int end) const {
#pragma unroll
    for (int j = 0; j < kPast; ++j) state[j * channels] = input(end - kPast + j);
  }
};

/* Grid (channels / kThreads, tokens / tile): a thread computes one channel of `tile` tokens.  Some inputs of a sequence's
 * first kPast tokens are in its state, so the CTA that has the sequence's first token computes all of these tokens. */
template <class T, int kTaps>
__global__ void __launch_bounds__(kThreads) causal_conv_kernel(ConvArgs a, int tile) {
  constexpr int kPast = kTaps - 1;
  let_next_kernel_start();
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= a.channels) return;
  float weight[kTaps];
#pragma unroll
  for (int j = 0; j < kTaps; ++j) weight[j] = a.weight[j * a.channels + c];
  const float bias = a.bias ? a.bias[c] : 0.0f;
  wait_for_previous_kernels();
  const T* x = static_cast<const T*>(a.x) + c;
  T *states = static_cast<T*>(a.states) + c, *out = static_cast<T*>(a.out) + c;
  const Packed& packed = a.packed;
  int t = blockIdx.y * tile;
  const int last = min(t + tile, static_cast<int>(a.tokens));
  for (int s = sequence_of(packed, t); t < last && s < packed.sequences; ++s) {
    const int begin = packed.starts[s], end = packed.starts[s + 1];
    if (end <= t) continue;
    int stop = min(end, last);
    if (packed.lens && packed.lens[s] == 0) {
      for (; t < stop; ++t) out[t * a.channels] = from_float<T>(0.0f);
      continue;
    }
    const bool first = t == begin;
    T* state = states + packed.slots[s] * kPast * a.channels;
    Channel<T, kPast> channel{x + begin * a.x_stride, a.x_stride};
    if (first) {
#pragma unroll
      for (int j = 0; j < kPast; ++j) channel.old[j] = state[j * a.channels];
      stop = max(stop, min(end, begin + kPast));
    } else {
      t = min(max(t, begin + kPast), stop);
    }
    if (t < stop) {
      float window[kTaps];
#pragma unroll
      for (int j = 0; j < kPast; ++j) window[j] = to_float(channel.input(t - begin - kPast + j));
#pragma unroll 4
      for (int at = t; at < stop; ++at) {
        window[kPast] = to_float(x[at * a.x_stride]);
        float sum = bias;
#pragma unroll
        for (int j = 0; j < kTaps; ++j) sum = fmaf(window[j], weight[j], sum);
        out[at * a.channels] = from_float<T>(a.silu ? silu_of(sum) : sum);
#pragma unroll
        for (int j = 0; j < kPast; ++j) window[j] = window[j + 1];
      }
    }
    if (first) {
      for (int i = 0; i < packed.keep_count; ++i) {
        const Keep keep = packed.keeps[i];
        if (keep.end > begin && keep.end <= end)
          channel.save(states + keep.place * kPast * a.channels, a.channels, keep.end - begin);
      }
      channel.save(state, a.channels, end - begin);
    }
    t = max(t, stop);
  }
}

template <int kTaps>
void launch_conv(const ConvArgs& a, cudaStream_t stream) {
  const int tile = static_cast<int>(std::clamp<int64_t>(a.tokens / kTokenShares, 1, kMostTokens));
  const dim3 grid((a.channels + kThreads - 1) / kThreads, (a.tokens + tile - 1) / tile);
  by_dtype(a.dtype, [&](auto type) {
    launch(causal_conv_kernel<decltype(type), kTaps>, grid, dim3(kThreads), 0, stream, a, tile);
  });
}

}  // namespace

void causal_conv(const ConvArgs& a, cudaStream_t stream) {
  if (a.tokens == 0 || a.channels == 0) return;
  switch (a.taps) {
    case 2: return launch_conv<2>(a, stream);
    case 3: return launch_conv<3>(a, stream);
    default: return launch_conv<4>(a, stream);
  }
}

}  // namespace quire::cuda
