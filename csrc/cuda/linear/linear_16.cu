#define QUIRE_LINEAR_EIGHTS 2
#include "cuda/linear/linear.cuh"
