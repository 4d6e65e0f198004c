"""Triton kernels: attention's forward and first backward, and the two passes of the second backward.

    forward      O, L               a program holds one row block of one query head at a time
    backward     dQ, then dK, dV    row blocks, then key blocks
    row_pass     Q̃, dÕ, α, E        row blocks
    column_pass  K̃, Ṽ               key blocks of a key-value head; loops over its group of query heads

Every output element is written once, by one program, in a fixed order of additions: no atomics in sums, and the
same bits on every run. The modules import triton: the library imports them when a call needs them, not before.
"""
