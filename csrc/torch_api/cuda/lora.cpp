// Bindings of LoRA adapters on a GPU.

#include "cuda/lora/lora.h"

#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "torch_api/cuda/convert.h"

namespace quire::cuda::torch_api {
namespace {

constexpr int64_t kAligned = 8;  // elements in 16 bytes

void expect_lora_rows(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(in_16_bytes(t.const_data_ptr(), t.stride(0), 2) && t.size(1) % kAligned == 0, who,
                    ": rows do not start at multiples of 16 bytes, or have a size that is no multiple of ", kAligned);
}

// Checks the arguments that all LoRA operators have, and returns them.  x_or_y: [rows, .] in the model's dtype.
LoraRows lora_rows_of(const at::Tensor& x_or_y, const at::Tensor& weights, const at::Tensor& table,
                      const at::Tensor& order, const at::Tensor& tiles, int64_t site, int64_t ranks) {
  const Place place = on_gpu(x_or_y);
  Size slots("slots"), elements("elements"), sites("sites"), fields("fields"), most("rows"), tile_count("tiles"),
      four("fields");
  fields.agree("this operator", kLoraFields);
  four.agree("this operator", 4);
  const int64_t rows = x_or_y.size(0);
  TORCH_CHECK_VALUE(x_or_y.scalar_type() == at::kBFloat16 || x_or_y.scalar_type() == at::kHalf, "x or y: dtype is ",
                    x_or_y.scalar_type(), ", not bfloat16 or float16");
  expect_plain("weights", weights, {slots, elements}, x_or_y.scalar_type(), place, "x");
  expect_plain("table", table, {slots, sites, fields}, at::kLong, place);
  expect_plain("order", order, {most}, at::kInt, place);
  expect_plain("tiles", tiles, {tile_count, four}, at::kInt, place);
  TORCH_CHECK_VALUE(most >= rows, "order: has ", int64_t{most}, " rows, x ", rows);
  TORCH_CHECK_INDEX(site >= 0 && site < sites, "site is ", site, ", not in [0, ", int64_t{sites}, ")");
  TORCH_CHECK_VALUE(ranks > 0 && ranks % kLoraRanks == 0 && ranks <= 1 << 16, "ranks: ", ranks, " are no multiple of ",
                    kLoraRanks);
  TORCH_CHECK_VALUE(tile_count <= 32768, "tiles: over the limits of a grid");
  TORCH_CHECK_VALUE(rows <= 1 << 20, "x: ", rows, " rows, over ", 1 << 20);
  TORCH_CHECK_VALUE(elements % kAligned == 0, "weights: ", int64_t{elements}, " elements per slot are no multiple of ",
                    kAligned);
  return {
      .dtype = model_dtype_of("x", x_or_y),
      .weights = weights.const_data_ptr(),
      .slot_elements = elements,
      .table = table.const_data_ptr<int64_t>(),
      .sites = static_cast<int>(sites),
      .site = static_cast<int>(site),
      .order = order.const_data_ptr<int32_t>(),
      .tiles = reinterpret_cast<const int4*>(tiles.const_data_ptr<int32_t>()),
      .tile_count = static_cast<int>(tile_count),
      .rows = static_cast<int>(rows),
      .ranks = static_cast<int>(ranks),
  };
}

// Checks h: either partial sums of A x, float32 [splits, rows, ranks], or A x itself, [1, rows, ranks] in the model's
// dtype.  Returns the number of partial sums; 0: it is A x.
int check_h(const at::Tensor& h, const at::Tensor& x_or_y) {
  Size splits("splits"), rows("rows"), ranks("ranks");
  rows.agree("x or y", x_or_y.size(0));
  const bool complete = h.scalar_type() == x_or_y.scalar_type();
  expect_plain("h", h, {splits, rows, ranks}, complete ? x_or_y.scalar_type() : at::kFloat, on_gpu(x_or_y));
  TORCH_CHECK_VALUE(splits > 0 && splits <= 65535, "h: over the limits of a grid");
  TORCH_CHECK_VALUE(!complete || splits == 1, "h: in the dtype of x it has one sum per element");
  return complete ? 0 : static_cast<int>(int64_t{splits});
}

void check_x(const at::Tensor& x) {
  TORCH_CHECK_VALUE(x.dim() == 2, "x: has ", x.dim(), " dimensions, not 2");
  expect_last_contiguous("x", x);
  expect_lora_rows("x", x);
  TORCH_CHECK_VALUE(x.size(1) <= 1 << 20, "x: ", x.size(1), " columns, over ", 1 << 20);
}

// Sets the parts of a site.  `size`: columns of the tensor `who`, which the parts must cover.
void set_parts(LoraOut& args, at::IntArrayRef features, const char* who, int64_t size) {
  args.parts = static_cast<int>(features.size());
  TORCH_CHECK_VALUE(args.parts >= 1 && args.parts <= kLoraParts, "features: ", args.parts, " parts, not 1 to ",
                    kLoraParts);
  int64_t columns = 0;
  for (int part = 0; part < args.parts; ++part) {
    TORCH_CHECK_VALUE(features[part] > 0 && features[part] % kAligned == 0, "features: ", features[part],
                      " is no multiple of ", kAligned);
    args.features[part] = static_cast<int>(features[part]);
    columns += features[part];
  }
  TORCH_CHECK_VALUE(columns == size && columns <= std::numeric_limits<int>::max(), who, ": has ", size,
                    " columns, the parts ", columns);
}

// Checks y and out, the destination of B h, and returns them.
LoraOut lora_out_of(const LoraRows& rows_of_step, const at::Tensor& slot_of_row, at::IntArrayRef features,
                    const at::Tensor& y, const std::optional<at::Tensor>& out) {
  TORCH_CHECK_VALUE(y.dim() == 2, "y: has ", y.dim(), " dimensions, not 2");
  expect_last_contiguous("y", y);
  expect_lora_rows("y", y);
  LoraOut args{rows_of_step};
  args.y = y.data_ptr();
  args.y_stride = y.stride(0);
  set_parts(args, features, "y", y.size(1));
  args.out = nullptr;
  if (out) {
    Size rows("rows"), size("features"), most("rows");
    rows.agree("y", y.size(0));
    size.agree("features", features[0]);
    TORCH_CHECK_VALUE(args.parts == 2 && features[0] == features[1], "features: an activation takes two equal parts");
    expect_device("out", *out, on_gpu(y));
    expect("out", *out, {rows, size});
    expect_dtype("out", *out, y.scalar_type(), "y");
    expect_last_contiguous("out", *out);
    expect_lora_rows("out", *out);
    expect_plain("slot_of_row", slot_of_row, {most}, at::kInt, on_gpu(y));
    TORCH_CHECK_VALUE(most >= rows, "slot_of_row: has ", int64_t{most}, " rows, y ", int64_t{rows});
    args.out = out->data_ptr();
    args.out_stride = out->stride(0);
    args.slot_of_row = slot_of_row.const_data_ptr<int32_t>();
  }
  return args;
}

void lora_shrink(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& table, const at::Tensor& order,
                 const at::Tensor& tiles, int64_t site, const at::Tensor& h) {
  check_x(x);
  const int splits = check_h(h, x);
  const LoraShrinkArgs args{lora_rows_of(x, weights, table, order, tiles, site, h.size(2)),
                            splits,
                            h.data_ptr(),
                            x.const_data_ptr(),
                            x.stride(0),
                            static_cast<int>(x.size(1))};
  if (args.rows == 0 || args.tile_count == 0) return;
  const c10::cuda::CUDAGuard guard(x.device());
  if (splits > 0) return cuda::lora_shrink(args, stream_of(x));
  TORCH_CHECK_VALUE(fits_shrink_in_clusters(), "h: only Hopper and later make it in the dtype of x");
  lora_shrink_in_clusters(args, stream_of(x));
}

void lora_expand(const at::Tensor& h, const at::Tensor& weights, const at::Tensor& table, const at::Tensor& order,
                 const at::Tensor& tiles, const at::Tensor& slot_of_row, int64_t site, at::IntArrayRef features,
                 const at::Tensor& y, const std::optional<at::Tensor>& out) {
  const int splits = check_h(h, y);
  const LoraRows rows = lora_rows_of(y, weights, table, order, tiles, site, h.size(2));
  const LoraExpandArgs args{lora_out_of(rows, slot_of_row, features, y, out), splits, h.const_data_ptr(), nullptr};
  if (args.rows == 0 || (args.tile_count == 0 && !out)) return;
  const c10::cuda::CUDAGuard guard(y.device());
  cuda::lora_expand(args, stream_of(y));
}

void lora_store_deltas(const at::Tensor& h, const at::Tensor& weights, const at::Tensor& table, const at::Tensor& order,
                       const at::Tensor& tiles, int64_t site, at::IntArrayRef features, const at::Tensor& deltas) {
  TORCH_CHECK_VALUE(h.dim() == 3 && h.size(0) == 1, "h: not [1, rows, ranks]");
  const at::Tensor sums = h.select(0, 0);
  const int splits = check_h(h, sums);
  Size rows("rows"), columns("columns");
  rows.agree("h", h.size(1));
  expect_plain("deltas", deltas, {rows, columns}, at::kFloat, on_gpu(h));
  LoraOut out{lora_rows_of(sums, weights, table, order, tiles, site, h.size(2))};
  set_parts(out, features, "deltas", columns);
  const LoraExpandArgs args{out, splits, h.const_data_ptr(), deltas.data_ptr<float>()};
  if (args.rows == 0 || args.tile_count == 0) return;
  const c10::cuda::CUDAGuard guard(h.device());
  cuda::lora_store_deltas(args, stream_of(h));
}

void lora_add_deltas(const at::Tensor& deltas, const at::Tensor& slot_of_row, const at::Tensor& y,
                     const std::optional<at::Tensor>& out) {
  Size rows("rows"), columns("columns"), most("rows"), half("columns / 2");
  TORCH_CHECK_VALUE(y.dim() == 2, "y: has ", y.dim(), " dimensions, not 2");
  rows.agree("y", y.size(0));
  columns.agree("y", y.size(1));
  half.agree("y", y.size(1) / 2);
  expect_last_contiguous("y", y);
  expect_lora_rows("y", y);
  expect_plain("deltas", deltas, {rows, columns}, at::kFloat, on_gpu(y));
  expect_plain("slot_of_row", slot_of_row, {most}, at::kInt, on_gpu(y));
  TORCH_CHECK_VALUE(most >= rows && rows <= 65535, "slot_of_row: has ", int64_t{most}, " rows, y ", int64_t{rows},
                    " of at most 65535");
  if (out) {
    TORCH_CHECK_VALUE(columns % (2 * kAligned) == 0, "y: ", int64_t{columns}, " columns are no multiple of ",
                      2 * kAligned);
    expect_device("out", *out, on_gpu(y));
    expect("out", *out, {rows, half});
    expect_dtype("out", *out, y.scalar_type(), "y");
    expect_last_contiguous("out", *out);
    expect_lora_rows("out", *out);
  }
  const LoraDeltasArgs args{.dtype = model_dtype_of("y", y),
                            .deltas = deltas.const_data_ptr<float>(),
                            .slot_of_row = slot_of_row.const_data_ptr<int32_t>(),
                            .y = y.data_ptr(),
                            .y_stride = y.stride(0),
                            .rows = static_cast<int>(rows),
                            .columns = static_cast<int>(columns),
                            .out = out ? out->data_ptr() : nullptr,
                            .out_stride = out ? out->stride(0) : 0};
  if (args.rows == 0) return;
  const c10::cuda::CUDAGuard guard(y.device());
  cuda::lora_add_deltas(args, stream_of(y));
}

bool lora_add(const at::Tensor& x, const at::Tensor& weights, const at::Tensor& table, const at::Tensor& order,
              const at::Tensor& tiles, const at::Tensor& slot_of_row, int64_t site, int64_t ranks,
              at::IntArrayRef features, bool x_is_ready, const at::Tensor& y, const std::optional<at::Tensor>& out) {
  check_x(x);
  TORCH_CHECK_VALUE(y.size(0) == x.size(0), "y: has ", y.size(0), " rows, x ", x.size(0));
  expect_device("y", y, on_gpu(x));
  expect_dtype("y", y, x.scalar_type(), "x");
  const LoraRows rows = lora_rows_of(x, weights, table, order, tiles, site, ranks);
  const LoraAddArgs args{lora_out_of(rows, slot_of_row, features, y, out), x.const_data_ptr(), x.stride(0),
                         static_cast<int>(x.size(1)), x_is_ready};
  const c10::cuda::CUDAGuard guard(y.device());
  if (!fits_lora_add(args)) return false;
  if (args.rows == 0 || (args.tile_count == 0 && !out)) return true;
  cuda::lora_add(args, stream_of(y));
  return true;
}

TORCH_LIBRARY_IMPL(quire, CUDA, m) {
  m.impl("lora_shrink", lora_shrink);
  m.impl("lora_expand", lora_expand);
  m.impl("lora_add", lora_add);
  m.impl("lora_store_deltas", lora_store_deltas);
  m.impl("lora_add_deltas", lora_add_deltas);
}

}  // namespace
}  // namespace quire::cuda::torch_api
