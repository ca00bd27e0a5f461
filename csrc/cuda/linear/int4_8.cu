#define QUIRE_INT4_N_TILES 2
#include "cuda/linear/int4.cuh"
