// Linear layer with int8 weights.  x is quantised once, row by row, into the workspace.  Then a task is some rows times
// some strips of the weight, as in product.cpp, for each run of `inner`:
//
//      a row in the workspace                   a step of a strip: kColumns features
//     | q0 q1 q2 q3 ...      | its scale, sum |  | w0 w1 of feature 0 | w0 w1 of feature 1 | ...
//       `---- a step ----'                       a lane adds w0 q0 + w1 q1 to the sum of its feature
//
// VNNI multiplies unsigned bytes (weights) by signed bytes (activations).  So w + 128 is stored, and 128 times the sum
// of the row is subtracted at the end.  With VNNI an element of x is 256 * high + low, two signed bytes, and a lane
// takes the high bytes of four elements, then their low bytes.  Without VNNI, weights are widened to 16 bits, like x.

#include "cpu/product_int8.h"

#include <algorithm>

#include "cpu/integers.h"
#include "cpu/pool.h"

namespace quire::cpu {
namespace {

typedef double Doubles __attribute__((vector_size(8 * kLanes)));
typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));

#if defined(__AVX512VNNI__)
constexpr int kRows = 6;  // registers: kRows x 2 strips of lanes x 2 bytes per activation, and the weights
constexpr int64_t kRun =
    4096;  // elements of `inner` whose sums of high or low bytes fit into 32 bits: 4096 * 255 * 128
#else
constexpr int kRows = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;
constexpr int64_t kRun = 256;  // elements of `inner` whose sum fits into 32 bits: 256 * 255 * 32,639
#endif
constexpr int64_t kTaskRows = 8 * kRows;
constexpr int64_t kStepBytes = kColumns * kInt8Together;  // bytes per step of a strip
constexpr int64_t kAhead = 1024;                          // prefetch distance of the weights, in bytes
constexpr float kOffset = 128;                            // offset added to each stored weight

// Stored after a row's integers in the workspace.
struct Row {
  float scale;  // x = q * scale
  double sum;   // sum of all q
};

// Stores kLanes quantised elements at `values`, in the order in which Sum reads them.
inline void put(uint8_t* values, Ints q) {
#if defined(__AVX512VNNI__)
  store_bytes(values, q);
#else
  const Shorts narrow = __builtin_convertvector(q, Shorts);
  std::memcpy(values, &narrow, sizeof narrow);
#endif
}

template <class T>
void quantise(const T* x, int64_t inner, uint8_t* values) {
  Doubles sum{};
  Row row{};
  row.scale = round_row(x, inner, [&](int64_t k, Ints q) {
    sum += __builtin_convertvector(q, Doubles);
    put(values + 2 * k, q);
  });
  const int64_t written = (inner + kLanes - 1) / kLanes * kLanes, size = int8_row_bytes(inner) - 64;
  std::memset(values + 2 * written, 0, size - 2 * written);
  for (int i = 0; i < kLanes; ++i) row.sum += sum[i];
  std::memcpy(values + size, &row, sizeof row);
}

// Loads the weights of kLanes features for one step.
inline Words load_weights(const uint8_t* p) {
#if defined(__AVX512VNNI__)
  Words bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return bytes;
#elif defined(__AVX512BW__)
  return bit_cast<Words>(_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  Halves pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  const Words wide = __builtin_convertvector(pairs, Words);
  return (wide & 0xff) | (wide >> 8 << 16);
#endif
}

// Accumulators of kLanes features over a run.  add() takes the kInt8Together elements of x for a step.
#if defined(__AVX512VNNI__)
struct Sum {
  Words high{}, low{};

  void add(Words weights, const uint8_t* x) {
    int32_t high_bytes, low_bytes;  // two loads: from one load GCC 12 would extract them in general registers, slowly
    std::memcpy(&high_bytes, x, sizeof high_bytes);
    std::memcpy(&low_bytes, x + sizeof high_bytes, sizeof low_bytes);
    high = multiply_add(high, weights, high_bytes);
    low = multiply_add(low, weights, low_bytes);
  }
  Doubles total() const {
    return __builtin_convertvector(bit_cast<Ints>(high), Doubles) * 256.0 +
           __builtin_convertvector(bit_cast<Ints>(low), Doubles);
  }
};
#else
struct Sum {
  Words all{};

  void add(Words weights, const uint8_t* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    all = multiply_add(all, weights, pair);
  }
  Doubles total() const { return __builtin_convertvector(bit_cast<Ints>(all), Doubles); }
};
#endif

// Adds x times a strip, over one run, to sums [rows, kColumns], or sets them if `first`.
template <int rows>
void multiply(const uint8_t* x, int64_t stride, const uint8_t* weight, int64_t steps, double* sums, bool first) {
  Sum sum[rows][2];
  for (int64_t step = 0; step < steps; ++step) {
    for (int64_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(weight + kAhead + line);
    const Words left = load_weights(weight), right = load_weights(weight + kStepBytes / 2);
    unroll<rows>([&](auto i) {
      sum[i][0].add(left, x + i * stride);
      sum[i][1].add(right, x + i * stride);
    });
    weight += kStepBytes;
    x += 2 * kInt8Together;
  }
  unroll<rows>([&](auto i) {
    for (int half = 0; half < 2; ++half) {
      double* to = sums + i * kColumns + half * kLanes;
      Doubles all = sum[i][half].total(), before{};
      if (!first) std::memcpy(&before, to, sizeof before);
      all += before;
      std::memcpy(to, &all, sizeof all);
    }
  });
}

template <int... i>
void multiply(int64_t rows, const uint8_t* x, int64_t stride, const uint8_t* weight, int64_t steps, double* sums,
              bool first, std::integer_sequence<int, i...>) {
  using Multiply = void (*)(const uint8_t*, int64_t, const uint8_t*, int64_t, double*, bool);
  static constexpr Multiply by_rows[] = {multiply<i + 1>...};
  by_rows[rows - 1](x, stride, weight, steps, sums, first);
}

// Applies the row's scale and the epilogue to one strip of one row.
template <class Args>
void scale_and_finish(const Args& args, int64_t row, int64_t column, const double* sums) {
  const int64_t bytes = int8_row_bytes(args.inner);
  Row x_row;
  std::memcpy(&x_row, args.workspace + (row + 1) * bytes - 64, sizeof x_row);
  float results[kColumns];
  for (int64_t j = 0; j < kColumns; j += kLanes) {
    Doubles sum;
    std::memcpy(&sum, sums + j, sizeof sum);
    store(results + j,
          __builtin_convertvector(sum - kOffset * x_row.sum, Floats) * x_row.scale * load(args.scale + column + j));
  }
  finish(args, row, column, results);
}

// Computes a task.  Reads the weights once and sequentially, because sequential reads are prefetched best.
template <class Args>
void task(const Args& args, int64_t first_row, int64_t rows, int64_t first_strip, int64_t strips) {
  alignas(64) double sums[kTaskRows][kColumns];
  const int64_t steps = (args.inner + kInt8Together - 1) / kInt8Together, bytes = int8_row_bytes(args.inner);
  const int64_t groups = (rows + kRows - 1) / kRows, run_steps = kRun / kInt8Together;
  for (int64_t strip = first_strip; strip < first_strip + strips; ++strip) {
    for (int64_t run = 0; run < steps || run == 0; run += run_steps) {
      const uint8_t* weight = args.weight + (strip * steps + run) * kStepBytes;
      for (int64_t group = 0; group < groups; ++group) {
        const int64_t begin = group * rows / groups, count = (group + 1) * rows / groups - begin;
        const uint8_t* x = args.workspace + (first_row + begin) * bytes + 2 * run * kInt8Together;
        multiply(count, x, bytes, weight, std::min(run_steps, steps - run), sums[begin], run == 0,
                 std::make_integer_sequence<int, kRows>{});
      }
    }
    for (int64_t i = 0; i < rows; ++i) scale_and_finish(args, first_row + i, strip * kColumns, sums[i]);
  }
}

// Weight in byte `byte` (0 or 1) of each lane, as float.  The integer becomes the low bits of a float's fraction, which
// takes no conversion instruction.
template <int byte>
inline Floats weight_of(Words bytes) {
  constexpr float kBase = byte == 0 ? 0x1p23f : 0x1p15f;
  const Words bits = (bytes & 0xff << 8 * byte) | bit_cast<uint32_t>(kBase);
  return bit_cast<Floats>(bits) - (kBase + kOffset);
}

// Converts two weights per lane to bfloat16, exactly.
inline Words as_bf16(Words bytes) {
  return bit_cast<Words>(weight_of<0>(bytes)) >> 16 | (bit_cast<Words>(weight_of<1>(bytes)) & 0xffff0000);
}

}  // namespace

void widen_int8(const uint8_t* weight, int64_t inner, int64_t strip, int64_t first, int64_t count, bf16* to) {
  const int64_t all_steps = (inner + kInt8Together - 1) / kInt8Together;
  weight += (strip * all_steps + first / kInt8Together) * kStepBytes;
  for (int64_t k = 0; k < count; k += kInt8Together) {
    for (int64_t line = 0; line < kStepBytes; line += 64) __builtin_prefetch(weight + kAhead + line);
    for (int half = 0; half < 2; ++half) {
      Words bytes;  // kInt8Together bytes per lane
      if constexpr (kInt8Together == 4) {
        std::memcpy(&bytes, weight + half * kStepBytes / 2, sizeof bytes);
      } else {
        bytes = bit_cast<Words>(load(reinterpret_cast<const bf16*>(weight + half * kStepBytes / 2))) >> 16;
      }
      for (int64_t pair = 0; pair < kInt8Together / 2; ++pair) {
        const Words values = as_bf16(bytes >> 16 * pair);
        std::memcpy(to + (pair * 2 + half) * 2 * kLanes, &values, sizeof values);
      }
    }
    weight += kStepBytes;
    to += kInt8Together * kColumns;
  }
}

template <class T, class Out>
void product_int8(const Int8ProductArgs<T, Out>& args) {
  over_rows(args.rows, args.inner, args.threads, [&](int64_t row) {
    quantise(args.x + row * args.x_stride, args.inner, args.workspace + row * int8_row_bytes(args.inner));
  });
  share_product(args, kTaskRows, [&](int64_t first_row, int64_t rows, int64_t first_strip, int64_t strips) {
    task(args, first_row, rows, first_strip, strips);
  });
}

template void product_int8(const Int8ProductArgs<float>&);
template void product_int8(const Int8ProductArgs<bf16>&);
template void product_int8(const Int8ProductArgs<fp16>&);
template void product_int8(const Int8ProductArgs<bf16, float>&);
template void product_int8(const Int8ProductArgs<fp16, float>&);

}  // namespace quire::cpu
