"""Time functions of one process in turn, in several rounds: A B C, C B A, A B C, ..."""


def interleaved(functions, rounds):
    """{name: [the result of each round]} of functions {name: function}; every second round has the reverse order."""
    results = {name: [] for name in functions}
    for number in range(rounds):
        for name in list(functions)[:: 1 if number % 2 == 0 else -1]:
            results[name].append(functions[name]())
    return results
