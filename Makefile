# Every target sets up .venv by itself. PYTHON=/path/to/python picks the interpreter; ARGS="..." goes to pytest.
PYTHON ?=
ARGS ?=
RUN := .venv/bin/python -m
SETUP := $(or $(PYTHON),python3) scripts/setup.py --python "$(PYTHON)"

.PHONY: help demo test check format clean setup

help:
	@echo "make demo     a recorded PPO rollout through the HTTP server, checked and timed (sets up .venv first)"
	@echo "make test     all tests; ARGS=\"-k gae\" goes to pytest"
	@echo "make check    ruff, formatting, mypy"
	@echo "make format   apply ruff's fixes and formatting"
	@echo "make setup    the development environment alone, in .venv"
	@echo "make clean    remove .venv, caches and build output"
	@echo "Every target sets up what it needs. PYTHON=/path/to/python3.12 picks the interpreter."

demo:
	@$(SETUP) demo
	@.venv/bin/rlhf-scan demo

test: setup
	OMP_NUM_THREADS=1 $(RUN) pytest $(ARGS)

check: setup
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

format: setup
	$(RUN) ruff check --fix .
	$(RUN) ruff format .

setup:
	@$(SETUP) dev

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find rlhf_scan server ray_actors integrations tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
