# Each target makes its own .venv when it is missing. PYTHON chooses the interpreter.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests run in a random order, whose seed is said at the end. `make test SEED=7` takes that of 7.
PYTEST := $(BIN)/python -m pytest -q $(if $(SEED),--randomly-seed=$(SEED))
# Most tests wait for processes, not for the CPU: two workers a core, eight at most.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 4 ? 2 * cores : 8)))

# What says most within half a minute: the shape of the code, decisions, gates, the commands, the
# wire, the database, one simulated life of the controller, and a client that runs a job. Long runs
# over the core and the daemons that refuse a broken database are left to `make test`.
QUICK := tests/test_rooms.py tests/core tests/jobs tests/client/commands tests/client/wire \
	tests/store/test_database.py \
	'tests/sim/test_controller.py::test_every_promise_holds_at_every_step[1]' \
	--deselect tests/core/test_properties.py --deselect tests/core/test_benchmarks.py \
	--deselect tests/core/test_fairshare.py::test_shares_of_three_to_one_give_three_quarters \
	--deselect tests/core/test_fairshare.py::test_users_of_large_and_of_small_jobs_get_half_each \
	--deselect tests/store/test_database.py::test_an_unusable_database_ends

# One script a question; each rewrites its own section of benchmarks/README.md.
BENCHMARKS := start start_pid1 throughput bulk lists idle memory replay
BENCHMARK := $(BIN)/python benchmarks

.PHONY: demo quick test test-system soak bench bench-long check format clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test,dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

quick: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m "not systemd and not soak" $(QUICK)

test: $(STAMP)
	$(PYTEST) -n $(WORKERS) -m "not systemd and not soak"

test-system: $(STAMP)
	$(PYTEST) -m systemd tests/system

soak: $(STAMP)
	GPUSCHED_SOAK=1 $(PYTEST) -m "not systemd" --timeout=3600

bench: $(STAMP)
	set -e; for name in $(BENCHMARKS); do $(BENCHMARK)/$$name.py --write; done
	$(BENCHMARK)/report.py plan
	$(BENCHMARK)/database.py --jobs 20000 --write
	$(BENCHMARK)/backfill.py --exact --write

bench-long: $(STAMP)
	$(BENCHMARK)/backfill.py --write
	$(BENCHMARK)/database.py --write
	$(BENCHMARK)/lists.py --finished 1000000 --write
	$(BENCHMARK)/many_jobs.py --write
	$(BIN)/python -m benchmarks.many_users --write

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/test_tidy.py tests/test_rooms.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
