"""Tensor parallelism: several processes, called ranks, compute one forward together.

Each rank has a part of the weights of each layer, and the keys and values of its heads.
"""
