#include "cuda/attention/decode.cuh"

namespace quire::cuda {

void decode_64(const DecodeKernelArgs& args, cudaStream_t stream) { launch_decode<64>(args, stream); }

}  // namespace quire::cuda
