.DEFAULT_GOAL := help
.PHONY: figures help lock audit demo test test-full test-slow test-kernels test-kernels-short test-deploy test-frameworks browser check format bench robustness smoke campaign docs site dist clean
PYTHON ?= python3
BIN := .venv/bin
export OMP_WAIT_POLICY ?= passive

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

.venv/.complete: pyproject.toml constraints.txt
	@echo "making an environment in .venv"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing PyTorch into .venv (some minutes, once)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0 setuptools
	@echo "installing fedsso and the other packages into .venv (a minute or two, once)"
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	touch $@

lock:  ## fit constraints.txt to pyproject.toml and change as little as possible; UPGRADE="-P flwr" raises a package
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	test -x $(BIN)/uv || $(BIN)/pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile --quiet pyproject.toml --extra dev --python-version 3.11 --python-platform linux --no-header --no-annotate $(UPGRADE) --output-file constraints.txt

audit:  ## compare constraints.txt with the published holes (needs the internet)
	$(BIN)/uv tool run pip-audit --strict --no-deps --disable-pip --requirement constraints.txt

demo: .venv/.complete  ## install, then compare FedSSO, FedAvg and FedSGD on bundled data: demo/index.html (a minute, plus minutes to install)
	$(BIN)/python examples/demo.py

test: .venv/.complete  ## install and run the tests, with a sample of the variants (minutes)
	$(BIN)/python -m pytest -m "not slow and not full" -n 2 --dist loadfile

test-full: .venv/.complete  ## what `make test` leaves out: other variants, killed processes, a short campaign
	$(BIN)/python -m pytest -m full -n 2 --dist loadfile

test-slow: .venv/.complete  ## the long tests: the paper's numbers on MNIST (needs FEDSSO_DATA)
	$(BIN)/python -m pytest -m slow

test-kernels: .venv/.complete  ## numerical tests with other CPU kernels and thread counts, as a table (an hour)
	$(BIN)/python tests/kernels.py

test-kernels-short: .venv/.complete  ## four of these settings, on the most numerical test suites (minutes)
	$(BIN)/python tests/kernels.py --short

test-deploy: .venv/.complete  ## a real federation on this machine: SuperLink and SuperNodes over TLS, with authentication (minutes)
	command -v openssl > /dev/null && command -v ssh-keygen > /dev/null || apt-get install --yes --quiet openssl openssh-client
	$(BIN)/python -m pytest tests_deploy

browser:  ## install Debian's chromium and its driver, with which the tests open the report (otherwise skipped)
	command -v chromium > /dev/null && command -v chromedriver > /dev/null || { apt-get update --quiet && apt-get install --yes --quiet chromium chromium-driver; }

FRAMEWORKS := build/frameworks
$(FRAMEWORKS)/pfl/.complete: FRAMEWORK := pfl==0.6.0
$(FRAMEWORKS)/nvflare/.complete: FRAMEWORK := nvflare==2.9.0
$(FRAMEWORKS)/%/.complete: pyproject.toml
	@echo "installing $(FRAMEWORK), PyTorch and fedsso into $(@D) (some minutes, once)"
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 $(FRAMEWORK) 'setuptools>=77'
	$(@D)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation torch==2.13.0 --editable .
	touch $@

test-frameworks: $(FRAMEWORKS)/pfl/.complete $(FRAMEWORKS)/nvflare/.complete  ## FedSSO in pfl and NVFlare, each in its own environment, against the simulator
	for name in pfl nvflare; do PYTHONPATH=$(CURDIR)/tests $(FRAMEWORKS)/$$name/bin/python tests_frameworks/$${name}_run.py || exit 1; done

check: .venv/.complete  ## ruff, ruff format, mypy --strict
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

figures: .venv/.complete  ## readability of the code: files per folder, documentation, density
	$(BIN)/python docs/figures.py

format: .venv/.complete  ## fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/.complete  ## time and memory against a plain loop and a hand-stacked reference: build/bench.json
	$(BIN)/python -m benchmarks

robustness: .venv/.complete  ## FedSSO's default against tuned rivals on all tasks, resumable: docs/robustness.json (long; half an hour on one H200)
	$(BIN)/python -m benchmarks.robustness
	$(BIN)/python -m benchmarks.robustness_report

smoke: .venv/.complete  ## FedAvg and FedSSO on every data set on this machine, with each of its models (long)
	$(BIN)/python docs/smoke.py

campaign: .venv/.complete  ## test campaign with kills, damaged files, faults, hostile replies and odd numbers: build/campaign.json (half an hour)
	$(BIN)/python -m campaign

docs: .venv/.complete  ## update generated tables and figures, then build the documentation site: build/site/index.html
	$(BIN)/python docs/build.py --figures
	$(MAKE) site

site: .venv/.complete  ## build the documentation site, which works offline: build/site/index.html
	$(BIN)/python docs/site.py

PACKAGING := build/packaging
$(PACKAGING)/.complete: Makefile
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check build==1.6.1 twine==7.0.0 setuptools==84.2.1
	touch $@

dist: $(PACKAGING)/.complete  ## build the wheel and the source distribution, and check both: dist/
	rm -rf dist
	$(PACKAGING)/bin/python -m build --no-isolation
	$(PACKAGING)/bin/twine check --strict dist/*
	$(PACKAGING)/bin/python tests/distribution.py dist

clean:  ## remove everything that the other targets made
	rm -rf .venv build dist demo .pytest_cache .mypy_cache .ruff_cache
