"""Transfers KV blocks over sockets, from a prefill engine to a decode engine.

`PrefillServer` accepts prompts and sends their blocks as they are computed. `Receiver` requests the
blocks of a prompt. A block has the same record format as the files of `mlx_paged.offload`. Standard
library only, except for checksums.
"""
