// Interface between decode.cu and the kernels, which are compiled per head size.

#pragma once

#include "cuda/attention/decode_plan.cuh"

namespace quire::cuda {

struct DecodeKernelArgs {
  DecodeArgs a;
  DecodePlan plan;
  DecodeShape shape;
  int block_shift;                        // log2 of block_size
  uint32_t k_block_bytes, v_block_bytes;  // bytes from one block to the next
  float score_scale, cap;                 // factor of q . k, and soft cap (0: none), both for scores in units of log2
};

void decode_64(const DecodeKernelArgs& args, cudaStream_t stream);
void decode_80(const DecodeKernelArgs& args, cudaStream_t stream);
void decode_96(const DecodeKernelArgs& args, cudaStream_t stream);
void decode_128(const DecodeKernelArgs& args, cudaStream_t stream);
void decode_192(const DecodeKernelArgs& args, cudaStream_t stream);
void decode_256(const DecodeKernelArgs& args, cudaStream_t stream);

}  // namespace quire::cuda
