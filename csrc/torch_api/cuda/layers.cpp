// The GPU's door to what a decoder layer does between its products: tensors come in, are checked, and leave as pointers.

#include "cuda/layers/layers.h"

#include <torch/library.h>

#include <optional>
#include <utility>

#include "torch_api/cuda/convert.h"
#include "torch_api/cuda/slots.h"

namespace quire::cuda::door {

// [tokens, size] counts as one head.
Heads heads_of(const at::Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), t.stride(0), t.dim() == 3 ? t.stride(1) : 0};
}

void norm(const at::Tensor& x, const at::Tensor* delta, const at::Tensor& weight, double eps, const at::Tensor& out) {
  Size tokens("tokens"), heads("heads"), size("size");
  const auto expect_heads = [&](const char* who, const at::Tensor& t) {
    expect_cuda(who, t, x);
    if (x.dim() == 3) {
      expect(who, t, {tokens, heads, size});
    } else {
      expect(who, t, {tokens, size});
    }
    expect_last_contiguous(who, t);
    expect_dtype(who, t, x.scalar_type(), "x");
  };
  expect_heads("x", x);
  expect_heads("out", out);
  if (delta) expect_heads("delta", *delta);
  expect_cuda("weight", weight, x);
  expect("weight", weight, {size});
  expect_contiguous("weight", weight);
  expect_dtype("weight", weight, x.scalar_type(), "x");
  TORCH_CHECK_VALUE(size <= kMaxNorm, "x: size ", int64_t{size}, " is over ", kMaxNorm);
  const RmsNormArgs args{
      .dtype = model_dtype_of("x", x),
      .x = heads_of(x),
      .delta = delta ? heads_of(*delta) : Heads{},
      .out = heads_of(out),
      .weight = weight.const_data_ptr(),
      .eps = static_cast<float>(eps),
      .tokens = tokens,
      .heads = x.dim() == 3 ? int64_t{heads} : 1,
      .size = static_cast<int>(size),
  };
  const c10::cuda::CUDAGuard guard(x.device());
  cuda::rms_norm(args, stream_of(x));
}

void rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const at::Tensor& out) {
  norm(x, nullptr, weight, eps, out);
}

void add_rms_norm(const at::Tensor& x, const at::Tensor& delta, const at::Tensor& weight, double eps,
                  const at::Tensor& out) {
  norm(x, &delta, weight, eps, out);
}

void silu_mul(const at::Tensor& gate_up, const at::Tensor& out) {
  Size tokens("tokens"), two("gate and up"), size("size");
  expect("out", out, {tokens, size});
  two.agree("out", 2 * size);
  expect("gate_up", gate_up, {tokens, two});
  for (const auto& [who, t] : {std::pair{"gate_up", gate_up}, {"out", out}}) {
    expect_cuda(who, t, out);
    expect_contiguous(who, t);
    expect_dtype(who, t, out.scalar_type(), "out");
  }
  const c10::cuda::CUDAGuard guard(out.device());
  cuda::silu_mul({model_dtype_of("out", out), gate_up.const_data_ptr(), out.data_ptr(), tokens, size}, stream_of(out));
}

void rope_kv_write(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& k_cache,
                   const at::Tensor& v_cache, const at::Tensor& slots, const std::optional<at::Tensor>& q_norm,
                   const std::optional<at::Tensor>& k_norm, double eps, const std::optional<at::Tensor>& scales) {
  Size tokens("tokens"), all_heads("heads of q, k and v"), kv_heads("KV heads"), dim("head size");
  const KvSlots to = slots_of(qkv, k_cache, v_cache, slots, scales, tokens, kv_heads, dim);
  expect_cuda("qkv", qkv, qkv);
  expect("qkv", qkv, {tokens, all_heads, dim});
  expect_last_contiguous("qkv", qkv);
  TORCH_CHECK_VALUE(all_heads > 2 * kv_heads, "qkv: has ", int64_t{all_heads}, " heads, too few for ",
                    int64_t{kv_heads}, " KV heads");
  TORCH_CHECK_VALUE(dim % 2 == 0, "qkv: head size ", int64_t{dim}, " is odd");
  TORCH_CHECK_VALUE(dim <= kMaxRope, "qkv: head size ", int64_t{dim}, " is over ", kMaxRope);
  for (const auto& [who, t] : {std::pair{"cos", cos}, {"sin", sin}}) {
    expect_cuda(who, t, qkv);
    expect(who, t, {tokens, dim});
    expect_last_contiguous(who, t);
    expect_dtype(who, t, qkv.scalar_type(), "qkv");
  }
  TORCH_CHECK_VALUE(q_norm.has_value() == k_norm.has_value(), "q_norm, k_norm: only one of them is given");
  for (const auto& [who, t] : {std::pair{"q_norm", q_norm}, {"k_norm", k_norm}}) {
    if (t) {
      expect_vector(who, *t, dim, qkv.scalar_type(), qkv);
    }
  }
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
      .to = to,
      .tokens = tokens,
      .heads = static_cast<int>(all_heads - 2 * kv_heads),
      .kv_heads = static_cast<int>(kv_heads),
      .size = static_cast<int>(dim),
  };
  const c10::cuda::CUDAGuard guard(qkv.device());
  cuda::rope_kv_write(args, stream_of(qkv));
}

}  // namespace quire::cuda::door

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("rms_norm", quire::cuda::door::rms_norm);
  m.impl("add_rms_norm", quire::cuda::door::add_rms_norm);
  m.impl("silu_mul", quire::cuda::door::silu_mul);
  m.impl("rope_kv_write", quire::cuda::door::rope_kv_write);
}
