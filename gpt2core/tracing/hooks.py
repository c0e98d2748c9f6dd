"""Call a function around each kernel of a backend, or around each collective of a group, to time or to record it.

A hook is an attribute of one instance, which hides the method of its class. So the kernels and the collectives contain
no code for it, compute the same bits, and cost nothing more after Hooks.remove().
"""

import functools
import inspect

from gpt2core.backend import Backend
from gpt2core.communicator import address

KERNEL_SUFFIXES = ("_forward", "_backward", "_cached", "_step", "clip", "page_sums")
KERNELS = [name for name in vars(Backend) if name.endswith(KERNEL_SUFFIXES) or name in ("loss", "loss_rows", "add")]
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", "recv")
# {name of a kernel: the names of its parameters, without self}
PARAMETERS = {name: list(inspect.signature(getattr(Backend, name)).parameters)[1:] for name in KERNELS}
AUX = {name: names.index("aux") for name, names in PARAMETERS.items() if "aux" in names}  # the index of `aux`


class Hooks:
    """The attributes that set() has given to objects; remove() restores the objects."""

    def __init__(self):
        self.replaced = []  # (object, name of an attribute, its earlier value or None, whether there was one)

    def set(self, owner, name, value):
        self.replaced.append((owner, name, vars(owner).get(name), name in vars(owner)))
        setattr(owner, name, value)

    def remove(self):
        for owner, name, earlier, existed in reversed(self.replaced):
            if existed:
                setattr(owner, name, earlier)
            else:
                delattr(owner, name)
        self.replaced.clear()

    def around_kernels(self, backend, around):
        """From now on, a call of a kernel of `backend` is a call of around(name, kernel, arguments, options).

        `around` calls kernel(*arguments, **options) and returns its result. A kernel may call other kernels of the same
        backend: `around` is called for these too, inside the first call. Gradients that a kernel returns as functions
        are computed after `around` has returned: see around_gradients().
        """

        def hooked(name, kernel):
            @functools.wraps(kernel)
            def call(*arguments, **options):
                return around(name, kernel, arguments, options)

            return call

        for name in KERNELS:
            self.set(backend, name, hooked(name, getattr(backend, name)))

    def around_collectives(self, group, around):
        """From now on, a collective or message of `group` is a call of around(name, call, x, blocking).

        call() makes the call and returns its result: the Handle of a non-blocking call, else an array or None. x: the
        array that is sent; for recv, the array to which the message is written. In a group of one rank nothing is
        hooked. A blocking call may consist of a non-blocking call: `around` is called once for both.
        """
        busy = False  # two threads never call one communicator at the same time

        def hooked(name, method, blocking):
            @functools.wraps(method)
            def call(x, *arguments, **options):
                nonlocal busy
                if busy:
                    return method(x, *arguments, **options)
                busy = True
                try:
                    return around(name, functools.partial(method, x, *arguments, **options), x, blocking)
                finally:
                    busy = False

            return call

        for name in () if group.one_process else COLLECTIVES:
            self.set(group, name, hooked(name, getattr(group, name), True))
            self.set(group, f"{name}_start", hooked(name, getattr(group, f"{name}_start"), False))


def around_gradients(result, around):
    """The result of a kernel, in which a call gradient(out) of a gradient is a call of around(gradient, out)."""
    results = result if isinstance(result, tuple) else (result,)
    wrapped = tuple(functools.partial(around, each) if callable(each) else each for each in results)
    return wrapped if isinstance(result, tuple) else wrapped[0]


class Modules:
    """Finds the module of the model for which a kernel is called, for example "h.3.mlp.c_fc".

    parameters: {Hugging Face name: Tensor} of the model. A kernel that reads no parameter, such as attention, gets the
    block of the kernel before it ("h.3.attn"); its backward kernel finds the same module by its argument `aux`.
    The module of a parameter that is NotInMemory between the steps (ZeRO-2, ZeRO-3) is not found.
    """

    def __init__(self, parameters):
        present = {name: tensor.data for name, tensor in parameters.items() if in_memory(tensor.data)}
        self.of_parameter = {address(array): module_name(name) for name, array in present.items()}
        self.of_aux, self.current = {}, ""

    def before(self, name, arguments):
        """The module of a call, or "". Call this method before the kernel runs."""
        if name in ("loss", "loss_rows", "add"):
            return self.current
        if not name.endswith(("_forward", "_backward")):
            return ""
        addresses = [address(x) for x in arguments if in_memory(x)]
        if modules := [self.of_parameter[at] for at in addresses if at in self.of_parameter]:
            self.current = modules[0 if name.startswith("embedding") else -1]
            self.current = self.current.removesuffix(".c_proj" if name.startswith("mlp") else "")
        elif name in AUX and len(arguments) > AUX[name]:
            self.current = self.of_aux.pop(id(arguments[AUX[name]]), self.current)
        else:
            self.current = self.current.removesuffix(".c_attn")
        return self.current

    def after(self, name, module, result):
        """Store the module of the `aux` that a forward kernel has returned."""
        if name.endswith("_forward") and isinstance(result, tuple):
            self.of_aux[id(result[-1])] = module


def in_memory(x):
    """Whether x is a NumPy or CuPy array: a NotInMemory has no address."""
    return hasattr(x, "__array_interface__") or hasattr(x, "__cuda_array_interface__")


def module_name(parameter):
    """The module of a parameter without the prefix of the model: "h.3.ln_1" of "transformer.h.3.ln_1.weight"."""
    return parameter.removeprefix("transformer.").rpartition(".")[0]
