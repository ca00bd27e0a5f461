#include "cpu/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/layers.h"
#include "cpu/pool.h"
#include "cpu/simd.h"

namespace quire::cpu {
namespace {

using sampling::Settings;

// Tokens per block: the draw first sums the kept weights of each block, then scans one block.
constexpr int64_t kBlock = 1024;
constexpr float kNever = -std::numeric_limits<float>::infinity();

// Work space of one row.  x holds logits, then w; it is padded to complete blocks with elements of weight 0.
struct Space {
  std::vector<float> x, in_bucket;
  std::vector<uint64_t> sums;
};

Ints weight(Floats w) {
  return __builtin_convertvector(w * broadcast(sampling::kOne) + broadcast(sampling::kRounding), Ints);
}

uint64_t weight(float w) { return static_cast<uint64_t>(w * sampling::kOne + sampling::kRounding); }

// Sets x[token] = kNever for every token whose bit in the mask is 0.
void forbid(const uint32_t* mask, int64_t size, std::vector<float>& x) {
  for (int64_t first = 0; first < size; first += 32) {
    const uint32_t word = mask[first / 32];
    if (word == ~uint32_t{0}) continue;
    const int64_t last = std::min(first + 32, size);
    if (word == 0) {
      std::fill(x.begin() + first, x.begin() + last, kNever);
      continue;
    }
    for (int64_t i = first; i < last; ++i) x[i] = word >> (i - first) & 1 ? x[i] : kNever;
  }
}

// x[0, size) = the adjusted logits, and kNever after them.
template <class T>
void adjust(const T* from, const Settings& settings, int64_t position, int64_t size, std::vector<float>& x) {
  x.resize((size + kBlock - 1) / kBlock * kBlock);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(&x[i], load(from + i) + Floats{});  // + 0: turns -0 into 0
  if (i < size) {
    T rest[kLanes] = {};
    std::copy(from + i, from + size, rest);
    store(&x[i], load(rest) + Floats{});
  }
  std::fill(x.begin() + size, x.end(), kNever);
  if (settings.mask) forbid(settings.mask, size, x);
  if (!settings.marks && !settings.bias) return;
  const bool early = position < settings.min_tokens;
  for (i = 0; i < size; ++i) {
    x[i] = sampling::adjusted(x[i], settings.marks ? settings.marks[i] : 0, settings.bias ? settings.bias[i] : 0.0f,
                              settings, early);
  }
}

// Maximum of x, or NaN if x contains NaN.
float largest(const std::vector<float>& x) {
  constexpr int kChains = 4;  // independent chains of max, because each max waits for the one before it
  Floats top[kChains];
  Ints nan = {};
  unroll<kChains>([&](auto j) { top[j] = broadcast(kNever); });
  for (size_t i = 0; i < x.size(); i += kChains * kLanes) {
    unroll<kChains>([&](auto j) {
      const Floats one = load(&x[i + j * kLanes]);
      nan |= one != one;
      top[j] = max(one, top[j]);
    });
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    if (nan[lane]) return std::numeric_limits<float>::quiet_NaN();
  }
  return max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
}

// Set of all tokens with w >= floor.
struct Upper {
  float floor;
  uint64_t sum;  // sum of these tokens' weights
};

// Count and sum of weights per bucket of w; find() searches from the most probable bucket down.
class Histogram {
 public:
  explicit Histogram(const std::vector<float>& w) : w_(w) {
    for (float one : w) {
      const int at = sampling::bucket(bit_cast<uint32_t>(one));
      counts_[at] += 1;
      sums_[at] += weight(one);
    }
  }

  uint64_t total() const {
    uint64_t sum = 0;
    for (uint64_t one : sums_) sum += one;
    return sum;
  }

  // Returns the smallest set of the form w >= floor for which reached(count, sum of weights) holds; all tokens if that
  // set would include tokens of weight 0.
  template <class Reached>
  Upper find(const Reached& reached, std::vector<float>& in_bucket) const {
    uint64_t count = 0, sum = 0;
    int at = sampling::kBuckets - 1;
    for (; at > 0 && !reached(count + counts_[at], sum + sums_[at]); --at) count += counts_[at], sum += sums_[at];
    if (at == 0) return {0.0f, sum};
    in_bucket.clear();
    for (float one : w_) {
      if (sampling::bucket(bit_cast<uint32_t>(one)) == at) in_bucket.push_back(one);
    }
    std::sort(in_bucket.begin(), in_bucket.end(), std::greater<>());
    float floor = 0;
    for (size_t i = 0; i < in_bucket.size() && (in_bucket[i] == floor || !reached(count, sum)); ++i) {
      floor = in_bucket[i];
      count += 1, sum += weight(floor);
    }
    return {floor, sum};
  }

 private:
  const std::vector<float>& w_;
  uint32_t counts_[sampling::kBuckets] = {};
  uint64_t sums_[sampling::kBuckets] = {};
};

float floor_of(const Settings& settings, const std::vector<float>& w, std::vector<float>& in_bucket) {
  Upper kept{0.0f, 0};
  if (settings.top_k > 0 || settings.top_p < 1) {
    const Histogram histogram(w);
    kept.sum = histogram.total();
    if (settings.top_k > 0) {
      const uint64_t k = settings.top_k;
      kept = histogram.find([k](uint64_t count, uint64_t) { return count >= k; }, in_bucket);
    }
    if (settings.top_p < 1) {
      const uint64_t need = sampling::share(settings.top_p, kept.sum);
      const Upper nucleus = histogram.find([need](uint64_t, uint64_t sum) { return sum >= need; }, in_bucket);
      kept.floor = std::max(kept.floor, nucleus.floor);
    }
  }
  return std::max(kept.floor, settings.min_p);  // the maximum w is 1, so min_p is the floor itself
}

int64_t draw(const Settings& settings, int64_t position, float peak, Space& space) {
  std::vector<float>& w = space.x;
  const Floats from = broadcast(peak), scale = broadcast(settings.scale);
  for (size_t i = 0; i < w.size(); i += kLanes) store(&w[i], exp2((load(&w[i]) - from) * scale));
  const float floor = floor_of(settings, w, space.in_bucket);

  space.sums.clear();
  uint64_t total = 0;
  for (size_t first = 0; first < w.size(); first += kBlock) {
    Ints low = {}, high = {};  // halves of the weights, so that 32-bit sums suffice
    for (size_t i = first; i < first + kBlock; i += kLanes) {
      const Floats one = load(&w[i]);
      const Ints kept = weight(one) & (one >= broadcast(floor));
      low += kept & 0x7fff;
      high += kept >> 15;
    }
    uint64_t sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += static_cast<uint64_t>(low[lane]) + (uint64_t(high[lane]) << 15);
    space.sums.push_back(sum);
    total += sum;
  }

  uint64_t left = sampling::goal(sampling::hash(settings.seed, settings.sibling, position), total);
  size_t block = 0;
  while (left >= space.sums[block]) left -= space.sums[block++];
  int64_t token = block * kBlock;
  for (;; ++token) {
    const uint64_t one = w[token] >= floor ? weight(w[token]) : 0;
    if (left < one) return token;
    left -= one;
  }
}

}  // namespace

template <class T>
void sample(const T* logits, const SampleArgs& a, int threads) {
  const auto plain = [&](int64_t first, int64_t rows, int threads) {
    std::vector<float> values(rows);
    row_max(logits + first * a.row_stride, a.row_stride, values.data(), a.tokens + first, rows, a.size, threads);
    for (int64_t i = 0; i < rows; ++i) {
      a.outcome[first + i] = std::isfinite(values[i]) ? sampling::kChosen : sampling::kNotFinite;
      if (a.outcome[first + i] != sampling::kChosen) a.tokens[first + i] = 0;
    }
  };
  if (!a.general) {
    plain(0, a.rows, threads);
    for (int64_t row = 0; row < a.rows; ++row) {
      if (a.slots[row] < 0) a.tokens[row] = 0, a.outcome[row] = sampling::kChosen;
    }
    return;
  }
  share(a.rows, threads, [&](Tickets& tickets) {
    static thread_local Space space;
    for (int64_t row; tickets.take(row);) {
      a.tokens[row] = 0;
      a.outcome[row] = sampling::kChosen;
      if (a.slots[row] < 0) continue;
      const Settings& settings = a.table[a.slots[row]];
      if (settings.scale == 0 && !settings.marks && !settings.bias && !settings.mask) {
        plain(row, 1, 1);
        continue;
      }
      const int64_t position = a.known[row] - settings.prompt_len;
      adjust(logits + row * a.row_stride, settings, position, a.size, space.x);
      const float peak = largest(space.x);
      if (!std::isfinite(peak)) {
        plain(row, 1, 1);  // the raw logits show whether the model or the settings left no finite logit
        if (a.outcome[row] == sampling::kChosen && (settings.marks || settings.bias || settings.mask))
          a.outcome[row] = sampling::kNothingAllowed;
        a.tokens[row] = 0;
        continue;
      }
      a.tokens[row] = settings.scale == 0 ? std::find(space.x.begin(), space.x.end(), peak) - space.x.begin()
                                          : draw(settings, position, peak, space);
      if (settings.marks) settings.marks[a.tokens[row]] += 1;
    }
  });
}

template <class T>
void argmax(const T* logits, int64_t row_stride, int64_t first, int64_t* keys, int64_t rows, int64_t size,
            int threads) {
  std::vector<float> values(rows);
  row_max(logits, row_stride, values.data(), keys, rows, size, threads);
  for (int64_t i = 0; i < rows; ++i) {
    keys[i] = sampling::to_signed(sampling::key_of(values[i] + 0.0f, first + keys[i]));  // + 0: turns -0 into 0
  }
}

void chosen(const int64_t* keys, const int64_t* slots, int64_t* tokens, uint8_t* outcome, int64_t rows) {
  for (int64_t i = 0; i < rows; ++i) {
    const uint64_t key = sampling::from_signed(keys[i]);
    const bool finite = std::isfinite(sampling::value_of(key));
    tokens[i] = finite && slots[i] >= 0 ? sampling::place_of(key) : 0;
    outcome[i] = finite || slots[i] < 0 ? sampling::kChosen : sampling::kNotFinite;
  }
}

template void argmax<float>(const float*, int64_t, int64_t, int64_t*, int64_t, int64_t, int);
template void argmax<bf16>(const bf16*, int64_t, int64_t, int64_t*, int64_t, int64_t, int);
template void argmax<fp16>(const fp16*, int64_t, int64_t, int64_t*, int64_t, int64_t, int);

template void sample<float>(const float*, const SampleArgs&, int);
template void sample<bf16>(const bf16*, const SampleArgs&, int);
template void sample<fp16>(const fp16*, const SampleArgs&, int);

}  // namespace quire::cpu
