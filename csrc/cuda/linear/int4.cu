#include "cuda/linear/int4.h"

#include <algorithm>

#include "cuda/linear/int4.cuh"
#include "cuda/linear/tensor_map.h"

namespace quire::cuda {
namespace {

using namespace linears;

constexpr int kWarp = 32, kDequantising = 256;  // threads of a block

CUtensorMap map_weight(const Int4Args& a, const Int4Params& p) {
  constexpr int kNumber = 8;  // bytes: as many at once as a box of records may have
  const int halves = a.silu_mul ? 2 : 1;
  const cuuint64_t record = int4_record_bytes(a.groups), rows = record * p.records;
  const cuuint64_t all = static_cast<cuuint64_t>(a.features / kInt4Rows);
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(record / kNumber), static_cast<cuuint32_t>(p.blocks / halves),
                             static_cast<cuuint32_t>(halves), static_cast<cuuint32_t>(p.depth)};
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_INT64, a.weight,
                    {record / kNumber, all, static_cast<cuuint64_t>(halves), static_cast<cuuint64_t>(p.records)},
                    {rows, rows * all, record}, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

CUtensorMap map_x(const Int4Args& a, const Int4Params& p) {
  const cuuint32_t box[3] = {kInt4Inputs, static_cast<cuuint32_t>(p.depth), static_cast<cuuint32_t>(a.tokens)};
  return tensor_map(CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, a.x,
                    {kInt4Inputs, static_cast<cuuint64_t>(p.records), static_cast<cuuint64_t>(a.tokens)},
                    {kXBytes, static_cast<cuuint64_t>(a.x_stride) * sizeof(bf16)}, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

Int4Params params_of(const Int4Args& a) {
  Int4Params p;
  p.bias = a.bias;
  p.out = a.out;
  p.out_stride = a.out_stride;
  p.tokens = a.tokens;
  p.features = a.features;
  p.tile_features = features_of_tile(a.features, a.silu_mul, kInt4Rows);
  p.rows = p.tile_features * (a.silu_mul ? 2 : 1);
  p.add = a.add;
  p.silu_mul = a.silu_mul;
  p.row_scale = a.row_scale;
  p.blocks = p.rows / kInt4Rows;
  p.records = a.inner / kInt4Inputs;
  // Copies of some 16 KB: what is multiplied after the last one has arrived is not hidden.
  constexpr int kCopyBytes = 16 << 10;
  p.depth = std::clamp(kCopyBytes / (p.blocks * int4_record_bytes(a.groups) + a.tokens * kXBytes), 1, p.records);
  p.count = tiles_of(p.records, p.depth);
  p.stages = std::min({kMaxStages, p.count, kRoom / stage_bytes(p, a.groups)});
  return p;
}

// A warp makes 16 rows x 128 inputs of a record.  Grid (records / warps of a block).  Moves the bytes of the weight, and two
// for each number.
__global__ void __launch_bounds__(kDequantising) dequantise_kernel(DequantiseArgs a) {
  let_next_kernel_start();
  const int lane = threadIdx.x % kWarp, g = lane / 4, t = lane % 4;
  const int64_t records = a.inner / kInt4Inputs;
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kDequantising + threadIdx.x) / kWarp;
  const int64_t block = at / records;
  if (block >= a.rows / kInt4Rows) return;
  const uint8_t* const record = a.weight + at * int4_record_bytes(a.groups);
  const int of_half = a.groups == 4 ? 2 : 1;  // groups
  const auto* const scales = reinterpret_cast<const fp16*>(record + kHalves * kHalfBytes);
  const uint8_t* const zeros = record + kHalves * kHalfBytes + a.groups * kInt4Rows * sizeof(fp16);
  const int64_t row = block * kInt4Rows + g;
  bf16* const out = static_cast<bf16*>(a.out) + row * a.inner + at % records * kInt4Inputs + t * 8;
  wait_for_previous_kernels();  // out may be the memory of something that they read
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const auto words = load_pack<4>(reinterpret_cast<const uint32_t*>(record + half * kHalfBytes) + lane * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // 32s of inputs: 8 of them in each lane
      const int pair = (((a.groups == 1 ? 0 : half) * 8 + g) * of_half + (of_half == 2 ? i : 0)) * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = to_float(scales[pair + r]) * a.row_scale[row + 8 * r], zero = zeros[pair + r];
        float numbers[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {  // 4 (j % 2) + 2 p + c
          const uint32_t q = words.at[2 * i + n / 4] >> (4 * (r + 2 * (n / 2 % 2)) + 16 * (n % 2)) & 15;
          numbers[n] = (static_cast<float>(q) - zero) * scale;
        }
        store_pack(out + 8 * r * a.inner + half * kUnit + i * 32, narrow<bf16>(numbers));
      }
    }
  }
}

}  // namespace

bool fits_int4(const Int4Args& a) {
  return a.tokens > 0 && device_attribute(cudaDevAttrComputeCapabilityMajor) >= 9 &&
         in_16_bytes(a.x, a.x_stride, 2) && in_16_bytes(a.out, a.out_stride, 2);
}

void linear_int4(const Int4Args& a, cudaStream_t stream) {
  const Int4Params p = params_of(a);
  const CUtensorMap weight_map = map_weight(a, p), x_map = map_x(a, p);
  const int tiles = tiles_of(a.features, p.tile_features);
  if (a.tokens <= 8) return run_int4<1>(weight_map, x_map, p, a.groups, tiles, stream);
  run_int4<2>(weight_map, x_map, p, a.groups, tiles, stream);
}

void dequantise_int4(const DequantiseArgs& a, cudaStream_t stream) {
  const int64_t threads = a.rows / kInt4Rows * (a.inner / kInt4Inputs) * kWarp;
  const auto blocks = static_cast<unsigned>((threads + kDequantising - 1) / kDequantising);
  launch(dequantise_kernel, dim3(blocks), dim3(kDequantising), 0, stream, a);
}

}  // namespace quire::cuda
