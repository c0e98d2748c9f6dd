"""Remove work from Triton's interpreter that changes no result; it takes more than half of the time of a small kernel.

- Before a kernel, and before each function that a kernel calls, the interpreter searches triton.language for the
  functions that it replaces. Here it searches once per process, and replaces them once per kernel.
- For each sum and product of integers it computes whether the result overflows, and then ignores the answer unless
  Triton's debug mode is on.
- For each operation it builds a table of dtypes, and broadcasts both operands, also if their shapes are equal.

The functions are private to Triton (tried with 3.9). A version that lacks one of them stays as it is.
"""

import dataclasses
import functools
import importlib
import inspect
from types import SimpleNamespace

PRIVATE = "_patch_lang", "_patch_builtin", "_patch_attr", "_get_np_dtype", "interpreter_semantic", "InterpretedFunction"


@functools.cache
def install():
    """Replace functions of the interpreter in this process, once."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in PRIVATE):
        return
    semantic = interpreter.interpreter_semantic
    if not hasattr(getattr(semantic.builder, "options", None), "sanitize_overflow"):
        return
    replace_once_per_kernel(interpreter, importlib.import_module("triton.language"))
    interpreter._get_np_dtype = cached_by_name(interpreter._get_np_dtype)
    type(semantic).broadcast_impl_value = broadcast_if_needed(type(semantic).broadcast_impl_value)
    options = semantic.builder.options
    semantic.builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)


def replace_once_per_kernel(interpreter, language):
    is_builtin, patch_lang = language.core.is_builtin, interpreter._patch_lang
    # kernels use triton.language, the functions of Triton's own library use its module core
    both = SimpleNamespace(__globals__={"tl": language, "core": language.core})

    @functools.cache
    def builtins_of(owner):
        return [name for name, member in inspect.getmembers(owner) if is_builtin(member)]

    def patch_builtin(owner, *options):
        for name in builtins_of(owner):
            if is_builtin(member := getattr(owner, name)):  # not replaced yet
                interpreter._patch_attr(owner, name, member, *options)

    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = lambda kernel: patch_lang(both)
    interpreter.InterpretedFunction.__call__ = lambda function, *args, **kwargs: function.rewrite()(*args, **kwargs)


def cached_by_name(np_dtype_of):
    """np_dtype_of, a function of a Triton dtype, with a cache."""
    found = {}

    def cached(dtype):
        if dtype.name not in found:
            found[dtype.name] = np_dtype_of(dtype)
        return found[dtype.name]

    return cached


def broadcast_if_needed(broadcast):
    """`broadcast`, a method with two operands, unless they are blocks of one shape."""

    def broadcast_unequal(semantic, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape == rhs.type.shape:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    return broadcast_unequal
