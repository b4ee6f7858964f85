# `make course` and `make test` do all the set-up on a fresh Debian or Ubuntu machine with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
STEM ?= decoding
COURSE ?= course
PORT ?= 8000
HUB_PROXY := 5.1.0
export PATH := $(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(VENV)/.installed: requirements.txt pyproject.toml etc/jupyter/nbgrader_config.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || scripts/system_packages.sh no-venv=python3-venv
	@echo "Installing into $(VENV) (a few minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements.txt
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@mkdir -p $(VENV)/etc/jupyter && cp etc/jupyter/nbgrader_config.py $(VENV)/etc/jupyter/ # an editable install leaves it out
	@touch $@

install: $(VENV)/.installed ## create .venv and install everything

sandbox: ## make sure that bubblewrap is there
	@scripts/system_packages.sh bwrap=bubblewrap

browser: ## make sure that Chromium is there, for the tests
	@scripts/system_packages.sh chromium=chromium

servers: install ## make sure that PostgreSQL and JupyterHub's proxy are there, for the tests
	@scripts/system_packages.sh pg_ctlcluster=postgresql node=nodejs npm=npm
	@test "$$($(BIN)/configurable-http-proxy --version 2>/dev/null)" = $(HUB_PROXY) || \
		npm install --global --prefix $(VENV) --no-audit --no-fund --loglevel=error configurable-http-proxy@$(HUB_PROXY) > /dev/null

sync: install ## generate notebooks and catalogs from solutions/
	@$(BIN)/python -m autograder.sync

gate: install ## refuse exercises that do not hold together
	@$(BIN)/python -m autograder.gate
	@$(BIN)/lint-imports --no-cache > /dev/null || $(BIN)/lint-imports --no-cache

book: install ## build the book into _build/html
	@$(BIN)/jupyter-book build . -W -n --keep-going

class: install sandbox ## grade the bundled sample class of STEM into COURSE
	@$(BIN)/python -m samples.run $(STEM) --course $(COURSE)

course: install sandbox sync book class ## everything: install, book, notebooks, graded sample class
	@echo
	@echo "book      file://$(CURDIR)/_build/html/index.html   (or: make serve)"
	@echo "feedback  $(COURSE)/feedback/"
	@echo "grades    $(COURSE)/$(STEM).csv"

serve: ## open the built book on http://localhost:$(PORT)
	@test -f _build/html/index.html || { echo "The book is not built yet. Run: make book" >&2; exit 1; }
	@echo "http://localhost:$(PORT)  (Ctrl-C ends it)"
	@$(PYTHON) -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html

test: install sandbox browser servers ## run the whole test suite
	@$(BIN)/ruff check src autograder samples tests solutions scripts notebooks benchmarks
	@$(BIN)/python -m pytest -n $$(($$(env -u OMP_NUM_THREADS nproc) + 2)) --dist loadfile --no-loadscope-reorder

lint: install ## check and format the code
	@$(BIN)/ruff check --fix src autograder samples tests solutions scripts notebooks benchmarks
	@$(BIN)/ruff format src autograder samples tests scripts benchmarks

bench: install sandbox ## measure grading against stock nbgrader, side by side
	@$(BIN)/python -m benchmarks.grading

lock: ## write requirements.txt from what is installed
	@$(BIN)/python scripts/lock.py

pdf: book browser ## the whole book as _build/course_llm.pdf
	@$(BIN)/python scripts/print_book.py pdf

epub: book browser ## the whole book as _build/course_llm.epub
	@$(BIN)/python scripts/print_book.py epub

zip: book ## the built site as _build/course_llm.zip, which works without a network
	@$(BIN)/python -c "import shutil; shutil.make_archive('_build/course_llm', 'zip', '_build/html')"

lighthouse: book browser ## audit every page with Lighthouse (needs npm; PAGES=... for some)
	@$(BIN)/python scripts/lighthouse.py $(PAGES)

clean: ## remove what was built (not the course folder)
	rm -rf _build build dist *.egg-info

.PHONY: help install sandbox browser servers sync gate book class course serve test lint bench lock pdf epub zip lighthouse clean
