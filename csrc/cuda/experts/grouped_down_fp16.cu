#include "cuda/experts/grouped.cuh"
template void quire::cuda::grouped::run<quire::cuda::grouped::PlainRows<quire::cuda::fp16>,
                                        quire::cuda::grouped::Kind::down>(const Gemm&, cudaStream_t);
