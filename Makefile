# The two commands of the README are `make demo` and `make test`; everything they need, they set up.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test check format lint types clean

demo: $(STAMP)
	$(BIN)/offbeat compare --model mlp --data digits --workers 4 --strategy bsp --strategy partial --slow none --slow 1:5

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses 2 --dist worksteal

check: format lint types test

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[demo,dev]'
	touch $@

clean:
	rm -rf $(VENV)
