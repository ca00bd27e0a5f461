#include "cpu/batch.h"

namespace quire::cpu {

void apply_edits(const int32_t* edits, int64_t count, Tables tables) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = edits[3 * i], column = edits[3 * i + 1], block = edits[3 * i + 2];
    if (row >= 0) tables.data[row * tables.stride + column] = block;
  }
}

void decode_inputs(const int32_t* seats, int64_t count, const int64_t* token, const int64_t* position, Tables tables,
                   int64_t block_size, DecodeInputs out) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t seat = seats[i];
    const int64_t at = seat < 0 ? 0 : position[seat];
    const bool padding = seat < 0 || at >= tables.columns * block_size;
    out.ids[i] = padding ? 0 : token[seat];
    out.positions[i] = padding ? 0 : at;
    out.slots[i] =
        padding ? -1 : tables.data[seat * tables.stride + at / block_size] * block_size + at % block_size;
    out.rows[i] = padding ? 0 : seat;
    out.lens[i] = padding ? 0 : static_cast<int32_t>(at + 1);
  }
}

void decode_outputs(const int32_t* seats, int64_t count, const int64_t* tokens, int64_t* token, int64_t* position) {
  for (int64_t i = 0; i < count; ++i) {
    if (seats[i] < 0) continue;
    token[seats[i]] = tokens[i];
    position[seats[i]] += 1;
  }
}

}  // namespace quire::cpu
