// Layout of the quantised weights of experts, shared by the kernels of all devices.
//
//   weight    [experts, row tiles, slabs, 2, tile bytes] u8: a row tile has 64 low rows ([0]) and 64 high rows ([1])
//   gate_up   low rows: gate, high rows: up         down   low rows: first half of hidden, high rows: second half
//   a tile    64 rows x 64 elements (a slab) of an expert: values, then scales; rows past the last one are zeros
//
// Values are in the order of wgmma's left operand in registers.  For step k of 16 elements, lane 4g + t of warp w has
// four pairs p of neighbouring elements e = 0, 1: row 16w + g + 8 (p % 2), column 16k + 8 (p / 2) + 2t + e.
//
//   mxfp4   values u32 [lane of four warps][k]: e2m1, bits as kFields says; element 1 in the upper half
//           scales u8 [w][g][row g or g + 8][group of 32 columns]: exponent + 126, so value = e2m1 * 2^(scale - 253)
//   fp8     values u8 [k / 2][lane of four warps][k % 2][p][e]: e4m3
//           scales f32 [row]: value = e4m3 * scale, rounded to the dtype of the model
#pragma once

#include <cstdint>

namespace quire::experts_layout {

enum class Format { mxfp4, fp8 };

constexpr int kRows = 64, kColumns = 64;  // rows and elements per tile
constexpr int kTileLanes = 128;           // lanes of four warps
constexpr int kMxfp4Values = kRows * kColumns / 2, kMxfp4Bytes = kMxfp4Values + kRows * kColumns / 32;
constexpr int kFp8Values = kRows * kColumns, kFp8Bytes = kFp8Values + kRows * 4;

constexpr int tile_bytes(Format format) { return format == Format::mxfp4 ? kMxfp4Bytes : kFp8Bytes; }

// mxfp4: a value with the bits s e1 e0 m becomes the bfloat16 (s e1 e0 m at bits 15, 8, 7, 6) * 2^126.  The positions
// of these bits in each half of a word depend on the pair p, so that one or two shifts and masks move all of them to
// their places.
struct Field {
  int sign, e1, e0, m;  // bit within the half
};
constexpr Field kFields[4] = {{15, 8, 7, 6}, {12, 5, 4, 3}, {9, 2, 1, 0}, {14, 13, 11, 10}};

// Position of an element in a tile.
struct Place {
  int lane, k, pair, e;
};
constexpr Place place_of(int row, int column) {
  const int t = column % 8 / 2;
  return {row / 16 * 32 + row % 8 * 4 + t, column / 16, column % 16 / 8 * 2 + row % 16 / 8, column % 2};
}

}  // namespace quire::experts_layout
