#include "cuda/experts/grouped.cuh"
template void quire::cuda::grouped::run<quire::cuda::grouped::PlainRows<quire::cuda::fp16>,
                                        quire::cuda::grouped::Kind::silu>(const Gemm&, cudaStream_t);
