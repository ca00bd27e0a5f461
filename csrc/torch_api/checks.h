// Shape and dtype checks, shared by the bindings of all devices.  A size has a name and remembers which tensor set it,
// so that an error names both tensors:
//
//   Size T("tokens"), H("heads"), D("head size");
//   expect("q", q, {T, H, D});
//   expect("out", out, {T, H, D});   // ValueError: out: heads is 8, q has 32
//
// The other headers of this folder check complete operators; they return the sizes that the launch needs.

#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <functional>
#include <initializer_list>
#include <string>

namespace quire {

class Size {
 public:
  explicit Size(const char* name) : name_(name) {}

  // The value that all tensors agree on.  Valid only after an expect() has set it.
  operator int64_t() const { return value_; }

  // Sets the value, or raises ValueError if `who` differs from the tensor that set it.
  void agree(const char* who, int64_t value) {
    if (value_ < 0) {
      value_ = value;
      set_by_ = who;
    }
    TORCH_CHECK_VALUE(value == value_, who, ": ", name_, " is ", value, ", ", set_by_, " has ", value_);
  }

 private:
  const char* name_;
  int64_t value_ = -1;
  std::string set_by_;
};

// The device that all tensors of a call must be on.
struct Place {
  c10::DeviceType type;
  c10::Device device;
};
inline Place on_cpu() { return {at::kCPU, at::Device(at::kCPU)}; }
inline Place on_gpu(const at::Tensor& like) { return {at::kCUDA, like.device()}; }

inline void expect_device(const char* who, const at::Tensor& t, const Place& place) {
  const bool cpu = place.type == at::kCPU;
  TORCH_CHECK_VALUE(t.device().type() == place.type, who, ": is on ", t.device(), ", not on ",
                    cpu ? "the CPU" : "a GPU");
  TORCH_CHECK_VALUE(cpu || t.device() == place.device, who, ": is on ", t.device(), ", another tensor on ",
                    place.device);
}

inline void expect(const char* who, const at::Tensor& t, std::initializer_list<std::reference_wrapper<Size>> sizes) {
  TORCH_CHECK_VALUE(t.dim() == static_cast<int64_t>(sizes.size()), who, ": has ", t.dim(), " dimensions, not ",
                    sizes.size());
  int64_t i = 0;
  for (Size& size : sizes) size.agree(who, t.size(i++));
}

// `like` names the tensor that has the expected dtype; null: the operator supports this dtype only.
inline void expect_dtype(const char* who, const at::Tensor& t, at::ScalarType dtype, const char* like = nullptr) {
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, who, ": dtype is ", t.scalar_type(), ", ", like ? like : "this operator",
                    like ? " has " : " needs ", dtype);
}

inline void expect_last_contiguous(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.numel() == 0 || t.size(-1) == 1 || t.stride(-1) == 1, who, ": last dimension has stride ",
                    t.stride(-1), ", not 1");
}

inline void expect_contiguous(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.is_contiguous(), who, ": is not contiguous");
}

// Checks that t is contiguous and has these sizes, this dtype and this device.
inline void expect_plain(const char* who, const at::Tensor& t,
                         std::initializer_list<std::reference_wrapper<Size>> sizes, at::ScalarType dtype,
                         const Place& place, const char* like = nullptr) {
  expect_device(who, t, place);
  expect(who, t, sizes);
  expect_contiguous(who, t);
  expect_dtype(who, t, dtype, like);
}

}  // namespace quire
