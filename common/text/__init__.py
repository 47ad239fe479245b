"""Text in and out: prompts to tokens, tokens to text, stop strings."""
