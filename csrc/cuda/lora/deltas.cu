// Adds B A x, which a branch of a CUDA graph has computed (`lora_store_deltas`), to the GEMM's output.

#include "cuda/common/launch.cuh"
#include "cuda/lora/lora.cuh"

namespace quire::cuda {
namespace {

using namespace loras;

constexpr int kWidth = 8;  // elements per thread

template <class T>
__device__ Pack<T, kWidth> sum_of(const Pack<T, kWidth>& y, const float4& low, const float4& high) {
  float x[kWidth];
  widen(y, x);
  x[0] += low.x, x[1] += low.y, x[2] += low.z, x[3] += low.w;
  x[4] += high.x, x[5] += high.y, x[6] += high.z, x[7] += high.w;
  return narrow<T>(x);
}

/* Grid (columns of y or out / (8 * kThreads), rows). */
template <class T, bool kSilu>
__global__ void __launch_bounds__(kThreads) add_deltas_kernel(LoraDeltasArgs a) {
  let_next_kernel_start();
  const int row = blockIdx.y, size = kSilu ? a.columns / 2 : a.columns;
  const int column = (blockIdx.x * kThreads + threadIdx.x) * kWidth;
  const bool has_adapter = a.slot_of_row[row] >= 0;
  wait_for_previous_kernels();
  if (column >= size || (!kSilu && !has_adapter)) return;
  T* const y = static_cast<T*>(a.y) + row * a.y_stride + column;
  const float4* const deltas =
      reinterpret_cast<const float4*>(a.deltas + static_cast<int64_t>(row) * a.columns + column);
  Pack<T, kWidth> gate = load_pack<kWidth>(y);
  if (!kSilu) return store_pack(y, sum_of(gate, deltas[0], deltas[1]));
  Pack<T, kWidth> up = load_pack<kWidth>(y + size);
  if (has_adapter) {
    gate = sum_of(gate, deltas[0], deltas[1]);
    up = sum_of(up, deltas[size / 4], deltas[size / 4 + 1]);
  }
  store_pack(static_cast<T*>(a.out) + row * a.out_stride + column, activated(gate, up));
}

template <class T>
void add(const LoraDeltasArgs& a, cudaStream_t stream) {
  const int size = a.out == nullptr ? a.columns : a.columns / 2;
  const dim3 grid((size + kWidth * kThreads - 1) / (kWidth * kThreads), a.rows);
  launch(a.out == nullptr ? add_deltas_kernel<T, false> : add_deltas_kernel<T, true>, grid, kThreads, 0, stream, a);
}

}  // namespace

void lora_add_deltas(const LoraDeltasArgs& a, cudaStream_t stream) {
  a.dtype == Dtype::fp16 ? add<fp16>(a, stream) : add<bf16>(a, stream);
}

}  // namespace quire::cuda
