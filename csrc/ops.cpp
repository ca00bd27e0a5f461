// Schemas of all operators, declared once.  torch_api/cpu and torch_api/cuda implement them.  Torch's dispatcher
// chooses by the tensors' device, so Python has no device branch.
//
//   T tokens of this step, all sequences one after another     S sequences in this step
//   H query heads   Hkv KV heads (H % Hkv == 0)                D head size
//
// A cache holds the keys, or the values, of one layer: [blocks, Hkv, block_size, D], in the dtype of the model or e4m3.
// An e4m3 cache has scales [2, Hkv] f32, for keys and for values: value = stored * scale.

#include <torch/library.h>

TORCH_LIBRARY(quire, m) {
  // key, value [T, Hkv, D] · caches [blocks, Hkv, block_size, D] · kv_indices [T] i64 = block * block_size + offset,
  // -1: skip the token
  m.def(
      "kv_write(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor kv_indices, "
      "Tensor? scales) -> ()");

  //   q, out     [T, H, D]; a sequence with lens 0 gives zeros
  //   caches     as in kv_write
  //   tables     [max_rows, max_blocks] i32
  //   rows       [S] i32: row of `tables` that each sequence has
  //   q_start    [S + 1] i32: sequence s owns q[q_start[s]:q_start[s + 1]]
  //   lens       [S] i32, keys including this step's
  //   window     > 0: a query sees only the last `window` positions up to its own
  //   soft_cap   > 0: score = soft_cap * tanh(score / soft_cap)
  //   sinks      [H] f32: attention sink, a score without a value in every softmax of its head
  //   decodes    number of leading sequences with at most one query each: a hint that a device may use
  //   plan       written by attention_plan for the same q_start, lens, decodes, sizes and window.  tables and rows must
  //              be written before attention_plan is called
  // Query i of a sequence with n queries has position lens - n + i and sees positions up to its own.
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor tables, Tensor rows, Tensor q_start, "
      "Tensor lens, Tensor? scales, Tensor? sinks, int decodes, Tensor(a!) plan, float scale, int window, "
      "float soft_cap, Tensor(b!) out) -> ()");
  // Partitions the work of paged_attention, once per step for all layers of equal sizes and window.  plan: u8, at least
  // attention_plan_bytes; on a GPU it also has memory for partial results.  A CPU does not use it.
  m.def(
      "attention_plan(Tensor q_start, Tensor lens, int decodes, int heads, int kv_heads, int head_size, int window, "
      "Tensor(a!) plan) -> ()");
  m.def(
      "attention_plan_bytes(Tensor like, int max_seqs, int max_tokens, int heads, int kv_heads, int head_size) -> int");

  // caches: K and V of all layers whose caches have one shape · pairs [n, 2] i64: (source block, destination block).  A
  // block may be one destination at most, and not a source too
  m.def("block_copy(Tensor(a!)[] caches, Tensor pairs) -> ()");

  // Fills blocks [n] i64 of all `caches` (as in block_copy) with `value`
  m.def("block_fill(Tensor(a!)[] caches, Tensor blocks, float value) -> ()");

  // blocks [n] i64 · buffer [n, caches, bytes of a block] u8.  block_gather copies block blocks[i] of cache c to
  // buffer[i, c]; block_scatter copies buffer[i, c] back to that block, and requires distinct blocks
  m.def("block_gather(Tensor[] caches, Tensor blocks, Tensor(a!) buffer) -> ()");
  m.def("block_scatter(Tensor buffer, Tensor blocks, Tensor(a!)[] caches) -> ()");

  // Sets the number of threads of the CPU kernels; 0: at::get_num_threads()
  m.def("set_threads(int threads) -> ()");

  // Operators between the GEMMs of a decoder layer.  They compute in float32 and round once, to the dtype of x.  No
  // earlier kernel may write the norm weights, because a GPU may read them before earlier kernels have ended.

  // x, out [T, size], or [T, heads, size] with a norm per head · weight [size]. out may be x
  m.def("rms_norm(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()");

  // gate_up [T, 2 * size]: gate, then up · out [T, size] = silu(gate) * up
  m.def("silu_mul(Tensor gate_up, Tensor(a!) out) -> ()");

  //   qkv             [T, H + 2 * Hkv, D]: queries are rotated in place; rotated keys and values are written to the
  //                   caches
  //   cos, sin        [T, D]
  //   caches, kv_indices, scales  as in kv_write
  //   q_norm, k_norm  [D]: rms_norm of each query and key head before the rotation, rounded to the dtype of qkv; the
  //                   weight is norm_offset + these
  // Element i of a head is rotated with element i + D / 2.
  m.def(
      "rope_kv_write(Tensor(a!) qkv, Tensor cos, Tensor sin, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor kv_indices, "
      "Tensor? q_norm, Tensor? k_norm, float eps, Tensor? scales, float norm_offset) -> ()");

  // For each slot the device has a row of the block tables, the next input token and its position.  In the following
  // three operators slots [n] i32 lists the decoding slots, in the order of the step; -1 is padding.

  // edits [n, 3] i32: tables[row, column] = block; row -1: no edit.  Entries must be distinct
  m.def("apply_edits(Tensor edits, Tensor(a!) tables) -> ()");

  //   token, position             [max_rows] i64: next input token of each slot, and its position
  //   tables                      [max_rows, max_blocks] i32
  //   ids, positions, kv_indices  [n] i64, out: inputs of the step
  //   rows, lens                  [n] i32, out: inputs of the step
  // Padding, and a slot whose position is past the end of its table, get id 0, position 0, kv_index -1, row 0, lens 0.
  m.def(
      "decode_inputs(Tensor slots, Tensor token, Tensor position, Tensor tables, int block_size, Tensor(a!) ids, "
      "Tensor(b!) positions, Tensor(c!) kv_indices, Tensor(d!) rows, Tensor(e!) lens) -> ()");

  // tokens [n] i64, sampled: token[slots[i]] = tokens[i], position[slots[i]] += 1.  Slots must be distinct
  m.def("decode_outputs(Tensor slots, Tensor tokens, Tensor(a!) token, Tensor(b!) position) -> ()");

  // Samples one token per row of logits [N, V], by the rules of sampling_rules.h.
  //   slots    [N] i64: the row's slot in `table`; -1: the row has no slot, and its token is 0
  //   known    [N] i64: number of tokens before the sampled one
  //   table    [max_seqs, 9] i64: sampling::Settings per slot; `sample` counts the token in their marks
  //   tokens   [N] i64, out; 0 if none was sampled
  //   outcome  [N] u8, out: kChosen, kNotFinite or kNothingAllowed of sampling_rules.h
  //   general  false: each token is the argmax of the row's raw logits; `table` is neither read nor written
  m.def(
      "sample(Tensor logits, Tensor slots, Tensor known, Tensor table, bool general, Tensor(a!) tokens, "
      "Tensor(b!) outcome) -> ()");

  // `sample` without `general` for vocab-parallel logits: each rank calls `argmax`, an all-reduce takes the maximum of
  // the keys, and each rank calls `chosen`.
  //   logits  [N, C]: this rank's columns, for the tokens first, first + 1, ...
  //   keys    [N] i64: a row's maximum logit and its token, as one integer
  m.def("argmax(Tensor logits, int first, Tensor(a!) keys) -> ()");
  m.def("chosen(Tensor keys, Tensor slots, Tensor(a!) tokens, Tensor(b!) outcome) -> ()");
}

// Linear layers.
TORCH_LIBRARY_FRAGMENT(quire, m) {
  //   x         [T, inner]
  //   weight    [size, inner]
  //   bias      [size]
  //   out       [T, size] = x weight^T + bias
  //   norm      [inner]: the GEMM's input is rms_norm(x, norm, eps), rounded to x's dtype
  //   silu_mul  weight and bias have `size` gate rows, then `size` up rows; out = silu(gate) * up, with gate and up
  //             rounded to x's dtype first
  //   add       out += the result, which may be rounded first
  // Sums are float32.  No earlier kernel may write weight and bias (as with norm weights).  On a GPU out may be float32
  // for a 16-bit x, without silu_mul and add: the result is then not rounded.
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, float eps, bool add, bool silu_mul, "
      "Tensor(a!) out) -> ()");

  // `linear` on a Hopper GPU in bfloat16, with weight [size, inner] e4m3 and scale [size] f32: weight = stored * scale.
  // With many tokens x is quantised to e4m3, too, with one scale per row.
  m.def(
      "linear_fp8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? norm, float eps, bool add, bool silu_mul, "
      "Tensor(a!) out) -> ()");

  // `linear` on a GPU in bfloat16 with int4 weights.  A group is 32, 64 or 128 inputs of a row: weight = (q - zero) *
  // scale of the group * scale of the row.
  //   weight     [size / 16, inner / 128, bytes] u8: the packed blocks of cuda/linear/int4.h, with q, zeros and group
  //              scales
  //   scale      [size] f32
  m.def(
      "linear_int4(Tensor x, Tensor weight, Tensor scale, Tensor? bias, Tensor? norm, float eps, bool add, bool silu_mul, "
      "Tensor(a!) out) -> ()");

  // All-reduce over the ranks of a model (one GPU each), fused with the residual and the norm.  All ranks make the same
  // calls.
  //   part     [rows, size], this rank's term of the sum; without `plus` the sum is stored here.  A row is a multiple
  //            of 16 bytes and has at most 16384 elements
  //   plus     [rows, size], the residual, equal on all ranks: plus += the sum of all parts
  //   norm     [size]; normed [rows, size] = rms_norm(part or plus, norm, eps), after the sum
  //   inbox    [bytes] u8, written by the other ranks; initially zeros
  //   inboxes  addresses of all ranks' inboxes, in this process
  //   calls    [256] i32 of this rank, initially zeros
  //   ctas     maximum CTAs per call, all of which must be resident on each rank's GPU at once
  //   words    true: every 8 bytes sent contain the call number: lower latency, twice the bytes.  words_share,
  //            blocks_share: maximum bytes of `part` per CTA, with and without `words`
  m.def(
      "rank_sum(Tensor(a!) part, Tensor(b!)? plus, Tensor? norm, float eps, Tensor(c!)? normed, Tensor(d!) inbox, "
      "int[] inboxes, Tensor(e!) calls, int rank, int ctas, int words_share, int blocks_share, bool words) -> ()");
}

// Mixtures of experts.
TORCH_LIBRARY_FRAGMENT(quire, m) {
  // A GPU computes in bfloat16 or float16.  The CPU's plain loops are the reference of the tests.  On a GPU `experts`
  // supports T * k up to 512; on Hopper any number of tokens if hidden and inner are multiples of 64.
  //   logits     [T, E]
  //   chosen     [T, k] i32: the experts of the k largest logits, largest first; of equal logits the lower index first
  //   weights    [T, k] f32: the chosen experts' probabilities in a softmax over all experts
  //   normalise  divide a token's weights by their sum · rounded: round the weights to the dtype of logits
  m.def("route(Tensor logits, bool normalise, bool rounded, Tensor(a!) chosen, Tensor(b!) weights) -> ()");
  //   x             [T, hidden]
  //   gate_up       [E, 2 * inner, hidden]: per expert gate rows, then up rows; with `clamped` gate and up rows
  //                 alternate
  //   gate_up_bias  [E, 2 * inner], in the order of the rows
  //   down          [E, hidden, inner]
  //   down_bias     [E, hidden]
  //   activation    silu: silu(gate) * up;  clamped (gpt-oss): g * sigmoid(alpha * g) * (u + 1), where
  //                 g = min(gate, limit) and u = max(-limit, min(up, limit))
  //   out           [T, hidden] = the sum over a token's experts of weight * (down activation(gate, up) + down_bias);
  //                 add: is added to out
  m.def(
      "experts(Tensor x, Tensor chosen, Tensor weights, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
      "Tensor? down_bias, str activation, float alpha, float limit, bool add, Tensor(a!) out) -> ()");
  // `experts` with quantised weights, in the layout of experts_layout.h.  hidden and inner are multiples of 64.  A GPU
  // must be a Hopper with x in bfloat16, and supports mxfp4 with `clamped` and fp8 with `silu`, any number of tokens.
  //   format   mxfp4 or fp8
  //   gate_up  [E, ceil(inner / 64), hidden / 64, 2, tile bytes] u8
  //   down     [E, ceil(hidden / 128), inner / 64, 2, tile bytes] u8
  m.def(
      "experts_packed(Tensor x, Tensor chosen, Tensor weights, str format, Tensor gate_up, Tensor? gate_up_bias, "
      "Tensor down, Tensor? down_bias, str activation, float alpha, float limit, bool add, Tensor(a!) out) -> ()");
}

// Linear layers with packed weights, on a CPU.
TORCH_LIBRARY_FRAGMENT(quire, m) {
  // One linear layer with fused neighbours: x = rms_norm(x) if there is a norm; out = x weight^T + bias + plus.  With
  // silu_mul, and without plus, out = silu(gate) * up of the result's two halves.  Sums are float32, rounded once.  A
  // row's result is bit-identical in any batch, except with `widen`.
  //   x          [rows, inner] in any dtype
  //   packed     a weight [features, inner] in the layout of product_layout, padded with zeros
  //   bias       [features]
  //   plus, out  [rows, features]; out may be plus.  Both have x's dtype, or both f32
  // A one-dimensional scale means int8 weights.  Rows of x are quantised to 16 bits, and sums are exact integers.
  //   packed     u8: w + 128
  //   scale      [strips * columns] f32, one per feature: weight = w * scale
  // A three-dimensional scale means int4 weights.  Rows of x are quantised to 16 bits, and sums within a group of
  // inputs are exact integers.
  //   packed     [strips, inner / 4, columns / 2, 4] u8: packed[s, k, c, t] = w[s * columns + c, 4 * k + t]
  //              + 16 * w[s * columns + columns / 2 + c, 4 * k + t]
  //   scale      [strips, groups, columns] f16 or f32; groups have 32, 64, .. 4,096 inputs
  //   zero       [strips, groups, columns] u8: weight = (w - zero) * scale; absent: 8
  // widen: bfloat16 x and weights are multiplied on matrix tiles (AMX) if the inner size is even, with sums in another
  // order.  With many rows of bfloat16, quantised weights are dequantised to bfloat16 first: int8 weights stay exact,
  // and x is not rounded.  The bits of such a row then depend on the number of rows.  Requires AVX-512
  m.def(
      "packed_linear(Tensor x, Tensor packed, Tensor? scale, Tensor? zero, Tensor? bias, Tensor? norm, float eps, "
      "bool silu_mul, bool widen, Tensor? plus, Tensor(a!) out) -> ()");
  // Minimum rows at which `widen` takes effect, for int8 and for int4 weights
  m.def("widened_rows() -> (int, int)");
  // All layers of a decoder on a CPU.  x is the residual stream, updated in place.  A layer calls packed_linear,
  // rope_kv_write, paged_attention, and packed_linear three more times.
  //   x                 [T, hidden]
  //   weights           20 tensors per layer. Four norms: of the input, of each query head, of each key head, of the
  //                     MLP's input.  Then packed, scale, zero and bias of four linear layers: qkv; o; gate and up,
  //                     with silu(gate) * up; down.  A missing tensor is None
  //   caches, scales    per layer, as in kv_write
  //   inner             inputs of down · eps, head_eps: eps of the norms, and of the norms per head
  //   kv_indices, tables  per KV group, as in kv_write and paged_attention · groups: KV group of each layer
  //   windows           per layer, as `window` of paged_attention; widen: as in packed_linear
  //   lora_*            as weights, tables, rows and starts of `lora`; a site is 4 * layer + linear layer.  Empty
  //                     lists: no row has an adapter
  m.def(
      "decoder_layers(Tensor(a!) x, Tensor cos, Tensor sin, Tensor?[] weights, Tensor(b!)[] k_caches, "
      "Tensor(c!)[] v_caches, Tensor?[] scales, Tensor[] kv_indices, Tensor[] tables, int[] groups, Tensor rows, "
      "Tensor q_start, Tensor lens, int heads, int inner, float eps, float head_eps, float scale, int[] windows, "
      "bool widen, Tensor[] lora_weights, Tensor[] lora_tables, Tensor? lora_rows, Tensor? lora_starts) -> ()");
  // y[row] += B A x[row] for the rows of each LoRA adapter, on a CPU.  A site is one GEMM that computes 1 to 3 linear
  // layers (parts), for example q, k and v.
  //   x         [T, inner] · y [T, columns]
  //   weights   per adapter [elements] in x's dtype: its matrices, each packed in the layout of product_layout
  //   tables    per adapter [sites, 14] i64: offset of A in weights, rows of A (0: nothing is added); then for each
  //             part: offset of B, rank (0: nothing is added), first column of y, number of columns.  A's rows are the
  //             ranks of the first part, then those of the next
  //   rows      [n] i32: rows of x and y, ascending within an adapter
  //   starts    [adapters + 1] i32: adapter g has rows[starts[g] : starts[g + 1]]
  // Sums are float32; A x is rounded to x's dtype.  A row's result is bit-identical in any batch.
  m.def("lora(Tensor x, Tensor[] weights, Tensor[] tables, Tensor rows, Tensor starts, int site, Tensor(a!) y) -> ()");
  // Returns (columns, together) for weights of like's dtype, or for int8 weights if like is u8.  packed is [strips,
  // steps, columns, together]: packed[s, k, c, t] = weight[s * columns + c, k * together + t]
  m.def("product_layout(Tensor like) -> (int, int)");
}

// LoRA adapters on a GPU.
TORCH_LIBRARY_FRAGMENT(quire, m) {
  // y += B A x for the rows of a step that have an adapter, in bfloat16 or float16.  lora_shrink computes h = A x, then
  // lora_expand y += B h; lora_add does both in one launch.  cuda/lora/lora.h has the packed layout of A and B.
  //   x, y         [T, inner], [T, columns of all parts]; other rows of y are untouched
  //   weights      [slots, elements] in x's dtype: the packed matrices of the adapter in each slot
  //   table        [slots, sites, 14] i64: as in `lora`; offsets count from the start of the slot
  //   order        [>= T] i32: rows with an adapter, sorted by slot
  //   tiles        [tiles, 4] i32: slot (-1: none), first index into order, rows (up to 32), 0
  //   slot_of_row  [>= T] i32: slot of the row's adapter; -1: none
  //   h            [splits, T, ranks] f32: partial sums of A x; h[:, i] is of row order[i]; ranks are a multiple of 16.
  //                On Hopper also [1, T, ranks] in x's dtype: the complete sums, rounded
  //   out          [T, columns of a part] = silu(gate) * up for all T rows, where y + B h has gate, then up; y is not
  //                written
  m.def(
      "lora_shrink(Tensor x, Tensor weights, Tensor table, Tensor order, Tensor tiles, int site, Tensor(a!) h) -> ()");
  m.def(
      "lora_expand(Tensor h, Tensor weights, Tensor table, Tensor order, Tensor tiles, Tensor slot_of_row, int site, "
      "int[] features, Tensor(a!) y, Tensor(b!)? out) -> ()");
  // ranks: maximum ranks of an adapter at this site, all parts together.  x_is_ready: what `linear_sharing_x` returned
  // if it is the preceding GEMM; else False.  Returns False, and does nothing, if rows or ranks are too many or the GPU
  // is older than Hopper
  m.def(
      "lora_add(Tensor x, Tensor weights, Tensor table, Tensor order, Tensor tiles, Tensor slot_of_row, int site, "
      "int ranks, int[] features, bool x_is_ready, Tensor(a!) y, Tensor(b!)? out) -> bool");
  // lora_expand in two operators.  lora_store_deltas runs during the GEMM, on a parallel branch of a CUDA graph, and
  // writes deltas [T, sum of features] f32 = B h of the rows with an adapter.  lora_add_deltas runs after the GEMM: y
  // += deltas, or with `out` as in lora_expand
  m.def(
      "lora_store_deltas(Tensor h, Tensor weights, Tensor table, Tensor order, Tensor tiles, int site, int[] features, "
      "Tensor(a!) deltas) -> ()");
  m.def("lora_add_deltas(Tensor deltas, Tensor slot_of_row, Tensor(a!) y, Tensor(b!)? out) -> ()");
  // `linear` on a GPU, without norm and activation.  Returns whether a following `lora_add` may read x before this GEMM
  // has ended
  m.def("linear_sharing_x(Tensor x, Tensor weight, Tensor? bias, bool add, Tensor(a!) out) -> bool");
}

// Layers with a state per slot.  Sequence s owns tokens q_start[s] .. q_start[s + 1] - 1 and the state rows[s], which
// is updated in place.  No two sequences share a state.  lens [S] i32: a sequence of length 0 is padding of a CUDA
// graph, its outputs are 0 and it has no state; without `lens` there is no padding.  keeps [n, 2] i32, by ascending
// `end`: a pair (end, place) copies the state of its sequence to states[place] once the tokens before `end` are
// computed.  A token's result has the same bits in any batch and chunking.
TORCH_LIBRARY_FRAGMENT(quire, m) {
  //   x, out   [T, channels]
  //   weight   [taps, channels] f32, the last tap is the newest token's · bias [channels] f32
  //   states   [slots, taps - 1, channels], dtype of x: the last inputs, the oldest first
  // out = bias + sum over the taps of weight * input; with `silu`: out = silu of that
  m.def(
      "causal_conv(Tensor x, Tensor weight, Tensor? bias, bool silu, Tensor(a!) states, Tensor rows, Tensor q_start, "
      "Tensor? lens, Tensor? keeps, Tensor(b!) out) -> ()");
  //   q, k     [T, key_heads, keys]; v [T, heads, values]; one dtype.  keys, values: elements of a key and of a value
  //   decay    [T, heads] f32: logarithm of the factor of the old state · beta [T, heads] f32: factor of the delta rule
  //   q_scale  factor of q; eps > 0: q and k become x / sqrt(sum(x^2) + eps) first
  //   states   [slots, heads, keys, values] f32 · out [T, heads, values] f32
  // S = exp(decay) S;  w = beta (v - k^T S), or v if beta is absent;  S += k w^T;  out = q^T S
  m.def(
      "linear_recurrence(Tensor q, Tensor k, Tensor v, Tensor decay, Tensor? beta, float q_scale, float eps, "
      "Tensor(a!) states, Tensor rows, Tensor q_start, Tensor? lens, Tensor? keeps, Tensor(b!) out) -> ()");
  // On a GPU only; ops/recurrent.py has the same in torch's operators.
  //   x        [T, heads, size] f32 or the dtype of out · gate, out the same shape · weight [size] f32
  // out = x / sqrt(mean(x^2) + eps) * weight; gate: then times silu(gate)
  m.def("gated_norm(Tensor x, Tensor weight, float eps, Tensor? gate, Tensor(a!) out) -> ()");
  //   a, b     [T, heads], one dtype · rate, dt_bias [heads] f32 · decay, beta [T, heads] f32
  // decay = rate * softplus(a + dt_bias);  beta = beta_scale * sigmoid(b), the sigmoid rounded to the dtype of b
  m.def(
      "delta_gates(Tensor a, Tensor b, Tensor rate, Tensor dt_bias, float beta_scale, Tensor(a!) decay, "
      "Tensor(b!) beta) -> ()");
}

// Operators of the host, without tensors.
TORCH_LIBRARY_FRAGMENT(quire, m) {
  // The drafter (cpu/drafter.h), on the host for every device; the first argument is the handle from drafter_open.
  //   owner         key of the requests that share recent answers · owners: maximum number of owners
  //   own, recent   maximum tokens kept per slot, and of recent answers per owner
  //   predicted     the answer that the client expects · prompt: number of prompt tokens in `tokens`
  //   drafter_find  appends a token to each of `slots` · least: minimum tokens of a match.  Returns, for each slot that
  //                 has changed since the last call and has drafts: slot, matching tokens, source (0: own text, 1:
  //                 recent answers, 2: predicted), number of drafts, and the drafts
  //   drafter_end   keep: the answer becomes one of its owner's recent answers
  m.def("drafter_open(int slots, int own, int recent, int owners) -> int");
  m.def("drafter_close(int drafter) -> ()");
  m.def("drafter_begin(int drafter, int slot, str owner, int[] tokens, int prompt, int[] predicted) -> ()");
  m.def("drafter_extend(int drafter, int slot, int[] tokens) -> ()");
  m.def("drafter_length(int drafter, int slot) -> int");
  m.def("drafter_find(int drafter, Tensor slots, Tensor tokens, int count, int least) -> int[]");
  m.def("drafter_end(int drafter, int slot, bool keep) -> ()");
}
