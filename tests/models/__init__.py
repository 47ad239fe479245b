"""Loading models, their passes, stored weights, the kernels in C and in Triton."""
