# One virtual environment, made once: `make demo` and `make test` both build it when it is missing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test proofs lint format bench science health-table chaos clean

demo: $(READY)
	$(BIN)/orch sweep sweeps/zloss.yaml --resume

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

proofs: $(READY)
	$(BIN)/python -m pytest -m slow -n 2 --dist loadfile

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks

science: $(READY)
	$(BIN)/python -m benchmarks.science

health-table: $(READY)
	$(BIN)/python -m benchmarks.health_table

chaos: $(READY)
	$(BIN)/python -m benchmarks.chaos

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	-test -x $(BIN)/orch && $(BIN)/orch down
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
