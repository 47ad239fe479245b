"""Weights in the precision in which a checkpoint stores them.

formats    the formats, and how a weight of each is laid out in memory
gguf       the blocks of a GGUF file as scales and quanta
weight     `StoredWeight`: one weight, packed for the kernels
modules    which modules of a model have stored weights, and how they become float32 again
file       the converted GGUF files in the cache folder
"""
