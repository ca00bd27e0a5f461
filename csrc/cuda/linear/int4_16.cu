#define QUIRE_INT4_EIGHTS 2
#include "cuda/linear/int4.cuh"
