.PHONY: demo test check bench

demo: ## set up and see a notification on its whole way
	scripts/demo

test: ## set up and run everything that must pass
	scripts/test

check: ## formatter, linter and types only
	scripts/setup dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: ## all benchmarks with smaller sizes, about three minutes
	scripts/setup dev
	.venv/bin/python -m bench --quick
