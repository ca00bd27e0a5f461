#define QUIRE_LINEAR_EIGHTS 4
#include "cuda/linear/linear.cuh"
