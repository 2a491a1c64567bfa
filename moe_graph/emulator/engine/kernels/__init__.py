"""Kernels of GE ops, one small function per op, grouped by subject."""
