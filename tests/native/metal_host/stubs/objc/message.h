// Copyright © 2026 the mlx_paged authors. Apache-2.0.
// The parts of Apple's SDK that metal-cpp names, and no more.
#pragma once

#include <objc/runtime.h>

extern "C" {
void objc_msgSend(void);
void objc_msgSend_stret(void);
void objc_msgSend_fpret(void);
}
