"""Make Triton's interpreter faster: skip work that changes no result but takes most of the time of a small kernel.

- To run a kernel on the CPU, the interpreter replaces functions of triton.language. It searches for these functions
  before each kernel and before each function that a kernel calls. Here it searches once per process, and replaces the
  functions once per kernel.
- For each sum and product of integers the interpreter computes whether the result overflows, but it uses this only in
  Triton's debug mode. Here it is computed only in debug mode.
- To find the NumPy dtype of a Triton dtype, the interpreter builds a table at each operation. Here each result is kept.
- It converts and broadcasts the two operands of an operation even if their types are equal. Here it does so only if
  they differ.
- For each result it computes the shape of the block, its number of elements and the name of its type again. Here each
  result is kept.

The functions that are replaced here are private to Triton (3.9). If another version lacks one, nothing is changed.
"""

import dataclasses
import functools
import importlib
import inspect
from types import SimpleNamespace

PRIVATE = (
    "_patch_lang", "_patch_builtin", "_LangPatchScope", "_get_np_dtype", "interpreter_semantic", "InterpretedFunction",
)  # fmt: skip


@functools.cache
def install():
    """Apply all changes to the interpreter of this process. Later calls do nothing."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    if not all(hasattr(interpreter, name) for name in PRIVATE):
        return
    semantic, language = interpreter.interpreter_semantic, importlib.import_module("triton.language")
    if not hasattr(getattr(semantic.builder, "options", None), "sanitize_overflow"):
        return
    if not hasattr(semantic, "binary_op_type_checking_impl") or not hasattr(language.core, "_unwrap_if_constexpr"):
        return
    patch_once_per_kernel(interpreter, language)
    keep_shapes(language.core, semantic.builder)
    interpreter._get_np_dtype = cached_by_name(interpreter._get_np_dtype)
    type(semantic).binary_op_type_checking_impl = convert_if_needed(type(semantic).binary_op_type_checking_impl)
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

    @functools.cache
    def with_semantic(builtin):
        """The function `builtin`, without the check that its argument _semantic is given, with this argument."""
        function, semantic = getattr(builtin, "__wrapped__", builtin), interpreter.interpreter_semantic

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        return call

    def patch_builtin(owner, builder, scope):
        for name in builtins_of(owner):
            if is_builtin(member := getattr(owner, name)):  # false if it is patched already
                scope.set_attr(owner, name, with_semantic(member))

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


def keep_shapes(core, builder):
    """Let the blocks of triton.language.core with equal shapes share what is computed from the shape.

    builder: the interpreter's. Its IR of a type is the type itself.
    """
    unwrap, initialize, to_ir = core._unwrap_if_constexpr, core.block_type.__init__, core.block_type.to_ir
    not_wrapped = {int, float, bool, str, type(None), core.dtype, core.pointer_type, core.block_type, core.tensor}
    scalar = core.tuple([]), core.constexpr(1)
    known = {}  # {(shape, name of the elements' type): attributes of a block_type}

    def unwrap_if_wrapped(value):
        return value if type(value) in not_wrapped else unwrap(value)

    def initialize_block_type(block, element_ty, shape):
        key = tuple(map(unwrap_if_wrapped, shape)), element_ty.name
        if key not in known:
            initialize(block, element_ty, list(key[0]))
            of_tensor = core.tuple([core.constexpr(size) for size in key[0]]), core.constexpr(block.numel)
            known[key] = vars(block) | dict(sizes=key[0], of_tensor=of_tensor)
        block.__dict__ = known[key] | dict(element_ty=element_ty)

    def initialize_tensor(tensor, handle, type):
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = type.of_tensor if type.is_block() else scalar

    core.block_type.__init__, core.tensor.__init__ = initialize_block_type, initialize_tensor
    core.block_type.with_element_ty = lambda block, element_ty: core.block_type(element_ty, block.sizes)
    core.block_type.to_ir = lambda block, other: block if other is builder else to_ir(block, other)
    core._unwrap_if_constexpr = unwrap_if_wrapped


def convert_if_needed(convert):
    """The method `convert` of binary operations, changed to only broadcast two tensors of one type of numbers."""

    def convert_unequal(semantic, lhs, rhs, *options, **keywords):
        division = len(options) > 3 or keywords  # which converts 16 bits to 32
        if type(lhs) is type(rhs) is semantic.tensor and lhs.dtype is rhs.dtype:
            if not (division or lhs.dtype.is_ptr()):
                return semantic.broadcast_impl_value(lhs, rhs)
        return convert(semantic, lhs, rhs, *options, **keywords)

    return convert_unequal


def broadcast_if_needed(broadcast):
    """The method `broadcast`, changed to return two blocks of equal shape as they are."""

    def broadcast_unequal(semantic, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.sizes == rhs.type.sizes:
            return lhs, rhs
        return broadcast(semantic, lhs, rhs)

    return broadcast_unequal
