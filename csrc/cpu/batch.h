// Operators on the device copy of the block tables.  A slot has the block table of its sequence, the next input token
// and that token's position.  csrc/ops.cpp has the shapes.

#pragma once

#include <cstdint>

namespace quire::cpu {

struct Tables {
  int32_t* data;  // [rows, columns], the block ids of each slot
  int64_t stride, columns;
};

// tables[row, column] = block for each edit (row, column, block); row < 0: no edit.
void apply_edits(const int32_t* edits, int64_t count, Tables tables);

struct DecodeInputs {
  int64_t* ids;
  int64_t* positions;
  int64_t* kv_indices;
  int32_t* rows;
  int32_t* lens;
};

// Writes the inputs of one decoding token per slot.  Padding is a negative slot, or a position past the slot's table;
// its id, position, row and len are 0, its kv_index is -1.
void decode_inputs(const int32_t* slots, int64_t count, const int64_t* token, const int64_t* position, Tables tables,
                   int64_t block_size, DecodeInputs out);

// Stores each sampled token as its slot's next input token, and increments the slot's position.  Slots < 0 are padding.
void decode_outputs(const int32_t* slots, int64_t count, const int64_t* tokens, int64_t* token, int64_t* position);

}  // namespace quire::cpu
