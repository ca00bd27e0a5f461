#define QUIRE_INT4_N_TILES 8
#include "cuda/linear/int4.cuh"
