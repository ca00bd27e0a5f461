// Binding of LoRA adapters on a CPU.

#include "cpu/lora.h"

#include <torch/library.h>

#include <vector>

#include "cpu/product.h"
#include "torch_api/checks.h"
#include "torch_api/cpu/bindings.h"
#include "torch_api/cpu/convert.h"

namespace quire::cpu::torch_api {
namespace {

// Fields of a site in an adapter's table: offset of A, rows of A; then per part: offset of B, rank, first column of y,
// number of columns.
constexpr int64_t kPartFields = 4, kLoraFields = 2 + kPartFields * kLoraParts;

// Returns the start of a packed matrix [features, inner].  Raises ValueError if the matrix exceeds `weights`.
template <class T>
const T* packed_at(const at::Tensor& weights, int64_t offset, int64_t features, int64_t inner) {
  const int64_t strips = (features + kColumns - 1) / kColumns, steps = (inner + kTogether<T> - 1) / kTogether<T>;
  const int64_t size = strips * steps * kColumns * kTogether<T>;
  TORCH_CHECK_VALUE(offset >= 0 && offset + size <= weights.numel(), "weights: has ", weights.numel(),
                    " elements, a packed matrix ends at ", offset + size);
  return static_cast<const T*>(weights.const_data_ptr()) + offset;
}

template <class T>
LoraGroup<T> group_of(const at::Tensor& weights, const int64_t* fields, int64_t inner, int64_t columns,
                      int64_t& widest) {
  LoraGroup<T> group{};
  group.ranks = fields[1];
  if (group.ranks == 0) return group;
  group.a = packed_at<T>(weights, fields[0], group.ranks, inner);
  int64_t first_rank = 0;
  for (int64_t part = 0; part < kLoraParts; ++part) {
    const int64_t* of = fields + 2 + part * kPartFields;
    LoraPart<T>& to = group.parts[part];
    to = {nullptr, of[1], first_rank, of[2], of[3]};
    first_rank += to.rank;
    if (to.rank == 0) continue;
    TORCH_CHECK_VALUE(to.rank > 0 && to.first >= 0 && to.features > 0 && to.first + to.features <= columns,
                      "tables: a part ends at column ", to.first + to.features, ", y has ", columns);
    to.b = packed_at<T>(weights, of[0], to.features, to.rank);
    widest = std::max(widest, to.features);
  }
  TORCH_CHECK_VALUE(first_rank == group.ranks, "tables: the parts have ", first_rank, " ranks, A has ", group.ranks);
  return group;
}

}  // namespace

void lora(const at::Tensor& x, at::TensorList weights, at::TensorList tables, const at::Tensor& rows,
          const at::Tensor& starts, int64_t site, const at::Tensor& y) {
  const auto groups = static_cast<int64_t>(weights.size());
  Size tokens("tokens"), inner("inner size"), columns("columns"), count("groups"), fields("fields");
  expect("x", x, {tokens, inner});
  expect("y", y, {tokens, columns});
  expect_dtype("y", y, x.scalar_type(), "x");
  expect_last_contiguous("x", x);
  expect_last_contiguous("y", y);
  count.agree("weights", groups);
  count.agree("tables", tables.size());
  fields.agree("this operator", kLoraFields);
  Size bounds("group bounds"), adapted("adapted rows");
  bounds.agree("weights", groups + 1);
  expect_plain("starts", starts, {bounds}, at::kInt, on_cpu());
  expect_plain("rows", rows, {adapted}, at::kInt, on_cpu());
  const int32_t *start = starts.const_data_ptr<int32_t>(), *row = rows.const_data_ptr<int32_t>();
  expect_below("rows", row, adapted, 0, tokens);
  by_dtype("x", x, [&](auto type) {
    using T = decltype(type);
    int64_t widest = 0;
    std::vector<LoraGroup<T>> found;
    for (int64_t g = 0; g < groups; ++g) {
      Size sites("sites");
      expect_plain("tables", tables[g], {sites, fields}, at::kLong, on_cpu());
      expect_dtype("weights", weights[g], x.scalar_type(), "x");
      expect_contiguous("weights", weights[g]);
      TORCH_CHECK_INDEX(site >= 0 && site < sites, "site is ", site, ", not in [0, ", int64_t{sites}, ")");
      TORCH_CHECK_VALUE(start[g] >= 0 && start[g] <= start[g + 1] && start[g + 1] <= adapted, "starts[", g, "] is ",
                        start[g], ", starts[", g + 1, "] is ", start[g + 1]);
      const int64_t* of_site = tables[g].const_data_ptr<int64_t>() + site * kLoraFields;
      found.push_back(group_of<T>(weights[g], of_site, inner, columns, widest));
      found.back().rows = row + start[g];
      found.back().count = start[g + 1] - start[g];
    }
    cpu::lora(LoraArgs<T>{
        .x = static_cast<const T*>(x.const_data_ptr()),
        .x_stride = x.stride(0),
        .y = static_cast<T*>(y.data_ptr()),
        .y_stride = y.stride(0),
        .groups = found.data(),
        .group_count = groups,
        .inner = inner,
        .widest = widest,
        .threads = threads(),
    });
  });
}

namespace {

TORCH_LIBRARY_IMPL(quire, CPU, m) { m.impl("lora", lora); }

}  // namespace
}  // namespace quire::cpu::torch_api
