#include "cpu/batch.h"

namespace quire::cpu {

void apply_edits(const int32_t* edits, int64_t count, Tables tables) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t row = edits[3 * i], column = edits[3 * i + 1], block = edits[3 * i + 2];
    if (row >= 0) tables.data[row * tables.stride + column] = block;
  }
}

void decode_inputs(const int32_t* slots, int64_t count, const int64_t* token, const int64_t* position, Tables tables,
                   int64_t block_size, DecodeInputs out) {
  for (int64_t i = 0; i < count; ++i) {
    const int32_t slot = slots[i];
    const int64_t at = slot < 0 ? 0 : position[slot];
    const bool padding = slot < 0 || at >= tables.columns * block_size;
    out.ids[i] = padding ? 0 : token[slot];
    out.positions[i] = padding ? 0 : at;
    out.kv_indices[i] =
        padding ? -1 : tables.data[slot * tables.stride + at / block_size] * block_size + at % block_size;
    out.rows[i] = padding ? 0 : slot;
    out.lens[i] = padding ? 0 : static_cast<int32_t>(at + 1);
  }
}

void decode_outputs(const int32_t* slots, int64_t count, const int64_t* tokens, int64_t* token, int64_t* position) {
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] < 0) continue;
    token[slots[i]] = tokens[i];
    position[slots[i]] += 1;
  }
}

}  // namespace quire::cpu
