#include "cuda/cache/batch.h"

#include "cuda/common/launch.cuh"

namespace quire::cuda {
namespace {

// One thread per edit, or per slot; the cost of these kernels is their launch.
constexpr int kThreads = 128;

__device__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

dim3 blocks_for(int64_t count) { return dim3((count + kThreads - 1) / kThreads); }

__global__ void apply_edits_kernel(const int32_t* edits, int64_t count, Tables tables) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t i = thread_index();
  if (i >= count) return;
  const int32_t row = edits[3 * i], column = edits[3 * i + 1], block = edits[3 * i + 2];
  if (row >= 0) tables.data[row * tables.stride + column] = block;
}

__global__ void decode_inputs_kernel(DecodeInputs a) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t i = thread_index();
  if (i >= a.count) return;
  const int32_t slot = a.slots[i];
  const int64_t at = slot < 0 ? 0 : a.position[slot];
  const bool padding = slot < 0 || at >= a.tables.columns * a.block_size;
  a.ids[i] = padding ? 0 : a.token[slot];
  a.positions[i] = padding ? 0 : at;
  a.kv_indices[i] =
      padding ? -1
              : static_cast<int64_t>(a.tables.data[slot * a.tables.stride + at / a.block_size]) * a.block_size +
                    at % a.block_size;
  a.rows[i] = padding ? 0 : slot;
  a.lens[i] = padding ? 0 : static_cast<int32_t>(at + 1);
}

__global__ void decode_outputs_kernel(const int32_t* slots, int64_t count, const int64_t* tokens, int64_t* token,
                                      int64_t* position) {
  let_next_kernel_start();
  wait_for_previous_kernels();
  const int64_t i = thread_index();
  if (i >= count || slots[i] < 0) return;
  token[slots[i]] = tokens[i];
  position[slots[i]] += 1;
}

}  // namespace

void apply_edits(const int32_t* edits, int64_t count, Tables tables, cudaStream_t stream) {
  if (count == 0) return;
  launch(apply_edits_kernel, blocks_for(count), kThreads, 0, stream, edits, count, tables);
}

void decode_inputs(const DecodeInputs& args, cudaStream_t stream) {
  if (args.count == 0) return;
  launch(decode_inputs_kernel, blocks_for(args.count), kThreads, 0, stream, args);
}

void decode_outputs(const int32_t* slots, int64_t count, const int64_t* tokens, int64_t* token, int64_t* position,
                    cudaStream_t stream) {
  if (count == 0) return;
  launch(decode_outputs_kernel, blocks_for(count), kThreads, 0, stream, slots, count, tokens, token, position);
}

}  // namespace quire::cuda
