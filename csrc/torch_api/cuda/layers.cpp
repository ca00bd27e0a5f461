// Bindings of the operators between the linear layers of a decoder layer, on a GPU.

#include "cuda/layers/layers.h"

#include <torch/library.h>

#include <optional>

#include "torch_api/cuda/convert.h"
#include "torch_api/layers.h"

namespace quire::cuda::torch_api {
namespace {

void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  const NormSizes sizes = check_rms_norm(x, weight, out, on_gpu(x));
  TORCH_CHECK_VALUE(sizes.size <= kMaxNorm, "x: size ", int64_t{sizes.size}, " is over ", kMaxNorm);
  const RmsNormArgs args{
      .dtype = model_dtype_of("x", x),
      .x = heads_of(x),
      .out = heads_of(out),
      .weight = weight.const_data_ptr(),
      .eps = static_cast<float>(eps),
      .tokens = sizes.tokens,
      .heads = sizes.heads,
      .size = static_cast<int>(sizes.size),
  };
  const c10::cuda::CUDAGuard guard(x.device());
  cuda::rms_norm(args, stream_of(x));
}

void silu_mul(const at::Tensor& gate_up, const at::Tensor& out) {
  const SiluMulSizes sizes = check_silu_mul(gate_up, out, on_gpu(out));
  const c10::cuda::CUDAGuard guard(out.device());
  cuda::silu_mul({model_dtype_of("out", out), gate_up.const_data_ptr(), out.data_ptr(), sizes.tokens, sizes.size},
                 stream_of(out));
}

void rope_kv_write(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& k_cache,
                   const at::Tensor& v_cache, const at::Tensor& kv_indices, const std::optional<at::Tensor>& q_norm,
                   const std::optional<at::Tensor>& k_norm, double eps, const std::optional<at::Tensor>& scales,
                   double norm_offset) {
  const RopeSizes sizes =
      check_rope_kv_write(qkv, cos, sin, k_cache, v_cache, kv_indices, q_norm, k_norm, scales, kMaxRope, on_gpu(qkv));
  const RopeArgs args{
      .dtype = model_dtype_of("qkv", qkv),
      .stored = dtype_of("k_cache", k_cache),
      .qkv = heads_of(qkv),
      .cos = cos.const_data_ptr(),
      .sin = sin.const_data_ptr(),
      .cos_stride = cos.stride(0),
      .sin_stride = sin.stride(0),
      .q_norm = q_norm ? q_norm->const_data_ptr() : nullptr,
      .k_norm = k_norm ? k_norm->const_data_ptr() : nullptr,
      .eps = static_cast<float>(eps),
      .norm_offset = static_cast<float>(norm_offset),
      .to = kv_target_of(k_cache, v_cache, sizes.cache.block_size, kv_indices, sizes.scales),
      .tokens = sizes.tokens,
      .heads = static_cast<int>(sizes.heads()),
      .kv_heads = static_cast<int>(sizes.cache.kv_heads),
      .size = static_cast<int>(sizes.cache.head_size),
  };
  const c10::cuda::CUDAGuard guard(qkv.device());
  cuda::rope_kv_write(args, stream_of(qkv));
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("rope_kv_write", rope_kv_write);
}

}  // namespace
}  // namespace quire::cuda::torch_api
