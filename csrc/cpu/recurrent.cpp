#include "cpu/recurrent.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/pool.h"
#include "cpu/simd.h"

namespace quire::cpu {
namespace {

constexpr int64_t kChannels = 512;  // channels per work item of the convolution
constexpr int64_t kTokens = 16;     // tokens whose keys and queries are prepared at once
constexpr int kColumns = 2;         // vectors of state columns that stay in L1 for kTokens tokens
constexpr int kSums = 4;            // partial sums over keys, so that additions overlap
// Multiplications below which waking a second thread takes longer than it saves.
constexpr int64_t kWorkOnce = 64 << 10;

// exp2 supports arguments up to 126, so e^-x is capped; silu(x) is then a tiny negative value.
Floats silu(Floats x) { return x / (1.0f + exp2(-max(x * broadcast(1.4426950408889634f), broadcast(-126.0f)))); }

// Computes a range of channels of one sequence: all its tokens, then the new state.
template <class T>
void conv_channels(const ConvArgs<T>& a, int64_t sequence, int64_t first, int64_t end) {
  const int64_t begin = a.packed.starts[sequence], count = a.packed.starts[sequence + 1] - begin;
  const int64_t past = a.taps - 1, channels = a.channels;
  if (a.packed.is_padding(sequence)) {
    for (int64_t t = 0; t < count; ++t) std::fill_n(a.out + (begin + t) * channels + first, end - first, T{});
    return;
  }
  T* state = a.states + a.packed.slots[sequence] * past * channels;
  // Input i of the sequence in this step; i < 0: inputs of earlier steps, from the state.
  const auto input = [&](int64_t i) -> const T* {
    return i < 0 ? state + (past + i) * channels : a.x + (begin + i) * a.x_stride;
  };
  for (int64_t t = 0; t < count; ++t) {
    over_lanes(end - first, [&](int64_t at, auto n) {
      const int64_t c = first + at;
      Floats sum = a.bias ? read(a.bias + c, n) : Floats{};
      for (int64_t j = 0; j < a.taps; ++j)
        sum = fma(read(input(t - past + j) + c, n), read(a.weight + j * channels + c, n), sum);
      write(a.out + (begin + t) * channels + c, a.silu ? silu(sum) : sum, n);
    });
  }
  a.packed.each_keep(begin, begin + count, [&](const Keep& keep) {
    T* kept = a.states + keep.place * past * channels;
    for (int64_t j = 0; j < past; ++j) {
      const T* from = input(keep.end - begin - past + j);
      std::copy(from + first, from + end, kept + j * channels + first);
    }
  });
  // j must ascend: entry j of the new state is input count - past + j, which no smaller j has overwritten.
  for (int64_t j = 0; j < past; ++j) {
    const T* from = input(count - past + j);
    std::copy(from + first, from + end, state + j * channels + first);
  }
}

// out [keys] f32 = x * scale, also divided by sqrt(sum(x^2) + eps) if eps > 0.
template <class T>
void prepare(const T* x, int64_t keys, float eps, float scale, float* out) {
  Floats squares = {};
  over_lanes(keys, [&](int64_t i, auto n) {
    const Floats one = read(x + i, n);
    squares = fma(one, one, squares);
  });
  const Floats factor = broadcast(eps > 0 ? 1.0f / std::sqrt(sum(squares) + eps) : 1.0f);
  over_lanes(keys, [&](int64_t i, auto n) { write(out + i, read(x + i, n) * factor * broadcast(scale), n); });
}

// Computes total = the sum over i < keys of weight[i] * row(i), for kColumns vectors of state columns.
template <class Row>
void weigh_rows(int64_t keys, const float* weight, const Row& row, Floats (&total)[kColumns]) {
  Floats sums[kSums][kColumns] = {};
  int64_t i = 0;
  for (; i + kSums <= keys; i += kSums) {
    unroll<kSums>([&](auto s) {
      const Floats w = broadcast(weight[i + s]);
      unroll<kColumns>([&](auto c) { sums[s][c] = fma(w, row(i + s, c), sums[s][c]); });
    });
  }
  for (; i < keys; ++i) {
    const Floats w = broadcast(weight[i]);
    unroll<kColumns>([&](auto c) { sums[0][c] = fma(w, row(i, c), sums[0][c]); });
  }
  unroll<kColumns>([&](auto c) { total[c] = (sums[0][c] + sums[1][c]) + (sums[2][c] + sums[3][c]); });
}

// Inputs of one token for the update of a range of columns of a head's state [keys, stride].
struct Token {
  const float *q, *k;  // [keys]
  float decay, beta;   // factor of the old state; factor of the delta rule
  bool delta;
};

void step_columns(const Token& token, const float* v, float* state, int64_t stride, int64_t keys, float* out) {
  const Floats decay = broadcast(token.decay);
  Floats write_value[kColumns];
  unroll<kColumns>([&](auto c) { write_value[c] = load(v + c * kLanes); });
  if (token.delta) {
    Floats known[kColumns];
    weigh_rows(keys, token.k, [&](int64_t i, auto c) { return load(state + i * stride + c * kLanes); }, known);
    unroll<kColumns>([&](auto c) { write_value[c] = broadcast(token.beta) * fma(-decay, known[c], write_value[c]); });
  }
  Floats result[kColumns];
  const auto updated = [&](int64_t i, auto c) {
    float* place = state + i * stride + c * kLanes;
    const Floats next = fma(broadcast(token.k[i]), write_value[c], decay * load(place));
    store(place, next);
    return next;
  };
  weigh_rows(keys, token.q, updated, result);
  unroll<kColumns>([&](auto c) { store(out + c * kLanes, result[c]); });
}

// Computes one head of one sequence: all its tokens.
template <class T>
void recur_head(const RecurrenceArgs<T>& a, int64_t sequence, int64_t head, float* scratch) {
  constexpr int64_t kWidth = kColumns * kLanes;
  const int64_t begin = a.packed.starts[sequence], end = a.packed.starts[sequence + 1];
  const int64_t key_head = head / (a.heads / a.key_heads), keys = a.keys, values = a.values;
  const int64_t size = keys * values;
  if (a.packed.is_padding(sequence)) {
    for (int64_t t = begin; t < end; ++t) std::fill_n(a.out + (t * a.heads + head) * values, values, 0.0f);
    return;
  }
  float* state = a.states + (a.packed.slots[sequence] * a.heads + head) * size;
  float *q = scratch, *k = q + kTokens * keys, *edge = k + kTokens * keys;  // edge: fewer than kWidth columns
  for (int64_t first = begin, count; first < end; first += count) {
    count = std::min(kTokens, end - first);
    a.packed.each_keep(first, first + count, [&](const Keep& keep) { count = std::min(count, keep.end - first); });
    for (int64_t t = 0; t < count; ++t) {
      prepare(a.q.at(first + t, key_head), keys, a.eps, a.q_scale, q + t * keys);
      prepare(a.k.at(first + t, key_head), keys, a.eps, 1.0f, k + t * keys);
    }
    for (int64_t column = 0; column < values; column += kWidth) {
      const int64_t width = std::min(kWidth, values - column);
      const bool narrow = width < kWidth;
      float* columns = narrow ? edge : state + column;
      const int64_t stride = narrow ? kWidth : values;
      if (narrow) {
        std::fill_n(edge, keys * kWidth, 0.0f);
        for (int64_t i = 0; i < keys; ++i) std::copy_n(state + i * values + column, width, edge + i * kWidth);
      }
      for (int64_t t = 0; t < count; ++t) {
        const int64_t place = (first + t) * a.heads + head;
        float v[kWidth] = {}, out[kWidth];
        const T* from = a.v.at(first + t, head) + column;
        over_lanes(width, [&](int64_t i, auto n) { write(v + i, read(from + i, n), n); });
        const Token token{q + t * keys, k + t * keys, std::exp(a.decay[place]), a.beta ? a.beta[place] : 0.0f,
                          a.beta != nullptr};
        step_columns(token, v, columns, stride, keys, out);
        std::copy_n(out, width, a.out + place * values + column);
      }
      if (narrow) {
        for (int64_t i = 0; i < keys; ++i) std::copy_n(edge + i * kWidth, width, state + i * values + column);
      }
    }
    a.packed.each_keep(first, first + count, [&](const Keep& keep) {
      std::copy_n(state, size, a.states + (keep.place * a.heads + head) * size);
    });
  }
}

int threads_for(int64_t work, int threads) { return work < kWorkOnce ? 1 : threads; }

int64_t tokens_of(const Packed& packed) { return packed.starts[packed.sequences] - packed.starts[0]; }

}  // namespace

template <class T>
void causal_conv(const ConvArgs<T>& a) {
  const int64_t parts = (a.channels + kChannels - 1) / kChannels;
  const int threads = threads_for(tokens_of(a.packed) * a.channels * a.taps, a.threads);
  share(a.packed.sequences * parts, threads, [&](Tickets& tickets) {
    for (int64_t item; tickets.take(item);) {
      const int64_t first = item % parts * kChannels;
      conv_channels(a, item / parts, first, std::min(a.channels, first + kChannels));
    }
  });
}

template <class T>
void linear_recurrence(const RecurrenceArgs<T>& a) {
  const int threads = threads_for(tokens_of(a.packed) * a.heads * a.keys * a.values, a.threads);
  share(a.packed.sequences * a.heads, threads, [&](Tickets& tickets) {
    std::vector<float> scratch(a.keys * (2 * kTokens + kColumns * kLanes));
    for (int64_t item; tickets.take(item);) recur_head(a, item / a.heads, item % a.heads, scratch.data());
  });
}

template void causal_conv<float>(const ConvArgs<float>&);
template void causal_conv<bf16>(const ConvArgs<bf16>&);
template void causal_conv<fp16>(const ConvArgs<fp16>&);
template void linear_recurrence<float>(const RecurrenceArgs<float>&);
template void linear_recurrence<bf16>(const RecurrenceArgs<bf16>&);
template void linear_recurrence<fp16>(const RecurrenceArgs<fp16>&);

}  // namespace quire::cpu
