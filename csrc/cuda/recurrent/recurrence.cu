#include <type_traits>

#include "cuda/common/launch.cuh"
#include "cuda/common/packs.cuh"
#include "cuda/common/warp.cuh"
#include "cuda/recurrent/recurrent.h"

namespace quire::cuda {
namespace {

/* A CTA keeps kColumns columns of one head's state [keys, values] in registers while the tokens of a sequence pass:
 *
 *             lanes 0..7 of a warp: columns
 *   keys  0-3  |  |  |  |  |  |  |  |   lane group 0      a thread has 4 keys of every 16 in one column; two shuffles
 *         4-7  |  |  |  |  |  |  |  |   lane group 1      add the groups' sums over keys
 *         ...
 *
 * Outputs need no second pass over the new state:  q^T (decay S + k w^T) = decay q^T S + (q . k) w. */
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kGroups = 4, kWarpColumns = 32 / kGroups, kColumns = kWarps * kWarpColumns;
// Tokens whose inputs are prepared at the same time; decode steps: one per warp.
constexpr int kPromptTokens = 16, kDecodeTokens = kWarps;
constexpr int kVector = 4;  // elements of a query or key per access to shared memory

// Inputs of up to kTokens tokens, ready for use.
template <int kKeys, int kTokens>
struct alignas(16) Prepared {
  float q[kTokens][kKeys], k[kTokens][kKeys];
  float v[kTokens][kColumns];
  float decay[kTokens];  // factor of the old state
  float beta[kTokens];
  float dot[kTokens];  // q . k
};

// Inputs of the next tokens, still being loaded from memory into registers.
template <class T, int kKeys, int kTokens>
struct Fetched {
  static constexpr int kEach = kKeys / 32;  // elements of a vector per lane
  static constexpr int kWarpTokens = kTokens / kWarps, kValueLoads = kTokens * kColumns / kThreads;
  T q[kWarpTokens][kEach], k[kWarpTokens][kEach], v[kValueLoads];
  float decay, beta;

  // count: tokens from `first` on, at most kTokens.
  __device__ void load(const RecurrenceArgs& a, int head, int column, int first, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, key_head = head / (a.heads / a.key_heads);
#pragma unroll
    for (int i = 0; i < kWarpTokens; ++i) {
      const int token = warp + i * kWarps;
      const T* q_row =
          static_cast<const T*>(a.q.data) + (first + token) * a.q.token_stride + key_head * a.q.head_stride;
      const T* k_row =
          static_cast<const T*>(a.k.data) + (first + token) * a.k.token_stride + key_head * a.k.head_stride;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const int key = lane + e * 32;
        const bool present = token < count && key < a.keys;
        q[i][e] = present ? q_row[key] : from_float<T>(0.0f);
        k[i][e] = present ? k_row[key] : from_float<T>(0.0f);
      }
    }
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i) {
      const int at = threadIdx.x + i * kThreads, token = at / kColumns, value = column + at % kColumns;
      const T* row = static_cast<const T*>(a.v.data) + (first + token) * a.v.token_stride + head * a.v.head_stride;
      v[i] = token < count && value < a.values ? row[value] : from_float<T>(0.0f);
    }
    decay = beta = 0.0f;
    if (threadIdx.x < count) {
      const int64_t at = static_cast<int64_t>(first + threadIdx.x) * a.heads + head;
      decay = a.decay[at];
      if (a.beta) beta = a.beta[at];
    }
  }

  __device__ void prepare(const RecurrenceArgs& a, Prepared<kKeys, kTokens>& to) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kWarpTokens; ++i) {
      const int token = warp + i * kWarps;
      float qq = 0, kk = 0, qk = 0;
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const float x = to_float(q[i][e]), y = to_float(k[i][e]);
        qq = fmaf(x, x, qq), kk = fmaf(y, y, kk), qk = fmaf(x, y, qk);
      }
      qk = sum_of_warp(qk);
      float q_factor = a.q_scale, k_factor = 1.0f;
      if (a.eps > 0) {
        q_factor *= rsqrtf(sum_of_warp(qq) + a.eps);
        k_factor = rsqrtf(sum_of_warp(kk) + a.eps);
      }
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        to.q[token][lane + e * 32] = to_float(q[i][e]) * q_factor;
        to.k[token][lane + e * 32] = to_float(k[i][e]) * k_factor;
      }
      if (lane == 0) to.dot[token] = qk * q_factor * k_factor;
    }
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i) {
      const int at = threadIdx.x + i * kThreads;
      to.v[at / kColumns][at % kColumns] = to_float(v[i]);
    }
    if (threadIdx.x < kTokens) {
      to.decay[threadIdx.x] = expf(decay);
      to.beta[threadIdx.x] = beta;
    }
  }
};

// A thread's part of the state: kShare keys of one column.
template <int kShare>
struct Column {
  float at[kShare];
  int group;         // lane group
  int keys, stride;  // rows of the state; elements between them
  bool present;      // false: past the last column

  __device__ int key(int i) const { return (i / kVector * kGroups + group) * kVector + i % kVector; }

  // Calls use(i, element) with the place of each present key.  The pointer moves on, or there would be one per key.
  template <class Use>
  __device__ void each(float* state, const Use& use) const {
    float* row = state + key(0) * stride;
    const int count = present ? keys : 0;
#pragma unroll
    for (int i = 0; i < kShare; i += kVector, row += kVector * kGroups * stride) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        if (key(i + j) < count) use(i + j, row[j * stride]);
      }
    }
  }

  __device__ void load(float* state) {
#pragma unroll
    for (int i = 0; i < kShare; ++i) at[i] = 0.0f;
    each(state, [&](int i, float& element) { at[i] = element; });
  }

  __device__ void store(float* state) const {
    each(state, [&](int i, float& element) { element = at[i]; });
  }

  // Returns the output of token t, and updates the state by it.
  template <bool kDelta, class Inputs>
  __device__ float step(const Inputs& in, int t, int column) {
    const float decay = in.decay[t];
    float known[kVector] = {}, result[kVector] = {}, k[kShare];
#pragma unroll
    for (int i = 0; i < kShare; i += kVector) {
      const auto keys4 = load_pack<kVector>(&in.k[t][key(i)]), queries4 = load_pack<kVector>(&in.q[t][key(i)]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        k[i + j] = keys4.at[j];
        if constexpr (kDelta) known[j] = fmaf(keys4.at[j], at[i + j], known[j]);
        result[j] = fmaf(queries4.at[j], at[i + j], result[j]);
      }
    }
    float w = in.v[t][column];
    if constexpr (kDelta) w = in.beta[t] * fmaf(-decay, over_groups(known), w);
    const float out = fmaf(decay, over_groups(result), in.dot[t] * w);
#pragma unroll
    for (int i = 0; i < kShare; ++i) at[i] = fmaf(k[i], w, decay * at[i]);
    return out;
  }

  __device__ static float over_groups(const float (&parts)[kVector]) {
    float sum = (parts[0] + parts[1]) + (parts[2] + parts[3]);
#pragma unroll
    for (int lanes = kWarpColumns; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
    return sum;
  }
};

// CTAs per multiprocessor that the registers must allow: states of a decode step come from memory, so many should be on
// their way.
constexpr int min_ctas(int share, int tokens) {
  if (tokens == kPromptTokens) return 1;
  return share <= 16 ? 8 : share <= 32 ? 4 : 2;
}

/* Grid (values / kColumns, heads, sequences), the last sequence first: prompts come after decoding sequences and take
 * longest.  Reads and writes the state once per step.  kTokens: fewer take fewer registers, so that more CTAs of a decode
 * step have their state on the way. */
template <class T, int kShare, bool kDelta, int kTokens>
__global__ void __launch_bounds__(kThreads, min_ctas(kShare, kTokens))
    linear_recurrence_kernel(const __grid_constant__ RecurrenceArgs a) {
  constexpr int kKeys = kShare * kGroups;
  __shared__ Prepared<kKeys, kTokens> inputs;
  let_next_kernel_start();
  wait_for_previous_kernels();
  const Packed& packed = a.packed;
  const int s = gridDim.z - 1 - blockIdx.z, head = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_column = blockIdx.x * kColumns, own = warp * kWarpColumns + lane % kWarpColumns;
  const int value = first_column + own, group = lane / kWarpColumns;
  const int begin = packed.starts[s], end = packed.starts[s + 1];
  if (begin >= end) return;
  const bool present = value < a.values, writes = present && group == 0;
  float* out = a.out + (static_cast<int64_t>(begin) * a.heads + head) * a.values + value;
  const int64_t out_stride = static_cast<int64_t>(a.heads) * a.values;
  if (packed.lens && packed.lens[s] == 0) {
    for (int t = begin; t < end && writes; ++t, out += out_stride) *out = 0.0f;
    return;
  }
  const auto state_at = [&](int64_t place) { return a.states + (place * a.heads + head) * a.keys * a.values + value; };
  Column<kShare> column{.group = group, .keys = a.keys, .stride = a.values, .present = present};
  column.load(state_at(packed.slots[s]));
  const Keep* keep = packed.keeps;
  const Keep* const last_keep = keep + packed.keep_count;
  while (keep < last_keep && keep->end <= begin) ++keep;
  Fetched<T, kKeys, kTokens> fetched;
  fetched.load(a, head, first_column, begin, min(kTokens, end - begin));
  for (int first = begin; first < end; first += kTokens) {
    const int count = min(kTokens, end - first);
    if (first > begin) __syncthreads();  // all threads have read the preceding tokens' inputs
    fetched.prepare(a, inputs);
    __syncthreads();
    if (first + kTokens < end)
      fetched.load(a, head, first_column, first + kTokens, min(kTokens, end - first - kTokens));
    for (int t = 0; t < count; ++t, out += out_stride) {
      const float result = column.template step<kDelta>(inputs, t, own);
      if (writes) *out = result;
      for (; keep < last_keep && keep->end == first + t + 1; ++keep) column.store(state_at(keep->place));
    }
  }
  column.store(state_at(packed.slots[s]));
}

template <class T, int kShare>
void launch_recurrence(const RecurrenceArgs& a, cudaStream_t stream) {
  const dim3 grid((a.values + kColumns - 1) / kColumns, a.heads, a.packed.sequences);
  const auto run = [&](auto delta, auto tokens) {
    launch(linear_recurrence_kernel<T, kShare, delta(), tokens()>, grid, dim3(kThreads), 0, stream, a);
  };
  using std::bool_constant, std::integral_constant;
  const auto with_tokens = [&](auto tokens) {
    a.beta ? run(bool_constant<true>{}, tokens) : run(bool_constant<false>{}, tokens);
  };
  const bool decodes = a.tokens <= a.packed.sequences;
  decodes ? with_tokens(integral_constant<int, kDecodeTokens>{}) : with_tokens(integral_constant<int, kPromptTokens>{});
}

}  // namespace

void linear_recurrence(const RecurrenceArgs& a, cudaStream_t stream) {
  if (a.packed.sequences == 0 || a.heads == 0 || a.values == 0) return;
  by_dtype(a.dtype, [&](auto type) {
    using T = decltype(type);
    if (a.keys <= 32) return launch_recurrence<T, 8>(a, stream);
    if (a.keys <= 64) return launch_recurrence<T, 16>(a, stream);
    if (a.keys <= 128) return launch_recurrence<T, 32>(a, stream);
    launch_recurrence<T, 64>(a, stream);
  });
}

}  // namespace quire::cuda
