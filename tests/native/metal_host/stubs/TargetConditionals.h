// Copyright © 2026 the mlx_paged authors. Apache-2.0.
// The parts of Apple's SDK that metal-cpp names, and no more.
#pragma once

#define TARGET_OS_OSX 1
#define TARGET_OS_MAC 1
#define TARGET_OS_IPHONE 0
#define TARGET_OS_IOS 0
#define TARGET_OS_TV 0
#define TARGET_OS_VISION 0
#define TARGET_OS_SIMULATOR 0
