// Samples one token per row of logits.  sampling_rules.h has the rules that all devices share.

#pragma once

#include <cstdint>

#include "sampling_rules.h"

namespace quire::cpu {

struct SampleArgs {
  int64_t row_stride;    // elements between rows of logits
  const int64_t* slots;  // [rows]: the row's slot in `table`; -1: the row has no slot, and its token is 0
  const int64_t* known;  // [rows]: number of tokens before the sampled one
  const sampling::Settings* table;
  bool general;      // false: every row takes the argmax of its raw logits; table and known are not read
  int64_t* tokens;   // [rows]; 0 if no token was sampled
  uint8_t* outcome;  // [rows]: kChosen, kNotFinite or kNothingAllowed; kChosen for a row without a slot
  int64_t rows, size;
};

// logits [rows, size] of T: float, bf16 or fp16.  Counts each token in the marks of its row.
template <class T>
void sample(const T* logits, const SampleArgs& args, int threads);

// logits [rows, size]: this rank's columns, from token `first` on.  Writes keys [rows]: each row's maximum key,
// converted by sampling::to_signed.
template <class T>
void argmax(const T* logits, int64_t row_stride, int64_t first, int64_t* keys, int64_t rows, int64_t size, int threads);

// Writes the token and outcome that `sample` would choose, from the keys [rows] of raw logits.
void chosen(const int64_t* keys, const int64_t* slots, int64_t* tokens, uint8_t* outcome, int64_t rows);

}  // namespace quire::cpu
