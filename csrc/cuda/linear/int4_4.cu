#define QUIRE_INT4_N_TILES 1
#include "cuda/linear/int4.cuh"
