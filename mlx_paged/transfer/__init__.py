"""Blocks of the KV cache over sockets, from an engine that computes prompts to one that answers
them. Standard library only, except for checksums.

`PrefillServer` takes prompts and sends their blocks as they are computed; `Receiver` asks it for
those of a prompt. A block travels as the record that `mlx_paged.offload` writes to disk.
"""
