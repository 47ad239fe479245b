"""Instruments: most find wrong answers without a GPU, and the suite and `soak` use them.

hash_chain           the answers of the hash model, in plain Python
hash_model           a model with answers that any wrong slot, position or mask changes
plain_runner         a model runner in plain Python, for cores without torch
streams              forward streams that run their work as late, or as early, as events allow
audit                engines that check their invariants after each step, and memory of NaN
path_of_a_token      the files and functions that one decode token crosses
paged_case           a random batch over a pool of pages, to compare kernels
fake_cuda            a fake of `torch.cuda` that records calls and replays graphs
fake_memory          the memory of this fake: waits, races and mixed devices are faults
random_adapter       random LoRA adapters, and models into which one is merged
"""
