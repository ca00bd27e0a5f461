#define QUIRE_INT4_FOURS 8
#include "cuda/linear/int4.cuh"
