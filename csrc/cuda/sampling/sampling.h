// One token for each row of logits: see sampling_rules.h for what all devices agree on.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"
#include "sampling_rules.h"

namespace quire::cuda {

struct SampleArgs {
  Dtype dtype;           // of the logits: f32, bf16, fp16
  const void* logits;    // [rows, size]
  int64_t row_stride;    // in numbers
  const int64_t* slots;  // [rows]: the row of `table` each samples for; -1: none, the token is 0
  const int64_t* known;  // [rows]: tokens before the one chosen now
  const sampling::Settings* table;
  bool general;      // false: every row takes the likeliest token of its raw logits, and table and known are not read
  int64_t* tokens;   // [rows]; 0 where no token is chosen
  uint8_t* outcome;  // [rows]: kChosen, kNotFinite or kNothingAllowed; kChosen for a row without a slot
  int64_t rows;
  int size;
};

// Counts each token in the marks of its row.
void sample(const SampleArgs& args, cudaStream_t stream);

struct LikeliestArgs {
  Dtype dtype;         // of the logits: f32, bf16, fp16
  const void* logits;  // [rows, size]: some columns of the whole logits
  int64_t row_stride;  // in numbers
  int64_t first;       // token of the first column
  int64_t* keys;       // [rows]: sampling::to_signed of the largest key of each row
  int64_t rows;
  int size;
};

void likeliest(const LikeliestArgs& args, cudaStream_t stream);

// Of keys [rows]: the token and outcome that `sample` would choose from the raw logits that they are of.
void chosen(const int64_t* keys, const int64_t* slots, int64_t* tokens, uint8_t* outcome, int64_t rows,
            cudaStream_t stream);

}  // namespace quire::cuda
