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

bench: ## the short benchmarks, one after the other
	scripts/setup dev
	for name in protocol tls store; do .venv/bin/python -m bench.$$name; done
