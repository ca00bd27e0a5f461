#include "cuda/attention/decode.cuh"

namespace quire::cuda {

void decode_128(const DecodeKernelArgs& args, cudaStream_t stream) { launch_decode<128>(args, stream); }

}  // namespace quire::cuda
