#include "cuda/attention/decode.cuh"

namespace quire::cuda {

void decode_256(const DecodeKernelArgs& args, cudaStream_t stream) { launch_decode<256>(args, stream); }

}  // namespace quire::cuda
