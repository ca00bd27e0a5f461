#include "cuda/attention/prefill_sm90.cuh"

namespace quire::cuda::sm90 {

template void run<__nv_bfloat16, 64>(const Params&, int, cudaStream_t);
template void run<__half, 64>(const Params&, int, cudaStream_t);

}  // namespace quire::cuda::sm90
