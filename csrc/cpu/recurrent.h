// Layers with a state per slot: the causal convolution over a few tokens, and the linear recurrence of Gated DeltaNet
// and Mamba2.
//
// Tokens of a step lie one sequence after another: sequence s owns tokens starts[s] .. starts[s + 1] - 1 and the state
// slots[s], which has the result of earlier steps and is updated in place.  A token's result has the same bits in any
// batch, in any chunking of its prompt and on any number of threads: tokens are computed one after another.
//
//   tokens   | a | b0 b1 b2 b3 | c |      keeps (4, 9): once b2 is computed, the state of b's slot is copied to index 9
//   starts   0   1             5   6

#pragma once

#include <cstdint>

namespace quire::cpu {

struct Keep {
  int32_t end;    // the copy is taken when the step's tokens before this index are computed
  int32_t place;  // index in `states` that gets the copy; no sequence of the step uses it
};

struct Packed {
  const int32_t* slots;   // [sequences]
  const int32_t* starts;  // [sequences + 1]
  const int32_t* lens;    // [sequences]; 0: padding, with outputs of 0 and no state; null: there is no padding
  int64_t sequences;
  const Keep* keeps;  // [keep_count], by ascending end
  int64_t keep_count;

  bool is_padding(int64_t sequence) const { return lens && lens[sequence] == 0; }

  // Calls use(keep) for each keep with first < end <= last, where first and last lie in one sequence.
  template <class Use>
  void each_keep(int64_t first, int64_t last, const Use& use) const {
    for (const Keep* keep = keeps; keep < keeps + keep_count; ++keep) {
      if (keep->end > first && keep->end <= last) use(*keep);
    }
  }
};

template <class T>
struct ConvArgs {
  const T* x;           // [tokens, channels]
  int64_t x_stride;     // elements between tokens
  const float* weight;  // [taps, channels]; the last tap is the newest token's
  const float* bias;    // [channels] or null
  T* states;            // [slots, taps - 1, channels]: the last inputs of the sequence, the oldest first
  T* out;               // [tokens, channels]
  int64_t channels, taps;
  bool silu;
  Packed packed;
  int threads;
};

// out[t] = bias + sum over j of weight[j] * input[t - taps + 1 + j], then silu; inputs before the step are in `states`.
template <class T>
void causal_conv(const ConvArgs<T>& args);

// [tokens, heads, size]; a head's elements are contiguous.  Strides in elements.
template <class T>
struct HeadRows {
  const T* data;
  int64_t token_stride, head_stride;
  const T* at(int64_t token, int64_t head) const { return data + token * token_stride + head * head_stride; }
};

template <class T>
struct RecurrenceArgs {
  HeadRows<T> q, k;    // [tokens, key_heads, keys]
  HeadRows<T> v;       // [tokens, heads, values]
  const float* decay;  // [tokens, heads]: logarithm of the factor of the old state
  const float* beta;   // [tokens, heads]: factor of the delta rule; null: no delta rule
  float* states;       // [slots, heads, keys, values]
  float* out;          // [tokens, heads, values]
  int64_t heads, key_heads, keys, values;
  float q_scale;  // factor of queries
  float eps;      // > 0: q and k become x / sqrt(sum(x^2) + eps) first
  Packed packed;
  int threads;
};

// Per token and head, where S [keys, values] is the state:
//   S = exp(decay) * S;  w = beta * (v - k^T S), or v without beta;  S = S + k w^T;  out = q^T S
// Head h reads the keys and queries of head h / (heads / key_heads).
template <class T>
void linear_recurrence(const RecurrenceArgs<T>& args);

}  // namespace quire::cpu
