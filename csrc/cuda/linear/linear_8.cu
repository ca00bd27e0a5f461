#define QUIRE_LINEAR_EIGHTS 1
#include "cuda/linear/linear.cuh"
