#include <metal_tensor>
