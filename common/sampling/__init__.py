"""From logits to tokens: parameters, filters, and a seeded sampler."""
