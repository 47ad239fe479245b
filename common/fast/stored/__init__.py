"""Weights in the precision in which a checkpoint stores them.

formats    the formats, and how a weight of each is laid out in memory
gguf       the blocks of a GGUF file as scales and quanta
weight     `StoredWeight`: one weight, packed for the kernels
modules    which modules of a model have stored weights, and how they become float32 again
file       a file of stored weights, which is mapped into memory
convert    the tensors of a GGUF file under the names of Hugging Face
folder     a converted GGUF file: its configuration and its weights, in a folder of the cache
"""
