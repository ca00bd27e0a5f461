#include "cuda/linear/int4.h"

#include <algorithm>

#include "cuda/linear/int4.cuh"
#include "cuda/linear/tensor_map.h"

namespace quire::cuda {
namespace {

using namespace linears;

constexpr int kWarp = 32, kConverting = 256, kDequantising = 256;  // threads per block

CUtensorMap map_weight(const Int4Args& a, const Int4Params& p) {
  constexpr int kElementBytes = 8;  // TMA element of 8 bytes, so a packed block fits the 256-element limit of a box
  const int halves = a.silu_mul ? 2 : 1;
  const cuuint64_t k_block = int4_block_bytes(a.groups), rows = k_block * p.k_blocks;
  const cuuint64_t all = static_cast<cuuint64_t>(a.features / kInt4Rows);
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(k_block / kElementBytes),
                             static_cast<cuuint32_t>(p.blocks / halves), static_cast<cuuint32_t>(halves),
                             static_cast<cuuint32_t>(p.depth)};
  return tensor_map(
      CU_TENSOR_MAP_DATA_TYPE_INT64, a.weight,
      {k_block / kElementBytes, all, static_cast<cuuint64_t>(halves), static_cast<cuuint64_t>(p.k_blocks)},
      {rows, rows * all, k_block}, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// x: bf16 activations, or their quantised form of the same size.
CUtensorMap map_x(const Int4Args& a, const Int4Params& p, const void* x, int64_t stride) {
  const cuuint32_t box[3] = {kInt4Inputs, static_cast<cuuint32_t>(p.depth), static_cast<cuuint32_t>(a.tokens)};
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, x,
                    {kInt4Inputs, static_cast<cuuint64_t>(p.k_blocks), static_cast<cuuint64_t>(a.tokens)},
                    {kXBytes, static_cast<cuuint64_t>(stride) * sizeof(bf16)}, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Whether each CTA quantises the activations itself; otherwise convert_kernel runs first.
bool converts(int tokens, int inner) { return parts_of(tokens, inner) <= kMaxParts; }

// Scales of the quantised activations; they follow the activations [tokens, inner] in the scratch buffer.
char* x_scales_of(const Int4Args& a) {
  return static_cast<char*>(a.converted) + static_cast<int64_t>(a.tokens) * a.inner * static_cast<int>(sizeof(bf16));
}

Int4Params params_of(const Int4Args& a) {
  Int4Params p{epilogue_of(a, kInt4Rows)};
  p.row_scale = a.row_scale;
  p.x = a.x;
  p.x_stride = a.x_stride;
  p.blocks = p.rows / kInt4Rows;
  p.k_blocks = a.inner / kInt4Inputs;
  const bool converting = converts(a.tokens, a.inner);
  if (!converting) p.x_scales = x_scales_of(a);
  // Copies are small (about 16 KB), because the compute after the last copy is not hidden.
  constexpr int kCopyBytes = 16 << 10;
  const int k_block_bytes = p.blocks * int4_block_bytes(a.groups) + (converting ? 0 : a.tokens * kXBytes);
  p.depth = std::clamp(kCopyBytes / k_block_bytes, 1, p.k_blocks);
  p.count = tiles_of(p.k_blocks, p.depth);
  const int smem_bytes = int4_smem_bytes(a.tokens) - (converting ? converted_bytes(a.tokens, p.k_blocks, a.groups) : 0);
  p.stages = std::min({kMaxStages, p.count, smem_bytes / stage_bytes(p, a.groups, converting)});
  return p;
}

// Quantises x.  Eight lanes convert a chunk: the 128 elements of a token in one packed block.  Grid: (tokens * k
// blocks) chunks, divided by the chunks per thread block.  Memory traffic: tokens * inner * 4 bytes.
template <int kGroups>
__global__ void __launch_bounds__(kConverting) convert_kernel(Int4Args a, char* to, char* x_scales) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int at = (blockIdx.x * kConverting + threadIdx.x) / 8, k_block = at / a.tokens, token = at % a.tokens;
  if (k_block >= a.inner / kInt4Inputs) return;
  XChunk x;
  x.load(static_cast<const char*>(a.x) + token * a.x_stride * sizeof(bf16) + k_block * kXBytes);
  convert(x, to + (static_cast<int64_t>(token) * a.inner / kInt4Inputs + k_block) * kXBytes,
          reinterpret_cast<XScale<kGroups>*>(x_scales) + at);
}

void convert_first(const Int4Args& a, cudaStream_t stream) {
  const auto kernel = a.groups == 1 ? convert_kernel<1> : a.groups == 2 ? convert_kernel<2> : convert_kernel<4>;
  const int blocks = tiles_of(a.inner / kInt4Inputs * a.tokens * 8, kConverting);
  launch(kernel, dim3(blocks), dim3(kConverting), 0, stream, a, static_cast<char*>(a.converted), x_scales_of(a));
}

// Dequantises to bf16, one packed block per warp.  Grid: packed blocks / warps per thread block.  Memory traffic: reads
// the packed weight, writes 2 bytes per element.
__global__ void __launch_bounds__(kDequantising) dequantise_kernel(DequantiseArgs a) {
  let_next_kernel_start();
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int64_t k_blocks = a.inner / kInt4Inputs;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kDequantising + threadIdx.x) / kWarp;
  const int64_t block = at / k_blocks;
  if (block >= a.rows / kInt4Rows) return;
  const uint8_t* const k_block = a.weight + at * int4_block_bytes(a.groups);
  const int groups_per_half = a.groups == 4 ? 2 : 1;  // groups per half block
  const auto* const scales = reinterpret_cast<const fp16*>(k_block + kHalves * kHalfBytes);
  const uint8_t* const zeros = k_block + kHalves * kHalfBytes + a.groups * kInt4Rows * sizeof(fp16);
  const int64_t row = block * kInt4Rows + g;
  bf16* const out = static_cast<bf16*>(a.out) + row * a.inner + at % k_blocks * kInt4Inputs + t * 8;
  wait_for_previous_kernels();  // earlier kernels may still read the memory of out
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const auto words = load_pack<4>(reinterpret_cast<const uint32_t*>(k_block + half * kHalfBytes) + lane * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 32 inputs per iteration, 8 per lane
      const int pair = (((a.groups == 1 ? 0 : half) * 8 + g) * groups_per_half + (groups_per_half == 2 ? i : 0)) * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = to_float(scales[pair + r]) * a.row_scale[row + 8 * r], zero = zeros[pair + r];
        float values[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const uint32_t q = words.at[n / 4 * 2 + r] >> (8 * (n % 4) + 4 * i) & 15;
          values[n] = (static_cast<float>(q) - zero) * scale;
        }
        store_pack(out + 8 * r * a.inner + half * kUnit + i * 32, narrow<bf16>(values));
      }
    }
  }
}

}  // namespace

bool fits_int4(const Int4Args& a) {
  return a.tokens > 0 && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 && in_16_bytes(a.x, a.x_stride, 2) &&
         in_16_bytes(a.out, a.out_stride, 2);
}

int64_t int4_converted_bytes(int tokens, int inner, int groups) {
  return converts(tokens, inner) ? 0 : converted_bytes(tokens, inner / kInt4Inputs, groups);
}

void linear_int4(const Int4Args& a, cudaStream_t stream) {
  const bool first = !converts(a.tokens, a.inner);
  if (first) convert_first(a, stream);
  const Int4Params p = params_of(a);
  const CUtensorMap weight_map = map_weight(a, p);
  const CUtensorMap x_map = map_x(a, p, first ? a.converted : a.x, first ? a.inner : a.x_stride);
  const int tiles = tiles_of(a.features, p.tile_features);
  if (!first) return run_int4<1>(weight_map, x_map, p, a.groups, tiles, stream);
  if (a.tokens <= 8) return run_int4<2>(weight_map, x_map, p, a.groups, tiles, stream);
  if (a.tokens <= 16) return run_int4<4>(weight_map, x_map, p, a.groups, tiles, stream);
  run_int4<8>(weight_map, x_map, p, a.groups, tiles, stream);
}

void dequantise_int4(const DequantiseArgs& a, cudaStream_t stream) {
  const int64_t threads = a.rows / kInt4Rows * (a.inner / kInt4Inputs) * kWarp;
  const auto blocks = static_cast<unsigned>((threads + kDequantising - 1) / kDequantising);
  launch(dequantise_kernel, dim3(blocks), dim3(kDequantising), 0, stream, a);
}

}  // namespace quire::cuda
