PYTHON ?= python3
export VENV ?= $(CURDIR)/.venv
RUN = "$(VENV)/bin/python"
TOP = $(lastword $(sort $(wildcard m[0-9]_*)))

.PHONY: help setup demo test lint ladder slides

help:  ## show the commands
	@echo "make demo    set up if needed, and run the demo of the highest milestone"
	@echo "make test    set up if needed, and run the whole suite (ARGS='--milestone=m2_continuous')"
	@echo "make setup   only set up: an environment in .venv, the packages, the embedded model"
	@echo "make lint    ruff and mypy"
	@echo "make slides  the lectures as HTML and PDF, in slides/dist (needs Chromium or Chrome)"
	@echo "make ladder  measure all milestones and other engines on this machine"

setup:
	@$(PYTHON) common/bootstrap.py

demo: setup
	@$(RUN) -m $(TOP).demo $(ARGS)

test: setup
	@$(RUN) -m pytest -n auto --dist worksteal $(ARGS)

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m milestones types

ladder: setup
	@$(RUN) -m milestones bench $(ARGS)

slides: setup
	@$(RUN) -m slides build $(ARGS)
