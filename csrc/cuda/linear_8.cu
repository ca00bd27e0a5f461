#define QUIRE_LINEAR_EIGHTS 1
#include "linear.cuh"
