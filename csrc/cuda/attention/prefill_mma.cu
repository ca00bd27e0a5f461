// Launcher of prefill attention.  Head sizes are compiled in separate files, in parallel.

#include <stdexcept>

#include "cuda/attention/prefill.h"
#include "cuda/common/launch.cuh"

namespace quire::cuda {

namespace mma {
template <int D>
void launch_prefill(const PrefillArgs& args, cudaStream_t stream);
}

void prefill_mma(const PrefillArgs& args, cudaStream_t stream) {
  if (args.first >= args.seqs) return;
  switch (args.head_size) {
    case 64: return mma::launch_prefill<64>(args, stream);
    case 80: return mma::launch_prefill<80>(args, stream);
    case 96: return mma::launch_prefill<96>(args, stream);
    case 128: return mma::launch_prefill<128>(args, stream);
    case 192: return mma::launch_prefill<192>(args, stream);
    case 256: return mma::launch_prefill<256>(args, stream);
    default: throw std::invalid_argument("prefill: head size is not 64, 80, 96, 128, 192 or 256");
  }
}

void prefill(const PrefillArgs& args, cudaStream_t stream) {
  // Small tiles are faster for few queries after a long context: with 32 query heads, 8 KV heads and 64 queries after
  // 8k keys, prefill_mma took 53 us and prefill_sm90 100 us.  (Measured before prefill_sm90 split tiles.)
  const bool few = int64_t{args.tokens} * args.heads < 64 * 128;
  const bool sm90 = device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && !few && prefill_sm90_takes(args);
  sm90 ? prefill_sm90(args, stream) : prefill_mma(args, stream);
}

}  // namespace quire::cuda
