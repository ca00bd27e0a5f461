#include "cuda/experts/packed.cuh"
template void quire::cuda::grouped::run<quire::cuda::grouped::PackedRows<quire::cuda::grouped::Mxfp4, 1>,
                                        quire::cuda::grouped::Kind::down>(const Gemm&, cudaStream_t);
template void quire::cuda::grouped::run<quire::cuda::grouped::PackedRows<quire::cuda::grouped::Mxfp4, 2>,
                                        quire::cuda::grouped::Kind::down>(const Gemm&, cudaStream_t);
