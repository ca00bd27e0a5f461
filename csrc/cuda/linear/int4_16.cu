#define QUIRE_INT4_N_TILES 4
#include "cuda/linear/int4.cuh"
