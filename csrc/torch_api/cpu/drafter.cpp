// Bindings of the drafter.  It runs on the host, whatever the model's device is.

#include "cpu/drafter.h"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace quire::cpu::torch_api {
namespace {

struct Open {
  Drafter drafter;
  int64_t slots;
};

std::mutex drafters_mutex;
std::unordered_map<int64_t, std::unique_ptr<Open>> drafters;
int64_t last_drafter = 0;

int64_t drafter_open(int64_t slots, int64_t own, int64_t recent, int64_t owners) {
  TORCH_CHECK_VALUE(slots > 0 && own >= 4 && recent >= 0 && owners > 0, "drafter_open: slots ", slots, ", own ", own,
                    ", recent ", recent, ", owners ", owners);
  const std::lock_guard<std::mutex> lock(drafters_mutex);
  drafters.emplace(++last_drafter, std::make_unique<Open>(Open{Drafter(slots, own, recent, owners), slots}));
  return last_drafter;
}

void drafter_close(int64_t handle) {
  const std::lock_guard<std::mutex> lock(drafters_mutex);
  drafters.erase(handle);
}

Open& at(int64_t handle) {
  const std::lock_guard<std::mutex> lock(drafters_mutex);
  const auto found = drafters.find(handle);
  TORCH_CHECK_VALUE(found != drafters.end(), "drafter ", handle, " is not open");
  return *found->second;
}

Open& at(int64_t handle, int64_t slot) {
  Open& open = at(handle);
  TORCH_CHECK_INDEX(slot >= 0 && slot < open.slots, "slot is ", slot, ", the drafter has ", open.slots);
  return open;
}

void drafter_begin(int64_t handle, int64_t slot, c10::string_view owner, at::IntArrayRef tokens, int64_t prompt,
                   at::IntArrayRef predicted) {
  at(handle, slot)
      .drafter.begin(slot, std::string(owner), tokens.data(), static_cast<int64_t>(tokens.size()), prompt,
                     predicted.data(), static_cast<int64_t>(predicted.size()));
}

void drafter_extend(int64_t handle, int64_t slot, at::IntArrayRef tokens) {
  at(handle, slot).drafter.extend(slot, tokens.data(), static_cast<int64_t>(tokens.size()));
}

int64_t drafter_length(int64_t handle, int64_t slot) { return at(handle, slot).drafter.length(slot); }

std::vector<int64_t> drafter_find(int64_t handle, const at::Tensor& slots, const at::Tensor& tokens, int64_t count,
                                  int64_t least) {
  Open& open = at(handle);
  for (const at::Tensor* given : {&slots, &tokens}) {
    TORCH_CHECK_VALUE(given->is_cpu() && given->scalar_type() == at::kLong && given->is_contiguous() && count >= 0 &&
                          given->numel() >= count,
                      "drafter_find: slots and tokens must be contiguous int64 on the host, ", count, " or more");
  }
  const int64_t* numbers = slots.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < open.slots, "slot is ", numbers[i], ", the drafter has ",
                      open.slots);
  }
  std::vector<int64_t> flat;
  for (const Draft& draft :
       open.drafter.find(numbers, tokens.const_data_ptr<int64_t>(), count, static_cast<int>(least))) {
    flat.insert(flat.end(), {draft.slot, draft.match, draft.source, static_cast<int64_t>(draft.tokens.size())});
    flat.insert(flat.end(), draft.tokens.begin(), draft.tokens.end());
  }
  return flat;
}

void drafter_end(int64_t handle, int64_t slot, bool keep) { at(handle, slot).drafter.end(slot, keep); }

TORCH_LIBRARY_IMPL(quire, CompositeExplicitAutograd, m) {
  m.impl("drafter_open", drafter_open);
  m.impl("drafter_close", drafter_close);
  m.impl("drafter_begin", drafter_begin);
  m.impl("drafter_extend", drafter_extend);
  m.impl("drafter_length", drafter_length);
  m.impl("drafter_find", drafter_find);
  m.impl("drafter_end", drafter_end);
}

}  // namespace
}  // namespace quire::cpu::torch_api
