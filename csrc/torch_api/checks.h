// Checks for the doors.  A size has a name and remembers who set it, so that a mismatch says who disagrees with whom:
//
//   Size T("tokens"), H("heads"), D("head size");
//   expect("q", q, {T, H, D});
//   expect("out", out, {T, H, D});   // ValueError: out: heads is 8, q said 32

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

  // The value all agreed on.  Only after some expect() has set it.
  operator int64_t() const { return value_; }

  void agree(const char* who, int64_t value) {
    if (value_ < 0) {
      value_ = value;
      said_by_ = who;
    }
    TORCH_CHECK_VALUE(value == value_, who, ": ", name_, " is ", value, ", ", said_by_, " said ", value_);
  }

 private:
  const char* name_;
  int64_t value_ = -1;
  std::string said_by_;
};

inline void expect(const char* who, const at::Tensor& t, std::initializer_list<std::reference_wrapper<Size>> sizes) {
  TORCH_CHECK_VALUE(t.dim() == static_cast<int64_t>(sizes.size()), who, ": has ", t.dim(), " dimensions, not ",
                    sizes.size());
  int64_t i = 0;
  for (Size& size : sizes) size.agree(who, t.size(i++));
}

inline void expect_dtype(const char* who, const at::Tensor& t, at::ScalarType dtype, const char* said_by = nullptr) {
  TORCH_CHECK_VALUE(t.scalar_type() == dtype, who, ": dtype is ", t.scalar_type(), ", ",
                    said_by ? said_by : "this operator", said_by ? " said " : " wants ", dtype);
}

inline void expect_last_contiguous(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.numel() == 0 || t.size(-1) == 1 || t.stride(-1) == 1, who, ": last dimension has stride ",
                    t.stride(-1), ", not 1");
}

inline void expect_contiguous(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.is_contiguous(), who, ": is not contiguous");
}

inline void expect_cpu(const char* who, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.device().is_cpu(), who, ": is on ", t.device(), ", not on the CPU");
}

inline void expect_cuda(const char* who, const at::Tensor& t, const at::Tensor& like) {
  TORCH_CHECK_VALUE(t.device().is_cuda(), who, ": is on ", t.device(), ", not on a GPU");
  TORCH_CHECK_VALUE(t.device() == like.device(), who, ": is on ", t.device(), ", another tensor on ", like.device());
}

}  // namespace quire
