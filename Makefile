PYTHON ?= python3
export VENV ?= $(CURDIR)/.venv
RUN = "$(VENV)/bin/python"
PYTEST = $(RUN) -m pytest -n auto --dist worksteal
TOP = $(lastword $(sort $(wildcard m[0-9]_*)))

.PHONY: help setup demo diff test test-all lint bench slides site

help:  ## show the commands
	@echo "make demo    set up if needed, and run the demo of the highest milestone"
	@echo "make diff    what a milestone changes, in the order of its lesson (TO=m4)"
	@echo "make test    set up if needed, and run the first tier of the suite: five minutes on two cores"
	@echo "             (ARGS='--milestone=m2_continuous')"
	@echo "make test-all the whole suite in every mode, and the slides: about an hour"
	@echo "make setup   only set up: an environment in .venv, the packages, the embedded model"
	@echo "make lint    ruff and mypy"
	@echo "make slides  the lectures as HTML and PDF, in slides/dist (needs Chromium or Chrome)"
	@echo "make site    the book as a web site, in build/site (needs Node.js)"
	@echo "make bench   measure all milestones and other engines on this machine"

setup:
	@$(PYTHON) common/bootstrap.py

demo: setup
	@$(RUN) -m $(TOP).demo $(ARGS)

diff: setup
	@$(RUN) -m milestones diff $(or $(TO),$(TOP)) --files

test: setup
	@$(PYTEST) $(ARGS)

# Kinds of CPU that every x86 CPU with AVX2 can play, and a machine without a C compiler.
NARROWER = $(if $(filter x86_64,$(shell uname -m)),LADDER_CPU=x86-64-v3 LADDER_CPU=x86-64) CC=none

# REST=--rest leaves out what `make test` has just run.
# An engine with a forward stream also runs the suite without overlap, and what depends on the moment
# at which a forward ends on streams that end forwards as early and as late as possible. The serial
# loop has no more than the lower milestones have, so its first tier is enough.
test-all: setup
	@$(PYTEST) --thorough $(REST) $(ARGS)
	@$(PYTEST) --mode serial $(ARGS)
	@$(PYTEST) --thorough --mode early $(ARGS)
	@$(PYTEST) --thorough --mode late $(ARGS)
	@for narrower in $(NARROWER); do env $$narrower $(PYTEST) -m cpu $(ARGS) || exit 1; done
	@$(MAKE) --no-print-directory slides ARGS=

lint: setup
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m milestones types

bench: setup
	@$(RUN) -m milestones bench $(ARGS)

slides: setup
	@$(RUN) -m slides build $(ARGS)

site: setup
	@$(RUN) -m milestones extras book
	@$(RUN) -m milestones site $(ARGS)
