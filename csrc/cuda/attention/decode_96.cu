#include "cuda/attention/decode.cuh"

namespace quire::cuda {

void decode_96(const DecodeKernelArgs& args, cudaStream_t stream) { launch_decode<96>(args, stream); }

}  // namespace quire::cuda
