"""Make Triton's interpreter faster: skip work that changes no result but takes most of the time of a small kernel.

- To run a kernel on the CPU, the interpreter replaces functions of triton.language. It searches for these functions
  before each kernel and before each function that a kernel calls. Here it searches once per process, and replaces the
  functions once per kernel.
- For each sum and product of integers the interpreter computes whether the result overflows, but it uses this only in
  Triton's debug mode. Here it is computed only in debug mode.
- To find the NumPy dtype of a Triton dtype, the interpreter builds a table at each operation. Here each result is kept.
- It broadcasts the two operands of an operation even if their shapes are equal. Here it does so only if they differ.

The functions that are replaced here are private to Triton (3.9). If another version lacks one, nothing is changed.
"""

import dataclasses
import functools
import importlib
import inspect
from types import SimpleNamespace

PRIVATE = "_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype", "interpreter_semantic", "InterpretedFunction"


@functools.cache
def install():
    """Apply all changes to the interpreter of this process. Later calls do nothing."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in PRIVATE):
        return
    semantic = interpreter.interpreter_semantic
    if not hasattr(getattr(semantic.builder, "options", None), "sanitize_overflow"):
        return
    patch_once_per_kernel(interpreter, importlib.import_module("triton.language"))
    interpreter._get_np_dtype = cached_by_name(interpreter._get_np_dtype)
    type(semantic).broadcast_impl_value = broadcast_if_needed(type(semantic).broadcast_impl_value)
    options = semantic.builder.options
    semantic.builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


def patch_once_per_kernel(interpreter, language):
    """Let the interpreter patch (replace) functions of `language`, the module triton.language, once per kernel."""
    is_builtin, patch_lang = language.core.is_builtin, interpreter._patch_lang
    # Triton patches the modules in the globals of a kernel. Kernels use triton.language as `tl`; functions of Triton's
    # own library use triton.language.core. This object stands for a kernel that uses both.
    any_kernel = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    @functools.cache
    def builtins_of(owner):
        """The names of Triton's built-in functions in `owner`, a module or a class."""
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch_builtin(owner, *options):
        for name in builtins_of(owner):
            if is_builtin(member := getattr(owner, name)):  # false if it is patched already
                interpreter._patch_attr(owner, name, member, *options)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = lambda kernel: patch_lang(any_kernel)
    # a function that a kernel calls: run it without patching again
    interpreter.InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)


def cached_by_name(np_dtype_of):
    """The function np_dtype_of, which returns the NumPy dtype of a Triton dtype, with a cache."""
    cache = {}

    def cached_np_dtype_of(dtype):
        if dtype.name not in cache:
            cache[dtype.name] = np_dtype_of(dtype)
        return cache[dtype.name]

    return cached_np_dtype_of


def broadcast_if_needed(broadcast):
    """The method `broadcast`, changed to return two blocks of equal shape as they are."""

    def broadcast_unequal(semantic, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    return broadcast_unequal
