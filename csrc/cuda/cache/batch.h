// Updates of the device copy of the block tables, and the inputs and outputs of a decode step.  csrc/ops.cpp has shapes
// and guarantees.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace quire::cuda {

struct Tables {
  int32_t* data;
  int64_t stride, columns;
};

void apply_edits(const int32_t* edits, int64_t count, Tables tables, cudaStream_t stream);

struct DecodeInputs {
  const int32_t* slots;  // [count]
  int64_t count;
  const int64_t *token, *position;  // [max_rows]
  Tables tables;
  int block_size;
  int64_t *ids, *positions, *kv_indices;  // [count]
  int32_t *rows, *lens;                   // [count]
};
void decode_inputs(const DecodeInputs& args, cudaStream_t stream);

void decode_outputs(const int32_t* slots, int64_t count, const int64_t* tokens, int64_t* token, int64_t* position,
                    cudaStream_t stream);

}  // namespace quire::cuda
