#define QUIRE_LINEAR_N_TILES 4
#include "cuda/linear/linear.cuh"
