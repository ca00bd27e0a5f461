#include "cuda/experts/grouped.cuh"
template void quire::cuda::grouped::run<quire::cuda::grouped::PlainRows<quire::cuda::bf16>,
                                        quire::cuda::grouped::Kind::clamped>(const Gemm&, cudaStream_t);
