#include "cuda/attention/decode.cuh"

namespace quire::cuda {

void decode_192(const DecodeKernelArgs& args, cudaStream_t stream) { launch_decode<192>(args, stream); }

}  // namespace quire::cuda
