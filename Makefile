# make demo: from a bare machine to three trained models and their comparison. make test: the tests. All install what they need.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SCHEMES := learned sinusoidal rope

.PHONY: demo test test-slow reliability gpu clean

demo: $(VENV)/installed
	$(PY) prepare.py shakespeare
	for wpe in $(SCHEMES); do $(PY) train.py config/shakespeare_$$wpe.py --out_dir=out/demo_$$wpe --init_from=auto || exit $$?; done
	for wpe in $(SCHEMES); do $(PY) sample.py --out_dir=out/demo_$$wpe --start='O Romeo' --max_new_tokens=300 || exit $$?; done
	$(PY) compare.py $(SCHEMES:%=out/demo_%) --to=out/demo --eval_tokens=131072 --context_tokens=4096 --trials=0

test: $(VENV)/installed-dev
	$(PY) -m pytest -q -n 2 --dist=loadfile

test-slow: $(VENV)/installed-dev
	$(PY) -m pytest -q -n 2 --dist=loadfile -m 'slow and not gpu'

reliability: $(VENV)/installed-dev
	PYTHONPATH=tests $(PY) -m pytest -q -n 2 --dist=loadfile -m 'not gpu' -p reliability

# checks and speeds on CUDA, ten minutes; make gpu PYTHON=python3 installs nothing and runs with what that python has; PEER=DIR, a checkout
# of nanoGPT, is measured beside
ifeq ($(origin PYTHON),command line)
gpu: GPU_PY := $(PYTHON)
else
gpu: GPU_PY := $(PY)
gpu: $(VENV)/installed-dev
endif
gpu:
	$(GPU_PY) -m pytest -q -m gpu tests/test_gpu.py; checks=$$?; \
	$(GPU_PY) bench.py --device=cuda --parts=machine,train,sample,memory --shapes=gpt2 --wpe=learned,rope --deadline=360 \
		--json=bench_gpu.json $(PEER:%=--peer=%) && exit $$checks

$(VENV)/installed: requirements.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "nanoPE needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV)
