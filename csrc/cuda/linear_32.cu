#define QUIRE_LINEAR_EIGHTS 4
#include "linear.cuh"
