// Bindings of sampling on a CPU.

#include "cpu/sampling.h"

#include <torch/library.h>

#include "torch_api/cpu/convert.h"
#include "torch_api/sampling.h"

namespace quire::cpu::torch_api {
namespace {

void sample(const at::Tensor& logits, const at::Tensor& slots, const at::Tensor& known, const at::Tensor& table,
            bool general, const at::Tensor& tokens, const at::Tensor& outcome) {
  const SampleSizes sizes = check_sample(logits, slots, known, table, tokens, outcome, on_cpu());
  expect_below("slots", slots.const_data_ptr<int64_t>(), sizes.rows, -1, sizes.max_seqs);
  const SampleArgs args{logits.stride(0),
                        slots.const_data_ptr<int64_t>(),
                        known.const_data_ptr<int64_t>(),
                        static_cast<const sampling::Settings*>(table.const_data_ptr()),
                        general,
                        tokens.data_ptr<int64_t>(),
                        outcome.data_ptr<uint8_t>(),
                        sizes.rows,
                        sizes.size};
  by_dtype("logits", logits, [&](auto type) {
    cpu::sample(static_cast<const decltype(type)*>(logits.const_data_ptr()), args, threads());
  });
}

void argmax(const at::Tensor& logits, int64_t first, const at::Tensor& keys) {
  const SampleSizes sizes = check_argmax(logits, first, keys, on_cpu());
  by_dtype("logits", logits, [&](auto type) {
    cpu::argmax(static_cast<const decltype(type)*>(logits.const_data_ptr()), logits.stride(0), first,
                keys.data_ptr<int64_t>(), sizes.rows, sizes.size, threads());
  });
}

void chosen(const at::Tensor& keys, const at::Tensor& slots, const at::Tensor& tokens, const at::Tensor& outcome) {
  const SampleSizes sizes = check_chosen(keys, slots, tokens, outcome, on_cpu());
  cpu::chosen(keys.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), tokens.data_ptr<int64_t>(),
              outcome.data_ptr<uint8_t>(), sizes.rows);
}

TORCH_LIBRARY_IMPL(quire, CPU, m) {
  m.impl("sample", sample);
  m.impl("argmax", argmax);
  m.impl("chosen", chosen);
}

}  // namespace
}  // namespace quire::cpu::torch_api
