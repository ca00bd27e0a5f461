#define QUIRE_LINEAR_EIGHTS 2
#include "linear.cuh"
