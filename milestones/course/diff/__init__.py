"""The lesson between two milestones, symbol by symbol, as text and as HTML."""
