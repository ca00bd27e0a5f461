// Samples one token per row of logits.  sampling_rules.h has the rules that all devices share.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/dtype.h"
#include "sampling_rules.h"

namespace quire::cuda {

struct SampleArgs {
  Dtype dtype;           // dtype of the logits: f32, bf16, fp16
  const void* logits;    // [rows, size]
  int64_t row_stride;    // elements between rows
  const int64_t* slots;  // [rows]: the row's slot in `table`; -1: the row has no slot, and its token is 0
  const int64_t* known;  // [rows]: number of tokens before the sampled one
  const sampling::Settings* table;
  bool general;      // false: every row takes the argmax of its raw logits; table and known are not read
  int64_t* tokens;   // [rows]; 0 if no token was sampled
  uint8_t* outcome;  // [rows]: kChosen, kNotFinite or kNothingAllowed; kChosen for a row without a slot
  int64_t rows;
  int size;
};

// Samples, and counts each token in the marks of its row.
void sample(const SampleArgs& args, cudaStream_t stream);

struct ArgmaxArgs {
  Dtype dtype;         // dtype of the logits: f32, bf16, fp16
  const void* logits;  // [rows, size]: this rank's columns of the logits
  int64_t row_stride;  // elements between rows
  int64_t first;       // token of the first column
  int64_t* keys;       // [rows]: the row's maximum key, converted by sampling::to_signed
  int64_t rows;
  int size;
};

void argmax(const ArgmaxArgs& args, cudaStream_t stream);

// Writes the token and outcome that `sample` would choose, from the keys [rows] of raw logits.
void chosen(const int64_t* keys, const int64_t* slots, int64_t* tokens, uint8_t* outcome, int64_t rows,
            cudaStream_t stream);

}  // namespace quire::cuda
