// Everything of the Metal Shading Language's library that the simulator knows.
#pragma once
#include "atomic.h"
#include "bfloat.h"
#include "math.h"
#include "runtime.h"
#include "simd.h"
#include "simdgroup_matrix.h"
#include "types.h"
#include "vec.h"
