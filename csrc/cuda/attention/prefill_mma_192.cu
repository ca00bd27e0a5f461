#include "cuda/attention/prefill_mma.cuh"

namespace quire::cuda::mma {
template void launch_prefill<192>(const PrefillArgs&, cudaStream_t);
}
