// Every operator of Quire, declared once.  cpu/ops.cpp (and a device folder beside it) implements them; torch's
// dispatcher picks by where the tensors live, so Python has no device branch.
//
//   T tokens of this step, all sequences one after another     S sequences in this step
//   H query heads   Hkv KV heads (H % Hkv == 0)                D head size
//   a cache holds the keys, or the values, of one layer: [blocks, Hkv, block_size, D]

#include <torch/library.h>

TORCH_LIBRARY(quire, m) {
  // key, value [T, Hkv, D] · caches [blocks, Hkv, block_size, D] · slots [T] i64 = block * block_size + offset,
  // -1: skip the token
  m.def("kv_write(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots) -> ()");

  // q, out [T, H, D] · caches as above · tables [max_rows, max_blocks] i32 · rows [S] i32, a row of tables each ·
  // q_start [S + 1] i32, sequence s owns q[q_start[s]:q_start[s + 1]] · lens [S] i32, keys including this step's.
  // Query i of n stands at position lens - n + i and sees positions <= its own, with window > 0 only the last `window`
  // of them.  soft_cap > 0: score = soft_cap * tanh(score / soft_cap).
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor tables, Tensor rows, Tensor q_start, "
      "Tensor lens, float scale, int window, float soft_cap, Tensor(a!) out) -> ()");

  // caches: every layer's K and V · pairs [n, 2] i64 (from block, to block), applied in order
  m.def("block_copy(Tensor(a!)[] caches, Tensor pairs) -> ()");

  // caches: every layer's K and V · blocks [n] i64
  m.def("block_fill(Tensor(a!)[] caches, Tensor blocks, float value) -> ()");

  // What a decoder layer does between its matrix products.  Arithmetic in float32, one rounding to the dtype of x.

  // x, out [T, size], or [T, heads, size] with a norm for each head · weight [size].  out may be x
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()");

  // x += delta, then out = rms_norm(x); all [T, size]
  m.def("add_rms_norm(Tensor(a!) x, Tensor delta, Tensor weight, float eps, Tensor(b!) out) -> ()");

  // gate_up [T, 2 * size]: gate, then up · out [T, size] = silu(gate) * up
  m.def("silu_mul(Tensor gate_up, Tensor(a!) out) -> ()");

  // qkv [T, H + 2 * Hkv, D]: queries are rotated in place, rotated keys and the values go to their slots · cos, sin
  // [T, D] · caches and slots as in kv_write.  Number i of a head turns with number i + D / 2
  m.def(
      "rope_kv_write(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor slots) "
      "-> ()");

  // x [N, V] · values [N] f32: the largest of each row · places [N] i64: the first place it stands at.
  // NaN and 0 for a row with a NaN in it
  m.def("row_max(Tensor x, Tensor(a!) values, Tensor(b!) places) -> ()");
}
