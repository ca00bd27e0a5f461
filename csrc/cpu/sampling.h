// One token for each row of logits: see sampling_rules.h for what all devices agree on.

#pragma once

#include <cstdint>

#include "sampling_rules.h"

namespace quire::cpu {

struct SampleArgs {
  int64_t row_stride;    // of the logits, in elements
  const int64_t* slots;  // [rows]: the row of `table` each samples for; -1: none, the token is 0
  const int64_t* known;  // [rows]: tokens before the one chosen now
  const sampling::Settings* table;
  bool general;      // false: every row takes the likeliest token of its raw logits, and table and known are not read
  int64_t* tokens;   // [rows]; 0 where no token is chosen
  uint8_t* outcome;  // [rows]: kChosen, kNotFinite or kNothingAllowed; kChosen for a row without a slot
  int64_t rows, size;
};

// logits [rows, size] of T: float, bf16 or fp16.  Counts each token in the marks of its row.
template <class T>
void sample(const T* logits, const SampleArgs& args, int threads);

// logits [rows, size]: columns of the whole logits, of token `first` and those after it.  keys [rows]: sampling::to_signed
// of the largest key of each row.
template <class T>
void likeliest(const T* logits, int64_t row_stride, int64_t first, int64_t* keys, int64_t rows, int64_t size,
               int threads);

// Of keys [rows]: the token and outcome that `sample` would choose from the raw logits that they are of.
void chosen(const int64_t* keys, const int64_t* slots, int64_t* tokens, uint8_t* outcome, int64_t rows);

}  // namespace quire::cpu
