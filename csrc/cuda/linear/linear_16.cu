#define QUIRE_LINEAR_N_TILES 2
#include "cuda/linear/linear.cuh"
