// Wrappers of Hopper's instructions (sm_90a): shared-memory barriers, bulk tensor copies, warpgroup mma.  Terms:
//
//   mbarrier    a counter in shared memory. A phase ends when the expected threads and bytes have arrived.  Waiting for
//               phases 0, 1, 0, 1, ... lets producers and consumers share a ring of buffers.
//   TMA         the unit that copies a box of a tensor to shared memory.  One thread issues the copy, and an mbarrier
//               signals its end.
//   wgmma       4 warps multiply a [64, 16] matrix by a [16, N] matrix. Asynchronous: its registers and shared memory
//               must not be touched until wait_for_products returns.
//   proxy       TMA and wgmma access shared memory by another path than ordinary loads and stores; a fence orders
//               accesses by the two paths.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/common/async_copy.cuh"

namespace quire::cuda::hopper {

// -- mbarriers

__device__ inline void barrier_init(uint64_t* bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the TMA unit; call it before any thread uses them.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void arrive(uint64_t* bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
}

// Arrives, and makes the phase also wait for `bytes` bytes.
__device__ inline void arrive_expecting(uint64_t* bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
               : "memory");
}

__device__ inline void wait(uint64_t* bar, int phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(shared_address(bar)),
      "r"(phase)
      : "memory");
}

// Position in a ring of n buffers, and the phase of its barriers.
struct Ring {
  int at = 0, phase = 0;
  __device__ void step(int n) {
    if (++at == n) {
      at = 0;
      phase ^= 1;
    }
  }
};

// -- Named barriers of `threads` threads of the CTA: sync waits for all of them, pass only arrives.

__device__ inline void named_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ inline void named_pass(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// -- TMA

__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ inline void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (c0, c1, c2, c3) of a 4-dimensional tensor; the mbarrier `bar` counts the copied bytes.
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// copy_box for a 2-dimensional tensor.
__device__ inline void copy_box(void* to, const CUtensorMap* map, uint64_t* bar, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::
          "r"(shared_address(to)),
      "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1)
      : "memory");
}

// Copies the box at (c0, c1, c2) of a 3-dimensional tensor with an L2 eviction policy, in the encoding of PTX's
// createpolicy: evict first for data that is read once, evict last for data that many CTAs read.
__device__ inline void copy_with_policy(void* to, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2,
                                        uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4, %5}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}

// Copies contiguous bytes, a multiple of 16.
__device__ inline void copy_run(void* to, const void* from, uint64_t* bar, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(bar))
               : "memory");
}

constexpr uint64_t kLeavesFirst = 0x12F0000000000000, kLeavesInTurn = 0x1000000000000000;

__device__ inline void copy_once(void* to, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2) {
  copy_with_policy(to, map, bar, c0, c1, c2, kLeavesFirst);
}

// copy_once for a 4-dimensional tensor.
__device__ inline void copy_once(void* to, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(kLeavesFirst)
      : "memory");
}

// copy_once for a 5-dimensional tensor.
__device__ inline void copy_once(void* to, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2, int c3,
                                 int c4, uint64_t policy = kLeavesFirst) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, "
      "%4, %5, %6, %7}], [%2], %8;" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(bar)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(policy)
      : "memory");
}

__device__ inline void copy_often(void* to, const CUtensorMap* map, uint64_t* bar, int c0, int c1, int c2) {
  copy_with_policy(to, map, bar, c0, c1, c2, 0x14F0000000000000);
}

// -- Register reallocation between warpgroups: producers need few registers, consumers many.

template <int N>
__device__ inline void keep_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// -- wgmma

// Shared-memory descriptor of an operand: rows of 128 bytes, in groups of 8 (1024 bytes, aligned). Rows are swizzled as
// by TMA with SWIZZLE_128B: 16-byte chunk c of row r is stored at chunk c ^ (r % 8).
//
// K-major: a row holds 64 elements along the contracted dimension, and `between` is ignored.  The next 16 elements
// start 32 bytes further.
// MN-major, a transposed operand: a row holds 64 elements along a dimension of the result, and there is one row per
// index of the contracted dimension.  The next 64 elements start `between` bytes further, the next 16 rows 2048 bytes
// further.
__device__ inline uint64_t operand(const void* start, int between) {
  const uint64_t address = (shared_address(start) & 0x3ffff) >> 4;
  return address | static_cast<uint64_t>(between >> 4) << 16 | static_cast<uint64_t>(1024 >> 4) << 32 | 1ull << 62;
}

__device__ inline uint64_t operand_further(uint64_t operand, int bytes) { return operand + (bytes >> 4); }

// Required before the first wgmma after ordinary instructions wrote its registers.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the wgmma issued since the last call as one group.
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most Pending of the last committed groups are in flight.
template <int Pending>
__device__ inline void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Creates a dependency on d.  Without one, the compiler may move reads of a wgmma result above the wait for it.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i]));
}

// Marks the values in d as dead.  A wgmma that overwrites d still takes it as an input, so the compiler would preserve
// them.
template <int N>
__device__ inline void forget(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "=f"(d[i]));
}

// Layout of a result d [64, N].  For column block j (8 columns), lane `lane` of warp w (of the four) holds:
//   d[4j], d[4j + 1]      row 16w + lane / 4,      columns 8j + 2 (lane % 4), + 1
//   d[4j + 2], d[4j + 3]  row 16w + lane / 4 + 8,  the same columns
// A left operand of 64 x 16 in registers has the layout of two column blocks of a result, packed in pairs.
//
// multiply_shared:     d = A B   (or d += A B), both operands K-major in shared memory
// multiply_registers:  d += A B, A in registers, B MN-major in shared memory
// multiply_rows:       d = A B   (or d += A B), A in registers, B K-major in shared memory
template <class T, int N>
struct Wgmma;

#define QUIRE_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QUIRE_16(i) QUIRE_4(i), QUIRE_4(i + 4), QUIRE_4(i + 8), QUIRE_4(i + 12)
#define QUIRE_D8 QUIRE_4(0), QUIRE_4(4)
#define QUIRE_D16 QUIRE_16(0)
#define QUIRE_D32 QUIRE_D16, QUIRE_16(16)
#define QUIRE_D48 QUIRE_D32, QUIRE_16(32)
#define QUIRE_D64 QUIRE_D48, QUIRE_16(48)
#define QUIRE_D80 QUIRE_D64, QUIRE_16(64)
#define QUIRE_D96 QUIRE_D80, QUIRE_16(80)
#define QUIRE_D128 QUIRE_D96, QUIRE_16(96), QUIRE_16(112)
#define QUIRE_N8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define QUIRE_N16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define QUIRE_N32 QUIRE_N16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QUIRE_N48 QUIRE_N32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define QUIRE_N64 QUIRE_N48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define QUIRE_N80 QUIRE_N64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define QUIRE_N96 QUIRE_N80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define QUIRE_N128                                                                                                   \
  QUIRE_N96                                                                                                          \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118," \
  "%119,%120,%121,%122,%123,%124,%125,%126,%127"

// clang-format off: a table of instructions
// o0..o4: indices of the operands after the R = N / 2 registers of the result.
#define QUIRE_WGMMA(T, NAME, N, R, o0, o1, o2, o3, o4, o5)                                                           \
  template <>                                                                                                         \
  struct Wgmma<T, N> {                                                                                                \
    __device__ static void multiply_shared(float* d, uint64_t a, uint64_t b, bool add) {                              \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #o2 ", 0;\n"                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" QUIRE_N##R "}, %" #o0 ", %" #o1 \
                   ", add, 1, 1, 0, 0;\n}"                                                                            \
                   : QUIRE_D##R                                                                                       \
                   : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                     \
    }                                                                                                                 \
    __device__ static void multiply_registers(float* d, const uint32_t* a, uint64_t b) {                         \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" QUIRE_N##R "}, {%" #o0 ", %" #o1 \
                   ", %" #o2 ", %" #o3 "}, %" #o4 ", add, 1, 1, 1;\n}"                                                \
                   : QUIRE_D##R                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                             \
    }                                                                                                                 \
    __device__ static void multiply_rows(float* d, const uint32_t* a, uint64_t b, bool add) {                         \
      asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #o5 ", 0;\n"                                              \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME " {" QUIRE_N##R "}, {%" #o0 ", %" #o1 \
                   ", %" #o2 ", %" #o3 "}, %" #o4 ", add, 1, 1, 0;\n}"                                                \
                   : QUIRE_D##R                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));                 \
    }                                                                                                                 \
  };
// clang-format on

QUIRE_WGMMA(__nv_bfloat16, "bf16", 16, 8, 8, 9, 10, 11, 12, 13)
QUIRE_WGMMA(__nv_bfloat16, "bf16", 32, 16, 16, 17, 18, 19, 20, 21)
QUIRE_WGMMA(__nv_bfloat16, "bf16", 64, 32, 32, 33, 34, 35, 36, 37)
QUIRE_WGMMA(__nv_bfloat16, "bf16", 96, 48, 48, 49, 50, 51, 52, 53)
QUIRE_WGMMA(__nv_bfloat16, "bf16", 128, 64, 64, 65, 66, 67, 68, 69)
QUIRE_WGMMA(__nv_bfloat16, "bf16", 160, 80, 80, 81, 82, 83, 84, 85)
QUIRE_WGMMA(__nv_bfloat16, "bf16", 192, 96, 96, 97, 98, 99, 100, 101)
QUIRE_WGMMA(__nv_bfloat16, "bf16", 256, 128, 128, 129, 130, 131, 132, 133)
QUIRE_WGMMA(__half, "f16", 16, 8, 8, 9, 10, 11, 12, 13)
QUIRE_WGMMA(__half, "f16", 32, 16, 16, 17, 18, 19, 20, 21)
QUIRE_WGMMA(__half, "f16", 64, 32, 32, 33, 34, 35, 36, 37)
QUIRE_WGMMA(__half, "f16", 96, 48, 48, 49, 50, 51, 52, 53)
QUIRE_WGMMA(__half, "f16", 128, 64, 64, 65, 66, 67, 68, 69)
QUIRE_WGMMA(__half, "f16", 160, 80, 80, 81, 82, 83, 84, 85)
QUIRE_WGMMA(__half, "f16", 192, 96, 96, 97, 98, 99, 100, 101)
QUIRE_WGMMA(__half, "f16", 256, 128, 128, 129, 130, 131, 132, 133)

}  // namespace quire::cuda::hopper
