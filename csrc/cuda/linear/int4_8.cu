#define QUIRE_INT4_FOURS 2
#include "cuda/linear/int4.cuh"
