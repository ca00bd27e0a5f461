// Linear layer with int4 weights.  x is quantised once, row by row, into the workspace.  Then a task is some rows times
// some strips of the weight, as in product.cpp, for each run of `inner`:
//
//      a row in the workspace                             a step of a strip: 2 * kLanes features
//     | x0 x2 x1 x3 | ... | sums of groups | its scale |   | w0 w1 w2 w3 of feature 0 | .. of feature 1 | ...
//       `- a step                                          and in the high halves, of feature kLanes | ...
//
// A step has two parts.  Without VNNI, weights are widened to 16 bits, like x: the parts are w0 x0 + w2 x2 and w1 x1 +
// w3 x3, because a shift and a mask unpack weights in this order.  With VNNI an element of x is 256 * high + low, two
// signed bytes: one part multiplies all four weights by the high bytes, the other by the low bytes.

#include "cpu/product_int4.h"

#include <algorithm>

#include "cpu/integers.h"
#include "cpu/pool.h"

namespace quire::cpu {
namespace {

typedef int16_t Shorts __attribute__((vector_size(2 * kLanes)));

#if defined(__AVX512VNNI__)
constexpr int kSums = 2;  // accumulators per lane: high bytes and low bytes
#else
constexpr int kSums = 1;
#endif
constexpr int kRows = kLanes == 16 ? 6 : 4;  // registers: kRows x 2 halves of a strip x kSums, and the weights
constexpr int64_t kTaskRows = 12 * kRows;
constexpr int64_t kRun = 256;                           // elements of `inner` per run, chosen to stay in the cache
constexpr int64_t kStepBytes = kLanes * kInt4Together;  // bytes per step of a strip
constexpr int64_t kSteps = kInt4Block / kInt4Together;  // steps per block
constexpr int64_t kBlockBytes = kSteps * kStepBytes;    // bytes per block of a strip
constexpr int64_t kAhead = 1024;                        // prefetch distance of the weights, in bytes

template <int... i>
inline Ints swap_middle(Ints q, std::integer_sequence<int, i...>) {
  return __builtin_shufflevector(q, q, ((i & ~3) | (i & 1) << 1 | (i >> 1 & 1))...);
}

// Stores kLanes quantised elements at `values`, in the order in which steps read them.
inline void put(uint8_t* values, Ints q) {
#if defined(__AVX512VNNI__)
  store_bytes(values, q);
#else
  const Shorts narrow = __builtin_convertvector(swap_middle(q, std::make_integer_sequence<int, kLanes>{}), Shorts);
  std::memcpy(values, &narrow, sizeof narrow);
#endif
}

template <class T>
void quantise(const T* x, int64_t inner, int64_t group, uint8_t* to) {
  int32_t* sums = reinterpret_cast<int32_t*>(to + 2 * inner);
  Ints sum{};
  int64_t left = group;  // elements left in the group
  const float scale = round_row(x, inner, [&](int64_t k, Ints q) {
    put(to + 2 * k, q);
    sum += q;
    left -= kLanes;
    if (left > 0) return;
    int32_t total = 0;
    for (int i = 0; i < kLanes; ++i) total += sum[i];
    *sums++ = total;
    sum = Ints{};
    left = group;
  });
  std::memcpy(sums, &scale, sizeof scale);
}

// Unpacks the weights of half a strip for one part of a step.
template <int half, int part>
inline Words unpack(Words step) {
#if defined(__AVX512VNNI__)
  return step >> 4 * half & 0x0f0f0f0f;
#else
  return step >> (4 * half + 8 * part) & 0x000f000f;
#endif
}

// Start of a run in a strip's weights, scales and zero points.
template <class Scale>
struct Run {
  const uint8_t* weight;
  const Scale* scale;
  const uint8_t* zero;     // [strips, groups, kColumns], or null
  int64_t groups, blocks;  // groups per run, blocks per group
};

// Loads kLanes bytes and widens them to 32 bits.  Without intrinsics GCC 12 would convert them one by one.
inline Words load_zeros(const uint8_t* p) {
#if defined(__AVX512F__)
  return bit_cast<Words>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return bit_cast<Words>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  Bytes zeros;
  std::memcpy(&zeros, p, sizeof zeros);
  return __builtin_convertvector(zeros, Words);
#endif
}

// Adds x times a strip, over one run, to sums [rows, kColumns].  x, x_sums: start of the run in the first row.
template <int rows, class Scale>
void multiply(const uint8_t* x, const uint8_t* x_sums, int64_t stride, Run<Scale> run, float* sums) {
  for (int64_t group = 0; group < run.groups; ++group) {
    Words sum[rows][2][kSums] = {};
    for (int64_t block = 0; block < run.blocks; ++block) {
      for (int64_t line = 0; line < kBlockBytes; line += 64) __builtin_prefetch(run.weight + kAhead + line);
#pragma GCC unroll 4
      for (int64_t step = 0; step < kSteps; ++step) {
        Words weights;
        std::memcpy(&weights, run.weight + step * kStepBytes, sizeof weights);
        unroll<2>([&](auto part) {
          const Words left = unpack<0, part>(weights), right = unpack<1, part>(weights);
          unroll<rows>([&](auto i) {
            int32_t values;
            std::memcpy(&values, x + i * stride + (2 * step + part) * sizeof values, sizeof values);
            auto& row_sums = sum[i];
            row_sums[0][part % kSums] = multiply_add(row_sums[0][part % kSums], left, values);
            row_sums[1][part % kSums] = multiply_add(row_sums[1][part % kSums], right, values);
          });
        });
      }
      run.weight += kBlockBytes;
      x += 2 * kInt4Block;
    }
    unroll<2>([&](auto half) {
      const Floats scale = load(run.scale + half * kLanes);
      const Words zero = run.zero ? load_zeros(run.zero + half * kLanes) : Words{} + 8;
      unroll<rows>([&](auto i) {
        uint32_t x_sum;
        std::memcpy(&x_sum, x_sums + i * stride, sizeof x_sum);
        const Words* row_sums = sum[i][half];
        const Words all = (kSums == 2 ? (row_sums[0] << 8) + row_sums[kSums - 1] : row_sums[0]) - zero * x_sum;
        float* to = sums + i * kColumns + half * kLanes;
        store(to, load(to) + __builtin_convertvector(bit_cast<Ints>(all), Floats) * scale);
      });
    });
    run.scale += kColumns;
    run.zero += run.zero ? kColumns : 0;
    x_sums += sizeof(int32_t);
  }
}

template <class Scale, int... i>
void multiply(int64_t rows, const uint8_t* x, const uint8_t* x_sums, int64_t stride, Run<Scale> run, float* sums,
              std::integer_sequence<int, i...>) {
  using Multiply = void (*)(const uint8_t*, const uint8_t*, int64_t, Run<Scale>, float*);
  static constexpr Multiply by_rows[] = {multiply<i + 1, Scale>...};
  by_rows[rows - 1](x, x_sums, stride, run, sums);
}

// Applies the row's scale and the epilogue to one strip of one row.
template <class Args>
void scale_and_finish(const Args& args, int64_t row, int64_t column, float* sums) {
  float x_scale;
  const int64_t at = row * int4_row_bytes(args.inner, args.group) + 2 * args.inner + 4 * (args.inner / args.group);
  std::memcpy(&x_scale, args.workspace + at, sizeof x_scale);
  for (int64_t j = 0; j < kColumns; j += kLanes) store(sums + j, load(sums + j) * x_scale);
  finish(args, row, column, sums);
}

// Computes a task.  Reads the weights once and sequentially, because sequential reads are prefetched best.
template <class Scale, class Args>
void task(const Args& args, const Scale* scale, int64_t first_row, int64_t rows, int64_t first_strip, int64_t strips) {
  alignas(64) float sums[kTaskRows][kColumns];
  const int64_t groups = args.inner / args.group, bytes = int4_row_bytes(args.inner, args.group);
  const int64_t run_groups = std::max<int64_t>(1, kRun / args.group), tiles = (rows + kRows - 1) / kRows;
  for (int64_t strip = first_strip; strip < first_strip + strips; ++strip) {
    std::memset(sums, 0, rows * sizeof sums[0]);
    for (int64_t first = 0; first < groups; first += run_groups) {
      const int64_t at = strip * groups + first;
      const Run<Scale> run{args.weight + at * args.group / kInt4Together * kStepBytes, scale + at * kColumns,
                           args.zero ? args.zero + at * kColumns : nullptr, std::min(run_groups, groups - first),
                           args.group / kInt4Block};
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t begin = tile * rows / tiles, count = (tile + 1) * rows / tiles - begin;
        const uint8_t* x = args.workspace + (first_row + begin) * bytes;
        multiply(count, x + 2 * first * args.group, x + 2 * args.inner + 4 * first, bytes, run, sums[begin],
                 std::make_integer_sequence<int, kRows>{});
      }
    }
    for (int64_t i = 0; i < rows; ++i) scale_and_finish(args, first_row + i, strip * kColumns, sums[i]);
  }
}

// Scales and zero points of the features of half a strip, for one block.
struct HalfBlock {
  Floats scale;
  Floats zero[2];  // zero point plus kBase, for bytes 0 and 1 of a lane
};

// Value of byte `byte` (0 or 1) of each lane in half a strip, plus kBase.  The integer becomes the low bits of a
// float's fraction, which takes no conversion instruction.
template <int half, int byte>
constexpr float kBase = static_cast<float>(1 << (23 - 4 * half - 8 * byte));
template <int half, int byte>
inline Floats value_of(Words step) {
  const Words bits = (step & 0xf << (4 * half + 8 * byte)) | bit_cast<uint32_t>(kBase<half, byte>);
  return bit_cast<Floats>(bits);
}

// Dequantises two weights per lane and rounds them to bfloat16.
template <int half>
inline Words as_bf16(Words step, const HalfBlock& block) {
  const Floats even = (value_of<half, 0>(step) - block.zero[0]) * block.scale;
  const Floats odd = (value_of<half, 1>(step) - block.zero[1]) * block.scale;
  return bf16_pairs(even, odd);
}

template <int half, class Scale>
inline HalfBlock half_block(const Scale* scale, const uint8_t* zero) {
  const Words zeros = zero ? load_zeros(zero + half * kLanes) : Words{} + 8;
  const Floats zeros_as_float = __builtin_convertvector(bit_cast<Ints>(zeros), Floats);
  return {load(scale + half * kLanes), {zeros_as_float + kBase<half, 0>, zeros_as_float + kBase<half, 1>}};
}

template <class Scale>
void widen_block(const uint8_t* weight, const Scale* scale, const uint8_t* zero, bf16* to) {
  const HalfBlock low = half_block<0>(scale, zero), high = half_block<1>(scale, zero);
  for (int64_t line = 0; line < kBlockBytes; line += 64) __builtin_prefetch(weight + kAhead + line);
  for (int64_t step = 0; step < kSteps; ++step) {
    Words values;
    std::memcpy(&values, weight + step * kStepBytes, sizeof values);
    const Words pairs[] = {as_bf16<0>(values, low), as_bf16<1>(values, high), as_bf16<0>(values >> 16, low),
                           as_bf16<1>(values >> 16, high)};
    std::memcpy(to + step * kInt4Together * kColumns, pairs, sizeof pairs);
  }
}

}  // namespace

template <class Out>
void widen_int4(const Int4ProductArgs<bf16, Out>& args, int64_t strip, int64_t first, int64_t count, bf16* to) {
  const int64_t groups = args.inner / args.group, blocks = args.inner / kInt4Block;
  for (int64_t block = first / kInt4Block; block < (first + count) / kInt4Block; ++block) {
    const uint8_t* weight = args.weight + (strip * blocks + block) * kBlockBytes;
    const int64_t at = (strip * groups + block * kInt4Block / args.group) * kColumns;
    const uint8_t* zero = args.zero ? args.zero + at : nullptr;
    if (args.scale) {
      widen_block(weight, args.scale + at, zero, to);
    } else {
      widen_block(weight, args.wide_scale + at, zero, to);
    }
    to += kInt4Block * kColumns;
  }
}

template void widen_int4(const Int4ProductArgs<bf16>&, int64_t, int64_t, int64_t, bf16*);
template void widen_int4(const Int4ProductArgs<bf16, float>&, int64_t, int64_t, int64_t, bf16*);

template <class T, class Out>
void product_int4(const Int4ProductArgs<T, Out>& args) {
  over_rows(args.rows, args.inner, args.threads, [&](int64_t row) {
    quantise(args.x + row * args.x_stride, args.inner, args.group,
             args.workspace + row * int4_row_bytes(args.inner, args.group));
  });
  share_product(args, kTaskRows, [&](int64_t first_row, int64_t rows, int64_t first_strip, int64_t strips) {
    if (args.scale) {
      task(args, args.scale, first_row, rows, first_strip, strips);
    } else {
      task(args, args.wide_scale, first_row, rows, first_strip, strips);
    }
  });
}

template void product_int4(const Int4ProductArgs<float>&);
template void product_int4(const Int4ProductArgs<bf16>&);
template void product_int4(const Int4ProductArgs<fp16>&);
template void product_int4(const Int4ProductArgs<bf16, float>&);
template void product_int4(const Int4ProductArgs<fp16, float>&);

}  // namespace quire::cpu
