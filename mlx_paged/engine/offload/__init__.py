"""Offloading: evicted blocks are kept in host memory, and come back when a prompt needs them."""
