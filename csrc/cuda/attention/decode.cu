// Launcher of decode attention: derives the kernel's arguments and calls the file compiled for the head size.

#include <bit>
#include <stdexcept>

#include "cuda/attention/decode_launch.h"

namespace quire::cuda {

void decode(const DecodeArgs& args, cudaStream_t stream) {
  if (args.seqs == 0) return;
  const DecodeShape shape = decode_shape_here(args.heads, args.kv_heads, args.head_size);
  const int bytes = args.cache_dtype == Dtype::e4m3 ? 1 : 2;  // bytes per cache element
  constexpr float kLog2E = 1.4426950408889634f;
  const bool capped = args.soft_cap > 0;
  const DecodeKernelArgs kernel_args{
      .a = args,
      .plan = decode_plan_layout(args.plan, args.seqs, shape, args.head_size),
      .shape = shape,
      .block_shift = std::countr_zero(static_cast<unsigned>(args.block_size)),
      .k_block_bytes = static_cast<uint32_t>(args.k_block_stride * bytes),
      .v_block_bytes = static_cast<uint32_t>(args.v_block_stride * bytes),
      .score_scale = args.scale * kLog2E * (capped ? 2 / args.soft_cap : 1.f),
      .cap = capped ? args.soft_cap * kLog2E : 0.f,
  };
  switch (args.head_size) {
    case 64: return decode_64(kernel_args, stream);
    case 80: return decode_80(kernel_args, stream);
    case 96: return decode_96(kernel_args, stream);
    case 128: return decode_128(kernel_args, stream);
    case 192: return decode_192(kernel_args, stream);
    case 256: return decode_256(kernel_args, stream);
    default: throw std::invalid_argument("decode: no kernel for this head size");
  }
}

}  // namespace quire::cuda
