// Copyright © 2026 the mlx_paged authors. Apache-2.0.

#pragma once

// One instantiation of a kernel template under its host name.
#define PAGED_INSTANTIATE(name, ...) \
  template [[host_name(name)]] [[kernel]] decltype(__VA_ARGS__) __VA_ARGS__;
