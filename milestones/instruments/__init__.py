"""Instruments that find wrong answers without a GPU: the suite and `soak` use them.

hash_model   a model whose answer changes with any wrong slot, position or mask
streams      forward streams that run their work as late, or as early, as events allow
audit        engines that check their invariants after each step, and memory filled with NaN
"""
