"""Traces of runs: recording, Chrome traces, and a player in HTML."""
