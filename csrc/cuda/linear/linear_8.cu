#define QUIRE_LINEAR_N_TILES 1
#include "cuda/linear/linear.cuh"
