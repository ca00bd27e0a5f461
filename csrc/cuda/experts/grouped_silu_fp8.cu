#include "cuda/experts/packed.cuh"
template void quire::cuda::grouped::run<quire::cuda::grouped::PackedRows<quire::cuda::grouped::Fp8, 1>,
                                        quire::cuda::grouped::Kind::silu>(const Gemm&, cudaStream_t);
template void quire::cuda::grouped::run<quire::cuda::grouped::PackedRows<quire::cuda::grouped::Fp8, 2>,
                                        quire::cuda::grouped::Kind::silu>(const Gemm&, cudaStream_t);
