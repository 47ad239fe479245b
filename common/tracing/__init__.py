"""Traces of runs: recording, Chrome traces, a player in HTML; and forced retractions to watch."""
