#define QUIRE_INT4_FOURS 4
#include "cuda/linear/int4.cuh"
