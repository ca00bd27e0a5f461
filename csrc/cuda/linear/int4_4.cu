#define QUIRE_INT4_FOURS 1
#include "cuda/linear/int4.cuh"
