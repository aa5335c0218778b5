"""Kernels for Hopper in Gluon: partitions of warps that copy, multiply and add side by side."""
