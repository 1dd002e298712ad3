PYTHON ?= python3.11
BIN = .venv/bin
STAMP = .venv/installed

.PHONY: demo test test-all check bench clean

demo: $(STAMP)
	$(BIN)/anysize demo -o demo

test: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

test-all: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "slow or not slow"

check: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/check

bench: $(STAMP)
	$(BIN)/anysize bench --full --json bench.json --plot bench.png

# The same with the real tf_slim among the arms; takes 2 GB in .parity/.
.PHONY: bench-peers
bench-peers: $(STAMP) .parity/tf/installed
	$(BIN)/anysize bench --peers .parity/tf/bin/python --json bench-peers.json --plot bench-peers.png

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[demo,dev,tensorflow-checkpoint,caffe,export,coco,ultralytics,pose]"
	touch $(STAMP)

# The real tf_slim and Caffe against ours; takes 4 GB in .parity/.
.PHONY: parity
parity: $(STAMP) .parity/tf/installed
	TF_CPP_MIN_LOG_LEVEL=3 .parity/tf/bin/python -W ignore -m parity.slim_live .parity/slim
	$(BIN)/python -m parity.compare_slim .parity/slim
	TF_CPP_MIN_LOG_LEVEL=3 .parity/tf/bin/python -W ignore -m parity.pose_live .parity/pose
	$(BIN)/python -m parity.compare_pose .parity/pose
	$(BIN)/python parity/compare_caffe.py

.parity/tf/installed: parity/constraints-tf.txt
	$(PYTHON) -m venv .parity/tf
	.parity/tf/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Several GB, so not part of the other parity checks: the real torchvision and timm.
.PHONY: parity-torchvision
parity-torchvision: $(STAMP) .parity/torchvision/installed
	.parity/torchvision/bin/python parity/torchvision_live.py .parity/torchvision-run
	$(BIN)/python parity/compare_torchvision.py .parity/torchvision-run

.parity/torchvision/installed: parity/constraints-torchvision.txt
	$(PYTHON) -m venv .parity/torchvision
	.parity/torchvision/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# Nets of torchvision, timm and segmentation-models-pytorch on canvases; writes docs/nets.md.
.PHONY: prove-peers
prove-peers: .parity/peers/installed
	PYTHONPATH=src .parity/peers/bin/python -W ignore -m parity.prove_peers docs/nets.md

# Runs of such nets by the command, from the libraries' own weights.
.PHONY: runs-of-peers
runs-of-peers: .parity/peers/installed
	.parity/peers/bin/python -m pip install --quiet --disable-pip-version-check -c parity/constraints-peers.txt -e ".[export]"
	PYTHONPATH=src:. .parity/peers/bin/python -W ignore -m parity.runs_of_peers

.parity/peers/installed: parity/constraints-peers.txt
	$(PYTHON) -m venv .parity/peers
	.parity/peers/bin/python -m pip install --quiet --disable-pip-version-check -c $< torch "huggingface_hub<1" PyYAML safetensors tqdm numpy pillow rich
	.parity/peers/bin/python -m pip install --quiet --disable-pip-version-check -c $< --no-deps torchvision timm segmentation-models-pytorch
	touch $@

clean:
	rm -rf .venv .parity demo build dist src/*.egg-info
