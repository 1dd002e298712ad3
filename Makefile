PYTHON ?= python3.11
BIN = .venv/bin
STAMP = .venv/installed

.PHONY: demo test test-all check bench-main clean

demo: $(STAMP)
	$(BIN)/anysize demo -o demo

test: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	$(BIN)/python -m pytest

test-all: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	$(BIN)/python -m pytest -m "slow or not slow"

check: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,dev,tensorflow-checkpoint,caffe,export]"
	touch $(STAMP)

clean:
	rm -rf .venv demo build dist src/*.egg-info
