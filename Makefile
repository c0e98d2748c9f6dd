# The main commands are `make train` and `make test`. Each creates .venv and installs the packages that it needs.

targets = help train generate notebook doctor report exercise detective predict grade packages parity test test-fast \
  test-long test-gpu assignment sanitize bench bench-gpu lint clean

# The variables that a command line may set, as in `make train STAGE=1 N=2`. Any other variable is an error.
variables = STAGE N HOSTFILE PRESET ARGS OUT CASE DIR SUITE PYTHON PYTHONPATH TRITON_INTERPRET

STAGE    ?= 0
N        ?= 1
HOSTFILE ?= hostfile
PRESET   ?= paper
ARGS     ?=

STAGE_0 = stage0_serial
STAGE_1 = stage1_mpi
STAGE_2 = stage2_cuda
STAGE_3 = stage3_mpi_cuda

# not ?=: an environment variable OUT of another program must not change it
OUT = out/stage$(STAGE)-$(PRESET)

# OUT if it has a checkpoint, otherwise empty. Not $(wildcard ...): it divides a path at its spaces.
trained = $(if $(shell ls -d "$(OUT)"/step-* 2>/dev/null),$(OUT))

# Report a variable on the command line that is not in the list, with the variable or the flag that was probably meant.
given   := $(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name)))
unknown := $(firstword $(filter-out $(variables),$(given)))
ifneq ($(unknown),)
  upper := $(filter $(shell echo '$(unknown)' | tr a-z A-Z),$(variables))
  flag  := $(shell grep -o "^    $(shell echo '$(unknown)' | tr A-Z- a-z_):" gpt2core/app/settings/definitions.py | tr -d " :" | tr _ - | head -n 1)
  write := $(if $(upper),$(upper)=$($(unknown)),$(if $(flag),ARGS="--$(flag) $($(unknown))"))
  $(error $(unknown)=$($(unknown)): there is no such variable: $(if $(write),write $(write),use $(variables)))
endif

gpu_goal := $(firstword $(filter test-gpu sanitize bench-gpu,$(MAKECMDGOALS)))
ifneq ($(filter 2 3,$(STAGE))$(gpu_goal)$(filter report,$(MAKECMDGOALS)),)
  # The major CUDA version of the driver (12, 13), from the header of nvidia-smi's table; empty without a GPU.
  cuda := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Z ]* Version: *\([0-9]*\).*/\1/p')
  ifeq ($(if $(gpu_goal),$(cuda),not needed),)
    $(error no GPU was found (nvidia-smi lists none): run make $(gpu_goal) on a machine with an NVIDIA GPU and its driver)
  endif
endif

ifdef PYTHON
  # The user's interpreter: nothing is installed, and PYTHONPATH lets it import gpt2core and the stages from here.
  python := $(if $(findstring /,$(filter-out /%,$(PYTHON))),$(CURDIR)/$(PYTHON),$(PYTHON))
  ifeq ($(filter help clean,$(or $(MAKECMDGOALS),help))$(shell command -v "$(python)" 2>/dev/null),)
    $(error PYTHON=$(PYTHON): there is no such program: name an interpreter, for example PYTHON=python3, or omit PYTHON)
  endif
  export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
  test_ready = packages
  report_ready = packages
else
  python := $(CURDIR)/.venv/bin/python
  doctor: python := $(if $(wildcard .venv/bin/python),$(python),python3)
  cuda_ready  = $(if $(cuda),.venv/.train-nccl)
  test_ready  = .venv/.test
  report_ready = .venv/.train-mpi .venv/.train-interpreter .venv/.report $(cuda_ready)
  notebook_ready = .venv/.notebook
  ready_0     = .venv/.train
  ready_1     = .venv/.train-mpi
  ready_2     = .venv/.train-$(if $(interpreted),interpreter,cuda)
  ready_3     = $(if $(interpreted),.venv/.train-interpreter .venv/.train-mpi,.venv/.train-nccl)
  train_ready = $(ready_$(STAGE))
  mpi_ready   = .venv/.train-mpi
  exercise_ready = $(if $(filter 2 3,$(STAGE)),.venv/.train-interpreter,.venv/.train)
endif

# not from the environment: DIR and CASE there may belong to another program. With CASE, make grade grades a detective.
folder = $(if $(filter command,$(origin DIR)),--dir "$(DIR)")
case   = $(if $(filter command,$(origin CASE)),$(CASE))

ifneq ($(filter detective,$(MAKECMDGOALS)),)
  ifeq ($(case),)
    $(error CASE is missing: make detective CASE=1, the number of a detective in exercises/README.md)
  endif
endif
ifneq ($(and $(filter parity,$(MAKECMDGOALS)),$(folder)),)
  ifeq ($(shell test -d "$(DIR)" && echo yes),)
    $(error DIR=$(DIR) is not a directory: give a working folder, or omit DIR)
  endif
endif

ifneq ($(filter assignment,$(MAKECMDGOALS)),)
  ifeq ($(SUITE),)
    $(error SUITE is missing: make assignment SUITE=DIR, the directory of the fetched assignment)
  else ifeq ($(shell test -d "$(SUITE)" && echo yes),)
    $(error SUITE=$(SUITE) is not a directory: fetch the suite and give its directory)
  endif
endif

# Names of files and folders are not targets: make would call them up to date.
not_targets := $(foreach goal,$(filter-out $(targets),$(MAKECMDGOALS)),$(if $(findstring .venv/,$(goal)),,$(goal)))
ifneq ($(not_targets),)
  $(error $(firstword $(not_targets)): there is no such target: make help lists the targets)
endif

ifneq ($(filter train generate exercise predict grade notebook,$(MAKECMDGOALS)),)
  ifneq ($(words $(STAGE)) $(filter $(STAGE),0 1 2 3),1 $(STAGE))
    $(error STAGE=$(STAGE) is not a stage: STAGE is 0, 1, 2 or 3)
  endif
endif

ifneq ($(filter train generate,$(MAKECMDGOALS)),)
  ifneq ($(words $(PRESET)),1)
    $(error PRESET=$(PRESET) is not the name of one preset: use for example PRESET=nano)
  endif
  stage := $(STAGE_$(STAGE))
  ifneq ($(filter 0 2,$(STAGE)),)
    ifneq ($(N),1)
      threads = ; for threads, ARGS="--threads $(N)"
      $(error N=$(N): stage $(STAGE) is one process; omit N$(if $(filter 0,$(STAGE)),$(threads)))
    endif
    run = exec "$(python)"
  else
    ifeq ($(shell echo '$(N)' | grep -xE '0*[1-9][0-9]{0,5}'),)
      $(error N=$(N) is not a number of ranks: N is a whole number, 1 or more)
    endif
    hosts = $(if $(HOSTFILE),--hostfile "$(HOSTFILE)")
    run = exec "$(python)" -m stage1_mpi.launch -n $(N) $(hosts) --
  endif
  ifneq ($(filter 2 3,$(STAGE)),)
    interpreted := $(if $(cuda),,1)
    ifneq ($(filter-out 0,$(TRITON_INTERPRET)),)
      interpreted := 1
    endif
    why := $(if $(cuda),TRITON_INTERPRET is set,no GPU was found)
    ifeq ($(interpreted),1)
      ifeq ($(origin PRESET) $(MAKECMDGOALS),file generate)
        PRESET := nano
      endif
      ifneq ($(PRESET),nano)
        $(error $(why), and Triton's interpreter is far too slow for PRESET=$(PRESET): use PRESET=nano)
      endif
      $(info $(why): TRITON_INTERPRET=1 runs the same kernels on the CPU, slowly)
      ifeq ($(findstring --steps,$(ARGS))$(findstring --resume,$(ARGS)),)
        train: override ARGS := --steps 10 $(ARGS)
      endif
      export TRITON_INTERPRET := 1
    else ifneq ($(filter 1 2 3 4 5 6 7 8 9 10 11,$(cuda)),)
      $(error the driver of this GPU supports CUDA $(cuda), but stage $(STAGE) needs 12 or 13: install a newer driver)
    endif
  endif
endif

# The weights for `make generate`: the checkpoint of `make train` in OUT, or else, if the command line does not give OUT,
# the shipped weights of PRESET; empty if there are none. Read when the recipe runs, because `make train generate` writes
# the checkpoint first.
given_out = $(filter command,$(origin OUT))
weights = $(or $(trained),$(if $(given_out),,$(wildcard data/gpt2-$(PRESET))))
no_weights = $(OUT) has no checkpoint: run make train with the same STAGE, PRESET and OUT first, or omit $(if $(given_out),OUT,PRESET) for the shipped weights

.PHONY: $(targets)

help:  ## show this text
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo '  STAGE=0            the runtime (0 NumPy, 1 NumPy + MPI, 2 CUDA, 3 CUDA, NCCL)'
	@echo '  N=1                the number of ranks (stages 1 and 3)'
	@echo '  HOSTFILE=hostfile  the hosts of the ranks; empty: mpiexec chooses'
	@echo '  PRESET=paper       nano, tiny, paper, book, gpt2, ...; without a GPU,'
	@echo '                     stages 2 and 3 run only nano'
	@echo '  ARGS=              more flags, for example ARGS="--steps 200 --lr 1e-3"'
	@echo '  OUT=out/...        for checkpoints (default: out/stage$$STAGE-$$PRESET)'
	@echo '  CASE=1             the number of a detective, for make detective and grade'
	@echo '  DIR=work/...       the working folder (default: work/stageN, work/caseN);'
	@echo '                     make parity then compares the code of this folder'
	@echo '  SUITE=DIR          the directory of a fetched assignment (make assignment)'
	@echo '  PYTHON=python3     an interpreter; nothing is installed (default: .venv)'

train: $(train_ready)  ## train PRESET, write checkpoints to OUT, print a sample text
	$(run) -m $(stage).train_gpt2 --preset $(PRESET) --out "$(OUT)" --overwrite $(ARGS)

generate: $(train_ready)  ## continue a text with the model in OUT or shipped weights
	@$(if $(findstring --weights,$(ARGS)),,$(if $(weights),echo "weights: $(weights)",$(error $(no_weights))))
	@$(run) -m $(stage).inference --weights "$(weights)" $(ARGS)

# JupyterLab refuses to start as root without this flag.
allow_root = $(if $(filter 0,$(shell id -u)),--allow-root)

notebook: $(notebook_ready)  ## open the lesson of STAGE as a notebook in JupyterLab
	@"$(python)" -c 'import jupyterlab' 2>/dev/null || { echo 'make: $(python) has no JupyterLab: omit PYTHON, install' \
	  'jupyterlab, or open $(STAGE_$(STAGE))/walkthrough.ipynb in another program for notebooks' >&2; exit 2; }
	exec "$(python)" -m jupyterlab $(STAGE_$(STAGE))/walkthrough.ipynb $(allow_root) $(ARGS)

doctor:  ## print versions and GPUs; run one small step of each stage
	@"$(python)" -m gpt2core.app.doctor

report: $(report_ready)  ## measure the paper's tables; write out/report/index.html
	@"$(python)" -m benchmarks.report $(ARGS)

exercise: $(exercise_ready)  ## copy STAGE to DIR, without the functions to write
	@"$(python)" -m exercises.start --stage $(STAGE) $(folder)

detective: $(mpi_ready)  ## copy a stage with a fault to DIR: find and mend it (CASE=1)
	@"$(python)" -m exercises.detective --case "$(case)" $(folder)

predict: $(exercise_ready)  ## predict numbers of the lesson of STAGE, then measure them
	@"$(python)" -m exercises.predict --stage $(STAGE) $(ARGS)

grade: $(exercise_ready)  ## grade the functions in DIR: score, first mistakes, hints
	@"$(python)" -m exercises.grade $(if $(case),--case "$(case)",--stage $(STAGE)) $(folder) $(ARGS)

# Check that the interpreter PYTHON has the packages; a missing one is reported in one line.
packages:
	@"$(python)" -c 'import gpt2core.app.cli'

# Three tests run at the same time if pytest-xdist is installed, because many wait for processes that they have started.
# An interpreter given as PYTHON may not have pytest-xdist.
parallel = $(shell "$(python)" -c 'import xdist; print("-n 3 --dist loadgroup")' 2>/dev/null)

test: $(test_ready)  ## run all tests that need no GPU
	"$(python)" -m pytest -m "not gpu" $(parallel) $(ARGS)

parity: $(test_ready)  ## compare kernels, model, stages in a table (ARGS=--full)
	$(if $(folder),@cd "$(DIR)" && PYTHONPATH="$(CURDIR)" )"$(python)" -m benchmarks.parity $(ARGS)

test-fast: $(test_ready)  ## run the main tests, in about 90 seconds
	"$(python)" -m pytest -m "not gpu" --fast $(parallel) $(ARGS)

test-long: $(test_ready)  ## run all tests, and random ones again; write results/
	"$(python)" tests/tools/run_long.py $(ARGS)

test-gpu: $(test_ready) $(cuda_ready)  ## run the tests that need a GPU
	"$(python)" -m pytest -m gpu $(ARGS)

assignment: $(test_ready)  ## run the tests of a course's assignment in SUITE
	"$(python)" tests/tools/assignment.py "$(SUITE)" $(ARGS)

sanitize: $(test_ready) $(cuda_ready)  ## run every kernel under compute-sanitizer (CUDA toolkit)
	"$(python)" tests/tools/sanitize.py $(ARGS)

bench: $(test_ready)  ## compare with PyTorch on CPUs; print tables, write results/
	"$(python)" -m benchmarks.cpu.train_step --save $(ARGS)
	"$(python)" -m benchmarks.cpu.decode --save
	"$(python)" -m benchmarks.cpu.choices --save
	"$(python)" -m benchmarks.cpu.curve --save
	"$(python)" -m benchmarks.cpu.classroom --save --first --rounds 3
	"$(python)" -m benchmarks.cpu.classroom --save
	"$(python)" -m benchmarks.ranks.ranks --save
	"$(python)" -m benchmarks.ranks.strategies --save --ranks 2
	"$(python)" -m benchmarks.ranks.strategies --save --ranks 4 --only zero
	"$(python)" -m benchmarks.ranks.collectives --save
	"$(python)" -m benchmarks.ranks.collectives --save --idle
	"$(python)" -m benchmarks.ranks.parity --save
	"$(python)" -m benchmarks.ranks.kill --save
	"$(python)" -m benchmarks.ranks.survive --save

bench-gpu: $(test_ready) $(cuda_ready)  ## the same on GPUs: stage 2 on one GPU, stage 3 on four
	"$(python)" -m benchmarks.gpu.step --save $(ARGS)
	"$(python)" -m benchmarks.gpu.attention --save
	"$(python)" -m benchmarks.gpu.products --save
	"$(python)" -m benchmarks.gpu.decode --save
	"$(python)" -m benchmarks.gpu.start --save
	"$(python)" -m benchmarks.gpu.memory --save
	"$(python)" -m benchmarks.gpu.profile --save
	"$(python)" -m benchmarks.gpu.lesson --save
	"$(python)" -m benchmarks.gpu.ladder --save
	"$(python)" -m benchmarks.gpu.choices --save
	"$(python)" -m benchmarks.gpu.fusions --save
	"$(python)" -m benchmarks.gpus.scaling --save --strong 64 --paper
	"$(python)" -m benchmarks.gpus.strategies --save
	"$(python)" -m benchmarks.gpus.sharding --save
	"$(python)" -m benchmarks.ranks.parity --save --stage 3
	"$(python)" -m benchmarks.gpus.collectives --save
	"$(python)" -m benchmarks.gpus.timeline --save
	"$(python)" -m benchmarks.ranks.kill --save --stage 3 --times 10 --steps 1500 --checkpoint-every 100

lint: $(test_ready)  ## check the style (ruff)
	"$(python)" -m ruff check .

clean:  ## remove .venv, out/ and cached files
	rm -rf .venv out build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An empty file such as .venv/.train records that packages are installed: those of the extras in its command. If it is
# older than pyproject.toml, they are installed again. (An extra is a list of optional packages in pyproject.toml.)
.venv/.train: pyproject.toml | .venv/bin/python
	$(call install,.,$@)

.venv/.train-mpi: pyproject.toml | .venv/bin/python
	$(call install,.[mpi],.venv/.train $@)

# The CUDA packages include those for Triton's interpreter, so the file .train-interpreter is written too.
.venv/.train-cuda: pyproject.toml | .venv/bin/python
	$(call install,.[cuda$(major)],.venv/.train .venv/.train-interpreter $@)

.venv/.train-nccl: pyproject.toml | .venv/bin/python
	$(call install,.[$(nccl_extras)],.venv/.train .venv/.train-mpi .venv/.train-cuda .venv/.train-interpreter $@)

.venv/.train-interpreter: pyproject.toml | .venv/bin/python
	$(call install,.[interpreter],.venv/.train $@)

.venv/.report: pyproject.toml | .venv/bin/python
	$(call install,.[report],.venv/.train $@)

# These lists are variables, because a comma in $(call ...) would separate two arguments.
test_extras = mpi,report,test
notebook_extras = interpreter,notebook
nccl_extras = mpi,cuda$(major),nccl$(major)
major       = $(if $(filter 12,$(cuda)),12,13)

.venv/.test: pyproject.toml | .venv/bin/python
	$(call install,.[$(test_extras)],.venv/.train .venv/.train-mpi .venv/.train-interpreter .venv/.report $@)

# Wait until no other make installs packages. The shell holds the lock until it exits. Without flock, do not wait.
lock = ! command -v flock >/dev/null || { exec 9<pyproject.toml && { flock -n 9 || { \
  echo 'waiting for another make, which installs packages into .venv'; flock 9; }; }; }

# $(call install,.[extras],files): install the packages, then write the files. If another make has installed them while
# this one waited, do nothing.
define install
@$(lock); [ $@ -nt pyproject.toml ] && exit; \
echo 'installing $(1) into .venv (a few minutes the first time)'; \
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '$(1)' || { \
  echo 'make: the packages could not be installed (see above): check that the package registry can be reached, or' \
       'give an interpreter that has them, for example PYTHON=python3' >&2; exit 2; }; \
touch $(2)
endef

.venv/.notebook: pyproject.toml | .venv/bin/python
	$(call install,.[$(notebook_extras)],.venv/.train .venv/.train-interpreter $@)

.venv/bin/python:
	@$(lock); [ -x $@ ] && exit; \
	for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	  $$python -m venv --clear .venv && exit 0; \
	  rm -rf .venv; \
	  echo "make: $$python cannot create a virtual environment (see above); on Debian and Ubuntu: apt install python3-venv" >&2; \
	  exit 2; \
	done; \
	echo "make: Python 3.11 or newer is needed, and python3 is $$(python3 --version 2>&1)" >&2; exit 2
