// bfloat16 GEMMs by torch's small GEMM, which uses matrix tiles (AMX) if the CPU has them.
#pragma once

#include <ATen/native/CPUBlas.h>

#include <algorithm>

#include "cpu/product.h"
#include "cpu/product_tasks.h"

namespace quire::cpu::torch_api {

constexpr int64_t kTileRows = 256;                // rows per call of the library's GEMM
constexpr int64_t kTileTaskRows = 4096 / kLanes;  // rows per task; a task widens each strip of weights once
constexpr int64_t kTileRun =
    1024;  // elements of inner whose weights stay in the cache until all rows of a task have used them

// out = (x weight^T) * scale + bias + plus, sums in float.  A row's bits may depend on the number of rows.
//
// args: x, rows, and the arguments of `finish`. inner is even and more than 0.
// scale: [strips * kColumns], per feature; or null.
// weight_of(strip, first, count, buffer): returns the strip's weights of inputs first .. first + count - 1, as pairs of
//     inputs [count / 2, kColumns, 2].  It may write them to `buffer`.
template <class Args, class WeightOf>
void on_tiles(const Args& args, const float* scale, const WeightOf& weight_of) {
  const auto* x = reinterpret_cast<const at::BFloat16*>(args.x);
  share_product(args, kTileTaskRows, [&](int64_t first_row, int64_t rows, int64_t first_strip, int64_t strips) {
    alignas(64) bf16 buffer[kTileRun * kColumns];
    alignas(64) float sums[kTileTaskRows * kColumns];
    for (int64_t strip = first_strip; strip < first_strip + strips; ++strip) {
      for (int64_t run = 0; run < args.inner; run += kTileRun) {
        const int64_t count = std::min(kTileRun, args.inner - run);
        const auto* weight = reinterpret_cast<const at::BFloat16*>(weight_of(strip, run, count, buffer));
        for (int64_t row = 0; row < rows; row += kTileRows) {
          const auto* inputs = x + (first_row + row) * args.x_stride + run;
          at::native::cpublas::brgemm(std::min(kTileRows, rows - row), kColumns, count, args.x_stride, kColumns,
                                      kColumns, run > 0, inputs, weight, sums + row * kColumns);
        }
      }
      for (int64_t j = 0; scale && j < kColumns; j += kLanes) {
        const Floats of_features = load(scale + strip * kColumns + j);
        for (float* sum = sums + j; sum < sums + rows * kColumns; sum += kColumns) store(sum, load(sum) * of_features);
      }
      for (int64_t row = 0; row < rows; ++row) finish(args, first_row + row, strip * kColumns, sums + row * kColumns);
    }
    at::native::cpublas::brgemm_release();
  });
}

}  // namespace quire::cpu::torch_api
