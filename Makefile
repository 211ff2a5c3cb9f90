# Thin names for scripts/run, which does all set-up.
.PHONY: tune test bench lint generated

tune:
	sh scripts/run tune --model llama-3-8b

test:
	sh scripts/run test

bench:
	sh scripts/run bench --model llama-3-8b

lint:
	sh scripts/run --version
	.venv/bin/ruff check .

generated:
	sh scripts/run build
