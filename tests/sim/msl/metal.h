// Everything of the Metal Shading Language's library that the simulator knows.
#pragma once
#include "array.h"
#include "atomic.h"
#include "bfloat.h"
#include "logging.h"
#include "math.h"
#include "runtime.h"
#include "simd.h"
#include "simdgroup_matrix.h"
#include "types.h"
#include "uniform.h"
#include "vec.h"
