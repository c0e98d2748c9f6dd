"""GPT2: a model with its tokenizer; load and save it, generate texts, compute logits, losses and gradients.

Autograd is imported by the first call that needs it, not to load a model and generate text.
"""

from __future__ import annotations

# B batch, T time, V vocabulary
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import numpy as np

from gpt2core.app.backend_setup import memory_errors
from gpt2core.app.checkpoints.directory import describe_step, load_checkpoint, newest_step, save_checkpoint
from gpt2core.app.checkpoints.files import STATE
from gpt2core.app.checkpoints.run_lock import RunLock
from gpt2core.app.inference.continuations import continue_share, text_pieces
from gpt2core.app.inference.inference_command import fit_prompt, make_inference_backend, sampling_rule, tokenizer_of
from gpt2core.app.inference.prompts import encode_prompt
from gpt2core.app.resume import edited_notes
from gpt2core.app.settings.definitions import InferenceSettings
from gpt2core.app.settings.setting_fields import complete
from gpt2core.app.shipped import check_downloaded
from gpt2core.architecture import GPT2Config, parameter_count
from gpt2core.errors import CheckpointError, ConfigError, DataError, ShapeError
from gpt2core.parallel.launcher_env import read_launcher_env
from gpt2core.parallel.tensor.loaded_model import load_inference_model
from gpt2core.recording import no_grad
from gpt2core.text.tokenizer import Tokenizer
from staged_gpt2.arguments import checked, checked_path, python_errors, token_array, warn
from staged_gpt2.stages import chosen_stage, own_cores, stage_of

if TYPE_CHECKING:
    from gpt2core.tensor import Tensor


class GPT2:
    """A GPT-2 with its tokenizer; from_pretrained() or train() make it.

    stage: its number, 0 to 3. config: the sizes. tokenizer: encode(text) gives token ids (T,), decode(ids) a text.
    parameters: {Hugging Face's name: Tensor}, whose `data` and `grad` are arrays of the device (NumPy, CuPy).
    backend: the kernels. A rank of several computes the whole model, without the others.
    """

    stage: int
    config: GPT2Config
    tokenizer: Tokenizer

    def __init__(self, stage, config, arrays, tokenizer, settings):
        """arrays: {name: fp32 array on the host} of all parameters. settings: InferenceSettings."""
        self.stage, self.config, self.tokenizer = stage, config, tokenizer
        self.backend = make_inference_backend(stage_of(stage).backend, settings, own_cores())
        with self._memory_errors():
            self._inference_model = load_inference_model(config, arrays, self.backend)
        # the kernels of 16 bits read rounded copies: save_pretrained() writes what they were rounded from
        rounded = self.backend.compute_dtype != self.backend.dtype
        self._unrounded = {name: (arrays[name], self._host(name)) for name in arrays} if rounded else {}

    @functools.cached_property
    def _model(self):
        """The model that computes gradients, over the same arrays."""
        from gpt2core.model import GPT2 as Model
        from gpt2core.tensor import Tensor

        arrays = self._inference_model.arrays
        tensors = {name: Tensor(array, self.backend, requires_grad=True) for name, array in arrays.items()}
        return Model(self.config, tensors)

    @property
    def _generator(self):
        """The model that generates text: `parameters` may have other arrays than those that were loaded."""
        return self.__dict__.get("_model", self._inference_model)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return self._model.parameters

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, stage: int | str = "auto", precision: str = "fp32", tokenizer: str | None = None,
        threads: int | None = None, accept_edited: bool = False,
    ) -> GPT2:  # fmt: skip
        """The model in a directory: a checkpoint of this project, or a GPT-2 in Hugging Face's format.

        stage: 0 and 1 compute on CPUs, 2 and 3 on a GPU; "auto": on a GPU if CuPy finds one. precision: fp32, tf32,
        bf16 or fp16. tokenizer: "word", "byte" or the path of a tokenizer.json, instead of the one in the directory.
        threads: of the matrix products on CPUs, which BLAS then uses in the whole process; None: all its cores.
        accept_edited: load files that were changed after they were saved.

        Raises CheckpointError for files that are missing or damaged, DataError for a tokenizer that cannot be read,
        ConfigError for an argument that cannot be used.
        """
        with python_errors():
            stage = chosen_stage(stage)
            given = dict(weights=checked_path(path), precision=precision, tokenizer=tokenizer, threads=threads)
            settings = complete(checked(InferenceSettings, accept_edited=accept_edited, **given))
            check_downloaded(settings.weights)
            checkpoint = load_checkpoint(settings.weights, accept_edited=settings.accept_edited)
            for note in edited_notes(checkpoint):
                warn(note)
            tokenizer = tokenizer_of(settings, checkpoint)
            return cls(stage, checkpoint.config, checkpoint.parameters, tokenizer, settings)

    def save_pretrained(self, path: str | Path) -> None:
        """Write the model and its tokenizer to a directory that from_pretrained() and transformers read.

        The weights are float32. An earlier model in the directory is replaced atomically. Of several ranks, the first
        one writes. Raises CheckpointError if the directory cannot be written, or has the checkpoints of a training run.
        """
        if read_launcher_env().rank:
            return
        with python_errors(), RunLock(checked_path(path)):
            older = newest_step(path)
            if older and (older / STATE).exists():
                raise CheckpointError(
                    f"{path}: holds {describe_step(older)} of a training run: choose another directory"
                )
            arrays = {name: self._saved(name) for name in self._inference_model.arrays}
            save_checkpoint(path, 0, config=self.config, parameters=arrays, tokenizer=self.tokenizer, keep=1)

    def __call__(self, ids) -> Tensor:
        """ids (B, T), integers -> logits (B, T, V), a Tensor of the graph unless inside no_grad().

        T is at most config.block_size. Raises ConfigError for a text, ShapeError for wrong ids.
        """
        with python_errors(), self._memory_errors():
            return self._model.logits(self._prepared(token_array("ids", ids, self.config)))

    def loss(self, ids, targets) -> Tensor:
        """The mean cross-entropy of targets (B, T) after ids (B, T), in nats per token: a float64 Tensor of shape ().

        loss.backward() adds the gradients to `grad` of the parameters. Raises the errors of a call of the model.
        """
        with python_errors(), self._memory_errors():
            from staged_gpt2.loss import Loss

            return Loss(self._loss(ids, targets))

    def sum_of_losses(self, ids, targets) -> float:
        """The sum of the cross-entropy over all targets (B, T) after ids (B, T), without a graph."""
        with no_grad(), self._memory_errors():
            return self._loss(ids, targets, 1.0).item()

    @overload
    def generate(
        self, prompt: str, max_new_tokens: int = 30, *, temperature: float | None = None, top_k: int = 0,
        top_p: float = 1.0, seed: int = 0, stop: str | None = None, stream: Literal[False] = False,
    ) -> str: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: str, max_new_tokens: int = 30, *, temperature: float | None = None, top_k: int = 0,
        top_p: float = 1.0, seed: int = 0, stop: str | None = None, stream: Literal[True],
    ) -> Iterator[str]: ...  # fmt: skip

    @overload
    def generate(
        self, prompt: list[str], max_new_tokens: int = 30, *, temperature: float | None = None, top_k: int = 0,
        top_p: float = 1.0, seed: int = 0, stop: str | None = None, stream: Literal[False] = False,
    ) -> list[str]: ...  # fmt: skip

    def generate(
        self, prompt, max_new_tokens=30, *, temperature=None, top_k=0, top_p=1.0, seed=0, stop=None, stream=False,
    ):  # fmt: skip
        """The continuation of a prompt as text, without the prompt; of a list of prompts, the list of continuations.

        temperature: 0 chooses the most probable token; None is 0, or 1 if top_k or top_p is given. top_k: sample among
        the k most probable tokens, 0: among all. top_p: sample among the smallest set of most probable tokens whose
        probabilities add up to at least p. seed: of the sampling; prompt number i of a list has seed + i. stop: end
        after this text. stream: return an iterator of the text of each token. The model reads at most the last
        config.block_size tokens.

        Raises ConfigError for an argument of a wrong type or out of range, DataError for an empty prompt and for a word
        that is not in the vocabulary.
        """
        with python_errors():
            given = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, stop=stop, stream=stream)
            settings = complete(checked(InferenceSettings, max_new_tokens=max_new_tokens, **given))
            if stop == "":
                raise ConfigError("`stop=''` is in every text: give a text, or omit it")
            sampling_rule(settings, settings.seed)  # checks the range of its numbers
            self.backend.runtime.check_generation(self.config, settings.max_new_tokens)
            if isinstance(prompt, str):
                pieces = self._pieces(self._encoded(prompt), settings)
                return pieces if stream else "".join(pieces)
            if not isinstance(prompt, list | tuple) or not all(isinstance(each, str) for each in prompt):
                raise ConfigError(f"`prompt={prompt!r:.60}` must be a text, or a list of texts")
            if stream:
                raise ConfigError(f"`stream=True` is for one prompt, but there is a list of {len(prompt)}: omit it")
            with no_grad(), self._memory_errors():
                texts, _ = continue_share(
                    self._generator, self.tokenizer, list(map(self._encoded, prompt)), settings.max_new_tokens,
                    lambda i: sampling_rule(settings, settings.seed + i), settings.stop, range(len(prompt)),
                )  # fmt: skip
            return texts

    def __repr__(self):
        return f"GPT2(stage={self.stage}, parameters={parameter_count(self.config):,}, config={self.config})"

    def _pieces(self, prompt, settings):
        """Yield the text of each new token."""
        rule = sampling_rule(settings, settings.seed)
        pieces = text_pieces(self._generator, self.tokenizer, prompt, settings.max_new_tokens, rule, settings.stop)
        while True:
            with python_errors(), no_grad(), self._memory_errors():  # not while the caller uses the piece
                piece = next(pieces, None)
            if piece is None:
                return
            if piece:  # of an incomplete character there is no text yet
                yield piece

    def _encoded(self, prompt):
        """The token ids of a prompt, a list."""
        ids = encode_prompt(self.tokenizer, prompt)
        if not ids:
            raise DataError(f"`prompt={prompt!r}` is empty: give at least one word to continue")
        return fit_prompt(ids, self.config.block_size, lambda text, **_: warn(text))

    def _loss(self, ids, targets, scale=None):
        ids, targets = token_array("ids", ids, self.config), token_array("targets", targets, self.config)
        if ids.shape != targets.shape:
            raise ShapeError(f"`targets`: shape {targets.shape} must be that of `ids`, {ids.shape}")
        return self._model.loss(self._prepared(ids), self.backend.prepare_tokens(targets), scale)

    def _prepared(self, ids):
        return self.backend.prepare_tokens(ids, self.config.vocab_size)

    def _host(self, name):
        return self.backend.to_host(self._generator.without_autograd().arrays[name]).copy()

    def _saved(self, name):
        """The parameter `name` as it is saved, on the host: unrounded, if it has not changed since it was rounded."""
        array = self._host(name)
        if name in self._unrounded:
            unrounded, rounded = self._unrounded[name]
            array = unrounded if np.array_equal(array, rounded) else array
        return array.astype(np.float32)

    def _memory_errors(self):
        return memory_errors(self.backend, self.config)
