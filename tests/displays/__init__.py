"""What a person watches: demos, traces, the player."""
