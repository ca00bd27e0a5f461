#define QUIRE_INT4_EIGHTS 1
#include "cuda/linear/int4.cuh"
