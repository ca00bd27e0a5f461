// LoRA adapters of a linear layer, for rows of several adapters in one call.
//
//           shrink: A of all parts at once          expand: B of each part
//   x [n, inner] ────────────> h [n, ranks] ────────────────────────────────> added to columns of y
//     rows of one adapter        q | k | v             q │ k │ v
//
// Both steps are calls of `product`, so a row's bits do not depend on the other rows of the call.  Rows without an
// adapter are not read or written.

#pragma once

#include <cstdint>

namespace quire::cpu {

constexpr int kLoraParts = 3;  // maximum layers that share one GEMM: q, k and v

// An adapter's B for one of the layers that share a GEMM.
template <class T>
struct LoraPart {
  const T* b;          // packed [features, rank], multiplied by the adapter's scale
  int64_t rank;        // 0: the adapter leaves this layer as it is
  int64_t first_rank;  // first column of h that belongs to this part
  int64_t first;       // first column of y
  int64_t features;
};

// The rows of one adapter.
template <class T>
struct LoraGroup {
  const T* a;           // packed [ranks, inner]
  int64_t ranks;        // sum of the parts' ranks; 0: the adapter leaves all layers of this GEMM as they are
  const int32_t* rows;  // [count]: rows of x and y, ascending
  int64_t count;
  LoraPart<T> parts[kLoraParts];
};

template <class T>
struct LoraArgs {
  const T* x;  // [rows, inner]
  int64_t x_stride;
  T* y;  // [rows, features of all parts]
  int64_t y_stride;
  const LoraGroup<T>* groups;
  int64_t group_count;
  int64_t inner, widest;  // widest: maximum features of a part
  int threads;
};

// y[row] += B A x[row] for each row of each group (the rows of one adapter).  Sums in float; A x is rounded to T, and so is the result.
template <class T>
void lora(const LoraArgs<T>& args);

}  // namespace quire::cpu
