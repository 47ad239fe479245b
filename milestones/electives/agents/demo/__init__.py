"""Agents that pause, with hints and without: `python -m milestones demo agents`."""

from __future__ import annotations

from ... import paths_below

__path__ += paths_below(__name__)
