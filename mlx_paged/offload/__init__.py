"""Blocks of the KV cache in files. Standard library only, except for checksums.

A folder has one subfolder for each model, with segment files of about 32 MiB. A segment holds
blocks of any prefixes and groups; `index` maps digests of prefixes to their places. Several
processes may share a folder.
"""
