#include "cuda/attention/decode.cuh"

namespace quire::cuda {

void decode_80(const DecodeKernelArgs& args, cudaStream_t stream) { launch_decode<80>(args, stream); }

}  // namespace quire::cuda
